"""A small fleet and its agents' messages, for tests of the store and of ingest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.store import EntityRow, SampleBatch, entity_id
from drover_core.metrics.catalog import (
    BY_NAME,
    Metric,
    Scope,
    of_scope,
)
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import BlockBuilder, schema_message

T0 = 1_790_002_800_000  # a full hour
GPUS = 4


def index_of(nodes: int = 3) -> FleetIndex:
    links = (LinkSpec("mlx5_0"), LinkSpec("mlx5_1"))
    return FleetIndex(FleetSpec(tuple(NodeSpec(f"n{n}", "r", "l", "p", "sku", GPUS, links) for n in range(nodes))))


def gpu_key(node: int, slot: int) -> str:
    return f"S{node}-{slot}"


def gpu_row(node: int, slot: int, key: str | None = None, first_ms: int = T0) -> EntityRow:
    key = key or gpu_key(node, slot)
    return EntityRow(
        entity_id(Scope.GPU, key), Scope.GPU, key, f"n{node}", slot, serial=key, first_ms=first_ms, last_ms=first_ms
    )


def node_row(node: int) -> EntityRow:
    return EntityRow(
        entity_id(Scope.NODE, f"n{node}"), Scope.NODE, f"n{node}", f"n{node}", None, first_ms=T0, last_ms=T0
    )


def link_row(node: int, link: str) -> EntityRow:
    key = f"n{node}/{link}"
    return EntityRow(entity_id(Scope.LINK, key), Scope.LINK, key, f"n{node}", None, link=link, first_ms=T0, last_ms=T0)


def everything(nodes: int = 3) -> list[EntityRow]:
    rows = [gpu_row(n, g) for n in range(nodes) for g in range(GPUS)] + [node_row(n) for n in range(nodes)]
    return rows + [link_row(n, link) for n in range(nodes) for link in ("mlx5_0", "mlx5_1")]


def samples(scope: Scope, rows: Iterable[tuple[EntityRow, int, Mapping[str, float]]]) -> SampleBatch:
    """A batch of (entity, ts_ms, metric -> value in units)."""
    listed = list(rows)
    names = dict.fromkeys(name for _, _, values in listed for name in values)
    return SampleBatch.of_values(
        scope,
        np.array([row.entity_id for row, _, _ in listed], np.uint64),
        np.array([ts for _, ts, _ in listed], np.int64),
        {name: np.array([values.get(name, np.nan) for _, _, values in listed]) for name in names},
    )


def random_values(
    rng: np.random.Generator, metric: Metric, count: int, absent: float = 0.3
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Values within the metric's range, few of them distinct, in its resolution, NaN where absent."""
    low, high = max(metric.low, -1e15), min(metric.high, 1e15)
    values = low + (high - low) * rng.integers(0, 7, count) / 6
    if metric.step:
        values = np.rint(values / metric.step) * metric.step
    values[rng.random(count) < absent] = np.nan
    return values


def hello(
    node: str = "n0", spool: str = "s1", metrics: Sequence[str] = ("power_w", "gpu_temp_c"), **fields: object
) -> pb.Hello:
    """Node n0 with its GPUs at indexes 1.., the node itself at 0, and one schema (1) of GPU metrics."""
    message = pb.Hello(node=node, spool_id=spool, protocol=1, agent_version="test", ts_ms=T0, interval_ms=1000)
    message.entities.add(index=0, scope=pb.NODE, key=node)
    for slot in range(GPUS):
        key = gpu_key(int(node[1:]), slot)
        message.entities.add(index=slot + 1, scope=pb.GPU, key=key, gpu=slot, serial=key)
    message.schemas.append(schema_message(1, pb.GPU, [BY_NAME[name] for name in metrics]))
    message.MergeFrom(pb.Hello(**fields))  # type: ignore[arg-type]  # whatever the test says
    return message


def block(
    rows: Iterable[tuple[int, int, Sequence[float | None]]],
    metrics: Sequence[str] = ("power_w", "gpu_temp_c"),
    schema: int = 1,
) -> pb.Block:
    """A block of (ts_ms, entity index, values in units)."""
    builder = BlockBuilder(schema, [BY_NAME[name] for name in metrics])
    for ts_ms, entity, values in rows:
        present = {name: value for name, value in zip(metrics, values, strict=True) if value is not None}
        assert builder.add(ts_ms, entity, present) == ([], True)
    found = builder.take()
    assert found is not None
    return found


def batch(seq: int, *blocks: pb.Block, lane: pb.Lane.ValueType = pb.LIVE) -> pb.Batch:
    return pb.Batch(lane=lane, seq=seq, blocks=blocks)


GPU_METRICS = tuple(metric.name for metric in of_scope(Scope.GPU))
