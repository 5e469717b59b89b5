"""Stranger B: fleets built from the step of a job (phases with rooflines, and the group that each waits for)."""

from drover_simulator.strangers.b.case import write_case

__all__ = ["write_case"]
