"""SQL literals and Arrow columns that all tables use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from drover_collector.store.schema.tables import samples_table
from drover_core.metrics.catalog import BY_NAME, Scope

Floats = npt.NDArray[np.float64]


def sql_string(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def sql_timestamp(ts_ms: int) -> str:
    """Return a time as SQL."""
    return f"fromUnixTimestamp64Milli({int(ts_ms)}, 'UTC')"


def sql_time_range(from_ms: int, to_ms: int, column: str = "ts") -> str:
    """Return the condition that `column` is within [from_ms, to_ms)."""
    return f"`{column}` >= {sql_timestamp(from_ms)} AND `{column}` < {sql_timestamp(to_ms)}"


def sql_ms(column: str) -> str:
    """Return a time column as milliseconds since 1970."""
    return f"toUnixTimestamp64Milli(`{column}`)"


def whole_rows(scope: Scope, metrics: Sequence[str], where: str) -> str:
    """Return a subquery with one row per entity and time, also where several rows were stored (see `tables.SHAPE`)."""
    columns = ", ".join(
        f"max(`{name}`) AS `{name}`" for name in metrics
    )  # skips NULL, and does not depend on the order
    return f"(SELECT entity_id, ts, {columns} FROM {samples_table(scope)} WHERE {where} GROUP BY entity_id, ts)"


def numbers(table: pa.Table, column: str) -> npt.NDArray[Any]:
    """Return a column that has no nulls."""
    array: npt.NDArray[Any] = table[column].to_numpy()
    return array


def values(table: pa.Table, metric: str) -> Floats:
    """Return a metric's column in catalog units, NaN where null."""
    return in_units(metric, table[metric].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def in_units(metric: str, stored: Floats) -> Floats:
    """Return stored numbers in catalog units."""
    step = BY_NAME[metric].step
    return stored if step in (0, 1) else stored * step


def millis(values_ms: list[int] | list[int | None] | npt.NDArray[np.int64]) -> pa.Array:
    """Return times as a DateTime64(3, 'UTC') column."""
    return pa.array(values_ms, pa.timestamp("ms", "UTC"))


def coded(texts: pa.ChunkedArray) -> tuple[list[str], npt.NDArray[np.intp]]:
    """Return the distinct texts, and the number of each row's text among them."""
    coded = texts.combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.intp)
