"""Write what a message says to the person on call: where, what, since when, what to do. Pure.

The text is made from the stored JSON. A message of another version, or of an unknown kind, still gets the text that its
fields allow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drover_core.model import legacy
from drover_core.model.fleet import NodeSpec
from drover_core.model.reports import job_label
from drover_core.times import from_iso

Places = Mapping[str, NodeSpec]

CLOSED = "closed"
UPDATES = {  # step of an open incident -> what its headline says
    "asks": "needs your approval", "unanswered": "nobody answered", "action_failed": "action failed",
    "repair": "node needs repair",
}  # fmt: skip
LATE_MS = 120_000  # an older message says that it is late
MAX_EVIDENCE = 5  # the console shows all
MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class Notification:
    """The fields of one stored message, and the texts made from them.

    Attributes:
        step: opened, changed, repeated, closed, a key of UPDATES, or a step of a newer collector.
        news: the sentence of an update; "" for other steps.
        where: `r01n03 GPU 3`, `node r01n03`, `rack r01`, `job 4711`, `16 nodes`.
        place: `rack r01, pool train, H100-SXM`; "" if unknown or different between members.
        lost: GPU-hours lost so far; "" if unknown.
        sent_ms: when the message was written.
        because: why it was closed; "" if unknown.
        merged_into: id of the incident that it became part of; "": none.
    """

    step: str
    id: str
    severity: str
    kind: str
    cause: str
    scope: str
    node: str
    gpu: int | None
    where: str
    place: str
    rack: str
    pool: str
    members: tuple[str, ...]
    summary: str
    advice: str
    evidence: tuple[str, ...]
    job: str
    action: str
    asked: str
    confidence: float | None
    lost: str
    link: str
    sent_ms: int
    since_ms: int
    opened_ms: int
    closed_ms: int | None
    because: str
    merged_into: str
    news: str = ""

    @property
    def over(self) -> bool:
        return self.step == CLOSED

    @property
    def headline(self) -> str:
        """Return one line for a phone's screen."""
        if self.merged:
            return f"MERGED: {self.where}, {self.topic}, is now {self.because}"
        if self.over:
            return f"CLOSED: {self.where}, {self.topic}, after {span(self.ended_ms - self.since_ms)}"
        again = {
            "changed": " (worse than before)",
            "repeated": f" (still open, {span(self.sent_ms - self.since_ms)})",
        }.get(self.step, "")
        if self.news:
            return f"{self.severity.upper()} ({UPDATES.get(self.step, 'update')}): {self.news}"
        return f"{self.severity.upper()}{again}: {self.what}"

    @property
    def merged(self) -> bool:
        """Whether it was closed because another incident contains it now."""
        return self.over and bool(self.merged_into)

    @property
    def end(self) -> str:
        """Return why the incident is closed, and what it was."""
        if self.merged:
            return f"This incident is now {self.because}. It was: {self.what}"
        return f"Closed{f': {self.because}' if self.because else ''}. It was: {self.what}"

    @property
    def what(self) -> str:
        """Return the summary. It begins with the place unless the summary names it."""
        names = [self.node] if self.node else [self.job] if self.scope == "job" else []
        placed = all(name in self.summary for name in names) and (self.gpu is None or f"GPU {self.gpu}" in self.summary)
        if not names:
            placed = self.scope == "fleet" or self.scope in self.summary.lower()
        return self.summary if placed else f"{self.where}: {self.summary}"

    @property
    def topic(self) -> str:
        """Return kind and cause: `xid 79`, `straggler (power cap)`, `mass event`."""
        cause = self.cause.replace("_", " ")
        return cause if not cause or self.kind in cause else f"{self.kind} ({cause})"

    @property
    def ended_ms(self) -> int:
        return self.sent_ms if self.closed_ms is None else self.closed_ms

    def details(self, now_ms: int) -> list[tuple[str, str]]:
        """Return label and text of each further line: all but summary, advice, evidence and link."""
        long_ms = self.ended_ms - self.since_ms
        since = clock_time(self.since_ms) + (f", for {span(long_ms)}" if long_ms >= 10_000 else "")
        rows = [
            ("Where", self.where + (f" ({self.place})" if self.place else "")),
            ("Lasted", f"{span(long_ms)}, until {clock_time(self.ended_ms)}") if self.over else ("Since", since),
            ("Job", self.job if self.scope != "job" else ""),
            ("Members", join_names(self.members) if len(self.members) > 1 else ""),
            ("Lost" if self.over else "Lost so far", self.lost),
        ]
        if not self.over:
            differs = f" (detectors recommend {self.asked})" if self.asked != self.action else ""
            rows.append(("Drover wants", f"{self.action}{differs}" if self.action != "none" or differs else ""))
        late_ms = now_ms - self.sent_ms
        if late_ms > LATE_MS:
            rows.append(("Late", f"this message is {span(late_ms)} old; it could not be delivered earlier"))
        return [(label, text) for label, text in rows if text]

    @property
    def command(self) -> str:
        return f"drover explain {self.id}"

    def text(self, now_ms: int) -> str:
        """Return the whole message as plain text."""
        parts = [self.news, self.end if self.over else self.what]
        if self.advice and not self.over:
            parts.append(f"What to do: {self.advice}")
        parts.append("\n".join(f"{label}: {text}" for label, text in self.details(now_ms)))
        if self.evidence and not self.over:
            parts.append("\n".join(["Seen:", *(f"- {fact}" for fact in self.evidence)]))
        parts.append("\n".join(part for part in (self.link, self.command) if part))
        return "\n\n".join(part for part in parts if part)


