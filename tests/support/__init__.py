"""Builders that tests share."""
