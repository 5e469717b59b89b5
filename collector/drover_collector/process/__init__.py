"""Limits of this process: memory and open files."""
