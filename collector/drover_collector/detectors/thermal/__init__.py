"""Detect heat that slows GPUs, failing cooling, and racks that get hot air."""
