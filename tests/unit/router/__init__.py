"""The router, without services."""
