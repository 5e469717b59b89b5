"""Matching incidents to ground truth, and what follows: precision, recall, delays, false alarms per 1,000 GPU-days.

A label (hardware: true) is found by an incident of severity warning or critical that shares a member, is of a fitting
kind, and opened between 30 s before the label's start and 60 s after its end. Labels with hardware: false are hard
negatives: a drain or isolate on one is a false alarm, anything weaker is not counted either way.

Nothing else is found. What was reported in another way is counted separately (`otherwise`) and changes no figure: idle
GPUs, which are information and never more, and what comes out of an earlier fault (`follows`), reported in that
fault's incident.

A fault with a precursor (`precursor`, `precursor_start`) may be reported from the precursor's start on. An incident
whose kind fits only the precursor is right before the fault's start, and does not find the fault. What opened before
that start warned of it (`warned`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drover_core.times import from_iso

EARLY_MS = 30_000
LATE_MS = 60_000

# label kind -> incident kinds that name the same fault. A slow GPU may be reported by what makes it slow, a dead GPU
# by its XID or by its silence, a memory fault by its XID.
FITTING: dict[str, frozenset[str]] = {
    "straggler": frozenset({"straggler", "thermal", "link", "memory", "drift"}),
    "hang": frozenset({"hang", "xid", "liveness", "straggler"}),
    "thermal": frozenset({"thermal", "straggler"}),
    "memory": frozenset({"memory", "xid"}),
    "link": frozenset({"link", "xid", "straggler"}),
    "xid": frozenset({"xid", "liveness", "memory", "link"}),
    "liveness": frozenset({"liveness", "xid"}),
    "sdc": frozenset({"sdc"}),
    "drift": frozenset({"drift", "straggler"}),
    "risk": frozenset({"risk"}),
    "idle": frozenset({"idle"}),
    "slowdown": frozenset({"slowdown", "straggler", "thermal", "link"}),
}

# precursor -> incident kinds that name it
PRECURSORS: dict[str, frozenset[str]] = {
    "ecc": frozenset({"memory"}),
    "remap": frozenset({"memory"}),
    "link_errors": frozenset({"link"}),
    "heat": frozenset({"thermal"}),
    "telemetry": frozenset({"liveness", "xid"}),
}

KIND_OF = {"links": "link"}  # detectors whose name is not their kind's

Members = frozenset[tuple[str, int | None]]


@dataclass(frozen=True, slots=True)
class Label:
    id: str
    kind: str
    members: Members
    start_ms: int
    end_ms: int | None
    cause: str
    hardware: bool
    follows: str = ""  # label that it comes out of, or comes back after
    precursor: str = ""  # a key of PRECURSORS
    precursor_ms: int | None = None  # when it began

    @property
    def shown_ms(self) -> int:
        """When it could first be seen."""
        return self.start_ms if self.precursor_ms is None else min(self.start_ms, self.precursor_ms)


@dataclass(frozen=True, slots=True)
class Found:
    """An incident as `drover replay --json` prints it, as far as scoring needs it."""

    id: str
    kind: str
    members: Members
    opened_ms: int
    severity: str
    cause: str
    action: str
    joined: tuple[tuple[int, str], ...] = ()  # when more was seen of it, and by which detector; "": the same again


@dataclass(slots=True)
class KindScore:
    faults: int = 0
    found: int = 0
    delays_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Score:
    kinds: dict[str, KindScore]
    matched: int  # incidents that name a fault, the first for each
    duplicates: int  # further incidents for a fault already named
    false: list[Found]  # warnings and criticals that name nothing
    false_drains: list[Found]  # drains and isolates on what is healthy or a hard negative
    tolerated: int  # weaker incidents on hard negatives
    negatives: int
    missed: list[Label]
    gpu_days: float
    delays_of: dict[str, float] = field(default_factory=dict)  # label -> seconds until it was found
    otherwise: dict[str, float] = field(default_factory=dict)  # missed label -> seconds until it was reported otherwise
    false_notes: int = 0  # notes of idle GPUs that name nothing
    warned: dict[str, float] = field(default_factory=dict)  # label with a precursor -> seconds reported before it
    precursors: dict[str, str] = field(default_factory=dict)  # label with a precursor -> its kind
    cause_of: dict[str, str] = field(default_factory=dict)  # label of a fault -> kind/cause

    @property
    def faults(self) -> int:
        return sum(k.faults for k in self.kinds.values())

    @property
    def found(self) -> int:
        return sum(k.found for k in self.kinds.values())

    @property
    def precision(self) -> float | None:
        reported = self.matched + self.duplicates + len(self.false)
        return (self.matched + self.duplicates) / reported if reported else None

    @property
    def recall(self) -> float | None:
        return self.found / self.faults if self.faults else None

    @property
    def f1(self) -> float | None:
        p, r = self.precision, self.recall
        return 2 * p * r / (p + r) if p and r else None

    @property
    def delays_s(self) -> list[float]:
        return [d for k in self.kinds.values() for d in k.delays_s]

    def per_1000_gpu_days(self, count: int) -> str:
        """A rate, or its 95 % upper bound (3/N) where there was none."""
        if not self.gpu_days:
            return "unknown"
        rate = (count or 3) * 1000 / self.gpu_days
        return f"{rate:.2f}" if count else f"0 (<= {rate:.2f} at 95 %)"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def label_of(row: dict[str, Any]) -> Label:
    """A label from a row of labels.jsonl.

    Raises:
        KeyError, TypeError, ValueError: the row is not of the documented form.
    """
    end = row.get("end")
    if row["kind"] not in FITTING and row["hardware"]:
        raise ValueError(f"kind {row['kind']!r} is unknown; known are {', '.join(FITTING)}")
    precursor = str(row.get("precursor") or "")
    if precursor and precursor not in PRECURSORS:
        raise ValueError(f"precursor {precursor!r} is unknown; known are {', '.join(PRECURSORS)}")
    return Label(
        str(row["id"]), str(row["kind"]), _members(row), from_iso(row["start"]),
        None if end is None else from_iso(end), str(row.get("cause", "")), bool(row["hardware"]),
        str(row.get("follows") or ""), precursor, from_iso(row["precursor_start"]) if precursor else None,
    )  # fmt: skip


def found_of(row: dict[str, Any]) -> Found:
    """An incident from a line of `drover replay --json`.

    Raises:
        KeyError, TypeError, ValueError: the row is not of the documented form.
    """
    return Found(
        str(row["id"]), str(row["kind"]), _members(row), from_iso(row["opened"]), str(row["severity"]),
        str(row.get("cause", "")), str(row["action"]),
        tuple((from_iso(ts), str(by)) for ts, by in row.get("joined", ())),
    )  # fmt: skip


def _members(row: dict[str, Any]) -> Members:
    members = row.get("members") or [[row["node"], row.get("gpu")]]
    return frozenset((str(node), None if gpu is None else int(gpu)) for node, gpu in members)


def shares_member(a: Members, b: Members) -> bool:
    """Whether two sets of members meet; (node, None) stands for the node with all its GPUs."""
    if a & b:
        return True
    whole = {node for node, gpu in a if gpu is None}, {node for node, gpu in b if gpu is None}
    return any(node in whole[0] for node, _ in b) or any(node in whole[1] for node, _ in a)


def covers(label: Label, found: Found) -> bool:
    """Whether `found` opened in the label's time on one of its members."""
    late = math.inf if label.end_ms is None else label.end_ms + LATE_MS
    return label.shown_ms - EARLY_MS <= found.opened_ms <= late and shares_member(label.members, found.members)


