"""One pure decoder per engine dialect, the mirror of an engine's cache, and the shell that owns sockets."""
