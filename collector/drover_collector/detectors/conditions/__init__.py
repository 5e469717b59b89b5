"""Conditions of Kubernetes nodes that others write: a warning at most, and never a reason to drain."""
