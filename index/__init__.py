"""Block hashing, the fold of events into state, the match of a prompt, and one adapter per store."""
