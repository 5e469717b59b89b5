"""Write a case folder (cases.md): rows in blocks, then events, labels and inventory.

The generators share this file and nothing else. It knows no physics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Floats = npt.NDArray[np.float64]
KEYS: Mapping[str, str | None] = {"gpu": "gpu", "node": None, "link": "link"}  # scope -> second key of its rows
ROWS_PER_WRITE = 200_000


def iso(ts_ms: float) -> str:
    """Return "2026-01-01T00:00:00.000Z" for milliseconds UTC."""
    text = datetime.fromtimestamp(round(ts_ms) / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class CaseWriter:
    """Writes one case into a new folder."""

    def __init__(self, folder: Path, fleet: Mapping[str, Any]) -> None:
        """Make the folder, and write `fleet` (the content of fleet.json) into it.

        Raises:
            FileExistsError: the folder exists.
        """
        folder.mkdir(parents=True)
        self._folder = folder
        self._files = {scope: _Rows(folder / f"{scope}.parquet", key) for scope, key in KEYS.items()}
        self._lines: dict[str, list[dict[str, Any]]] = {"events": [], "labels": [], "inventory": []}
        (folder / "fleet.json").write_text(json.dumps(fleet), "utf-8")

    def rows(
        self,
        scope: str,
        ts_ms: npt.NDArray[np.int64],
        nodes: npt.NDArray[np.object_],
        columns: Mapping[str, Floats],
        second: npt.NDArray[Any] | None = None,
    ) -> None:
        """Add rows of `scope` ("gpu", "node", "link"), all arrays of one length.

        `columns`: catalog name -> values in catalog units, NaN for absent. Use the same columns in each call; leave out
        a column that this fleet never has. `second`: slots (gpu), names of ports (link). Rows that did not arrive are
        left out by the caller.
        """
        self._files[scope].add(ts_ms, nodes, second, columns)

    def event(self, ts_ms: float, node: str, gpu: int | None, kind: str, code: str, message: str) -> None:
        """Add a line of events.jsonl. `kind`: "xid", "sxid", "kernel" or "lifecycle"."""
        row = {"ts": iso(ts_ms), "node": node, "gpu": gpu, "kind": kind, "code": code, "message": message}
        self._lines["events"].append(row)

    def label(self, **row: Any) -> None:
        """Add a line of labels.jsonl; `start` and `end` in milliseconds or None."""
        row = {**row, "start": iso(row["start"]), "end": None if row["end"] is None else iso(row["end"])}
        self._lines["labels"].append(row)

    def inventory(self, ts_ms: float, node: str, facts: Mapping[str, str]) -> None:
        """Add a line of inventory.jsonl: all that a node reports of itself from then on."""
        self._lines["inventory"].append({"ts": iso(ts_ms), "node": node, "inventory": dict(facts)})

    def close(self) -> None:
        """Write what is left. Without this the case is not whole."""
        for rows in self._files.values():
            rows.close()
        for name, lines in self._lines.items():
            lines.sort(key=lambda row: str(row.get("ts", row.get("start"))))
            with (self._folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in lines)


class _Rows:
    """The Parquet file of one scope; there is none if no row came."""

    def __init__(self, path: Path, key: str | None) -> None:
        self._path, self._key = path, key
        self._writer: pq.ParquetWriter | None = None
        self._blocks: list[tuple[Any, Any, Any, dict[str, Floats]]] = []
        self._waiting = 0

    def add(self, ts_ms: Any, nodes: Any, second: Any, columns: Mapping[str, Floats]) -> None:
        if not len(ts_ms):
            return
        self._blocks.append((ts_ms, nodes, second, dict(columns)))
        self._waiting += len(ts_ms)
        if self._waiting >= ROWS_PER_WRITE:
            self._flush()

    def _flush(self) -> None:
        if not self._blocks:
            return
        times, nodes, seconds, columns = zip(*self._blocks, strict=True)
        arrays: dict[str, Any] = {
            "ts": pa.array(np.concatenate(times).astype(np.int64)).cast(pa.timestamp("ms", "UTC")),
            "node": pa.array(np.concatenate(nodes)),
        }
        if self._key is not None:
            arrays[self._key] = pa.array(np.concatenate(seconds))
        for name in columns[0]:
            values = np.concatenate([block[name] for block in columns])
            arrays[name] = pa.array(values, pa.float64(), mask=np.isnan(values))
        table = pa.table(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._blocks, self._waiting = [], 0

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