def warns(label: Label, found: Found) -> bool:
    """Whether the incident names the fault's precursor, before the fault."""
    kinds = FITTING[label.kind] | PRECURSORS.get(label.precursor, frozenset())
    return found.opened_ms < label.start_ms and found.kind in kinds and covers(label, found)


def counts(found: Found) -> bool:
    """Whether an incident says that something is wrong; information does not."""
    return found.severity in ("warning", "critical")


def _is_note(found: Found) -> bool:
    """Return True if it is about idle GPUs. Scattered free ones are no label's matter."""
    return found.severity == "info" and found.kind == "idle" and found.cause != "scattered"


def _said(label: Label, found: Found) -> int | None:
    """When the incident of what a label follows first reported the label too; None: it did not."""
    late = math.inf if label.end_ms is None else label.end_ms + LATE_MS
    for ts_ms, by in found.joined:
        kind = KIND_OF.get(by, by) or found.kind
        same = kind in FITTING[label.kind] and shares_member(label.members, found.members)
        if same and label.start_ms - EARLY_MS <= ts_ms <= late:
            return ts_ms
    return None


def _otherwise(missed: Sequence[Label], first: Mapping[str, Found], notes: Sequence[Found]) -> dict[str, float]:
    """Return label -> seconds until it was reported in an earlier fault's incident, or by a note."""
    result: dict[str, float] = {}
    for label in missed:
        source = first.get(label.follows)
        at = _said(label, source) if source is not None else None
        if at is None and label.kind == "idle":
            at = next((note.opened_ms for note in notes if covers(label, note)), None)
        if at is not None:
            result[label.id] = max(0.0, (at - label.start_ms) / 1000)
    return result


