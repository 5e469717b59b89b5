"""What the store holds against what the journals of the agents tell. Prints one JSON line.

python -m durability.check URL JOURNALS NODES
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from drover_collector.buckets import BUCKET_MS, aggregate
from drover_collector.store import Store
from drover_proto.catalog import BY_NAME, Scope
from durability.content import GPUS, METRICS, checksum, name, values

EVER = (0, 1 << 42)
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


def check(store: Store, journal: Journal, others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Counts of what is wrong, each 0 when all is well, and of what there was; `others`: nodes to leave out."""
    series: Series = defaultdict(list)
    for table in store.export(Scope.GPU, *EVER):
        columns = [table[metric].to_pylist() for metric in METRICS]
        moments = table["ts"].cast("int64").to_pylist()
        for ts_ms, node, gpu, *found in zip(
            moments, table["node"].to_pylist(), table["gpu"].to_pylist(), *columns, strict=True
        ):
            if node in others:
                continue
            series[node, gpu].append((ts_ms, tuple(found)))
    lost = doubled = wrong = more = unequal = 0
    for node in sorted({node for node, _ in series} | set(journal.rows)):
        for gpu in range(GPUS):
            held, told = series.get((node, gpu), []), journal.rows[node]
            counts = Counter(ts_ms for ts_ms, _ in held)
            lost += len(told - counts.keys())
            doubled += sum(count - 1 for count in counts.values())
            more += len(counts.keys() - told)  # in the spool, but killed before the journal knew: must be right too
            wrong += sum(found != values(node, gpu, ts_ms) for ts_ms, found in held)
            expected = ((ts_ms, tuple(map(float, values(node, gpu, ts_ms)))) for ts_ms in told | counts.keys())
            unequal += checksum(held) != checksum(expected)
    events = Counter(event.message for event in store.events(*EVER, limit=1_000_000) if event.code == "oom")
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
        "damaged_parts": len(store.integrity.look()) if store.integrity is not None else 0,
        **check_rollups(store, series, others),
    }


def check_rollups(store: Store, series: Series, others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The 10 s rollups against the rows that the store itself holds."""
    state = store._clients.rows(
        "SELECT toUnixTimestamp64Milli(max(upto)) AS upto FROM rollup_state FINAL WHERE level = '10s'"
    )
    upto_ms = state[0]["upto"] if state else 0
    gpus = [row for row in store._placements.rows() if row.scope is Scope.GPU]
    names = {(row.node, row.gpu): row.entity_id for row in gpus}
    left_out = {row.entity_id for row in gpus if row.node in others}
    marked = [(mark.from_ms, mark.to_ms) for mark in store.open_marks() if mark.scope is Scope.GPU]
    columns = ", ".join(METRICS)
    held = {
        (row["entity_id"], row["ts_ms"]): row
        for row in store._clients.rows(
            f"SELECT entity_id, toUnixTimestamp64Milli(ts) AS ts_ms, rows, present, {columns} FROM gpu_10s FINAL"
        )
        if row["entity_id"] not in left_out
    }
    compared = unequal = 0
    for place, rows in series.items():
        ts = np.array([ts_ms for ts_ms, _ in rows])
        buckets = ts // BUCKET_MS
        for bucket in np.unique(buckets).tolist():
            begin = bucket * BUCKET_MS
            if begin >= upto_ms or any(low <= begin < high for low, high in marked):
                continue
            chosen = np.flatnonzero(buckets == bucket)
            found = held.pop((names[place], begin), None)
            compared += 1
            unequal += found is None or found["rows"] != len(chosen)
            for number, metric in enumerate(METRICS):
                column = np.array([rows[row][1][number] for row in chosen], float)
                expected = aggregate(metric, np.zeros(len(chosen), np.int32), ts[chosen], column, 1)[0]
                got = None if found is None else found[metric]
                unequal += got is None or bool(got * (BY_NAME[metric].step or 1) != expected)
    beyond = sum(begin < upto_ms and not any(a <= begin < b for a, b in marked) for _, begin in held)
    return {
        "rollups_compared": compared,
        "rollups_unequal": unequal + beyond,
        "rollup_marks_open": len(marked),
    }


if __name__ == "__main__":
    opened = Store.open(sys.argv[1], wait_s=30, retention_days=3650)
    try:
        print(json.dumps(check(opened, read_journals(Path(sys.argv[2]), int(sys.argv[3])))))
    finally:
        opened.close()
