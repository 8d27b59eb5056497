"""Real vLLM servers beside the whole stack; started by hand, see drive.py."""
