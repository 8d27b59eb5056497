"""Relays of pools: caches that several replicas read, told of once for all of them."""
