"""The HTTP service that prices prompts per replica."""
