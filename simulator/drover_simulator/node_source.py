"""Simulate the hardware of one node, to try Drover without a GPU. Needs the extra `simulation`."""

from __future__ import annotations

from dataclasses import replace

from drover_agent.sources.base import Reading
from drover_core.model.fleet import FleetSpec
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.readings import inventory

LONGEST_STEP_S = 60.0  # the most that the fleet advances after a pause of the machine


class SimulatedNode:
    """Eight healthy GPUs with jobs, and their host, as one source in real time."""

    name = "simulated"
    interval_s = 0.0  # every tick

    def __init__(self, node: str, seed: int = 1) -> None:
        spec = build_fleet(1, seed)
        self._spec = FleetSpec((replace(spec.nodes[0], name=node),), (), spec.name)
        self._node, self._seed = node, seed
        self._fleet: SimulatedFleet | None = None
        self._last_ms = 0

    def read(self, now_ms: int) -> Reading:
        first = self._fleet is None
        if self._fleet is None:
            self._fleet = SimulatedFleet(self._spec, self._seed, [], now_ms)
            self._last_ms = now_ms - 1000
        self._fleet.step(min(max((now_ms - self._last_ms) / 1000, 0.001), LONGEST_STEP_S))
        self._last_ms = now_ms
        reading = self._fleet.readings().get(self._node, Reading())
        if first:
            reading.inventory = inventory(self._fleet.hardware, 0)
        return reading

    def close(self) -> None:
        """Do nothing: no resource is open."""
