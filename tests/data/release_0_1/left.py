"""What an agent of release 0.1 left in its spool and sent to its collector: how both releases look at it."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from testbed.fleets import T0

try:
    from testbed.release_names import Scope, Store, SystemClock
except ModuleNotFoundError:  # release 0.1, in which make.py runs
    from drover_proto.catalog import Scope  # type: ignore[import-not-found, no-redef]

    from drover_agent.clock import SystemClock
    from drover_collector.store import Store

SPOOL_MS = T0 + 7_200_000


class Then(SystemClock):
    """The machine's clock, set to a moment of the past."""

    def __init__(self, begin_ms: int) -> None:
        super().__init__()
        self._ahead_ms = begin_ms - super().now_ms()

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


def _method(store: Store, old: str, new: str) -> Any:
    """Return a read of a store: release 0.1 calls it `old`; today it is `new`, of the part `old` if there is no dot."""
    if callable(getattr(store, old, None)):
        return getattr(store, old)
    return operator.attrgetter(new if "." in new else f"{old}.{new}")(store)


def samples(store: Store) -> dict[str, Any]:
    """Of each scope the rows of the agent's minutes, their values, and a checksum over them."""
    return {scope.value: checked(rows(store, scope)) for scope in (Scope.GPU, Scope.NODE)}


def rows(store: Store, scope: Scope) -> Iterator[str]:
    for table in _method(store, "export", "tables")(scope, SPOOL_MS, SPOOL_MS + 120_000):
        for row in table.to_pylist():
            yield json.dumps({k: str(v) if k == "ts" else v for k, v in sorted(row.items()) if v is not None})


def checked(lines: Iterable[str]) -> dict[str, Any]:
    listed = sorted(lines)
    return {"rows": len(listed), "checksum": hashlib.blake2b("\n".join(listed).encode(), digest_size=8).hexdigest()}


def ids(store: Store) -> list[list[Any]]:
    """Events of the agent up to its end; an id names spool and sequence."""
    found = _method(store, "events", "read")(SPOOL_MS, SPOOL_MS + 120_000, limit=1000)
    return sorted([e.id, e.ts_ms, e.code, e.message] for e in found if e.node == "n1")


def counts(store: Store) -> dict[str, int]:
    return {
        "incidents": len(_method(store, "incidents", "newest")("open"))
        + len(_method(store, "incidents", "newest")("closed", 0)),
        "findings": len(_method(store, "findings", "between")(0, 2**42)),
        "duties": len(_method(store, "duties", "outages.current")()),
        "actions": len(_method(store, "actions", "newest")()),
        "verdicts": len(_method(store, "probe_verdicts", "probes.verdicts.read")()),
    }
