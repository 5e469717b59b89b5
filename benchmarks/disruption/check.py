"""What the store holds against what the agents' journals hold, with the moments of what is missing. One JSON line.

python -m disruption.check URL JOURNALS NODES JSON

JSON has `allowed`: [node, from_ms, to_ms] of rows that a damaged spool may have lost before anybody acknowledged them;
`others`: nodes without a journal, parted by commas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from durability.check import EVER, Journal, check, read_journals
from durability.content import GPUS

from drover_collector.store import Store
from drover_core.metrics.catalog import Scope


def missing(store: Store, journal: Journal) -> dict[str, dict[int, int]]:
    """Node -> moment -> how many of its GPUs' rows are not there; only what is missing."""
    held: dict[str, dict[int, int]] = {node: {} for node in journal.rows}
    for table in store.export.tables(Scope.GPU, *EVER):
        for ts_ms, node in zip(table["ts"].cast("int64").to_pylist(), table["node"].to_pylist(), strict=True):
            if node in held:
                held[node][ts_ms] = held[node].get(ts_ms, 0) + 1
    return {
        node: {ts_ms: GPUS - held[node].get(ts_ms, 0) for ts_ms in rows if held[node].get(ts_ms, 0) < GPUS}
        for node, rows in journal.rows.items()
    }


def main(url: str, folder: Path, nodes: int, words: str) -> None:
    asked = json.loads(words)
    journal = read_journals(folder, nodes)
    store = Store.open(url, wait_s=30, retention_days=3650)
    try:
        gone = missing(store, journal)
        cut = 0
        for node, from_ms, to_ms in asked["allowed"]:
            for ts_ms in [at for at in gone.get(node, {}) if from_ms <= at <= to_ms]:
                cut += gone[node].pop(ts_ms)
                journal.rows[node].discard(ts_ms)
        found = check(store, journal, frozenset(asked["others"].split(",")))
        moments = sorted(ts_ms for missing in gone.values() for ts_ms, count in missing.items() for _ in range(count))
        found |= {"cut_before_acknowledged": cut, "missing_ms": moments}  # each as often as rows of it are missing
        found["events_missing"] = sorted(
            journal.events - {event.message for event in store.events.read(*EVER, limit=1_000_000)}
        )
    finally:
        store.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
