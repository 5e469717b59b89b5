"""Drain, isolate and resume nodes through Kubernetes."""
