"""Prometheus pages of one node's GPUs, off by default."""
