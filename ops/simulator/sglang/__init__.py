"""A simulated SGLang engine: no model, but its radix tree, its host tier, its scheduler's order and its events."""
