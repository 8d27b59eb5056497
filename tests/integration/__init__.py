"""Behaviour that needs a service."""
