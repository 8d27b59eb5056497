"""Core functions alone, mirroring the packages; milliseconds, no services."""
