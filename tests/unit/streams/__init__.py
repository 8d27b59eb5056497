"""The worker, without services."""
