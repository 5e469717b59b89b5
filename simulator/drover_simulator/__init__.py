"""Simulated fleets: hardware, jobs, faults and probes for demos, tests and scores. No part of an agent's install."""
