"""Numbers, times and names as an operator reads them. Pure functions; absence is always a word, never a number."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Metric
from drover_core.model.events import (
    Incident,
    IncidentKind,
    Member,
    RecommendedAction,
)
from drover_core.model.reports import job_label
from drover_core.times import from_iso

ISO_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")

KIND_CAUSE = re.compile(rf"(?<![/\w])({'|'.join(IncidentKind)})/([a-z0-9_]+)\b")

ACTIONS: dict[RecommendedAction, str] = {
    RecommendedAction.NONE: "nothing to do",
    RecommendedAction.WATCH: "watch",
    RecommendedAction.ADVISE: "look into it",
    RecommendedAction.PROBE: "test it",
    RecommendedAction.DRAIN: "drain the node",
    RecommendedAction.ISOLATE: "isolate the node",
}

ABSENCES: dict[str, str] = {
    "unsupported": "not supported here",
    "lost": "device lost",
    "timeout": "read did not return",
    "no-permission": "no permission",
    "error": "read failed",
    "out-of-range": "impossible value",
    "": "not reported",
}

OUTCOMES: dict[str, str] = {
    "would_act": "would act (observe mode: nothing is done)",
    "held": "held back by the guard",
    "pending_approval": "waits for a person's approval",
    "approved": "approved by a person",
    "rejected": "rejected by a person: nothing is done",
    "expired": "expired: nobody answered in time, or it was over",
    "act": "acts",
}

MODES: dict[str, str] = {
    "observe": "observe: Drover only watches, nothing is drained",
    "approve": "approve: actions wait for a person, probes do not",
    "enforce": "enforce: Drover acts by its policy",
}


def zone(name: str | None) -> tzinfo:
    """The viewer's time zone; UTC where the browser names none that is known here."""
    try:
        return ZoneInfo(name) if name else UTC
    except (ZoneInfoNotFoundError, ValueError):
        return UTC


def clock(ts_ms: int, where: tzinfo, now_ms: int) -> str:
    """`03:12:09`, with the day in front when it is not today's: `Nov 20 23:58:01`."""
    moment = datetime.fromtimestamp(ts_ms / 1000, where)
    today = datetime.fromtimestamp(now_ms / 1000, where).date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%b %d %H:%M:%S")


def minute(ts_ms: int, where: tzinfo, now_ms: int) -> str:
    """`23:30`, with the day in front when it is not today's: `Nov 24 06:00`."""
    return clock(ts_ms, where, now_ms)[:-3]


def zone_name(where: tzinfo, now_ms: int) -> str:
    return datetime.fromtimestamp(now_ms / 1000, where).tzname() or "UTC"


def in_words(text: str) -> str:
    """A sentence of the collector without its codes: `for memory/xid_64` is `for XID 64 (memory)`."""
    return KIND_CAUSE.sub(lambda found: kind_and_cause(found[1], found[2]), text)


def local_times(text: str, where: tzinfo, now_ms: int) -> str:
    """`text` with its ISO times, which the collector sends in UTC, as the viewer's clock."""
    return ISO_TIME.sub(lambda found: clock(from_iso(found[0]), where, now_ms), text)


def duration(ms: float) -> str:
    """`42 s`, `14 min`, `3 h 05 min`, `2 d 4 h`."""
    seconds = max(0, round(ms / 1000))
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def unit(metric: Metric) -> str:
    """Return the unit next to a value: ratios are in percent, plain counts have none."""
    if metric.unit == "ratio" and metric.high <= 1:
        return "%"
    return {"degC": "°C", "count": "", "bool": "", "bitmask": "", "enum": "", "us": "µs"}.get(metric.unit, metric.unit)


def value(metric: Metric, number: float) -> str:
    """A present value with its unit: `1,410 MHz`, `71 °C`, `software power cap`."""
    return catalog.describe(metric, number).replace("degC", "°C").replace(" us", " µs")


def absent(reason: str) -> str:
    return ABSENCES.get(reason, reason)


def number(amount: float, digits: int = 0) -> str:
    return f"{amount:,.{digits}f}"


def size(count: float) -> str:
    """Bytes: `812 B`, `12.4 MB`, `3.1 GB`."""
    for prefix, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.1f} {prefix}"
    return f"{count:.0f} B"


def several(count: int, word: str) -> str:
    """`1 node`, `16 nodes`."""
    return f"{number(count)} {word}{'' if count == 1 else 's'}"


def hours(amount: float | None) -> str:
    """GPU-hours; an unknown cost is a word."""
    if amount is None or math.isnan(amount):
        return "not known"
    return number(amount, 1 if amount >= 1 or amount == 0 else 2)


def label(metric_name: str | None) -> str:
    if not metric_name:
        return ""
    metric = catalog.BY_NAME.get(metric_name)
    return capital(metric.label) if metric else metric_name


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def member(node: str | None, gpu: int | None) -> str:
    if node is None:
        return "fleet"
    return node if gpu is None else f"{node} GPU {gpu}"


def members(items: Iterable[Member], shown: int = 6) -> str:
    """`r01n01 GPU 3, r01n02 and 4 more`."""
    texts = [member(*item) for item in items]
    if len(texts) <= shown:
        return ", ".join(texts)
    return f"{', '.join(texts[:shown])} and {len(texts) - shown} more"


def where(incident: Incident, racks: dict[str, str]) -> str:
    """The place an incident names, with its rack where that is known."""
    if incident.node is not None:
        rack = racks.get(incident.node, "")
        return member(incident.node, incident.gpu) + (f" · rack {rack}" if rack else "")
    return f"{incident.scope}: {members(incident.members, 3)}" if incident.members else incident.scope


def job(name: str) -> str:
    """`job 812`; a name that says so itself stands alone: `job-1001`."""
    return job_label(name)


def event(kind: str, code: str) -> str:
    """An event of the log in words: `XID 64`, `agent started`."""
    if kind == "xid":
        return f"XID {code}"
    words = code.replace("_", " ")
    return words if kind == "lifecycle" and words else f"{kind} {words}".strip()


def rule(name: str) -> str:
    """Of a policy; `detector` is what stands there where none matched."""
    return "no rule matched: as its detector asks" if name == "detector" else name


def cause(word: str) -> str:
    """A cause's code as words: `power_cap` -> `power cap`, `xid_79` -> `XID 79`."""
    return re.sub(r"^xid\b", "XID", word.replace("_", " "))


def kind_and_cause(kind: str, word: str) -> str:
    """`cooling (thermal)`, `XID 64 (memory)`; of an incident that is its XID `XID 79`."""
    return cause(word) if kind == IncidentKind.XID else f"{cause(word)} ({kind})"


def action(wanted: RecommendedAction) -> str:
    return ACTIONS[wanted]


def deviation(number_: float, median: float) -> float | None:
    """How far a value lies from its peers' median, as a share of it; None where that says nothing."""
    if not math.isfinite(number_) or not math.isfinite(median) or abs(median) < 1e-9:
        return None
    return (number_ - median) / abs(median)


def out_of_service(out: Collection[str], with_duty: Collection[str]) -> str:
    """Nodes that are out, and apart from them those that only a decision speaks of: all of them in observe mode.

    Args:
        out: nodes that are out of service, or would be.
        with_duty: those of them for which something was done.
    """
    only_decided = sum(node not in with_duty for node in out)
    said = f"nodes: {len(out) - only_decided}"
    return f"{said}; only by a decision, with nothing done: {only_decided}" if only_decided else said


def plain(text: str) -> str:
    """Text for a label, which Streamlit reads as Markdown: no sign in it means anything."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)
