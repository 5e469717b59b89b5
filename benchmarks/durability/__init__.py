"""Collectors and agents that are killed, and what must be true afterwards."""
