"""What a message says to the person who is woken by it: where, what, since when, what to do. Pure.

Read out of the stored JSON, so that a message of an older version, or one with kinds that are not known here, is told
as well as it can be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drover_core.model import legacy
from drover_core.model.fleet import NodeSpec
from drover_core.model.reports import job_label
from drover_core.times import from_iso

Places = Mapping[str, NodeSpec]

CLOSED = "closed"
NEWS = {  # of an open incident, by the step
    "asks": "waits for your answer", "unanswered": "nobody answered", "action_failed": "an action failed",
    "repair": "goes to repair",
}  # fmt: skip
LATE_MS = 120_000  # from which age on a message says that it is late
EVIDENCE = 5  # facts that are shown; the console has all
NAMED = 6  # members that are named


@dataclass(frozen=True, slots=True)
class Story:
    """
    Attributes:
        step: opened, changed, repeated or closed, or one of NEWS; or what a newer collector says.
        news: of one of NEWS, the sentence.
        where: `r01n03 GPU 3`, `node r01n03`, `rack r01`, `job 4711`, `16 nodes`.
        place: `rack r01, pool train, H100-SXM`; "" where it is not known, or differs between members.
        because: why it was closed; "" where nobody noted it.
        lost: what it cost so far; "" where that cannot be told.
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
    told_ms: int
    since_ms: int
    opened_ms: int
    closed_ms: int | None
    because: str  # it was closed
    merged_into: str  # the id of the incident that it goes on as
    news: str = ""

    @property
    def over(self) -> bool:
        return self.step == CLOSED

    @property
    def headline(self) -> str:
        """One line for a phone's screen."""
        if self.merged:
            return f"MERGED: {self.where}, {self.topic}, is now {self.because}"
        if self.over:
            return f"OVER: {self.where}, {self.topic}, after {span(self.ended_ms - self.since_ms)}"
        again = {
            "changed": " (worse than told before)",
            "repeated": f" (still open, {span(self.told_ms - self.since_ms)})",
        }.get(self.step, "")
        if self.news:
            return f"{self.severity.upper()} ({NEWS.get(self.step, 'news')}): {self.news}"
        return f"{self.severity.upper()}{again}: {self.what}"

    @property
    def merged(self) -> bool:
        """Closed, and not over: another incident has it."""
        return self.over and bool(self.merged_into)

    @property
    def end(self) -> str:
        """What an end means, in a sentence or two."""
        if self.merged:
            return f"It goes on as {self.because}. It was told as: {self.what}"
        return f"It is over{f': {self.because}' if self.because else ''}. It was: {self.what}"

    @property
    def what(self) -> str:
        """The summary, with where it is in front unless it says so itself."""
        names = [self.node] if self.node else [self.job] if self.scope == "job" else []
        said = all(name in self.summary for name in names) and (self.gpu is None or f"GPU {self.gpu}" in self.summary)
        if not names:
            said = self.scope == "fleet" or self.scope in self.summary.lower()
        return self.summary if said else f"{self.where}: {self.summary}"

    @property
    def topic(self) -> str:
        """`xid 79`, `straggler (power cap)`, `mass event`."""
        cause = self.cause.replace("_", " ")
        return cause if not cause or self.kind in cause else f"{self.kind} ({cause})"

    @property
    def ended_ms(self) -> int:
        return self.told_ms if self.closed_ms is None else self.closed_ms

    def details(self, now_ms: int) -> list[tuple[str, str]]:
        """Label and text of each further line, without the summary, the advice and the link."""
        long_ms = self.ended_ms - self.since_ms
        since = moment(self.since_ms) + (f", for {span(long_ms)}" if long_ms >= 10_000 else "")
        rows = [
            ("Where", self.where + (f" ({self.place})" if self.place else "")),
            ("Lasted", f"{span(long_ms)}, until {moment(self.ended_ms)}") if self.over else ("Since", since),
            ("Job", self.job if self.scope != "job" else ""),
            ("Members", listed(self.members) if len(self.members) > 1 else ""),
            ("Lost" if self.over else "Lost so far", self.lost),
        ]
        if not self.over:
            differs = f" (its detectors ask for {self.asked})" if self.asked != self.action else ""
            rows.append(("Drover wants", f"{self.action}{differs}" if self.action != "none" or differs else ""))
        late_ms = now_ms - self.told_ms
        if late_ms > LATE_MS:
            rows.append(("Late", f"this message is {span(late_ms)} old: it could not be delivered before"))
        return [(label, text) for label, text in rows if text]

    @property
    def command(self) -> str:
        return f"drover explain {self.id}"

    def text(self, now_ms: int) -> str:
        """The whole of it as plain text, for receivers that have no form of their own."""
        parts = [self.news, self.end if self.over else self.what]
        if self.advice and not self.over:
            parts.append(f"What to do: {self.advice}")
        parts.append("\n".join(f"{label}: {text}" for label, text in self.details(now_ms)))
        if self.evidence and not self.over:
            parts.append("\n".join(["Seen:", *(f"- {fact}" for fact in self.evidence)]))
        parts.append("\n".join(part for part in (self.link, self.command) if part))
        return "\n\n".join(part for part in parts if part)


