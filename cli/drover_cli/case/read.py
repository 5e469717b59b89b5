"""Case folders: read and checked. case_writing.py writes them; docs/reference/cases.md has the form.

Anything that can be used is used; what cannot is counted and reported (`Case.notes`), never guessed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drover_cli.case.clocks import put_right
from drover_cli.case.inventory import read_inventories
from drover_cli.case.lines import CaseError as CaseError
from drover_cli.case.lines import read_jsonl as read_jsonl
from drover_cli.case.ports import add_ports
from drover_cli.case.probes import CaseProbes, read_probes
from drover_cli.case.samples import NodeParts, Samples, read_parts, read_samples
from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Workloads, aggregate
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Event, EventKind
from drover_core.model.fleet import FleetError, FleetSpec, load_json
from drover_core.times import from_iso

CHUNK_BUCKETS = 15
MAX_BUCKET_MS = 600_000


@dataclass(slots=True)
class Case:
    path: Path
    spec: FleetSpec
    index: FleetIndex
    gpu: Samples | None
    node: Samples | None
    link: Samples | None
    events: list[Event]
    interval_ms: int
    inventories: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)  # when, node, all that it reported
    probes: CaseProbes = field(default_factory=CaseProbes)
    work: NodeParts = field(default_factory=NodeParts)  # training loops and inference servers
    notes: list[str] = field(default_factory=list)
    _members: list[npt.NDArray[np.int64]] = field(default_factory=list)  # GPUs of each job
    _changes: tuple[list[int], list[int]] = ([], [])  # starts of the jobs, and their ends, in order of time
    _held: tuple[tuple[int, int], npt.NDArray[np.int32]] | None = None  # by whom, after so many of these

    @property
    def bucket_ms(self) -> int:
        """10 s, or for slower cases the interval rounded up to whole 10 s."""
        return max(BUCKET_MS, -(-self.interval_ms // BUCKET_MS) * BUCKET_MS)

    @property
    def span(self) -> tuple[int, int]:
        """First and last time of anything in the case."""
        times = [s.ts_ms[k] for s in self._samples() for k in (0, -1)]
        times += [e.ts_ms for e in self.events]
        return (int(min(times)), int(max(times))) if times else (0, 0)

    def buckets(self) -> Iterator[Bucket]:
        """All buckets of the case in time order, gaps included (as buckets without rows)."""
        sources = self._samples()
        if not sources:
            return
        length = self.bucket_ms
        first = min(int(s.ts_ms[0]) for s in sources) // length
        last = max(int(s.ts_ms[-1]) for s in sources) // length
        refused: Counter[str] = Counter()
        job_names = tuple(job.id for job in self.spec.jobs)
        for start in range(first, last + 1, CHUNK_BUCKETS):
            count = min(CHUNK_BUCKETS, last + 1 - start)
            gpu = _Chunk(self.gpu, start, count, length, self.index.gpu_count, refused)
            node = _Chunk(self.node, start, count, length, self.index.node_count, refused)
            link = _Chunk(self.link, start, count, length, len(self.index.ports), refused)
            work = _Chunk(self.work.samples, start, count, length, len(self.work.names), refused)
            for i in range(count):
                begin = (start + i) * length
                # A case without node.parquet: its GPUs speak for it.
                of_gpus = np.bincount(self.index.gpu_node, gpu.rows[i], self.index.node_count)
                rows = node.rows[i] + of_gpus.astype(np.int32)
                yield Bucket(
                    start_ms=begin,
                    length_ms=length,
                    gpu=gpu.columns(i),
                    node=node.columns(i),
                    gpu_rows=gpu.rows[i],
                    node_rows=rows,
                    jobs=self._jobs_at(begin + length),
                    job_names=job_names,
                    link=link.columns(i),
                    work=self._work(work, i),
                )
        self.notes += [f"{n} values of {name} outside its possible range were left out" for name, n in refused.items()]

    def _work(self, chunk: _Chunk, i: int) -> Workloads:
        there = np.flatnonzero(chunk.rows[i])
        names = [self.work.names[at] for at in there.tolist()]
        nodes = np.array([self.index.node_number[node] for node, _ in names], np.int32)
        columns = chunk.columns(i) if len(there) else {}
        return Workloads.of(nodes, [name for _, name in names], {m: columns[m][there] for m in columns})

    def _samples(self) -> list[Samples]:
        return [s for s in (self.gpu, self.node, self.link) if s is not None and len(s.ts_ms)]

    def _jobs_at(self, ts_ms: int) -> npt.NDArray[np.int32]:
        if not self._members:
            first, number_of = self.index.first_gpu, self.index.node_number
            self._members = [
                np.array([first[number_of[n]] + slot for n, slot in job.members], np.int64) for job in self.spec.jobs
            ]
            starts = sorted(job.start_ms for job in self.spec.jobs)
            self._changes = starts, sorted(job.end_ms for job in self.spec.jobs if job.end_ms is not None)
        gone_by = bisect_left(self._changes[0], ts_ms), bisect_left(self._changes[1], ts_ms)
        if self._held is None or self._held[0] != gone_by:
            jobs = np.full(self.index.gpu_count, -1, np.int32)
            for number, job in enumerate(self.spec.jobs):
                if job.start_ms < ts_ms and (job.end_ms is None or ts_ms <= job.end_ms):
                    jobs[self._members[number]] = number
            self._held = gone_by, jobs
        return self._held[1]


class _Chunk:
    """Some buckets of one file in a row; a column is aggregated when somebody asks for it."""

    def __init__(
        self, samples: Samples | None, start: int, count: int, length: int, entities: int, refused: Counter[str]
    ) -> None:
        """`start`: number of the first bucket of `length` ms since 1970."""
        self._samples, self._refused, self._shape = samples, refused, (count, entities)
        self._made: dict[str, npt.NDArray[np.float64]] = {}
        self.rows = np.zeros(self._shape, np.int32)
        self._many = np.zeros(0, np.int64)  # rows that share their cell with others
        if samples is None:
            return
        low, high = np.searchsorted(samples.ts_ms, [start * length, (start + count) * length])
        self._low, self._high, cells = int(low), int(high), count * entities
        if low == high:
            return
        self._ts_ms = ts_ms = samples.ts_ms[low:high]
        self._cell = cell = ((ts_ms // length - start) * entities + samples.entity[low:high]).astype(np.int32)
        each = np.bincount(cell, minlength=cells)
        # A row per bucket, as at 10 s: it is the bucket's value. The others' cells are given any row, and NaN later.
        row_of = np.full(cells, self._low)
        row_of[cell] = np.arange(self._low, self._high)
        self._rows_alone, self._others = samples.places(row_of), np.flatnonzero(each != 1)
        if (each > 1).any():
            self._many = many = np.flatnonzero(each[cell] > 1)
            self._rows_many = samples.places(self._low + many)
            pairs = np.unique(np.stack([cell[many].astype(np.int64), ts_ms[many]]), axis=1)[0]
            each = np.where(each == 1, 1, np.bincount(pairs, minlength=cells))
        self.rows = each.astype(np.int32).reshape(self._shape)

    def columns(self, i: int) -> Mapping[str, npt.NDArray[np.float64]]:
        """Of bucket `i`: metric -> float64 [entities]."""
        return _Columns(self, i)

    @property
    def names(self) -> Sequence[str]:
        return [] if self._samples is None else self._samples.names

    def value(self, name: str, i: int) -> npt.NDArray[np.float64]:
        if name not in self._made:
            self._made[name] = self._aggregated(name)
        value: npt.NDArray[np.float64] = self._made[name][i]
        return value

    def _aggregated(self, name: str) -> npt.NDArray[np.float64]:
        assert self._samples is not None
        metric, cells, many = BY_NAME[name], self.rows.size, self._many
        if self._low == self._high:
            return np.full(self._shape, np.nan)
        made = self._samples.values(metric, self._rows_alone, self._refused, self._others)
        if len(many):
            values = self._samples.values(metric, self._rows_many, self._refused)
            of_many = aggregate(name, self._cell[many], self._ts_ms[many], values, cells)
            made[self._others] = of_many[self._others]
        return made.reshape(self._shape)


class _Columns(Mapping[str, npt.NDArray[np.float64]]):
    """Columns of bucket `i` of a chunk, made when they are asked for: views of the chunk's own, so they are kept."""

    def __init__(self, chunk: _Chunk, i: int) -> None:
        self._chunk, self._i = chunk, i
        self._made: dict[str, npt.NDArray[np.float64]] = {}

    def __getitem__(self, metric: str) -> npt.NDArray[np.float64]:
        made = self._made.get(metric)
        if made is None:
            if metric not in self._chunk.names:
                raise KeyError(metric)
            made = self._made[metric] = self._chunk.value(metric, self._i)
        return made

    def __contains__(self, metric: object) -> bool:
        return metric in self._chunk.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunk.names)

    def __len__(self) -> int:
        return len(self._chunk.names)


