"""How far a running collector meets a sheet of requirements: NVIDIA's for AI clouds."""
