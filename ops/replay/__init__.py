"""Recorded engine traffic, replayed through kvatlas and compared with the engine's own truth."""
