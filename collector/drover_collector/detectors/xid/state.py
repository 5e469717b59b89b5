"""What the XID detector remembers. Bounded: see PER_KEY and MAX_KEYS in `xid.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from drover_core.model.events import (
    Event,
    IncidentKind,
    Member,
    Severity,
)

Where = tuple[str, int | None]
Key = tuple[str, int | None, int]


@dataclass(slots=True)
class Open:
    """What this detector holds open on a GPU (or node): the worst code of it."""

    severity: Severity
    kind: IncidentKind
    cause: str
    last_ms: int
    back_ms: int | None = None  # when the GPU was reset or answered again
    proven: set[int] = field(default_factory=set)  # GPUs that were reset since, of a node's
    gone: set[int] = field(default_factory=set)  # GPUs that gave nothing while their node did
    energy_j: dict[int, float] = field(default_factory=dict)  # GPU -> newest value
    asked: dict[int, float] = field(default_factory=dict)  # GPU -> what its driver asked for


@dataclass(slots=True)
class Seen:
    """One line of the last minutes."""

    ts_ms: int
    node: str
    gpu: int | None
    code: int
    job: str | None
    severity: Severity


PER_JOB = 16  # causes kept of a job: the first ones, to which the rest is put down


class Causes:
    """Worse lines of the last minutes, to which others are put down: the newest of each GPU and code, by node; the
    first critical ones by job. A storm has one of each GPU of the fleet, and each line asks."""

    def __init__(self) -> None:
        self._of_node: dict[str, dict[Key, Seen]] = {}
        self._of_job: dict[str, dict[Key, Seen]] = {}

    def add(self, seen: Seen) -> None:
        key = (seen.node, seen.gpu, seen.code)
        self._of_node.setdefault(seen.node, {})[key] = seen
        if seen.job is not None and seen.severity is Severity.CRITICAL:
            mine = self._of_job.setdefault(seen.job, {})
            if len(mine) < PER_JOB:
                mine.setdefault(key, seen)

    def near(self, node: str, job: str | None) -> list[Seen]:
        """Those of a node and of a job."""
        mine = {} if job is None else self._of_job.get(job, {})
        return list({**mine, **self._of_node.get(node, {})}.values())

    def forget(self, old: Callable[[Seen], bool]) -> None:
        for table in (self._of_node, self._of_job):
            for name in list(table):
                table[name] = {key: seen for key, seen in table[name].items() if not old(seen)}
                if not table[name]:
                    del table[name]


@dataclass(slots=True)
class XidState:
    bursts: dict[Key, list[list[int]]] = field(default_factory=dict)  # [first, last] of each, oldest first
    app_faults: dict[Key, list[int]] = field(default_factory=dict)  # those that were no crash of a whole job
    open: dict[Where, Open] = field(default_factory=dict)
    recent: dict[Key, Seen] = field(default_factory=dict)  # programs' faults: thousands when a large job crashes
    causes: Causes = field(default_factory=lambda: Causes())
    followed: dict[Key, int] = field(default_factory=dict)  # when a line was last put down to another
    pending: dict[Key, tuple[int, Event, str]] = field(default_factory=dict)  # (due, event, job)
    pruned_ms: int = 0  # when `recent` and `causes` last were
    crashes: dict[tuple[str, int], tuple[int, tuple[Member, ...]]] = field(default_factory=dict)  # newest, members


def back_in_service(state: XidState, node: str, at_ms: int, gap_ms: int) -> None:
    """A node has come back: a line from now on is a new burst, not the rest of the one that took the node out.

    Bursts keep their count, by which repeats are told; their end moves so far back that they are over.

    Args:
        gap_ms: lines closer than this are one burst.
    """
    for (name, _, _), bursts in state.bursts.items():
        if name == node and bursts:
            first, last = bursts[-1]
            end_ms = min(last, at_ms - gap_ms - 1)
            bursts[-1] = [min(first, end_ms), end_ms]
