"""Reads and writes of everything that is not a sample, a file for each subject."""
