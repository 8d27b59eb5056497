"""Settings, logs, metrics and replay."""