def story(body: bytes, places: Places) -> Story:
    """
    Args:
        body: a stored message.
        places: nodes of the fleet by name.
    Raises:
        ValueError, KeyError, TypeError, AttributeError: not a message of ours.
    """
    message = json.loads(body)
    data: dict[str, Any] = message["data"]
    members = tuple(_name(node, gpu) for node, gpu in data.get("members") or ())
    nodes = dict.fromkeys(node for node, _ in data.get("members") or ())
    if data.get("node"):
        nodes[data["node"]] = None
    known = [places[node] for node in nodes if node in places]
    rack, pool, sku = (
        (_same(values) for values in zip(*((p.rack, p.pool, p.sku) for p in known), strict=True))
        if (known and len(known) == len(nodes))
        else ("", "", "")
    )
    told_ms = from_iso(message["timestamp"])
    opened_ms = from_iso(data.get("opened") or message["timestamp"])
    scope, gpu, action = str(data.get("scope") or ""), data.get("gpu"), str(data.get("action") or "none")
    where = _where(scope, data, rack, len(nodes))
    parts = (f"rack {rack}" if rack and f"rack {rack}" != where else "", f"pool {pool}" if pool else "", sku)
    place = ", ".join(part for part in parts if part)
    return Story(
        step=str(message["type"]).rpartition(".")[2],
        id=str(data["id"]),
        severity=str(data["severity"]),
        kind=str(data.get("kind") or ""),
        cause=str(data.get("cause") or ""),
        scope=scope,
        node=str(data.get("node") or ""),
        gpu=gpu if isinstance(gpu, int) else None,
        where=where,
        place=place,
        rack=rack,
        pool=pool,
        members=members,
        summary=str(data.get("summary") or ""),
        advice=str(data.get("advice") or ""),
        evidence=tuple(str(e["text"]) for e in (data.get("evidence") or ())[:EVIDENCE] if e.get("text")),
        job=str(data.get("job") or ""),
        action=action,
        asked=str(data.get("asked") or action),
        confidence=data.get("confidence"),
        lost=_lost(data.get("gpu_hours_lost"), data.get("gpu_hours_waited")),
        link=str(data.get("console") or ""),
        told_ms=told_ms,
        since_ms=min(from_iso(data.get("since") or message["timestamp"]), told_ms),
        opened_ms=opened_ms,
        closed_ms=from_iso(data["closed"]) if data.get("closed") else None,
        because=str(data.get("closed_because") or ""),
        merged_into=_merged_into(data),
        news=str(data.get("news") or ""),
    )


def _merged_into(data: Mapping[str, Any]) -> str:
    if "merged_into" not in data and data.get("closed_because"):  # a message that an earlier release stored
        return str(legacy.note(str(data["closed_because"])).get("incident", ""))
    return str(data.get("merged_into") or "")


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with a sign that there was more."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def span(ms: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    seconds = max(0, round(ms / 1000))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(ts_ms: int) -> str:
    """`22 Nov 03:12 UTC`."""
    at = datetime.fromtimestamp(ts_ms / 1000, UTC)
    return f"{at.day} {at:%b %H:%M} UTC"


def listed(names: tuple[str, ...]) -> str:
    head = ", ".join(names[:NAMED])
    return head if len(names) <= NAMED else f"{head} and {len(names) - NAMED} more ({len(names)} in all)"


def _name(node: str, gpu: int | None) -> str:
    return str(node) if gpu is None else f"{node} GPU {gpu}"


def _where(scope: str, data: Mapping[str, Any], rack: str, nodes: int) -> str:
    count = f"the {scope or 'fleet'}" if not nodes else "1 node" if nodes == 1 else f"{nodes} nodes"
    if data.get("node"):
        node = str(data["node"])
        return _name(node, data.get("gpu")) if data.get("gpu") is not None else f"node {node}"
    if scope == "job" and data.get("job"):
        return job_label(str(data["job"]))
    if scope == "rack" and rack:
        return f"rack {rack}"
    return f"{count} of one {scope}" if scope in ("rack", "leaf", "job") else count


def _same(values: tuple[str, ...]) -> str:
    return values[0] if values and len(set(values)) == 1 else ""


def _lost(own: float | None, waited: float | None) -> str:
    parts = [f"{own:.1f} GPU-hours by the fault"] if own is not None and own >= 0.05 else []
    if waited is not None and waited >= 0.05:
        parts.append(f"{waited:.1f}{'' if parts else ' GPU-hours'} by peers that waited")
    return ", ".join(parts)
