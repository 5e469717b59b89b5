"""What the parts of the store share: the clients, the placements, and small turns of SQL and Arrow."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.durability.integrity import Integrity
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.recent import Recent
from drover_collector.store.schema.tables import samples_table
from drover_core.metrics.catalog import BY_NAME, Scope

Floats = npt.NDArray[np.float64]


class Base:
    """State of an open store."""

    def __init__(self, clients: Clients, placements: EntityRegistry, retention_days: int) -> None:
        self.retention_days = retention_days
        self.kept_days: dict[str, int] = {}  # of the tables that grow with time
        self._clients = clients
        self._placements = placements
        self._recent = Recent()
        self._count_lock = threading.Lock()
        self._last_ns = 0
        self.integrity: Integrity | None = None  # None: a server, which looks after itself
        self._stopping = threading.Event()  # no backup goes on
        # Of a backup that is being made on the store's own disk: set, it ends. None: there is none.
        self._room_needed: threading.Event | None = None
        self.absences_written = 0  # how often, by this process
        self.asked_s = -math.inf  # monotonic; when somebody last asked this process for newest values
        self.resend = False  # what was taken last is damaged: agents are asked for all that they still have
        # Called before each write of the active collector's; raises StoreError when this one is not active. Its answer
        # stands beside the write in a server's log.
        self.fence: Callable[[], str] = str

    def limited(self, seconds: float) -> AbstractContextManager[None]:
        """Within it, questions of this thread end after so long."""
        return self._clients.limited(seconds)

    def note_asked(self) -> None:
        """Somebody looks: what comes in is stored sooner."""
        self.asked_s = time.monotonic()

    def close(self) -> None:
        """Waits for running statements; what was written is durable anyway."""
        if self.integrity is not None:
            self.integrity.close()
        self._clients.close()


def sql_timestamp(ts_ms: int) -> str:
    """A time as SQL."""
    return f"fromUnixTimestamp64Milli({int(ts_ms)}, 'UTC')"


def sql_time_range(from_ms: int, to_ms: int, column: str = "ts") -> str:
    """`column` within [from_ms, to_ms)."""
    return f"`{column}` >= {sql_timestamp(from_ms)} AND `{column}` < {sql_timestamp(to_ms)}"


def whole_rows(scope: Scope, metrics: Sequence[str], where: str) -> str:
    """A subquery with one row per entity and moment, whatever parts it was told in (see `schema.SHAPE`)."""
    columns = ", ".join(f"max(`{name}`) AS `{name}`" for name in metrics)  # skips NULL, and is the same whatever order
    return f"(SELECT entity_id, ts, {columns} FROM {samples_table(scope)} WHERE {where} GROUP BY entity_id, ts)"


def numbers(table: pa.Table, column: str) -> npt.NDArray[Any]:
    """A column without nulls."""
    array: npt.NDArray[Any] = table[column].to_numpy()
    return array


def values(table: pa.Table, metric: str) -> Floats:
    """A metric's column in catalog units, NaN where null."""
    return in_units(metric, table[metric].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def in_units(metric: str, stored: Floats) -> Floats:
    """Stored numbers in catalog units."""
    step = BY_NAME[metric].step
    return stored if step in (0, 1) else stored * step


def millis(values_ms: list[int] | list[int | None] | npt.NDArray[np.int64]) -> pa.Array:
    """Times for a DateTime64(3, 'UTC') column."""
    return pa.array(values_ms, pa.timestamp("ms", "UTC"))


def sql_string(text: str) -> str:
    """A text as SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