def _false_notes(labels: Sequence[Label], notes: Sequence[Found]) -> int:
    """Return how many notes name nothing."""
    named = [label for label in labels if not label.hardware or label.kind == "idle"]
    return sum(not any(covers(label, note) for label in named) for note in notes)


def score(labels: Sequence[Label], incidents: Sequence[Found], gpu_days: float) -> Score:
    """Match `incidents` to `labels`."""
    counted = sorted((f for f in incidents if counts(f)), key=lambda f: f.opened_ms)
    faults = [label for label in labels if label.hardware]
    negatives = [label for label in labels if not label.hardware]
    kinds: dict[str, KindScore] = defaultdict(KindScore)
    first: dict[str, Found] = {}
    delays_of: dict[str, float] = {}
    matched_incidents: set[str] = set()
    false: list[Found] = []
    false_drains: list[Found] = []
    tolerated = duplicates = 0
    foretold = [label for label in faults if label.precursor]
    warned: dict[str, float] = {}
    for found in counted:
        names = [label for label in faults if covers(label, found) and found.kind in FITTING[label.kind]]
        ahead = [label for label in foretold if warns(label, found)]
        for label in ahead:
            warned.setdefault(label.id, (label.start_ms - found.opened_ms) / 1000)
        if names:
            matched_incidents.add(found.id)
            fresh = [label for label in names if label.id not in first]
            for label in fresh:
                first[label.id] = found
            duplicates += not fresh
            continue
        if ahead:
            matched_incidents.add(found.id)
            continue
        drains = found.action in ("drain", "isolate")
        if any(covers(label, found) for label in negatives):
            tolerated += not drains
            if drains:
                false.append(found)
                false_drains.append(found)
            continue
        false.append(found)
        if drains:
            false_drains.append(found)
    for label in faults:
        kind = kinds[label.kind]
        kind.faults += 1
        if label.id in first:
            kind.found += 1
            kind.delays_s.append(max(0.0, (first[label.id].opened_ms - label.start_ms) / 1000))
            delays_of[label.id] = kind.delays_s[-1]
    missed = [label for label in faults if label.id not in first]
    notes = sorted(filter(_is_note, incidents), key=lambda f: f.opened_ms)
    matched = len(matched_incidents) - duplicates
    return Score(
        dict(kinds), matched, duplicates, false, false_drains, tolerated, len(negatives), missed, gpu_days, delays_of,
        _otherwise(missed, first, notes), _false_notes(labels, notes), warned,
        {label.id: label.precursor for label in foretold},
        {label.id: f"{label.kind}/{label.cause}" for label in faults},
    )  # fmt: skip
