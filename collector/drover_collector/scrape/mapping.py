"""From the samples of one page to values of the catalog, for one node. Pure; remembers the counters of the last page.

What is not finite, is blank, or has another meaning than the catalog's is absent, never 0. A series that stands there
twice counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drover_collector.scrape.gpu_ids import MAX_GPUS, GpuId, HwGpus, gpu_of, is_plain
from drover_collector.scrape.tables import Row, Table
from drover_core.metrics.catalog import Metric, Scope
from drover_core.metrics.prometheus_text import ExpositionError, Sample, parse

MAX_LINKS = 128
CLOCK_MS = 60_000  # a sample whose own timestamp is off by more is stale, or the exporter's clock is wrong
IDLE_MODES = frozenset({"idle", "iowait"})
ACTIVE = 4.0  # InfiniBand's state ACTIVE (kernel: enum ib_port_state)
SIZE_OF = {"node_filesystem_avail_bytes": "node_filesystem_size_bytes"}
Labels = tuple[tuple[str, str], ...]
# Of one page: values of counters, values by metric, and XIDs.
Taken = tuple[
    dict[tuple[str, str, Labels], float],
    dict[tuple[Scope, object, str], tuple[Row, float]],
    "dict[GpuId, set[int]]",
]


@dataclass(slots=True)
class Found:
    """What one page, or the pages of one node together, gave.

    Attributes:
        xids: (slot, code) of XIDs that are new since the last page.
        vendors: of GPUs, where the page says them.
        problems: why samples were left out, each once.
    """

    node: dict[str, float] = field(default_factory=dict)
    gpus: dict[GpuId, dict[str, float]] = field(default_factory=dict)
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    xids: list[tuple[int, int]] = field(default_factory=list)
    vendors: set[str] = field(default_factory=set)
    problems: set[str] = field(default_factory=set)

    def add(self, other: Found) -> None:
        """Take what another page of the node gave. GPUs in one slot are one GPU; the first page names it."""
        self.node |= {name: value for name, value in other.node.items() if name not in self.node}
        slots = {gpu.slot: gpu for gpu in self.gpus}
        for gpu, values in other.gpus.items():
            mine = self.gpus.setdefault(slots.get(gpu.slot, gpu), {})
            mine |= {name: value for name, value in values.items() if name not in mine}
        for link, values in other.links.items():
            self.links.setdefault(link, {}).update(values)
        self.xids += other.xids
        self.vendors |= other.vendors
        self.problems |= other.problems


class PageMapper:
    """Maps the pages of one target, one after the other."""

    def __init__(self, table: Table, node: str = "") -> None:
        """`node`: whose pages they are, for GPUs whose names are unique in their node alone."""
        self._table = table
        self._hw = HwGpus(table.gpu, node) if table.gpu is not None and table.name == "hw" else None
        self._rows = table.by_series()
        self._wanted = frozenset({*self._rows, *(SIZE_OF[name] for name in self._rows if name in SIZE_OF)})
        self._counters: dict[tuple[str, str, Labels], float] = {}  # (entity, series, labels) -> value on the last page
        self._last_ms = 0
        self._xids: dict[str, set[int]] = {}  # GPU's key -> codes on the last page that named it; slots may change
        # Of the page at hand, by the labels' identity: the parser gives all samples of a GPU the same object.
        self._keys: dict[int, Labels] = {}
        self._gpus: dict[tuple[int, bool], GpuId | None] = {}

    def read(self, text: str, now_ms: int) -> Found:
        """Return the values of a page that was read at `now_ms`.

        Raises:
            ExpositionError: it is no exposition, too large, or has none of the exporter's series.
        """
        stale = 0

        def is_current(stamp_s: float) -> bool:
            nonlocal stale
            current = abs(stamp_s * 1000 - now_ms) <= CLOCK_MS
            stale += not current
            return current

        samples = parse(text, self._wanted, is_current)
        return self.map(samples, now_ms, stale)

    @property
    def wanted(self) -> frozenset[str]:
        """Return the names of series that are used."""
        return self._wanted

    def forget(self, series: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        """Forget the last values of counters that were reset: they have no rate on the next page."""
        over = {(name, tuple(sorted(labels.items()))) for name, labels in series}
        self._counters = {key: value for key, value in self._counters.items() if key[1:] not in over}

    def map(self, samples: Mapping[str, list[Sample]], now_ms: int, stale: int = 0) -> Found:
        """Return the values of samples that were all read at `now_ms`. Those of one GPU may share one object of labels.

        Args:
            stale: samples that were left out, as their time was off.
        Raises:
            ExpositionError: there is none of the exporter's series.
        """
        self._keys, self._gpus = {}, {}
        found = Found()
        if self._hw is not None:
            found.problems |= self._hw.learn(samples)
            found.vendors |= self._hw.vendors
        seen: dict[tuple[str, str, Labels], float] = {}
        joined: dict[tuple[Scope, object, str], tuple[Row, float]] = {}
        codes: dict[GpuId, set[int]] = {}
        for name, rows in self._rows.items():
            self._take_series(name, rows, samples, found, (seen, joined, codes))
        self._take_xids(codes, found)
        for (scope, entity, metric), (row, value) in joined.items():
            self._put(found, scope, entity, metric, row, value)
        self._shares(samples, found, seen, now_ms)
        self._rates(found, seen, now_ms)
        self._counters, self._last_ms = seen, now_ms
        if stale:
            found.problems.add(f"{stale} samples are {CLOCK_MS // 1000} s or more off the collector's clock")
        there = found.gpus if self._table.needs == "gpu" else found.node
        if not there:
            why = f": {', '.join(sorted(found.problems))}" if found.problems else ""
            raise ExpositionError(f"the page has none of {self._table.title}'s values{why}")
        return found

    # ---- samples

    def _take_series(
        self, name: str, rows: Sequence[Row], samples: Mapping[str, list[Sample]], found: Found, into: Taken
    ) -> None:
        seen, joined, codes = into
        once: set[Labels] = set()
        for labels, value in samples.get(name, ()):
            key = self._keys.get(id(labels))
            if key is None:
                key = self._keys[id(labels)] = tuple(sorted(labels.items()))
            if key in once:
                found.problems.add("series that stand there twice")
                continue
            once.add(key)
            if not math.isfinite(value) or value in self._table.blanks:
                continue
            for row in rows:
                if not row.matches(labels):
                    continue
                entity = self._entity(row, labels, found)
                if entity is None:
                    continue
                if row.metric is None:
                    if isinstance(entity, GpuId) and 0 <= value < 2**16:
                        codes.setdefault(entity, set()).add(int(value))
                elif row.how in ("rate", "busy_share"):
                    seen[_place(entity), name, key] = value
                elif row.how != "used_share" and (not row.states or value in row.states):
                    at = row.metric.scope, entity, row.metric.name
                    known = joined.get(at)
                    joined[at] = row, value if known is None else _join(known[0], known[1], row, value)

    def _entity(self, row: Row, labels: Mapping[str, str], found: Found) -> object | None:
        """Return the GPU, the name of the port, or "" for the node; None: of something else."""
        scope = Scope.GPU if row.metric is None else row.metric.scope
        if scope is Scope.NODE:
            return ""
        if scope is Scope.LINK:
            device, port = labels.get("device", ""), labels.get("port", "")
            name = device if port in ("", "1") else f"{device}/{port}"
            if not is_plain(name) or (name not in found.links and len(found.links) >= MAX_LINKS):
                found.problems.add("ports without a plain name, or too many")
                return None
            found.links.setdefault(name, {})
            return name
        at = id(labels), row.whole
        if at not in self._gpus:
            self._gpus[at] = self._gpu(labels, found, row.whole)
        return self._gpus[at]

    def _gpu(self, labels: Mapping[str, str], found: Found, whole: bool) -> GpuId | None:
        if self._hw is not None:
            gpu = self._hw.of(labels)
        else:
            gpu = None if self._table.gpu is None else gpu_of(self._table.gpu, labels, whole)
        if gpu is None or (gpu not in found.gpus and len(found.gpus) >= MAX_GPUS):
            if gpu is not None:
                found.problems.add(f"more than {MAX_GPUS} GPUs")
            return None
        if gpu not in found.gpus and any(other.slot == gpu.slot for other in found.gpus):
            found.problems.add(f"two GPUs in slot {gpu.slot}")
            return None
        found.gpus.setdefault(gpu, {})
        return gpu

    def _take_xids(self, codes: Mapping[GpuId, set[int]], found: Found) -> None:
        """Report codes that are new since the last page that named the GPU."""
        for gpu, now in codes.items():
            before = self._xids.get(gpu.key)
            self._xids[gpu.key] = now
            if before is not None:
                found.xids += [(gpu.slot, code) for code in sorted(now - before - {0})]

    # ---- values

    def _put(self, found: Found, scope: Scope, entity: object, metric: str, row: Row, value: float) -> None:
        assert row.metric is not None
        if row.how == "is_zero":
            value = float(value == 0)
        elif row.how == "is_active":
            value = float(value == ACTIVE)
        stored = clipped(row.metric, value * row.scale)
        if stored is None:
            found.problems.add(f"impossible values of {row.series}")
        elif isinstance(entity, GpuId):
            found.gpus[entity].setdefault(metric, stored)
        elif scope is Scope.LINK:
            found.links[str(entity)].setdefault(metric, stored)
        else:
            found.node.setdefault(metric, stored)

    def _rates(self, found: Found, seen: Mapping[tuple[str, str, Labels], float], now_ms: int) -> None:
        """Put what grew since the last page, per second. A counter that fell, or is new, has no rate."""
        elapsed_s = (now_ms - self._last_ms) / 1000
        if not self._last_ms or elapsed_s <= 0:
            return
        grown: dict[tuple[str, str], float] = {}
        for (place, name, labels), value in seen.items():
            before = self._counters.get((place, name, labels))
            if before is not None and value >= before:
                grown[place, name] = grown.get((place, name), 0.0) + value - before
        by_place: dict[str, object] = {_place(gpu): gpu for gpu in found.gpus}
        for (place, name), growth in grown.items():
            for row in self._rows[name]:
                if row.how == "rate" and row.metric is not None:
                    entity = by_place.get(place, place)
                    self._put(found, row.metric.scope, entity, row.metric.name, row, growth / elapsed_s)

    def _shares(
        self, samples: Mapping[str, list[Sample]], found: Found, seen: Mapping[tuple[str, str, Labels], float],
        now_ms: int,
    ) -> None:  # fmt: skip
        """Put the share of CPU time that was not idle since the last page, and of the root file system in use."""
        for name, rows in self._rows.items():
            for row in rows:
                assert row.metric is not None or row.event
                if row.metric is None:
                    continue
                share = None
                if row.how == "busy_share" and 0 < self._last_ms < now_ms:
                    share = self._busy(name, seen)
                elif row.how == "used_share":
                    share = _used(row, samples.get(name, ()), samples.get(SIZE_OF[name], ()))
                if share is not None:
                    self._put(found, Scope.NODE, "", row.metric.name, row, share)

    def _busy(self, name: str, seen: Mapping[tuple[str, str, Labels], float]) -> float | None:
        idle = total = 0.0
        for key, value in seen.items():
            growth = value - self._counters.get(key, math.inf) if key[1] == name else -1.0
            if growth >= 0:
                total += growth
                idle += growth if dict(key[2]).get("mode") in IDLE_MODES else 0.0
        return None if total <= 0 else 1 - idle / total


def _join(known: Row, before: float, row: Row, value: float) -> float:
    if known is not row or row.join == "first":
        return before
    return before + value if row.join == "sum" else max(before, value)


def _place(entity: object) -> str:
    return f"gpu {entity.slot}" if isinstance(entity, GpuId) else str(entity)


def _used(row: Row, free: Sequence[Sample], size: Sequence[Sample]) -> float | None:
    sizes = [value for labels, value in size if row.matches(labels) and value > 0]
    frees = [value for labels, value in free if row.matches(labels) and value >= 0]
    return 1 - frees[0] / sizes[0] if sizes and frees and math.isfinite(sizes[0]) else None


def clipped(metric: Metric, value: float) -> float | None:
    """Return a value that can be true; None: it cannot. Two windows that end apart make a share a little too large."""
    if metric.unit == "ratio" and metric.high < value <= metric.high * 1.05:
        return metric.high
    return value if metric.low <= value <= metric.high else None
