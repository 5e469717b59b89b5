"""What the store holds against what the journals of the agents hold. Prints one JSON line.

python -m durability.check URL JOURNALS NODES [spoil]

spoil: then make a rollup of each level wrong, and say whether that is found.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.buckets import BUCKET_MS, aggregate
from drover_collector.store import Store
from drover_collector.store.rollups.dirty_ranges import CHUNK_MS
from drover_core.metrics.catalog import BY_NAME, Scope
from durability.content import GPUS, METRICS, checksum, name, values

EVER = (0, 1 << 42)
Longs = npt.NDArray[np.int64]
Columns = npt.NDArray[np.float64]  # by METRICS
Expected = dict[tuple[int, int], tuple[float | None, ...]]
Series = dict[tuple[str, int], list[tuple[int, tuple[float | None, ...]]]]


@dataclass
class Journal:
    rows: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # node -> moments
    events: set[str] = field(default_factory=set)
    acks: int = 0


def read_journals(folder: Path, nodes: int) -> Journal:
    found = Journal()
    for number in range(nodes):
        for line in (folder / f"{name(number)}.journal").read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # its writer was killed amid it; the spool has it, and it is looked at as one that is more
            kind, _, rest = line.strip().partition(" ")
            if kind == "B":
                found.rows[name(number)].update(map(int, rest.split()))
            elif kind == "E":
                found.events.add(rest)
            else:
                found.acks += 1
    return found


def read_series(store: Store, others: frozenset[str] = frozenset()) -> Series:
    series: Series = defaultdict(list)
    for table in store.export.tables(Scope.GPU, *EVER):
        columns = [table[metric].to_pylist() for metric in METRICS]
        moments = table["ts"].cast("int64").to_pylist()
        for ts_ms, node, gpu, *found in zip(
            moments, table["node"].to_pylist(), table["gpu"].to_pylist(), *columns, strict=True
        ):
            if node not in others:
                series[node, gpu].append((ts_ms, tuple(found)))
    return series


def check(store: Store, journal: Journal, others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Counts of what is wrong, each 0 when all is well, and of what there was; `others`: nodes to leave out."""
    series = read_series(store, others)
    lost = doubled = wrong = more = unequal = 0
    for node in sorted({node for node, _ in series} | set(journal.rows)):
        for gpu in range(GPUS):
            held, sent = series.get((node, gpu), []), journal.rows[node]
            counts = Counter(ts_ms for ts_ms, _ in held)
            lost += len(sent - counts.keys())
            doubled += sum(count - 1 for count in counts.values())
            more += len(counts.keys() - sent)  # in the spool, but killed before the journal knew: must be right too
            wrong += sum(found != values(node, gpu, ts_ms) for ts_ms, found in held)
            expected = ((ts_ms, tuple(map(float, values(node, gpu, ts_ms)))) for ts_ms in sent | counts.keys())
            unequal += checksum(held) != checksum(expected)
    events = Counter(event.message for event in store.events.read(*EVER, limit=1_000_000) if event.code == "oom")
    return {
        "series": len(series),
        "rows": sum(len(rows) for rows in series.values()),
        "acks": journal.acks,
        "events": len(events),
        "rows_lost": lost,
        "rows_doubled": doubled,
        "rows_wrong": wrong,
        "rows_beyond_journal": more,
        "series_unequal": unequal,
        "events_lost": len(journal.events - events.keys()),
        "events_doubled": sum(count - 1 for count in events.values()),
        "damaged_parts": len(store.integrity.check_set_aside()) if store.integrity is not None else 0,
        **check_rollups(store, series, others),
    }


