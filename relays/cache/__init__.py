"""The parts of a mirror: one table of blocks, and what each kind of event does to it; pure."""
