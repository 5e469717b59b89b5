"""Detect hung jobs, and the GPU that the others wait for."""
