"""Incidents as they change, as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

A stream compares versions; it keeps no queue, so a slow reader costs nothing but its own thread, and gets the newest
version of what changed meanwhile. An event's id is the time of the change: a stream that begins behind one sends what
has changed since, some of it twice (`id` and `version` of the incident identify it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drover_collector.api.snapshot import ApiSnapshot, bad_argument
from drover_collector.rest.shapes import record_plain, time_text
from drover_core.model.events import SEVERITY_ORDER, Incident, IncidentKind, Severity

POLL_S = 1.0
READ_S = 8.0
BEAT_S = 15.0  # a proxy closes a stream that is silent for a minute
RETRY_MS = 3000
OVERLAP_MS = 60_000  # a bucket is judged after later events, so changes do not come in the order of their times
RECENT_MS = 7 * 86_400_000  # a stream that begins behind something older has an event `gap`


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which incidents a stream has. `after_ms`: those that changed since; None: it begins with the open ones."""

    min_severity: str = ""
    node: str = ""
    kind: str = ""
    after_ms: int | None = None

    def check(self, facts: ApiSnapshot) -> None:
        """
        Raises:
            RefusalError: a word that is none of its kind, or an unknown node.
        """
        if self.min_severity and self.min_severity not in list(Severity):
            raise bad_argument(f"min_severity {self.min_severity[:80]!r}: give one of {', '.join(Severity)}")
        if self.kind and self.kind not in list(IncidentKind):
            raise bad_argument(f"kind {self.kind[:80]!r}: give one of {', '.join(IncidentKind)}")
        if self.node:
            facts.node_number(self.node)

    def has(self, incident: Incident) -> bool:
        least = SEVERITY_ORDER.index(Severity(self.min_severity or "info"))
        return (
            SEVERITY_ORDER.index(incident.severity) >= least
            and (not self.kind or incident.kind == self.kind)
            and (not self.node or any(node == self.node for node, _ in incident.members))
        )


def last_id(text: str) -> int | None:
    """Return the time of the event that Last-Event-ID names; None: there is none.

    Raises:
        RefusalError: it is no id of this stream.
    """
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,15})-.{1,300}", text)
    if found is None:
        raise bad_argument("Last-Event-ID: give the id of an event of this stream, or leave it out")
    return int(found[1])


def stream(facts: ApiSnapshot, wanted: Wanted, wait: Callable[[float], bool]) -> Iterator[bytes]:
    """Yield the text of the stream until `wait` (for so many seconds) returns True.

    Raises:
        StoreError: what changed cannot be read.
    """
    yield f"retry: {RETRY_MS}\n\n".encode()
    sent: dict[str, int] = {}
    now_ms = facts.now_ms()
    begin_ms = None if wanted.after_ms is None else wanted.after_ms - OVERLAP_MS
    if begin_ms is not None and begin_ms > now_ms:
        begin_ms = None  # of a clock that was wrong: nothing would ever be newer
    if begin_ms is not None and begin_ms < now_ms - RECENT_MS:
        gap = json.dumps({"from": time_text(wanted.after_ms), "to": time_text(now_ms - RECENT_MS)})
        yield f"event: gap\ndata: {gap}\n\n".encode()
    if begin_ms is None:  # what is closed already is known, and comes if it changes again
        sent = {i.id: i.version for i in _recent(facts) if i.closed_ms is not None}
    else:
        sent = {i.id: i.version for i in _recent(facts) if i.updated_ms < begin_ms}
    silent_s = 0.0
    shown: set[str] = set()  # their ends are sent too, also where they have another kind or other members by then
    while True:
        changed = [i for i in _recent(facts) if sent.get(i.id, 0) < i.version]
        for incident in sorted(changed, key=lambda i: (i.updated_ms, i.id)):
            sent[incident.id] = incident.version
            if wanted.has(incident) or incident.id in shown:
                silent_s = 0.0
                shown.add(incident.id)
                yield _event(incident)
        if silent_s >= BEAT_S:
            silent_s = 0.0
            yield b": still here\n\n"
        if wait(POLL_S):
            return
        silent_s += POLL_S


def _recent(facts: ApiSnapshot) -> list[Incident]:
    """Return open incidents and those of the last days. All streams share one reading."""
    with facts.store.limited(READ_S):
        return facts.once("rest incidents", POLL_S / 2, lambda: facts.incidents(facts.now_ms() - RECENT_MS + 1000))


def _event(incident: Incident) -> bytes:
    data = json.dumps(record_plain(incident), separators=(",", ":"))
    return f"id: {incident.updated_ms}-{incident.id}-{incident.version}\nevent: incident\ndata: {data}\n\n".encode()
