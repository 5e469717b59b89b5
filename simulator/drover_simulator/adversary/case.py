"""Write an adversary's fleet as a case folder (docs/reference/cases.md). Some nodes' rows are late, out of order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import Event
from drover_core.model.fleet import dump_json
from drover_core.model.reports import event_report
from drover_simulator.adversary import AdversaryFleet
from drover_simulator.hardware import Bools, Floats

ROWS_PER_WRITE = 200_000
DELAYED_SHARE = 0.01  # of the nodes: their rows are written after what the others sent a minute later


def write_case(fleet: AdversaryFleet, path: Path, interval_ms: int = 10_000) -> dict[str, int]:
    """Write the case folder `path`. Return the number of samples and events.

    Raises:
        FileExistsError: `path` exists.
    """
    path.mkdir(parents=True)
    return write_into(fleet, path, interval_ms)


def write_into(
    fleet: AdversaryFleet, path: Path, interval_ms: int, progress: Callable[[int], object] = int
) -> dict[str, int]:
    """Write into an existing folder; call `progress` with the number of ticks written so far."""
    hw = fleet.hardware
    names = np.array(hw.names, object)
    slots = hw.gpu_slot.astype(np.uint8)
    ports = np.array([port for _, port in hw.link_names], object)
    delayed = np.random.default_rng([fleet.seed, 104]).random(hw.nodes) < DELAYED_SHARE
    files = [
        _File(path / "gpu.parquet", {"node": names[hw.gpu_node], "gpu": slots}, delayed[hw.gpu_node]),
        _File(path / "node.parquet", {"node": names}, delayed),
        _File(path / "link.parquet", {"node": names[hw.link_node], "link": ports}, delayed[hw.link_node]),
    ]
    skew_ms = np.round(fleet.realism.skew_s * 1000).astype(np.int64)
    of_row = (skew_ms[hw.gpu_node], skew_ms, skew_ms[hw.link_node])
    events: list[Event] = []
    for number, tick in enumerate(fleet.ticks(interval_ms), 1):
        columns = (tick.gpu, tick.node, tick.link)
        arrived = (tick.gpu_present, tick.node_present, tick.link_present)
        for file, skew, values, present in zip(files, of_row, columns, arrived, strict=True):
            file.add(tick.ts_ms - interval_ms // 2 + skew, present, values)  # means over the interval, at its middle
        events += tick.events
        progress(number)
    for file in files:
        file.close()
    (path / "fleet.json").write_text(dump_json(fleet.spec, "adversary"), "utf-8")
    _write_jsonl(path / "events.jsonl", (event_report(e) for e in events))
    _write_jsonl(path / "labels.jsonl", fleet.labels)
    _write_jsonl(path / "inventory.jsonl", fleet.inventory)
    return {"samples": sum(file.samples for file in files), "events": len(events)}


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


class _File:
    """Parquet file of one scope, written in blocks of rows."""

    def __init__(self, path: Path, keys: dict[str, Any], delayed: Bools) -> None:
        self._path, self._keys, self._delayed = path, keys, delayed
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[tuple[Any, Bools, dict[str, Floats]]] = []
        self._later: list[tuple[Any, Bools, dict[str, Floats]]] = []
        self._waiting = 0
        self.samples = 0

    def add(self, ts_ms: Any, present: Bools, columns: dict[str, Floats]) -> None:
        """Add the rows of one tick that are `present`; `ts_ms` int64 per row."""
        self._rows.append((ts_ms, present & ~self._delayed, columns))
        self._later.append((ts_ms, present & self._delayed, columns))
        self._waiting += len(present)
        self.samples += sum(int(np.count_nonzero(~np.isnan(values))) for values in columns.values())
        if self._waiting >= ROWS_PER_WRITE:
            self._flush()

    def _flush(self) -> None:
        together = [*self._rows, *self._later]
        if not together:
            return
        names = list(together[0][2])
        keep = [present for _, present, _ in together]
        arrays: dict[str, Any] = {
            "ts": pa.array(np.concatenate([ts[k] for (ts, k, _) in together])).cast(pa.timestamp("ms", "UTC"))
        }
        for key, values in self._keys.items():
            arrays[key] = pa.array(np.concatenate([values[k] for k in keep]))
        for name in names:
            arrays[name] = _column(name, np.concatenate([c[name][k] for _, k, c in together]))
        table = pa.table(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._rows, self._later, self._waiting = [], [], 0

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()


def _column(name: str, values: Floats) -> Any:
    """Return the values at the store's resolution; null where absent."""
    step, gone = BY_NAME[name].step, np.isnan(values)
    if not step:
        return pa.array(values, pa.float64(), mask=gone)
    scaled = np.where(gone, 0, np.rint(values / step))
    if step == 1:
        return pa.array(scaled.astype(np.int64), pa.int64(), mask=gone)
    return pa.array(scaled * step, pa.float64(), mask=gone)
