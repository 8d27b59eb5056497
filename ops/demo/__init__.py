"""The demo: simulated engines, the real stack and a client that replays a public trace through it."""
