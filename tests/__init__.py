"""Tests; every folder is a package, so that none of them hides a package of the same name."""
