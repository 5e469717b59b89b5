"""Rows of a case's Parquet files: checked when they are opened, read by column and row group when somebody asks.

Anything that can be used is used; what cannot is counted and reported, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from drover_cli.case.lines import CaseError
from drover_cli.case.write import KEYS
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import Metric, Scope, of_scope


@dataclass(frozen=True, slots=True)
class _Part:
    """A column of one row group, float64 with NaN where absent, and whether all that is known is possible."""

    values: npt.NDArray[np.float64]
    possible: bool


@dataclass(frozen=True, slots=True)
class Places:
    """So many rows: row group, which of them lie there, and as what rows of the group."""

    count: int
    parts: list[tuple[int, slice | npt.NDArray[np.int64], npt.NDArray[np.int64]]]


@dataclass(slots=True)
class Samples:
    """Rows of one Parquet file, in order of time. `entity` indexes the fleet's GPUs, nodes, ports or workloads."""

    path: Path
    ts_ms: npt.NDArray[np.int64]
    entity: npt.NDArray[np.int32]
    names: list[str]  # catalog columns that it has
    _file: pq.ParquetFile
    _rows: npt.NDArray[np.int64] | None  # which row of the file is the next in time; None: they stand in order
    _starts: npt.NDArray[np.int64]  # first row of each row group, and the end of the last
    _parts: dict[str, dict[int, _Part]] = field(default_factory=dict)  # column -> row group -> what was read of it

    def column(self, metric: Metric, low: int, high: int, refused: Counter[str]) -> npt.NDArray[np.float64]:
        """float64 of rows low .. high, NaN where absent or outside the catalog's range.

        Raises:
            CaseError: the file cannot be read there.
        """
        return self.values(metric, self.places(np.arange(low, high)), refused)

    def move(self, back_ms: npt.NDArray[np.int64]) -> None:
        """Give each row a time that is so much earlier, and put the rows in order again."""
        ts_ms = self.ts_ms - back_ms
        order = np.argsort(ts_ms, kind="stable")
        self.ts_ms, self.entity = ts_ms[order], self.entity[order]
        self._rows = order if self._rows is None else self._rows[order]

    def places(self, at: npt.NDArray[np.int64]) -> Places:
        """Where the file has the rows that are so many-th in time, for `values`."""
        rows, found = at if self._rows is None else self._rows[at], []
        group_of = np.searchsorted(self._starts, rows, "right") - 1
        for group in np.unique(group_of).tolist():
            mine = np.flatnonzero(group_of == group)
            first, end = int(mine[0]), int(mine[-1]) + 1
            which = slice(first, end) if end - first == len(mine) else mine
            found.append((group, which, rows[which] - self._starts[group]))
        return Places(len(rows), found)

    def values(
        self, metric: Metric, places: Places, refused: Counter[str], absent: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.float64]:
        """float64 of rows, else as `column`. `absent`: those among them that are none: NaN."""
        values, possible = np.empty(places.count), True
        held = self._parts.setdefault(metric.name, {})
        for group in [group for group in held if places.parts and group < places.parts[0][0]]:
            del held[group]  # time goes on: of a long case a few row groups are in memory
        for group, which, rows in places.parts:
            if group not in held:
                held[group] = self._read(metric, group)
            values[which] = np.take(held[group].values, rows)
            possible &= held[group].possible
        if absent is not None:
            values[absent] = np.nan
        if possible:
            return values  # as a rule
        with np.errstate(invalid="ignore"):
            wrong = (values < metric.low) | (values > metric.high)
        if wrong.any():
            refused[metric.name] += int(wrong.sum())
            values = np.where(wrong, np.nan, values)
        return values

    def _read(self, metric: Metric, group: int) -> _Part:
        try:  # threads for one column cost, and gain nothing
            column = self._file.read_row_group(group, columns=[metric.name], use_threads=False).column(0)
        except (OSError, pa.ArrowInvalid) as error:
            raise _unreadable(self.path, error) from None
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.uint8())
        values = np.asarray(column.to_numpy(), np.float64)  # null is NaN
        least, most = np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)
        return _Part(values, bool(least >= metric.low and most <= metric.high))


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Rows of what nodes have in addition to GPUs and ports: workloads, or MIG instances."""

    names: list[tuple[str, str]] = field(default_factory=list)  # (node, workload or SLOT/NAME), as samples number them
    samples: Samples | None = None


def read_parts(
    path: Path, scope: Scope, part: str, index: FleetIndex, notes: list[str], known: Callable[[str, str], bool]
) -> NodeParts:
    """Read the parts of the fleet's nodes that a file names; none without the file.

    Args:
        part: the column that names them. known: whether a (node, name) is one to take.
    Raises:
        CaseError: it cannot be used.
    """
    if not path.exists():
        return NodeParts()
    try:
        table = pq.ParquetFile(path).read(columns=["node", part])
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(path, error) from None
    rows = table.group_by(table.column_names).aggregate([]).to_pylist()
    pairs = [(str(row["node"]), str(row[part])) for row in rows if all(row.values())]
    names = sorted((node, name) for node, name in pairs if node in index.node_number and known(node, name))
    return NodeParts(names, read_samples(path, scope, index, notes, names, part))


def read_samples(
    path: Path,
    scope: Scope,
    index: FleetIndex,
    notes: list[str],
    workloads: Sequence[tuple[str, str]] = (),
    part: str = "",
) -> Samples | None:
    """One Parquet file; `workloads`: (node, name) of those to take, by whose place here the samples number them.
    `part`: the column of that name, if it is another than that of the scope.

    Raises:
        CaseError: it cannot be used; the message names the file and the mend.
    """
    if not path.exists():
        notes.append(f"{path.name} is missing: nothing that needs it was judged")
        return None
    needed = ["ts", "node", *([part] if part else KEYS.get(scope, []))]
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        missing = [name for name in needed if name not in schema.names]
        keys = None if missing else pq.ParquetFile(path, read_dictionary=needed).read(columns=needed, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(path, error) from None
    if keys is None:
        raise CaseError(f"{path}: column {missing[0]!r} is missing; it needs {', '.join(needed)} and catalog columns")
    ts_ms = _times(path, keys.column("ts"))
    entity = _entities(keys, scope, index, workloads, part)
    known = entity >= 0
    if not known.all():
        notes.append(_strangers(path, keys, scope, known))
    mine = {m.name for m in of_scope(scope)}
    unknown = [c for c in schema.names if c not in mine and c not in needed]
    if unknown:
        notes.append(f"{path.name}: columns that are not in the catalog were left out: {', '.join(unknown)}")
    columns = [c for c in schema.names if c in mine]
    for name in columns:
        kind = schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise CaseError(f"{path}: column {name!r} is {kind}; it must be a number in the catalog's unit")
    empty = sorted(mine - set(columns))
    if empty:
        notes.append(f"{path.name}: {len(empty)} of {len(mine)} catalog columns are missing: {', '.join(empty)}")
    by_entity = np.argsort(entity, kind="stable")
    late = int(((np.diff(ts_ms[by_entity]) < 0) & (np.diff(entity[by_entity]) == 0)).sum())
    if late:
        notes.append(f"{path.name}: {late} rows stood out of time order; they were put where they belong")
    order = np.flatnonzero(known)
    order = order[np.argsort(ts_ms[order], kind="stable")]
    in_order = len(order) == len(known) and bool((np.diff(order) == 1).all())
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Samples(path, ts_ms[order], entity[order], columns, file, None if in_order else order, starts)


def _unreadable(path: Path, error: Exception) -> CaseError:
    return CaseError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})")


def _strangers(path: Path, keys: pa.Table, scope: Scope, known: npt.NDArray[np.bool_]) -> str:
    some = np.flatnonzero(~known)[:1000].tolist()
    names, ports = keys.column("node"), keys.column("link") if scope is Scope.LINK else None
    who = sorted({f"{names[i]}" + (f" port {ports[i]}" if ports is not None else "") for i in some})
    return (
        f"{path.name}: {int((~known).sum())} rows of things fleet.json does not list "
        f"(such as {', '.join(who[:3])}) were left out"
    )


def _entities(
    keys: pa.Table, scope: Scope, index: FleetIndex, workloads: Sequence[tuple[str, str]], part: str
) -> npt.NDArray[np.int32]:
    """What each row describes, -1 for what the fleet does not list."""
    nodes, names = _coded(keys.column("node"))
    number = np.array([*(index.node_number.get(name, -1) for name in names), -1], np.int32)
    if scope is Scope.NODE:
        return number[nodes]
    if scope is Scope.GPU and not part:
        node = number[nodes]
        slots = keys.column("gpu").cast(pa.int64()).fill_null(-1).to_numpy()
        counts = np.diff(index.first_gpu)
        known = (node >= 0) & (slots >= 0) & (slots < counts[node])
        return np.where(known, index.first_gpu[node] + slots, -1).astype(np.int32)
    parts, part_names = _coded(keys.column(part or KEYS[scope][0]))
    places = {name: code for code, name in enumerate(names)}
    part_places = {name: code for code, name in enumerate(part_names)}
    table = np.full((len(names) + 1, len(part_names) + 1), -1, np.int32)  # the last of each: not named
    for at, (name, port) in enumerate(_ports_of(index) if scope is Scope.LINK else workloads):
        if name in places and port in part_places:
            table[places[name], part_places[port]] = at
    return table[nodes, parts]


def _coded(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Names as numbers of a list, -1 where there is none."""
    if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
        coded = column.unify_dictionaries().combine_chunks()
    else:
        coded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return np.asarray(coded.indices.fill_null(-1), np.int32), coded.dictionary.to_pylist()


def _ports_of(index: FleetIndex) -> list[tuple[str, str]]:
    """(node, link) of all ports of the fleet, in the order that buckets have them."""
    return [(index.nodes[port.node].name, port.name) for port in index.ports.all()]


def _times(path: Path, column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    if column.null_count:
        raise CaseError(f"{path}: {column.null_count} rows have no ts; every row needs its time")
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms"), safe=False)
    elif not pa.types.is_integer(column.type):
        raise CaseError(f"{path}: column 'ts' is {column.type}; it must be a timestamp, or milliseconds since 1970")
    return np.asarray(column.cast(pa.int64()), np.int64)
