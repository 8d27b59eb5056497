"""Replay of recordings."""
