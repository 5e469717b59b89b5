"""Fleets of strangers: generators whose authors had seen neither a detector, nor the adversary, nor another of these.

Each writes case folders: `write_case(folder, seed, nodes=..., hours=..., interval_s=..., healthy=...)`; what is not
given is drawn by the seed. A is for tuning, B for scoring, C for one look at the end, D for tuning, a second one
(docs/explanation/simulation.md).
"""
