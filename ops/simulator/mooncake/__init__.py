"""A simulated Mooncake store: a master that knows which blocks several engines have put there, and its events."""
