"""A small fleet and a store filled with what its agents would have sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_core.metrics.catalog import Scope
from drover_core.model.fleet import FleetSpec, NodeSpec

# A healthy, busy GPU. Whatever a test does not change stands so.
BUSY: Mapping[str, float] = {
    "sm_clock_mhz": 1750.0, "power_w": 600.0, "power_limit_w": 700.0, "gpu_temp_c": 62.0, "memory_temp_c": 70.0,
    "gpu_util_ratio": 1.0, "tensor_active_ratio": 0.5, "row_remap_failed": 0.0, "clock_event_reasons": 0.0,
}  # fmt: skip


def small_index(nodes: int = 4, gpus: int = 2) -> FleetIndex:
    """Two racks whose nodes alternate in the file, so that layout order and file order differ."""
    specs = [NodeSpec(f"n{i}", f"r{i % 2}", f"leaf{i % 2}", "pool", "H100", gpus) for i in range(nodes)]
    return FleetIndex(FleetSpec(tuple(specs), (), "small"))


def gpu_key(node: str, slot: int) -> str:
    return f"serial-{node}-{slot}"


def write_entities(store: Store, index: FleetIndex) -> None:
    rows = []
    for node in index.nodes:
        rows.append(EntityRow(entity_id(Scope.NODE, node.name), Scope.NODE, node.name, node.name, None))
        for slot in range(node.gpus):
            key = gpu_key(node.name, slot)
            rows.append(
                EntityRow(
                    entity_id(Scope.GPU, key),
                    Scope.GPU,
                    key,
                    node.name,
                    slot,
                    uuid=f"GPU-{key}",
                    serial=key,
                    pci=f"0000:{slot:02x}:00.0",
                    model="H100",
                )
            )
    store.entities.write(rows)


def write_ticks(
    store: Store,
    index: FleetIndex,
    from_ms: int,
    to_ms: int,
    step_ms: int = 1000,
    *,
    silent: Collection[str] = (),
    changed: Mapping[tuple[str, int], Mapping[str, float]] | None = None,
) -> None:
    """Samples of all nodes but the silent ones in [from_ms, to_ms); `changed` stands instead of BUSY (NaN: absent)."""
    ticks = np.arange(from_ms, to_ms, step_ms, dtype=np.int64)
    gpus = [(n.name, s) for n in index.nodes if n.name not in silent for s in range(n.gpus)]
    nodes = [n.name for n in index.nodes if n.name not in silent]
    if not gpus or not len(ticks):
        return
    ids = np.array([entity_id(Scope.GPU, gpu_key(*gpu)) for gpu in gpus], np.uint64)
    values = {
        name: np.tile([(changed or {}).get(gpu, {}).get(name, usual) for gpu in gpus], len(ticks))
        for name, usual in BUSY.items()
    }
    store.samples.write(SampleBatch.of_values(Scope.GPU, np.tile(ids, len(ticks)), np.repeat(ticks, len(gpus)), values))
    node_ids = np.array([entity_id(Scope.NODE, name) for name in nodes], np.uint64)
    load = {"cpu_util_ratio": np.full(len(nodes) * len(ticks), 0.25), "load1": np.full(len(nodes) * len(ticks), 8.0)}
    store.samples.write(
        SampleBatch.of_values(Scope.NODE, np.tile(node_ids, len(ticks)), np.repeat(ticks, len(nodes)), load)
    )
