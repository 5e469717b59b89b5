"""Case folders, written: Parquet block by block, lines of JSON, a folder that gets its name when it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from drover_cli.case.lines import CaseError
from drover_core.metrics.catalog import Metric, Scope, of_scope

# columns besides ts and node that say what a row describes
KEYS = {Scope.GPU: ["gpu"], Scope.LINK: ["link"], Scope.WORKLOAD: ["workload"]}

INSTANCE = "instance"  # the same for MIG instances, which have the scope of GPUs: "SLOT/NAME"


# What a case's Parquet columns are: whole numbers where the catalog's step is 1, else floats.
def arrow_type(metric: Metric) -> pa.DataType:
    return pa.int64() if metric.step == 1 else pa.float64()


class ParquetWriter:
    """One of a case's Parquet files, written block by block. `part`: what names its things, if not as in KEYS."""

    def __init__(self, path: Path, scope: Scope, part: str = "") -> None:
        self._metrics = of_scope(scope)
        keys = [part] if part else KEYS.get(scope, [])
        extra = [(key, pa.uint8() if key == "gpu" else pa.string()) for key in keys]
        self._schema = pa.schema(
            [("ts", pa.timestamp("ms", "UTC")), ("node", pa.string()), *extra]
            + [(m.name, arrow_type(m)) for m in self._metrics]
        )
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, keys: dict[str, Any], columns: dict[str, npt.NDArray[np.float64]]) -> None:
        """Append rows: `keys` has ts (ms), node and gpu or link; `columns` are float64 in units, NaN where absent."""
        count = len(keys["ts"])
        arrays = [pa.array(keys[f.name]).cast(f.type) for f in self._schema if f.name in keys]
        for metric in self._metrics:
            values = columns.get(metric.name)
            kind = arrow_type(metric)
            if values is None:
                arrays.append(pa.nulls(count, kind))
                continue
            gone = np.isnan(values)
            if metric.step:  # at the resolution that the store has too, so that a case and a live run agree
                values = np.rint(values / metric.step)
                values = np.where(gone, 0, values).astype(np.int64) if metric.step == 1 else values * metric.step
            arrays.append(pa.array(values, kind, mask=gone))
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def write_table(self, table: pa.Table) -> None:
        """Append a table whose columns have these names (missing ones become null)."""
        arrays = [
            table.column(f.name).cast(f.type) if f.name in table.column_names else pa.nulls(len(table), f.type)
            for f in self._schema
        ]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class NewFolder:
    """A case folder under way: it gets its name only when it is whole, so that no half-written case is left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")

    def __enter__(self) -> Path:
        if self.path.exists():
            raise CaseError(f"{self.path} exists; give another folder, or remove it first")
        try:
            self._remove()
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise CaseError(f"{self.partial}: {error.strerror}; choose a folder that can be written") from None
        return self.partial

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.partial.rename(self.path)
            return
        self._remove()
        if isinstance(error, OSError):
            raise CaseError(f"{self.path}: {error.strerror or error}; nothing was kept of it") from None

    def _remove(self) -> None:
        if self.partial.exists():
            for item in self.partial.iterdir():
                item.unlink()
            self.partial.rmdir()


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
