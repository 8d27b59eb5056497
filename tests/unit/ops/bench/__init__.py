"""The benchmark's workload."""
