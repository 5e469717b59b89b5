"""What `chaos.py` is made of: the processes, the faults, and what must be true afterwards."""
