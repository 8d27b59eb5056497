"""Decoders, mirror and records."""