def read_message(body: bytes, places: Places) -> Notification:
    """Return the notification of a stored message.

    Args:
        places: the fleet's nodes by name.
    Raises:
        ValueError, KeyError, TypeError, AttributeError: `body` is not a message that Drover wrote.
    """
    message = json.loads(body)
    data: dict[str, Any] = message["data"]
    sent_ms = from_iso(message["timestamp"])
    opened_ms = from_iso(data.get("opened") or message["timestamp"])
    scope, gpu, action = str(data.get("scope") or ""), data.get("gpu"), str(data.get("action") or "none")
    location = _location(data, places)
    return Notification(
        step=str(message["type"]).rpartition(".")[2],
        id=str(data["id"]),
        severity=str(data["severity"]),
        kind=str(data.get("kind") or ""),
        cause=str(data.get("cause") or ""),
        scope=scope,
        node=str(data.get("node") or ""),
        gpu=gpu if isinstance(gpu, int) else None,
        where=location.where,
        place=location.place,
        rack=location.rack,
        pool=location.pool,
        members=tuple(_name(node, gpu) for node, gpu in data.get("members") or ()),
        summary=str(data.get("summary") or ""),
        advice=str(data.get("advice") or ""),
        evidence=tuple(str(e["text"]) for e in (data.get("evidence") or ())[:MAX_EVIDENCE] if e.get("text")),
        job=str(data.get("job") or ""),
        action=action,
        asked=str(data.get("asked") or action),
        confidence=data.get("confidence"),
        lost=_lost(data.get("gpu_hours_lost"), data.get("gpu_hours_waited")),
        link=str(data.get("console") or ""),
        sent_ms=sent_ms,
        since_ms=min(from_iso(data.get("since") or message["timestamp"]), sent_ms),
        opened_ms=opened_ms,
        closed_ms=from_iso(data["closed"]) if data.get("closed") else None,
        because=str(data.get("closed_because") or ""),
        merged_into=_merged_into(data),
        news=str(data.get("news") or ""),
    )


def _merged_into(data: Mapping[str, Any]) -> str:
    if "merged_into" not in data and data.get("closed_because"):  # stored by release 0.1
        return str(legacy.note(str(data["closed_because"])).get("incident", ""))
    return str(data.get("merged_into") or "")


def cut(text: str, limit: int) -> str:
    """Return at most `limit` characters; a longer text ends in "…"."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def span(ms: float) -> str:
    """Return a duration: `40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    seconds = max(0, round(ms / 1000))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def clock_time(ts_ms: int) -> str:
    """Return `22 Nov 03:12 UTC`."""
    at = datetime.fromtimestamp(ts_ms / 1000, UTC)
    return f"{at.day} {at:%b %H:%M} UTC"


def join_names(names: tuple[str, ...]) -> str:
    head = ", ".join(names[:MAX_NAMES])
    return head if len(names) <= MAX_NAMES else f"{head} and {len(names) - MAX_NAMES} more ({len(names)} in all)"


def _name(node: str, gpu: int | None) -> str:
    return str(node) if gpu is None else f"{node} GPU {gpu}"


@dataclass(frozen=True, slots=True)
class _Location:
    """As in `Notification`. `rack` and `pool`: "" if unknown or different between nodes."""

    where: str
    place: str
    rack: str
    pool: str


def _location(data: Mapping[str, Any], places: Places) -> _Location:
    nodes = dict.fromkeys(node for node, _ in data.get("members") or ())
    if data.get("node"):
        nodes[data["node"]] = None
    specs = [places[node] for node in nodes if node in places]
    if len(specs) < len(nodes):
        specs = []
    rack, pool, sku = (_same([getattr(spec, key) for spec in specs]) for key in ("rack", "pool", "sku"))
    where = _where(data, rack, len(nodes))
    parts = (f"rack {rack}" if rack and f"rack {rack}" != where else "", f"pool {pool}" if pool else "", sku)
    return _Location(where, ", ".join(part for part in parts if part), rack, pool)


def _where(data: Mapping[str, Any], rack: str, nodes: int) -> str:
    scope = str(data.get("scope") or "")
    if data.get("node"):
        node = str(data["node"])
        return _name(node, data.get("gpu")) if data.get("gpu") is not None else f"node {node}"
    if scope == "job" and data.get("job"):
        return job_label(str(data["job"]))
    if scope == "rack" and rack:
        return f"rack {rack}"
    count = f"the {scope or 'fleet'}" if not nodes else "1 node" if nodes == 1 else f"{nodes} nodes"
    return f"{count} of one {scope}" if scope in ("rack", "leaf", "job") else count


def _same(values: Sequence[str]) -> str:
    return values[0] if values and len(set(values)) == 1 else ""


def _lost(own: float | None, waited: float | None) -> str:
    parts = [f"{own:.1f} GPU-hours to the fault"] if own is not None and own >= 0.05 else []
    if waited is not None and waited >= 0.05:
        parts.append(f"{waited:.1f}{'' if parts else ' GPU-hours'} to peers that waited")
    return ", ".join(parts)
