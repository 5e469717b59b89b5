"""The simulated fleet as buckets and events, as the detectors would get them live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.fleet.buckets import BUCKET_MS, Bucket, aggregate
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event, Incident
from drover_core.model.fleet import FleetSpec
from drover_simulator.adversary import AdversaryFleet
from drover_simulator.faults import Fault, Label
from drover_simulator.fleet import SimulatedFleet, build_fleet

START_MS = 1_800_000_000_000  # 08:00 UTC; seeds for tests and tuning: 1000 to 1999, never those of the scores


@dataclass(frozen=True)
class Recording:
    index: FleetIndex
    buckets: list[Bucket]
    events: list[Event]
    labels: list[Label]


def record(
    seed: int,
    minutes: float,
    faults: Callable[[FleetSpec], list[Fault]] = lambda spec: [],
    nodes: int = 16,
    step_s: float = 2.0,
    made: SimulatedFleet | None = None,
) -> Recording:
    """Let a fleet run; one sample every `step_s`. `made`: this one, which has not begun."""
    spec = build_fleet(nodes, seed) if made is None else made.spec
    index = FleetIndex(spec)
    fleet = made or SimulatedFleet(spec, seed, faults(spec), START_MS)
    buckets, events = [], []
    for number in range(round(minutes * 60_000 / BUCKET_MS)):
        gpu: dict[str, list[np.ndarray]] = {}
        node: dict[str, list[np.ndarray]] = {}
        link: dict[str, list[np.ndarray]] = {}
        gpu_rows, node_rows = np.zeros(index.gpu_count, np.int32), np.zeros(index.node_count, np.int32)
        steps = round(BUCKET_MS / 1000 / step_s)
        for _ in range(steps):
            fleet.step(step_s)
            for into, columns in (
                (gpu, fleet.gpu_columns()), (node, fleet.node_columns()), (link, fleet.link_columns()[1]),
            ):  # fmt: skip
                for name, values in columns.items():
                    into.setdefault(name, []).append(values.copy())
            gpu_rows += ~fleet.unreachable()
            node_rows += np.array([n.name not in fleet.silent_nodes() for n in spec.nodes])
            events += fleet.take_events()
        jobs = [job for job in fleet.jobs if job.start_ms <= fleet.now_ms and not _over(job.end_ms, fleet.now_ms)]
        holds = np.full(index.gpu_count, -1, np.int32)
        for j, job in enumerate(jobs):
            for name, slot in job.members:
                holds[index.gpu(name, slot)] = j
        buckets.append(
            Bucket(
                START_MS + number * BUCKET_MS, BUCKET_MS, _bucket(gpu), _bucket(node), gpu_rows, node_rows, holds,
                tuple(job.id for job in jobs), _bucket(link),
            )
        )  # fmt: skip
    return Recording(index, buckets, events, fleet.labels)


def _over(end_ms: int | None, now_ms: int) -> bool:
    return end_ms is not None and end_ms <= now_ms


def _bucket(samples: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    result = {}
    for name, rows in samples.items():
        width, count = len(rows[0]), len(rows)
        entity = np.tile(np.arange(width, dtype=np.int32), count)
        result[name] = aggregate(name, entity, np.repeat(np.arange(count), width), np.concatenate(rows), width)
    return result


def adversary_buckets(fleet: AdversaryFleet, interval_ms: int = BUCKET_MS) -> Iterator[tuple[Bucket, list[Event]]]:
    """An adversary's fleet as it arrives: each bucket with the events that came in its time."""
    names = tuple(job.id for job in fleet.spec.jobs)
    for tick in fleet.ticks(interval_ms):
        bucket = Bucket(
            tick.ts_ms - interval_ms, interval_ms, tick.gpu, tick.node, tick.gpu_present.astype(np.int32),
            tick.node_present.astype(np.int32), fleet.holders(tick.ts_ms), names, tick.link,
        )  # fmt: skip
        yield bucket, tick.events


def newest(versions: Sequence[Incident]) -> dict[str, Incident]:
    """The newest version of each incident."""
    return {incident.id: incident for incident in versions}