def read_case(path: Path, *, for_store: bool = False) -> Case:
    """Read a case folder.

    Args:
        for_store: to be stored, not judged: a case may be without samples, as that of an hour in which none came.
    Raises:
        CaseError: it cannot be used; the message names the file and the mend.
    """
    try:
        there = path.is_dir()
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}; choose a folder that this user may read") from None
    if not there:
        raise CaseError(f"{path}: no such folder; a case is a folder with fleet.json and gpu.parquet")
    try:
        spec = load_json(path / "fleet.json")
    except FleetError as error:
        raise CaseError(str(error)) from None
    index = FleetIndex(spec)
    notes: list[str] = []
    add_ports(index, path / "link.parquet")
    gpu = read_samples(path / "gpu.parquet", Scope.GPU, index, notes)
    node = read_samples(path / "node.parquet", Scope.NODE, index, notes)
    if gpu is None and node is None and not for_store:
        raise CaseError(f"{path}: neither gpu.parquet nor node.parquet; a case needs samples to judge")
    link = read_samples(path / "link.parquet", Scope.LINK, index, notes)
    events = _read_events(path / "events.jsonl", index, notes)
    interval = _interval_ms(gpu if gpu is not None else node, notes)
    notes += put_right(gpu, node, link, index, interval)
    inventories = read_inventories(path / "inventory.jsonl", index, notes)
    probes = read_probes(path / "probes.jsonl", index, notes)
    work = read_parts(path / "workload.parquet", Scope.WORKLOAD, "workload", index, notes, lambda _node, _name: True)
    return Case(path, spec, index, gpu, node, link, events, interval, inventories, probes, work, notes)


