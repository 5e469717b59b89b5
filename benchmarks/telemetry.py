"""Telemetry of a simulated fleet at 1 Hz, for the benchmarks of the store: what agents read, as the store takes it.

The fleet trains and idles by its own plan and has the faults that the simulator draws for scoring, far more than a real
fleet has. Seeds from 1000 on are for tuning; the others score.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex
from drover_collector.store import SampleBatch, entity_id
from drover_collector.store.records import placed_id
from drover_core.metrics.catalog import Scope
from drover_simulator.faults import draw_faults
from drover_simulator.fleet import SimulatedFleet, build_fleet

# An hour's beginning yesterday: what is older may be beyond the retention of a rollup.
T0_MS = (time.time_ns() // 1_000_000 - 86_400_000) // 14_400_000 * 14_400_000


def ids_of(nodes: int, scope: Scope, seed: int) -> npt.NDArray[np.uint64]:
    """uint64 [E]: entity ids in the order of the fleet's columns."""
    spec = build_fleet(nodes, seed)
    if scope is Scope.GPU:  # as an embedded store gives them
        near = FleetIndex(spec).near
        keys_at = ((f"GPU-{seed}-{n}-{g}", node.name) for n, node in enumerate(spec.nodes) for g in range(node.gpus))
        return np.array([placed_id(entity_id(scope, key), near(node), node) for key, node in keys_at], np.uint64)
    keys = {
        Scope.NODE: [node.name for node in spec.nodes],
        Scope.LINK: [f"{node.name}/{link}" for node in spec.nodes for link in node.links],
    }
    return np.array([entity_id(scope, key) for key in keys[scope]], np.uint64)


def record(nodes: int, seconds: int, seed: int, minute: int = 60) -> Iterator[SampleBatch]:
    """A batch per scope and `minute` seconds, in order of time, rows by time and then entity."""
    spec = build_fleet(nodes, seed)
    fleet = SimulatedFleet(spec, seed, draw_faults(spec, max(1.0, seconds / 3600), seed), T0_MS)
    ids = {scope: ids_of(nodes, scope, seed) for scope in (Scope.GPU, Scope.NODE, Scope.LINK)}
    held: dict[Scope, list[dict[str, npt.NDArray[np.float64]]]] = {scope: [] for scope in ids}
    times: list[int] = []
    for second in range(1, seconds + 1):
        fleet.step(1.0)
        fleet.take_events()
        times.append(fleet.now_ms)
        for scope, columns in (
            (Scope.GPU, fleet.gpu_columns()),
            (Scope.NODE, fleet.node_columns()),
            (Scope.LINK, fleet.link_columns()[1]),
        ):
            held[scope].append({name: column.copy() for name, column in columns.items()})
        if len(times) == minute or second == seconds:
            for scope, ticks in held.items():
                joined = {name: np.concatenate([tick[name] for tick in ticks]) for name in ticks[0]}
                batch = SampleBatch.of_values(
                    scope, np.tile(ids[scope], len(times)), np.repeat(np.array(times), len(ids[scope])), joined
                )
                yield present(batch)
                ticks.clear()
            times = []


def present(batch: SampleBatch) -> SampleBatch:
    """Without rows that hold nothing: of a lost GPU or a silent node nothing comes."""
    some = np.zeros(batch.rows, np.bool_)
    for _, mask in batch.columns.values():
        some |= mask
    columns = {name: (stored[some], mask[some]) for name, (stored, mask) in batch.columns.items()}
    return SampleBatch(batch.scope, batch.entity_id[some], batch.ts_ms[some], columns)
