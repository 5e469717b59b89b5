"""Rollups of samples, and the ranges that have to be rolled up again."""
