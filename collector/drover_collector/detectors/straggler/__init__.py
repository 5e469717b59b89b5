"""Detect the GPU that a synchronous job waits for, and why it is slow."""
