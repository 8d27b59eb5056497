"""A simulated vLLM engine: no model, but vLLM's block pool, its scheduler's order, its events and their wire."""