def check_rollups(store: Store, series: Series, others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The 10 s and 5 min rollups against the rows that the store itself holds.

    A 5 min value is made of 10 s values: it is compared with what the rows give as such.
    """
    state = store.clients.rows(
        "SELECT level, toUnixTimestamp64Milli(max(upto)) AS upto FROM rollup_state FINAL GROUP BY level"
    )
    upto_ms = {row["level"]: row["upto"] for row in state}
    gpus = [row for row in store.entities.registry.rows() if row.scope is Scope.GPU]
    names = {(row.node, row.gpu): row.entity_id for row in gpus}
    left_out = {row.entity_id for row in gpus if row.node in others}
    marked = [(mark.from_ms, mark.to_ms) for mark in store.dirty_ranges.all() if mark.scope is Scope.GPU]
    fine: Expected = {}
    coarse: Expected = {}
    for place, rows in series.items():
        ts = np.array([ts_ms for ts_ms, _ in rows])
        columns = np.array([found for _, found in rows], float).T
        made = _expected(names[place], ts, columns, BUCKET_MS, np.ones(len(ts), np.int64))
        fine |= made
        mine = [(begin, want) for (_, begin), want in made.items()]
        coarse |= _expected(
            names[place], np.array([begin for begin, _ in mine]), np.array([want[1:] for _, want in mine]).T, CHUNK_MS,
            np.array([want[0] for _, want in mine]),
        )  # fmt: skip
    found: dict[str, Any] = {"rollup_marks_open": len(marked)}
    for level, length_ms, expected in (("10s", BUCKET_MS, fine), ("5m", CHUNK_MS, coarse)):

        def covered(begin: int, end_ms: int = upto_ms.get(level, 0), length_ms: int = length_ms) -> bool:
            return begin + length_ms <= end_ms and not any(a < begin + length_ms and begin < b for a, b in marked)

        held = {
            (row["entity_id"], row["ts_ms"]): (row["rows"], *(in_units(row, metric) for metric in METRICS))
            for row in store.clients.rows(
                f"SELECT entity_id, toUnixTimestamp64Milli(ts) AS ts_ms, rows, {', '.join(METRICS)}"
                f" FROM gpu_{level} FINAL"
            )
            if row["entity_id"] not in left_out and covered(row["ts_ms"])
        }
        wanted = {key: want for key, want in expected.items() if covered(key[1])}
        name = "rollups" if level == "10s" else "rollups_5m"
        found[f"{name}_compared"] = len(wanted)
        found[f"{name}_unequal"] = sum(held.get(key) != want for key, want in wanted.items()) + len(
            held.keys() - wanted.keys()
        )
    return found


def _expected(entity: int, ts: Longs, columns: Columns, length_ms: int, rows: Longs) -> Expected:
    """(entity, begin) -> (rows, value of each metric) of each bucket of one GPU."""
    found: Expected = {}
    for bucket in np.unique(ts // length_ms).tolist():
        chosen = np.flatnonzero(ts // length_ms == bucket)
        first = np.zeros(len(chosen), np.int32)
        made = (aggregate(name, first, ts[chosen], columns[n][chosen], 1)[0] for n, name in enumerate(METRICS))
        found[entity, bucket * length_ms] = (int(rows[chosen].sum()), *(round(float(value), 3) for value in made))
    return found


def in_units(row: dict[str, Any], metric: str) -> float | None:
    return None if row[metric] is None else round(row[metric] * (BY_NAME[metric].step or 1), 3)


def spoiled(store: Store, series: Series) -> dict[str, int]:
    """Whether a wrong rollup would be found: one value of each level is made wrong, and everything compared again.

    Returns:
        Level -> how many were unequal then, of those levels that were compared; 0: the comparison is blind.
    """
    found: dict[str, int] = {}
    sound = check_rollups(store, series)
    for level, key in (("10s", "rollups"), ("5m", "rollups_5m")):
        if not sound[f"{key}_compared"]:
            continue
        store.clients.command(
            f"INSERT INTO gpu_{level} SELECT * REPLACE (power_w + 10 AS power_w, version + 1 AS version)"
            f" FROM gpu_{level} FINAL WHERE power_w IS NOT NULL ORDER BY ts, entity_id LIMIT 1"
        )
        found[level] = check_rollups(store, series)[f"{key}_unequal"] - sound[f"{key}_unequal"]
    return found


if __name__ == "__main__":
    opened = Store.open(sys.argv[1], wait_s=30, retention_days=3650)
    try:
        result = check(opened, read_journals(Path(sys.argv[2]), int(sys.argv[3])))
        if sys.argv[4:] == ["spoil"]:
            result["spoiled_found"] = spoiled(opened, read_series(opened))
        print(json.dumps(result))
    finally:
        opened.close()
