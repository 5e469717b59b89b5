"""Case folders (contract 7 of the design): read and checked. case_writing.py writes them; docs/cases.md has the form.

Anything that can be used is used; what cannot is counted and told (`Case.notes`), never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from drover_cli.case_inventory import read_inventories
from drover_cli.case_lines import CaseError as CaseError
from drover_cli.case_lines import read_jsonl as read_jsonl
from drover_cli.case_probes import CaseProbes, read_probes
from drover_cli.case_writing import KEYS
from drover_cli.ports import with_ports
from drover_collector.buckets import BUCKET_MS, Bucket, aggregate
from drover_collector.fleet_index import FleetIndex
from drover_proto.catalog import BY_NAME, Metric, Scope, of_scope
from drover_proto.events import Event, EventKind
from drover_proto.fleet import FleetError, FleetSpec, load_json
from drover_proto.times import from_iso

CHUNK_BUCKETS = 60
MAX_BUCKET_MS = 600_000
FAR_ROWS = 500_000  # rows that stand no further from their place are fetched from there, others are brought in order


@dataclass(slots=True)
class Samples:
    """Rows of one Parquet file, sorted by time. `entity` indexes the fleet's GPUs or nodes."""

    ts_ms: npt.NDArray[np.int64]
    entity: npt.NDArray[np.int32]
    table: pa.Table  # catalog columns only
    rows: npt.NDArray[np.int64] | None  # which row of the table is the next in time; None: they stand in order

    def column(self, metric: Metric, low: int, high: int, refused: Counter[str]) -> npt.NDArray[np.float64]:
        """float64 of rows low .. high, NaN where absent or outside the catalog's range."""
        wanted = None if self.rows is None else self.rows[low:high]
        first, end = (low, high) if wanted is None or not len(wanted) else (int(wanted.min()), int(wanted.max()) + 1)
        chunk = self.table.column(metric.name).slice(first, end - first)
        if pa.types.is_boolean(chunk.type):
            chunk = chunk.cast(pa.uint8())
        values = chunk.to_numpy()  # null is NaN
        values = np.asarray(values if wanted is None else values[wanted - first], np.float64)
        if not len(values) or (values.min() >= metric.low and values.max() <= metric.high):
            return values  # all known and possible, as a rule
        with np.errstate(invalid="ignore"):
            wrong = (values < metric.low) | (values > metric.high)
        if wrong.any():
            refused[metric.name] += int(wrong.sum())
            values = np.where(wrong, np.nan, values)
        return values


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
    inventories: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)  # when, node, all that it told
    probes: CaseProbes = field(default_factory=CaseProbes)
    notes: list[str] = field(default_factory=list)
    _members: list[npt.NDArray[np.int64]] = field(default_factory=list)  # GPUs of each job

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
            gpu, gpu_rows = _aggregate(self.gpu, start, count, length, self.index.gpu_count, refused)
            node, node_rows = _aggregate(self.node, start, count, length, self.index.node_count, refused)
            link, _ = _aggregate(self.link, start, count, length, len(_ports(self.index)), refused)
            for i in range(count):
                begin = (start + i) * length
                # A case without node.parquet: its GPUs speak for it.
                of_gpus = np.bincount(self.index.gpu_node, gpu_rows[i], self.index.node_count)
                rows = node_rows[i] + of_gpus.astype(np.int32)
                yield Bucket(
                    start_ms=begin,
                    length_ms=length,
                    gpu={name: values[i] for name, values in gpu.items()},
                    node={name: values[i] for name, values in node.items()},
                    gpu_rows=gpu_rows[i],
                    node_rows=rows,
                    jobs=self._jobs_at(begin + length),
                    job_names=job_names,
                    link={name: values[i] for name, values in link.items()},
                )
        self.notes += [f"{n} values of {name} outside its possible range were left out" for name, n in refused.items()]

    def _samples(self) -> list[Samples]:
        return [s for s in (self.gpu, self.node, self.link) if s is not None and len(s.ts_ms)]

    def _jobs_at(self, ts_ms: int) -> npt.NDArray[np.int32]:
        jobs = np.full(self.index.gpu_count, -1, np.int32)
        if not self._members:
            first, number_of = self.index.first_gpu, self.index.node_number
            self._members = [
                np.array([first[number_of[n]] + slot for n, slot in job.members], np.int64) for job in self.spec.jobs
            ]
        for number, job in enumerate(self.spec.jobs):
            if job.start_ms < ts_ms and (job.end_ms is None or ts_ms <= job.end_ms):
                jobs[self._members[number]] = number
        return jobs


