"""The stream to a collector."""
