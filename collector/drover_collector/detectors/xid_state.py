"""What the XID detector remembers. Bounded: see PER_KEY and MAX_KEYS in `xid.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from drover_proto.events import Event, IncidentKind, Member, Severity

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


@dataclass(slots=True)
class State:
    bursts: dict[Key, list[list[int]]] = field(default_factory=dict)  # [first, last] of each, oldest first
    app_faults: dict[Key, list[int]] = field(default_factory=dict)  # those that were no crash of a whole job
    open: dict[Where, Open] = field(default_factory=dict)
    recent: list[Seen] = field(default_factory=list)  # programs' faults: thousands when a large job crashes
    causes: list[Seen] = field(default_factory=list)  # worse ones, to which others are put down
    pending: list[tuple[int, Event, str]] = field(default_factory=list)  # (due, event, job)
    crashes: dict[tuple[str, int], tuple[int, tuple[Member, ...]]] = field(default_factory=dict)  # newest, members


def back_in_service(state: State, node: str, at_ms: int, gap_ms: int) -> None:
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
