"""Keep the state of the XID detector. Bounded by PER_KEY and MAX_KEYS of detector.py."""

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
    """The worst open XID of a GPU or node."""

    severity: Severity
    kind: IncidentKind
    cause: str
    last_ms: int
    back_ms: int | None = None  # when the GPU was reset or answered again
    proven: set[int] = field(default_factory=set)  # GPUs of the node that were reset since
    gone: set[int] = field(default_factory=set)  # GPUs without values while their node reports
    energy_j: dict[int, float] = field(default_factory=dict)  # GPU -> newest value
    requested: dict[int, float] = field(default_factory=dict)  # GPU -> newest recovery action


@dataclass(slots=True)
class Seen:
    """An XID line of the last minutes."""

    ts_ms: int
    node: str
    gpu: int | None
    code: int
    job: str | None
    severity: Severity


PER_JOB = 16  # causes kept of a job: the first ones, to which the others are attributed


class Causes:
    """Lines of the last minutes to which others may be attributed.

    It has the newest of each GPU and code, by node, and the first critical ones by job: a look-up stays fast in a storm
    with a line from every GPU of the fleet.
    """

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
        """Return the lines of a node and of a job."""
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
    app_faults: dict[Key, list[int]] = field(default_factory=dict)  # application faults outside crashes of jobs
    open: dict[Where, Open] = field(default_factory=dict)
    recent: dict[Key, Seen] = field(default_factory=dict)  # application faults: thousands when a large job crashes
    causes: Causes = field(default_factory=lambda: Causes())
    followed: dict[Key, int] = field(default_factory=dict)  # when a line was last attributed to another
    pending: dict[Key, tuple[int, Event, str]] = field(default_factory=dict)  # (due, event, job)
    pruned_ms: int = 0  # when `recent` and `causes` were last pruned
    crashes: dict[tuple[str, int], tuple[int, tuple[Member, ...]]] = field(default_factory=dict)  # newest, members


def back_in_service(state: XidState, node: str, at_ms: int, gap_ms: int) -> None:
    """End the bursts of a node that returned to service: a later line starts a new burst.

    Bursts keep their count, so that repeats are still recognised.

    Args:
        gap_ms: lines closer than this are one burst.
    """
    for (name, _, _), bursts in state.bursts.items():
        if name == node and bursts:
            first, last = bursts[-1]
            end_ms = min(last, at_ms - gap_ms - 1)
            bursts[-1] = [min(first, end_ms), end_ms]
