"""Simulated engines: no model, but a vLLM's or an SGLang's cache, its scheduler's order, its events and their wire."""
