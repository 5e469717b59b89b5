"""Reads metrics pages of other exporters for nodes without an agent, in a process of its own."""
