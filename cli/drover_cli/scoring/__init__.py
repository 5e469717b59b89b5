"""How well incidents match the ground truth of a case."""
