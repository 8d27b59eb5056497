"""The simulated engine, without sockets."""
