"""A bucket of a small fleet, and what is needed to export it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from drover_collector.exporters.gpus import Identities, IdentityReader, LastXids
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.records import EntityRow, entity_id
from drover_collector.store.samples.entities import EntityRegistry
from drover_core.metrics.catalog import Scope
from testbed.collected import BUSY, gpu_key, small_index

END_MS = 1_790_000_010_000
NAN = float("nan")


def registry_of(index: FleetIndex) -> EntityRegistry:
    """The GPUs of the fleet, each with a UUID that needs escapes."""
    return EntityRegistry(
        EntityRow(
            entity_id(Scope.GPU, gpu_key(node.name, slot)), Scope.GPU, gpu_key(node.name, slot), node.name, slot,
            uuid=f"GPU-{node.name}-{slot}", pci=f"0000:{slot + 0x1B:02x}:00.0", model='NVIDIA "H100"\\80GB',
        )
        for node in index.nodes for slot in range(node.gpus)
    )  # fmt: skip


def bucket_of(
    index: FleetIndex, end_ms: int = END_MS, jobs: Sequence[str] = (), changed: Mapping[str, Sequence[float]] = {}
) -> Bucket:
    """A bucket in which each GPU has the values of BUSY. `jobs`: by GPU, "" for none. `changed`: columns."""
    count = index.gpu_count
    names = tuple(dict.fromkeys(job for job in jobs if job))
    codes = [names.index(job) if job else -1 for job in jobs] or [-1] * count
    columns = {name: np.full(count, value) for name, value in BUSY.items()}
    columns |= {name: np.array(values, float) for name, values in changed.items()}
    rows = np.full(count, 10, np.int32)
    return Bucket(
        end_ms - 10_000, 10_000, columns, {}, rows, np.full(index.node_count, 10, np.int32),
        np.array(codes, np.int32), names,
    )  # fmt: skip


class Exported:
    """A fleet of four GPUs, n0 to n1, in two racks."""

    def __init__(self) -> None:
        self.index = small_index(2, 2)
        self.registry = registry_of(self.index)
        self.reader = IdentityReader(self.index, self.registry)
        self.xids = LastXids(self.index)

    def bucket(self, end_ms: int = END_MS, jobs: Sequence[str] = (), **changed: Sequence[float]) -> Bucket:
        return bucket_of(self.index, end_ms, jobs, changed)

    def identities(self, bucket: Bucket) -> Identities:
        return self.reader.read(bucket)


def silent(bucket: Bucket, gpu: int) -> Bucket:
    """The bucket as it would be if a GPU had sent nothing."""
    rows = bucket.gpu_rows.copy()
    rows[gpu] = 0
    columns = {name: np.where(np.arange(len(rows)) == gpu, np.nan, column) for name, column in bucket.gpu.items()}
    return replace(bucket, gpu_rows=rows, gpu=columns)


@contextmanager
def stopped(*closing: object) -> Iterator[None]:
    try:
        yield
    finally:
        for each in closing:
            each.close()  # type: ignore[attr-defined]  # all of them have it
