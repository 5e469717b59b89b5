"""A run of generators against a collector, watched: figures over time, and what they come to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from drover_proto import fleet_pb2 as pb
from load.collector import Collector, Usage
from load.fleet import Shape
from load.generator import Generator, Order

BUILD_S = 300.0  # within which the generators have built what they send
LEAD_S = 4.0  # before the first stream opens: a look at what the collector takes without any


@dataclass(frozen=True, slots=True)
class Plan:
    """`processes` generators; every stream sends `ticks` seconds of telemetry every `every_s` seconds."""

    shape: Shape
    processes: int
    open_s: float
    every_s: float
    ticks: int
    run_s: float
    drain_s: float = 30.0


@dataclass(slots=True)
class Moment:
    """What was seen at one time. `at_s` counts from the beginning of the load."""

    at_s: float
    usage: Usage
    generators: list[dict[str, Any]]
    status: pb.Status | None  # None: it did not answer in time
    status_s: float  # how long the answer took
    page: dict[str, float]  # the Prometheus page

    @property
    def waiting_bytes(self) -> float:
        return self.page.get("drover_waiting_bytes", float("nan"))

    def total(self, key: str) -> float:
        return float(sum(generator.get(key, 0) for generator in self.generators))

    @property
    def lag_s(self) -> float:
        return float(max((generator.get("lag_max_s", 0.0) for generator in self.generators), default=0.0))


@dataclass(slots=True)
class Run:
    plan: Plan
    moments: list[Moment] = field(default_factory=list)
    last: list[dict[str, Any]] = field(default_factory=list)  # of each generator, at its end

    def between(self, from_s: float, to_s: float) -> list[Moment]:
        return [moment for moment in self.moments if from_s <= moment.at_s <= to_s]


def drive(
    collector: Collector,
    plan: Plan,
    every_s: float = 2.0,
    also: Callable[[Moment], None] = lambda _: None,
) -> Run:
    """Let the load run to its end, and look every `every_s` seconds.

    Args:
        also: called with each moment, in the same thread.
    """
    run = Run(plan)
    with loading(collector, plan) as (generators, begin_s):
        while time.time() < begin_s + plan.run_s:
            now_s = time.time()
            run.moments.append(moment := look(collector, generators, begin_s))
            also(moment)
            time.sleep(max(0.0, every_s - (time.time() - now_s)))
        run.last = [generator.wait(plan.drain_s + 60) for generator in generators]
        run.moments.append(look(collector, generators, begin_s))
    return run


@contextlib.contextmanager
def loading(collector: Collector, plan: Plan, failing: Sequence[int] = ()) -> Iterator[tuple[list[Generator], float]]:
    """The generators, and when all streams are to be open (epoch).

    Args:
        failing: numbers of the streams that send an event when `Generator.fail` asks for it.
    """
    parts = np.array_split(np.arange(plan.shape.streams), min(plan.processes, plan.shape.streams))
    generators = [
        Generator(
            Order(
                str(collector.folder), collector.address, int(part[0]), len(part), plan.shape.streams, plan.shape.gpus,
                plan.open_s, plan.every_s, plan.ticks, plan.run_s, plan.drain_s,
                tuple(n for n in failing if part[0] <= n <= part[-1]),
            )
        )
        for part in parts
    ]  # fmt: skip
    try:
        for generator in generators:
            if not generator.said.wait(BUILD_S) or not generator.newest:
                raise RuntimeError(f"a generator was not ready within {BUILD_S:g} s")
        begin_s = time.time() + LEAD_S + plan.open_s
        for generator in generators:
            generator.begin(begin_s)
        yield generators, begin_s
    finally:
        for generator in generators:
            generator.stop()


def look(collector: Collector, generators: Sequence[Generator], begin_s: float) -> Moment:
    asked_s = time.monotonic()
    status = None
    with contextlib.suppress(grpc.RpcError):  # shown by its absence
        status = collector.status()
    took_s = time.monotonic() - asked_s
    newest = [generator.newest for generator in generators]
    return Moment(time.time() - begin_s, collector.usage(), newest, status, took_s, collector.page())


def slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Of a straight line through the points, a second; 0 for fewer than three."""
    if len(times_s) < 3:
        return 0.0
    return float(np.polyfit(np.array(times_s), np.array(values), 1)[0])


def cpu_by_thread(first: Usage, last: Usage) -> dict[str, float]:
    """CPU seconds between two looks, largest first, those above 1 %."""
    spent = {name: last.by_thread.get(name, 0.0) - first.by_thread.get(name, 0.0) for name in last.by_thread}
    total = sum(spent.values()) or 1.0
    return {n: round(s, 2) for n, s in sorted(spent.items(), key=lambda item: -item[1]) if s > 0.01 * total}
