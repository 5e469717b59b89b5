"""Nodes that are likelier than others to fail within a week."""
