"""Set lines aside that explain nothing: of the kernel long before the job's end, of another container.

A kernel's log goes back to the node's start, and `kubectl describe pod` shows how earlier containers ended too. What
is set aside is said, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drover_core.jobs.lines import Form, Line, Log, last_time_ms, set_time
from drover_core.jobs.model import Failure, Proof
from drover_core.jobs.rules import BY_ID, KERNEL, Role
from drover_core.times import iso


@dataclass(frozen=True, slots=True)
class Match:
    """A line and what it stands for."""

    line: Line
    failure: Failure
    role: Role
    confidence: float
    rule: str

    @property
    def proof(self) -> Proof:
        return Proof(self.line.shown, f"{self.line.log}:{self.line.number}", self.line.rank, self.rule)


BEFORE_MS, AFTER_MS = 3_600_000, 300_000  # around the job's end: errors of nodes that may explain it
UNDATED = 0.7  # of the confidence, where no time says that a kernel line is of this job
OF_KERNEL = frozenset(rule.id for rule in BY_ID.values() if rule.forms - {Form.QUIET} == KERNEL)
MAX_NOTES = 8
_CONTAINERS = re.compile(r" {0,6}(?:Init |Ephemeral )?Containers:\s*$")
_CONTAINER = re.compile(r" {2,8}([a-z0-9][\w.-]{0,62}):\s*$")
_STATE = re.compile(r"\s+(State|Last State): +(\w+)")
_REASON = re.compile(r"\s+Reason: +(\w+)")


def weigh(found: Sequence[Match], logs: Sequence[Log], ended_ms: int | None) -> tuple[list[Match], list[str]]:
    """Return the matches that count, and what is said of the others."""
    notes: list[str] = []
    kept = _kernel(found, ended_ms if ended_ms is not None else last_time_ms(logs), notes)
    kept = _containers(kept, logs, notes)
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"{len(notes) - MAX_NOTES} more lines were set aside"]
    return kept, notes


def _kernel(found: Sequence[Match], ended: int | None, notes: list[str]) -> list[Match]:
    """Leave out kernel lines outside the hour before the job's end; those without a time count for less."""
    raised = {m.line.log for m in found if m.line.form is Form.EXCEPTION and m.rule == "exception"}
    kept: list[Match] = []
    undated = 0
    for match in found:
        line = match.line
        if match.rule not in OF_KERNEL and line.form is not Form.KERNEL and "NVRM: " not in line.text:
            kept.append(match)
        elif (from_end := _from_end(line, ended)) is None:
            undated += 1
            if raised - {line.log}:
                notes.append(
                    f"{_where(line)}: no time says that this was in the job, which has an exception of its own: "
                    f"{line.text[:120]}"
                )
            else:
                kept.append(replace(match, confidence=match.confidence * UNDATED))
        elif ended is not None and not -BEFORE_MS <= from_end <= AFTER_MS:
            notes.append(f"{_where(line)}: outside the hour before {iso(ended)} (--at changes it): {line.text[:120]}")
        else:
            kept.append(match)
    if undated:
        notes.insert(0, f"{undated} kernel lines have no time to compare with the job's end: they count for less")
    return kept


def _from_end(line: Line, ended: int | None) -> int | None:
    """Return how long after the job's end a line was written, in ms; None: unknown."""
    if ended is None:
        return None
    if line.ms is not None:
        return line.ms - ended
    if line.at is None:
        return None
    end = Line("", 0, "")
    set_time(end, iso(ended))
    return round((line.at - (end.at or 0.0)) * 1000)  # syslog's form has no year


def _where(line: Line) -> str:
    return f"{line.log}:{line.number}"


def _containers(found: Sequence[Match], logs: Sequence[Log], notes: list[str]) -> list[Match]:
    """Leave out an OOMKilled that the job's own exception contradicts, or that is of another container."""
    oom = [m for m in found if m.rule == "k8s-oom"]
    if not oom:
        return list(found)
    others = [m for m in found if m.rule != "k8s-oom" and m.role is Role.CAUSE]
    raised = [m for m in others if m.line.form is Form.EXCEPTION and m.failure is not Failure.CANCELLED]
    kept: list[Match] = []
    described = {log.name: _describe(log) for log in logs if any(m.line.log == log.name for m in oom)}
    for match in found:
        if match.rule != "k8s-oom":
            kept.append(match)
            continue
        name, weak = described[match.line.log].get(match.line.number, ("", False))
        of = f"container {name}" if name else "a container"
        if raised and not any(_later(match.line, m.line) for m in raised):
            notes.append(
                f"{_where(match.line)}: {of} was OOMKilled, and the job's own exception is not earlier: left out"
            )
        elif weak and others:
            notes.append(f"{_where(match.line)}: {of} was OOMKilled, which is not the one that failed: left out")
        else:
            line = replace(match.line, text=f"{of}: {match.line.text.strip()}") if name else match.line
            kept.append(replace(match, line=line, confidence=0.5 if weak else match.confidence))
    return kept


def _later(line: Line, other: Line) -> bool:
    return line.at is not None and other.at is not None and line.at > other.at


def _describe(log: Log) -> dict[int, tuple[str, bool]]:
    """Return, for each line of `kubectl describe pod` with a reason, its container and whether another one failed.

    The last state of a container is how it ended before it was started again.
    """
    at: dict[int, tuple[str, bool]] = {}  # number of the line -> container, last state
    failed: set[str] = set()
    within, name, last = False, "", False
    for line in log.lines:
        text = line.text
        if _CONTAINERS.match(text):
            within, name, last = True, "", False
        elif within and (match := _CONTAINER.match(text)):
            name, last = match[1], False
        elif within and name and (match := _STATE.match(text)):
            last = match[1] == "Last State"
        elif within and name and (match := _REASON.match(text)):
            at[line.number] = name, last
            if not last and match[1] in ("Error", "OOMKilled", "ContainerCannotRun", "StartError"):
                failed.add(name)
        elif within and not text.startswith(" "):
            within, name = False, ""
    return {number: (name, last or bool(failed - {name})) for number, (name, last) in at.items()}
