"""Rank nodes by their risk to fail within a week."""
