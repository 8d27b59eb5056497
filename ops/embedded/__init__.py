"""Real Kafka and Valkey servers as child processes, from PyPI packages alone; for the demo and the tests."""
