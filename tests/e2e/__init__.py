"""Recorded engine traffic through the whole path."""
