"""Writes. Each returns when the rows are durable; all are columnar, and none loops over samples."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from drover_collector.store.base import Base, millis
from drover_collector.store.records import EntityRow, OutboxRow, SampleBatch, entity_id, placed_id
from drover_collector.store.samples.packed import Packed
from drover_collector.store.schema.tables import samples_table, shape_code
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Absence,
    Decision,
    Event,
    Finding,
    Holding,
    Incident,
    to_json,
)

# What only the active collector writes.
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
        "approvals",
        "audit",
        "silences",
    }
)


class Writes(Base):
    def write_samples(self, batch: SampleBatch) -> None:
        """One insert. Rows that were there already (same entity and ts) are not counted twice by any read."""
        if not batch.rows:
            return
        present, shape = np.zeros(batch.rows, np.uint16), np.zeros(batch.rows, np.uint32)
        columns: dict[str, pa.Array] = {"entity_id": pa.array(batch.entity_id), "ts": millis(batch.ts_ms)}
        for name, (stored, mask) in batch.columns.items():
            code = np.uint32(shape_code(name))
            if mask.all():  # most columns are whole or empty: neither needs a look at its rows
                present += 1
                shape += code
                columns[name] = pa.array(np.ascontiguousarray(stored))
            elif mask.any():
                present += mask
                shape += mask * code
                columns[name] = pa.array(np.ascontiguousarray(stored), mask=~mask)
        columns["shape"] = pa.array(shape)
        columns["present"] = pa.array(present)
        table = pa.table(columns)
        try:
            self._clients.insert(samples_table(batch.scope), table)
        except BaseException:
            self._recent.unsure(batch.scope, batch.ts_ms)
            raise
        if self._clients.embedded:
            self._recent.add(batch.scope, Packed(batch, present))
        self._placements.note_seen(batch.entity_id, batch.ts_ms)

    def gpu_id(self, key: str, node: str, near: str) -> int:
        """The id of a GPU, or of a part of one: the one that it has, else one beside those of its neighbours.

        A question about a rack or a job then reads few places of a table instead of one for each GPU. On a server it
        is the hash of the key alone: of several collectors none knows what another has just seen.

        Args:
            near: neighbourhood of the node, as `FleetIndex.near` gives it.
        """
        name = entity_id(Scope.GPU, key)
        if not self._clients.embedded:
            return name
        return self._placements.id_of(name) or placed_id(name, near, node)

    def write_entities(self, rows: Sequence[EntityRow]) -> None:
        """Who is where, from `first_ms` on."""
        stored = self._placements.add(rows)
        self._insert(
            "entities",
            stored,
            {
                "entity_id": lambda r: r.entity_id,
                "scope": lambda r: str(r.scope),
                "key": lambda r: r.key,
                "node": lambda r: r.node,
                "gpu": lambda r: -1 if r.gpu is None else r.gpu,
                "link": lambda r: r.link,
                "mig": lambda r: r.mig,
                "uuid": lambda r: r.uuid,
                "serial": lambda r: r.serial,
                "pci": lambda r: r.pci,
                "model": lambda r: r.model,
                "first": lambda r: Ms(r.first_ms),
                "last": lambda r: Ms(r.last_ms),
            },
        )
        ids, last = np.array([r.entity_id for r in stored], np.uint64), np.array([r.last_ms for r in stored], np.int64)
        self._placements.note_seen(ids, last)

    def write_events(self, events: Sequence[Event]) -> None:
        """An event whose id is there already is the same event."""
        self._insert(
            "events",
            events,
            {
                "id": lambda e: e.id,
                "ts": lambda e: Ms(e.ts_ms),
                "node": lambda e: e.node,
                "gpu": lambda e: e.gpu,
                "kind": lambda e: str(e.kind),
                "code": lambda e: e.code,
                "message": lambda e: e.message,
                "source": lambda e: e.source,
                "backlog": lambda e: e.backlog,
                "count": lambda e: e.count,
                "received": _received,
                "clock_suspect": lambda e: e.clock_suspect,
                "forgeable": lambda e: e.forgeable,
                "boot": lambda e: e.boot,
            },
        )

    def write_absences(self, absences: Sequence[Absence]) -> None:
        columns: dict[str, Callable[[Absence], Any]] = {
            "node": lambda a: a.node,
            "gpu": lambda a: -1 if a.gpu is None else a.gpu,
            "link": lambda a: a.link or "",
            "metric": lambda a: a.metric,
            "reason": lambda a: a.reason,
            "from": lambda a: Ms(a.from_ms),
            "to": lambda a: Ms(a.to_ms),
            "closed": lambda a: int(a.to_ms is not None),
        }
        self._insert("absences", absences, columns)
        newest = columns | {"version": lambda a: max(0, 2 * a.from_ms) + (a.to_ms is not None)}
        self._insert("absent", absences, newest)
        self.absences_written += 1

    def write_holdings(self, holdings: Sequence[Holding]) -> None:
        columns: dict[str, Callable[[Holding], Any]] = {
            "node": lambda h: h.node,
            "gpu": lambda h: h.gpu,
            "from": lambda h: Ms(h.from_ms),
            "job": lambda h: h.job or "",
        }
        self._insert("holdings", holdings, columns)
        self._insert("holders", holdings, columns)

    def write_inventory(self, node: str, ts_ms: int, inventory: Mapping[str, str]) -> None:
        """What the node is made of, from `ts_ms` on."""
        self.write_inventories([(node, ts_ms, inventory)])

    def write_inventories(self, inventories: Sequence[tuple[str, int, Mapping[str, str]]]) -> None:
        """(node, from when on, what it is made of) of several."""
        self._insert(
            "inventory",
            inventories,
            {
                "node": lambda i: i[0],
                "ts": lambda i: Ms(i[1]),
                "json": lambda i: json.dumps(dict(i[2]), sort_keys=True),
            },
        )

    def write_findings(self, findings: Sequence[Finding]) -> None:
        self._insert(
            "findings",
            findings,
            {
                "ts": lambda f: Ms(f.ts_ms),
                "detector": lambda f: f.detector,
                "kind": lambda f: str(f.kind),
                "node": lambda f: f.node or "",
                "json": to_json,
            },
        )

    def write_incidents(self, incidents: Sequence[Incident]) -> None:
        """A new version of each; the history stays."""
        self._insert(
            "incidents",
            incidents,
            {
                "id": lambda i: i.id,
                "version": lambda i: i.version,
                "opened": lambda i: Ms(i.opened_ms),
                "closed": lambda i: Ms(i.closed_ms),
                "updated": lambda i: Ms(i.updated_ms),
                "json": to_json,
            },
        )

    def write_decisions(self, decisions: Sequence[Decision]) -> None:
        self._insert(
            "decisions",
            decisions,
            {
                "id": lambda d: d.id,
                "incident_id": lambda d: d.incident_id,
                "ts": lambda d: Ms(d.ts_ms),
                "json": to_json,
            },
        )

    def write_health(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Changes as dicts: ts_ms, node, gpu (None: the node), health, reason, incident_id (may be None)."""
        self._insert(
            "health",
            changes,
            {
                "node": lambda c: c["node"],
                "gpu": lambda c: -1 if c["gpu"] is None else c["gpu"],
                "ts": lambda c: Ms(c["ts_ms"]),
                "health": lambda c: str(c["health"]),
                "reason": lambda c: c["reason"],
                "incident_id": lambda c: c["incident_id"] or "",
            },
        )

    def write_outbox(self, rows: OutboxRow | Sequence[OutboxRow]) -> None:
        """A new state of notifications; the newest written is the state."""
        listed = [rows] if isinstance(rows, OutboxRow) else rows
        with self._count_lock:
            written = self._last_ns = max(time.time_ns(), self._last_ns + 1)
        self._insert(
            "outbox",
            listed,
            {
                "id": lambda r: r.id,
                "incident_id": lambda r: r.incident_id,
                "notifier": lambda r: r.notifier,
                "payload_json": lambda r: r.payload_json,
                "created": lambda r: Ms(r.created_ms),
                "state": lambda r: r.state,
                "attempts": lambda r: r.attempts,
                "next": lambda r: Ms(r.next_ms),
                "detail": lambda r: r.detail,
                "written_ns": lambda _: written,
            },
        )

    def write_judged(self, events: Sequence[Event]) -> None:
        """Events whose outcome is stored."""
        self._insert("judged_events", events, {"id": lambda e: e.id, "received": _received})

    def write_lane_seqs(self, seqs: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
        """(node, spool id) -> lane -> the last sequence that is stored."""
        rows = [(node, spool, lane, seq) for (node, spool), held in seqs.items() for lane, seq in held.items()]
        now = Ms(time.time_ns() // 1_000_000)
        self._insert(
            "lane_seqs",
            rows,
            {
                "node": lambda r: r[0],
                "spool": lambda r: r[1],
                "lane": lambda r: r[2],
                "seq": lambda r: r[3],
                "at": lambda _: now,
            },
        )

    def _insert(self, table: str, rows: Iterable[Any], columns: Mapping[str, Any]) -> None:
        listed = list(rows)
        if not listed:
            return
        arrays: dict[str, pa.Array] = {}
        for name, get in columns.items():
            held = [get(row) for row in listed]
            times = isinstance(held[0], Ms)
            arrays[name] = millis([ms.value for ms in held]) if times else _array(table, name, held)
        self._clients.insert(table, pa.table(arrays), self.fence() if table in FENCED else "")


def _received(event: Event) -> Ms:
    return Ms(event.ts_ms if event.received_ms is None else event.received_ms)


class Ms:
    """A time in a column (None: NULL)."""

    __slots__ = ("value",)

    def __init__(self, value: int | None) -> None:
        self.value = value


_UNSIGNED = {
    ("entities", "entity_id"), ("lane_seqs", "seq"), ("outbox", "written_ns"), ("absent", "version"),
    ("probe_orders", "written_ns"), ("actions", "written_ns"), ("duties", "written_ns"),
}  # fmt: skip


def _array(table: str, name: str, held: list[Any]) -> pa.Array:
    if (table, name) in _UNSIGNED:
        return pa.array(held, pa.uint64())
    if name in ("gpu", "peer"):
        return pa.array(held, pa.int16())
    return pa.array(held, pa.float64()) if (table, name) == ("probes", "value") else pa.array(held)
