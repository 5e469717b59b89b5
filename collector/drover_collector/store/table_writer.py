"""Insert rows of Python objects into tables, each insert only while this collector may write to the table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import millis

# Tables that only the active collector writes.
FENCED = frozenset(
    {
        "findings",
        "incidents",
        "decisions",
        "health",
        "outbox",
        "judged_events",
        "probe_verdicts",
        "actions",
        "duties",
        "gpu_outages",
        "approvals",
        "audit",
        "silences",
    }
)

_UNSIGNED = {
    ("entities", "entity_id"), ("lane_seqs", "seq"), ("outbox", "written_ns"), ("absent", "version"),
    ("probe_orders", "written_ns"), ("actions", "written_ns"), ("duties", "written_ns"),
    ("gpu_outages", "written_ns"),
}  # fmt: skip


class WriteFence:
    """Refuse the writes of a collector that is not the active one.

    Call it before each such write: it raises StoreError, or returns a note that a server logs with the write.
    """

    def __init__(self) -> None:
        self._check: Callable[[], str] = str

    def __call__(self) -> str:
        return self._check()

    def use(self, check: Callable[[], str]) -> None:
        """Ask `check` from now on. Until then every write is allowed, as for a command without a lease."""
        self._check = check


class TableWriter:
    """Turns rows into columns and inserts them. Thread-safe."""

    def __init__(self, clients: Clients, fence: WriteFence) -> None:
        self._clients = clients
        self._fence = fence
        self._lock = threading.Lock()
        self._last_ns = 0

    def insert(self, table: str, rows: Iterable[Any], columns: Mapping[str, Callable[[Any], Any]]) -> None:
        """Insert rows; durable on return. `columns`: column name -> what to store of a row (`Ms` for a time).

        Raises:
            StoreError: nothing is stored, or this collector is not the active one.
        """
        listed = list(rows)
        if not listed:
            return
        arrays: dict[str, pa.Array] = {}
        for name, get in columns.items():
            held = [get(row) for row in listed]
            times = isinstance(held[0], Ms)
            arrays[name] = millis([ms.value for ms in held]) if times else _array(table, name, held)
        self._clients.insert(table, pa.table(arrays), self._fence() if table in FENCED else "")

    def next_numbers(self, count: int) -> range:
        """Return `count` numbers that grow with each call, also over restarts."""
        with self._lock:
            first = max(time.time_ns(), self._last_ns + 1)
            self._last_ns = first + count
        return range(first, first + count)


class Ms:
    """A time in a column, in ms since 1970; None: NULL."""

    __slots__ = ("value",)

    def __init__(self, value: int | None) -> None:
        self.value = value


def _array(table: str, name: str, held: list[Any]) -> pa.Array:
    if (table, name) in _UNSIGNED:
        return pa.array(held, pa.uint64())
    if name in ("gpu", "peer"):
        return pa.array(held, pa.int16())
    return pa.array(held, pa.float64()) if (table, name) == ("probes", "value") else pa.array(held)
