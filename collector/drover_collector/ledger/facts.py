"""What the ledger is made of: who held which GPU, what its telemetry showed, and what took time from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from drover_collector.ledger.spans import GpuSpans
from drover_core.model.events import NodeOutage


class Share(IntEnum):
    """What a millisecond of a held GPU was. Each is exactly one of these; numbers are columns of `Ledger.ms`."""

    USEFUL = 0
    WAITING = 1  # for a peer that a fault stopped or slowed
    LOST = 2  # to a fault of this GPU or its node, or because the whole job was slower than before
    RESTARTING = 3  # after a fault: until the job works again
    REPEATED = 4  # work since the last checkpoint, done again
    IDLE = 5
    UNKNOWN = 6


SHARES = len(Share)


class Activity(IntEnum):
    """What telemetry shows of a GPU in a bucket. Without a span nothing was reported: unknown."""

    UNCLEAR = 0  # it reports, and nothing of that says whether it works
    IDLE = 1
    WORKING = 2


PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class Claim:
    """Time that one incident takes from GPUs: `ppm` millionths of it, counted from `anchor_ms` on.

    Attributes:
        share: LOST, WAITING, RESTARTING or REPEATED.
        incident: number of the incident; -1: none.
        working: it takes only time in which telemetry shows work.
    """

    share: Share
    ppm: int
    anchor_ms: int
    incident: int = -1
    working: bool = False


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of one layer, in order: where several lie on one time, the first counts.

    Attributes:
        spans: of GPUs; their value is the number of the claim in `claims`.
    """

    claims: Sequence[Claim] = ()
    spans: GpuSpans = field(default_factory=lambda: GpuSpans.of(()))


@dataclass(frozen=True, slots=True)
class LedgerIncident:
    """What the ledger needs of an incident.

    Attributes:
        spans: when it was open; a reopened one has several.
        counted_ms: up to when its hours are counted.
        lost_ms, waited_ms: GPU-milliseconds that it took so far; None: not known.
    """

    id: str
    kind: str
    cause: str
    node: str | None
    members: Sequence[tuple[str, int | None]]
    job: str | None
    since_ms: int
    closed_ms: int | None
    counted_ms: int
    severity: str
    summary: str
    spans: Sequence[tuple[int, int | None]]
    lost_ms: int | None = None
    waited_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Stored facts. Everything that the ledger says follows from these alone.

    Attributes:
        holds: which job held each GPU, without overlaps; the value is its number in `jobs`. What is still held ends
            at `until_ms`.
        until_ms: up to when the facts reach.
        activity: what telemetry showed, without overlaps; the value is an `Activity`.
        steps: (job, from_ms, to_ms) in which a training loop of the job reported steps.
        outages: node -> its states, oldest first.
        checkpoints: (job, ms) at which a job reported that a checkpoint is on disk.
        checkpoints_from_ms: there may be further ones before this.
        teams: job -> its team, of jobs whose owner is known.
        gpu_outages: UUID -> states of a GPU that was out alone, oldest first.
    """

    jobs: Sequence[str]
    holds: GpuSpans
    until_ms: int
    activity: GpuSpans
    incidents: Sequence[LedgerIncident] = ()
    steps: Sequence[tuple[int, int, int]] = ()
    outages: Mapping[str, Sequence[NodeOutage]] = field(default_factory=dict)
    checkpoints: Sequence[tuple[int, int]] = ()
    checkpoints_from_ms: int = 0
    teams: Mapping[str, str] = field(default_factory=dict)
    gpu_outages: Mapping[str, Sequence[NodeOutage]] = field(default_factory=dict)
