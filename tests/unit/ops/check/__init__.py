"""Tests of ops.check."""
