"""An outbox without threads or a database: a store in memory, receivers that answer as set, a clock turned by hand.

The store keeps what the real one keeps of the outbox, by the same rule: the newest row of an id is its state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from drover_collector.notify import Delivery, Outbox, OutboxOptions
from drover_collector.notify.routes import RouteConfig, Routes
from drover_collector.notify.silences import Silences
from drover_collector.store import OutboxRow, StoreError
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    Silence,
)

T0 = 1_800_000_000_000
HOUR_MS = 3_600_000


def fault(id_: str = "i1", version: int = 1, severity: Severity = Severity.WARNING, **more: Any) -> Incident:
    return Incident(
        id_,
        IncidentKind.XID,
        "xid_79",
        "gpu",
        f"n-{id_}",
        0,
        ((f"n-{id_}", 0),),
        T0,
        T0,
        more.pop("closed_ms", None),
        severity,
        1.0,
        more.pop("action", RecommendedAction.WATCH),
        "a GPU fell off the bus",
        "drain it",
        version=version,
        **more,
    )


def silence(id_: str = "s1", minutes: float = 60, from_ms: int = T0, **places: Any) -> Silence:
    return Silence(id_, T0, from_ms, from_ms + round(minutes * 60_000), "anna", "planned", **places)


class MemoryStore:
    def __init__(self) -> None:
        self.rows: dict[str, OutboxRow] = {}
        self.fails = False
        self.asked: list[tuple[str, ...]] = []
        self.outbox = self

    def fence(self) -> str:
        return ""

    def write(self, rows: OutboxRow | Sequence[OutboxRow]) -> None:
        if self.fails:
            raise StoreError("no space left on device")
        for row in [rows] if isinstance(rows, OutboxRow) else rows:
            self.rows[row.id] = row

    def of_incidents(self, *incidents: str) -> list[OutboxRow]:
        if self.fails:
            raise StoreError("no space left on device")
        self.asked.append(incidents)
        return sorted((r for r in self.rows.values() if r.incident_id in incidents), key=lambda r: r.created_ms)

    def pending(self) -> list[OutboxRow]:
        return sorted((r for r in self.rows.values() if r.state == "pending"), key=lambda r: (r.created_ms, r.id))

    def states(self) -> list[tuple[str, str]]:
        """(type, state) of each message, oldest first."""
        rows = sorted(self.rows.values(), key=lambda r: (r.created_ms, r.id))
        return [(json.loads(r.payload_json)["type"].removeprefix("incident."), r.state) for r in rows]


class Listener:
    """A receiver that knows messages by their ids, as real ones do."""

    def __init__(
        self, name: str = "ops", min_severity: Severity = Severity.WARNING, repeat_s: float | None = None
    ) -> None:
        self.name, self.kind, self.min_severity, self.repeat_s = name, "slack", min_severity, repeat_s
        self.answer = Delivery(True)
        self.got: dict[str, dict[str, Any]] = {}
        self.tries = 0

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        self.tries += 1
        if self.answer.delivered:
            self.got.setdefault(message_id, json.loads(body))
        return self.answer

    def close(self) -> None:
        pass

    def received(self, incident: str = "") -> list[str]:
        """What it got, of one incident or of all, without its first word."""
        return [
            body["type"].removeprefix("incident.") for body in self.got.values() if incident in ("", body["data"]["id"])
        ]


class Scene:
    """One collector's outbox, which can be killed and started again."""

    def __init__(
        self, *listeners: Listener, routes: Sequence[RouteConfig] = (), silences: Silences | None = None,
        unstored: Path | None = None,
    ) -> None:  # fmt: skip
        self.now_ms, self.unstored = T0, unstored
        self.store = MemoryStore()
        self.listeners = listeners or (Listener(),)
        self.routes = Routes(self.listeners, routes)
        self.silences = silences or Silences()
        self.open: dict[str, Incident] = {}
        self.outbox = self._made()
        self.outbox.load()

    def _made(self) -> Outbox:
        store: Any = self.store
        return Outbox(
            store, self.listeners, "http://console",
            OutboxOptions(routes=self.routes, silences=self.silences, fallback_file=self.unstored),
            now_ms=lambda: self.now_ms,
        )  # fmt: skip

    def report(self, *incidents: Incident) -> int:
        self.open.update((i.id, i) for i in incidents)
        made = self.outbox.enqueue(incidents)
        self.run()
        return made

    def run(self) -> None:
        """All that is due now."""
        while self.outbox.delivery.step():
            pass

    def wait(self, minutes: float) -> None:
        """Time goes on, in steps in which messages are tried again and the open incidents are looked at."""
        until_ms = self.now_ms + round(minutes * 60_000)
        while self.now_ms < until_ms:
            self.now_ms = min(until_ms, self.now_ms + 5 * 60_000)
            self.outbox.sweep(self.open)
            self.run()

    def restart(self, known: Iterable[Incident] | None = None) -> None:
        """Killed: what only its memory had is gone. Then what a start does."""
        self.outbox = self._made()
        self.outbox.load()
        self.outbox.enqueue(self.open.values() if known is None else known)
        self.run()