def _interval_ms(samples: Samples | None, notes: list[str]) -> int:
    """The usual distance between two rows of one entity."""
    if samples is None or len(samples.ts_ms) < 2:
        return BUCKET_MS
    head = slice(0, 200_000)
    order = np.lexsort((samples.ts_ms[head], samples.entity[head]))
    entity, ts_ms = samples.entity[head][order], samples.ts_ms[head][order]
    steps = np.diff(ts_ms)[(np.diff(entity) == 0) & (np.diff(ts_ms) > 0)]
    if not len(steps):
        return BUCKET_MS
    interval = int(np.median(steps))
    if interval > MAX_BUCKET_MS:
        raise CaseError(f"rows are {interval / 1000:.0f} s apart; the longest interval that can be judged is 10 min")
    gaps = int((steps > 3 * interval).sum())
    if gaps:
        notes.append(f"{gaps} gaps longer than three intervals ({3 * interval / 1000:.0f} s)")
    return interval


def _read_events(path: Path, index: FleetIndex, notes: list[str]) -> list[Event]:
    if not path.exists():
        notes.append("events.jsonl is missing: XIDs and other events were not judged")
        return []
    events, strangers = [], 0
    for number, row in read_jsonl(path):
        try:
            gpu, received = row.get("gpu"), row.get("received")
            event = Event(
                id=str(row.get("id", f"case/{number}")),
                ts_ms=from_iso(row["ts"]),
                node=str(row["node"]),
                gpu=None if gpu is None else int(gpu),
                kind=EventKind(row["kind"]),
                code=str(row.get("code", "")),
                message=str(row.get("message") or ""),
                source=str(row.get("source", "case")),
                backlog=bool(row.get("backlog", False)),
                count=int(row.get("count", 1)),
                forgeable=bool(row.get("forgeable", False)),
                received_ms=None if received is None else from_iso(received),
                clock_suspect=bool(row.get("clock_suspect", False)),
                boot=str(row.get("boot") or ""),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CaseError(
                f'{path}: line {number}: expected {{"ts", "node", "gpu", "kind", "code", "message"}} ({error!r})'
            ) from None
        if event.node in index.node_number:
            events.append(event)
        else:
            strangers += 1
    if strangers:
        notes.append(f"events.jsonl: {strangers} events of nodes that fleet.json does not list were left out")
    return sorted(events, key=lambda e: e.ts_ms)