def _aggregate(
    samples: Samples | None, start: int, count: int, length: int, entities: int, refused: Counter[str]
) -> tuple[dict[str, npt.NDArray[np.float64]], npt.NDArray[np.int32]]:
    """Values [count, entities] per metric and rows [count, entities] of the buckets start .. start + count."""
    rows = np.zeros((count, entities), np.int32)
    if samples is None:
        return {}, rows
    low, high = np.searchsorted(samples.ts_ms, [start * length, (start + count) * length])
    ts_ms = samples.ts_ms[low:high]
    cell = ((ts_ms // length - start) * entities + samples.entity[low:high]).astype(np.int32)
    each = np.bincount(cell, minlength=count * entities)
    alone = bool(each.max(initial=0) <= 1)  # a row per bucket, as at an interval of 10 s: each is the bucket's value
    if not alone:
        each = np.bincount(np.unique(np.stack([cell.astype(np.int64), ts_ms]), axis=1)[0], minlength=count * entities)
    rows = each.astype(np.int32).reshape(count, entities)
    values = {}
    for name in samples.table.column_names:
        column = samples.column(BY_NAME[name], int(low), int(high), refused)
        if alone:
            made = np.empty(count * entities) if len(cell) == count * entities else np.full(count * entities, np.nan)
            made[cell] = column
        else:
            made = aggregate(name, cell, ts_ms, column, count * entities)
        values[name] = made.reshape(count, entities)
    return values, rows


def read_case(path: Path, *, all_ports: bool = False) -> Case:
    """Read a case folder.

    Args:
        all_ports: take ports of known nodes that fleet.json does not list too, as a store does; else they are left out.
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
    if all_ports:
        spec = with_ports(spec, path / "link.parquet")
    index = FleetIndex(spec)
    notes: list[str] = []
    gpu = read_samples(path / "gpu.parquet", Scope.GPU, index, notes)
    node = read_samples(path / "node.parquet", Scope.NODE, index, notes)
    if gpu is None and node is None:
        raise CaseError(f"{path}: neither gpu.parquet nor node.parquet; a case needs samples to judge")
    link = read_samples(path / "link.parquet", Scope.LINK, index, notes)
    events = _read_events(path / "events.jsonl", index, notes)
    interval = _interval_ms(gpu if gpu is not None else node, notes)
    inventories = read_inventories(path / "inventory.jsonl", index, notes)
    probes = read_probes(path / "probes.jsonl", index, notes)
    return Case(path, spec, index, gpu, node, link, events, interval, inventories, probes, notes)


def _ports(index: FleetIndex) -> list[tuple[str, str]]:
    """(node, link) of all ports of the fleet, in the order that buckets have them."""
    return [(node.name, link.link) for node in index.nodes for link in node.links]


def read_samples(
    path: Path, scope: Scope, index: FleetIndex, notes: list[str], workloads: Sequence[tuple[str, str]] = ()
) -> Samples | None:
    """One Parquet file; `workloads`: (node, name) of those to take, by whose place here the samples number them."""
    if not path.exists():
        notes.append(f"{path.name} is missing: nothing that needs it was judged")
        return None
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise CaseError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    needed = ["ts", "node", *KEYS.get(scope, [])]
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise CaseError(f"{path}: column {missing[0]!r} is missing; it needs {', '.join(needed)} and catalog columns")
    ts_ms = _times(path, table.column("ts"))
    entity = _entities(table, scope, index, workloads)
    known = entity >= 0
    if not known.all():
        names = table.column("node").cast(pa.string())
        ports = table.column("link") if scope is Scope.LINK else None
        strangers = sorted(
            {
                str(names[int(i)]) + (f" port {ports[int(i)]}" if ports is not None else "")
                for i in np.flatnonzero(~known)[:1000]
            }
        )
        notes.append(
            f"{path.name}: {int((~known).sum())} rows of things fleet.json does not list "
            f"(such as {', '.join(strangers[:3])}) were left out"
        )
    mine = {m.name for m in of_scope(scope)}
    unknown = [c for c in table.column_names if c not in mine and c not in needed]
    if unknown:
        notes.append(f"{path.name}: columns that are not in the catalog were left out: {', '.join(unknown)}")
    columns = [c for c in table.column_names if c in mine]
    for name in columns:
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise CaseError(f"{path}: column {name!r} is {kind}; it must be a number in {BY_NAME[name].unit}")
    empty = sorted(mine - set(columns))
    if empty:
        notes.append(f"{path.name}: {len(empty)} of {len(mine)} catalog columns are missing: {', '.join(empty)}")
    by_entity = np.argsort(entity, kind="stable")
    late = int(((np.diff(ts_ms[by_entity]) < 0) & (np.diff(entity[by_entity]) == 0)).sum())
    if late:
        notes.append(f"{path.name}: {late} rows stood out of time order; they were put where they belong")
    order = np.flatnonzero(known)
    order = order[np.argsort(ts_ms[order], kind="stable")]
    ts_ms, entity, table = ts_ms[order], entity[order], table.select(columns).combine_chunks()
    away = np.abs(order - np.arange(len(order))).max(initial=0)
    if away > FAR_ROWS:
        return Samples(ts_ms, entity, table.take(pa.array(order)), None)
    return Samples(ts_ms, entity, table, order if away else None)


def _entities(
    table: pa.Table, scope: Scope, index: FleetIndex, workloads: Sequence[tuple[str, str]]
) -> npt.NDArray[np.int32]:
    """What each row describes, -1 for what the fleet does not list."""

    def numbers(names: pa.Array, known: list[str]) -> npt.NDArray[np.int32]:
        found = pc.index_in(names, pa.array(known, pa.string()))
        return np.asarray(found.fill_null(-1), np.int32)

    names = table.column("node").cast(pa.string()).combine_chunks()
    if scope in (Scope.LINK, Scope.WORKLOAD):
        parts = table.column(KEYS[scope][0]).cast(pa.string()).combine_chunks()
        known_parts = _ports(index) if scope is Scope.LINK else workloads
        keys = pc.binary_join_element_wise(names, parts, "/")
        return numbers(keys, [f"{node}/{part}" for node, part in known_parts])
    node = numbers(names, [n.name for n in index.nodes])
    if scope is Scope.NODE:
        return node
    slots = table.column("gpu").cast(pa.int64()).fill_null(-1).to_numpy()
    counts = np.diff(index.first_gpu)
    known = (node >= 0) & (slots >= 0) & (slots < counts[node])
    return np.where(known, index.first_gpu[node] + slots, -1).astype(np.int32)


def _times(path: Path, column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    if column.null_count:
        raise CaseError(f"{path}: {column.null_count} rows have no ts; every row needs its time")
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms"), safe=False)
    elif not pa.types.is_integer(column.type):
        raise CaseError(f"{path}: column 'ts' is {column.type}; it must be a timestamp, or milliseconds since 1970")
    return np.asarray(column.cast(pa.int64()), np.int64)


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
