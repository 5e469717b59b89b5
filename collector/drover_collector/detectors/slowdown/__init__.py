"""Detect jobs and inference services that are slower than they were, and what explains it."""
