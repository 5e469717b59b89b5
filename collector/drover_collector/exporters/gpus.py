"""Who each GPU is, for labels, and what each GPU's newest values are. Laid out by the fleet's index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from drover_collector.fleet.buckets import GUESSED, Bucket, Floats
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.records import EntityRow
from drover_collector.store.samples.entities import EntityRegistry
from drover_core.metrics.catalog import Scope
from drover_core.metrics.dcgm_names import LAST_XID
from drover_core.metrics.series import GpuIdentity, Series
from drover_core.model.events import Event, EventKind

T = TypeVar("T")

FRESH_S = 60.0  # UUIDs and models are read again after this, if an entity has changed
SLICE = 2_000  # GPUs that one step handles: between steps other threads get the interpreter


@dataclass(frozen=True, slots=True, eq=False)
class Identities:
    """G known GPUs without their jobs, and the job of each, "" for none.

    Two with the same `known` object differ in jobs alone.
    """

    known: Sequence[GpuIdentity]
    jobs: Sequence[str]


class IdentityReader:
    """Reads who the GPUs of a fleet are. From any thread."""

    def __init__(
        self, index: FleetIndex, registry: EntityRegistry, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._index, self._registry, self._monotonic = index, registry, monotonic
        self._lock = threading.Lock()  # of all below
        self._version, self._read_s = -1, 0.0
        self._held = Identities((), ())

    def read(self, bucket: Bucket) -> Identities:
        """Return the GPUs and their jobs at the bucket's end; the same object if nothing has changed."""
        with self._lock:
            return self._read(bucket)

    def _read(self, bucket: Bucket) -> Identities:
        now_s = self._monotonic()
        known = self._held.known
        if self._version < 0 or (self._registry.version != self._version and now_s - self._read_s >= FRESH_S):
            self._version, self._read_s = self._registry.version, now_s
            known = self._known()
        # A job that nobody names is the detectors' guess from traffic, not a label that people know.
        names = [*("" if name.startswith(GUESSED) else name for name in bucket.job_names), ""]  # -1 is the last
        jobs = [names[code] for code in bucket.jobs.tolist()]
        if known is not self._held.known or jobs != self._held.jobs:
            self._held = Identities(known, jobs)
        return self._held

    def _known(self) -> list[GpuIdentity]:
        index = self._index
        newest: dict[int, EntityRow] = {}  # GPU -> who was there last
        for row in self._registry.rows():
            if row.scope is not Scope.GPU or row.mig or row.gpu is None:
                continue
            gpu = index.gpu(row.node, row.gpu)
            # Not who came last: a GPU may have left its slot to another one and come back.
            if gpu is not None and (gpu not in newest or _seen(newest[gpu]) <= _seen(row)):
                newest[gpu] = row
        found = []
        for gpu, (node, slot) in enumerate(zip(index.gpu_node.tolist(), index.gpu_slot.tolist(), strict=True)):
            spec = index.nodes[node]
            there = newest.get(gpu)
            uuid, model, pci = ("", "", "") if there is None else (there.uuid, there.model, there.pci)
            found.append(GpuIdentity(spec.name, slot, uuid, model or spec.sku, spec.rack, pci))
        return found


def _seen(row: EntityRow) -> tuple[int, int]:
    return row.last_ms, row.first_ms


class PerGpu(Generic[T]):
    """Something made of each GPU's identity, such as its labels as text. Made again only where a job has changed."""

    def __init__(self, make: Callable[[GpuIdentity, str], T]) -> None:
        """`make`: of an identity and the GPU's job."""
        self._make = make
        self._of = Identities((), ())
        self._made: list[T] = []

    def of(self, identities: Identities) -> Sequence[T]:
        """Return one for each GPU. It changes with the next call for other identities."""
        if identities is self._of:
            return self._made
        if identities.known is not self._of.known:
            self._made = [self._make(gpu, job) for gpu, job in zip(identities.known, identities.jobs, strict=True)]
        else:
            for gpu, (before, now) in enumerate(zip(self._of.jobs, identities.jobs, strict=True)):
                if before != now:
                    self._made[gpu] = self._make(identities.known[gpu], now)
        self._of = identities
        return self._made


class LastXids:
    """The newest XID of each GPU since the collector started, as DCGM keeps it. From any thread."""

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self._codes = np.zeros(index.gpu_count)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind is EventKind.XID and event.gpu is not None and event.code.isdecimal() and not event.backlog:
                gpu = self._index.gpu(event.node, event.gpu)
                if gpu is not None:
                    self._codes[gpu] = float(event.code)

    def column(self, bucket: Bucket) -> Floats:
        """Return the code of each GPU, 0 for none, float64 [G]; NaN where the GPU has no row in the bucket."""
        return np.where(bucket.gpu_rows > 0, self._codes, np.nan)


def column_of(series: Series, bucket: Bucket, xids: LastXids) -> Floats | None:
    """Return the values of a family, float64 [G], NaN where it is not known; None: no GPU has one."""
    values = _metric(series.metric, bucket, xids)
    if values is not None and series.less:
        less = _metric(series.less, bucket, xids)
        values = None if less is None else values - less
    if values is None:
        return None
    if series.factor != 1.0:
        values = values * series.factor
    return values if series.digits is None else np.round(values, series.digits)


def _metric(name: str, bucket: Bucket, xids: LastXids) -> Floats | None:
    return xids.column(bucket) if name == LAST_XID else bucket.gpu.get(name)
