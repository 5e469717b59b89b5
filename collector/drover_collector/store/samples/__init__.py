"""Samples: writes, reads, series, and where each entity is."""
