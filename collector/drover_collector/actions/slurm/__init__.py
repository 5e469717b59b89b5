"""Drain, isolate and resume nodes through Slurm."""
