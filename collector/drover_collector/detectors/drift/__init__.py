"""Nodes that differ from their peers in driver, firmware or settings."""
