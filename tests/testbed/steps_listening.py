"""The agent's end of the socket of training steps."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.steps import StepsSource
from drover_core.metrics.catalog import Scope
from testbed.waiting import wait_until

T = 1_800_000_000_000
GOOD = {"v": 1, "name": "pretrain", "rank": 3, "world_size": 8, "step": 5, "steps": 1, "step_time_s": 0.5}


class Ticks:
    """The source's clock, which stands still unless it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Listening:
    """A source with its socket open."""

    def __init__(self, path: Path, gpus: Gpus | None = None) -> None:
        self.path, self.ticks = path, Ticks()
        self.source = StepsSource("n1", path, gpus or Gpus(), self.ticks)
        self.source.read(T)

    def after(self, send: Callable[[], object], reports: int = 1) -> Reading:
        """The reading after `send`, when this many datagrams more were received."""
        before = self.source.received
        send()
        wait_until(lambda: self.source.received >= before + reports, "the reports are received")
        return self.source.read(T)

    def send(self, **fields: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.connect(str(self.path))
            one.send(json.dumps(GOOD | fields).encode())


def row(reading: Reading) -> dict[str, float]:
    [(entity, values)] = reading.rows
    assert entity.scope is Scope.WORKLOAD
    return dict(values)


def h100s(count: int = 8, model: str = "NVIDIA H100 80GB HBM3") -> Gpus:
    gpus = Gpus()
    for slot in range(count):
        gpus.set_entity(Entity(Scope.GPU, f"S{slot}", slot, serial=f"S{slot}", model=model))
    return gpus
