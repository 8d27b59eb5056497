"""Shapes, topics, profiles and errors."""
