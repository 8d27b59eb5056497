"""Hashing, fold, hit rule and lookup."""
