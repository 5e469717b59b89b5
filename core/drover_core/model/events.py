"""What happens to a fleet, as frozen dataclasses: Event, Finding, Incident, Decision, Action, ProbeResult.

They are stored and sent as JSON by `to_json` and `from_json`, which ignore unknown keys of newer versions.
All times are milliseconds since the epoch, UTC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drover_core.model.jsonform import from_dict as from_dict
from drover_core.model.jsonform import from_json as from_json
from drover_core.model.jsonform import to_dict as to_dict
from drover_core.model.jsonform import to_json as to_json
from drover_core.model.kinds import KERNEL_CODES as KERNEL_CODES
from drover_core.model.kinds import LIFECYCLE_CODES as LIFECYCLE_CODES
from drover_core.model.kinds import RANK_CODES as RANK_CODES
from drover_core.model.kinds import EventKind as EventKind
from drover_core.model.kinds import Severity as Severity
from drover_core.model.saving import Saving

Member = tuple[str, int | None]  # (node, GPU slot or None for the node itself)


class IncidentKind(StrEnum):
    STRAGGLER = "straggler"
    HANG = "hang"
    THERMAL = "thermal"
    MEMORY = "memory"
    LINK = "link"
    XID = "xid"
    LIVENESS = "liveness"
    SDC = "sdc"
    DRIFT = "drift"
    RISK = "risk"
    IDLE = "idle"
    SLOWDOWN = "slowdown"


class RecommendedAction(StrEnum):
    """What a finding asks for, before policy and guard; in order of strength."""

    NONE = "none"
    WATCH = "watch"
    ADVISE = "advise"
    PROBE = "probe"
    DRAIN = "drain"
    ISOLATE = "isolate"


class Health(StrEnum):
    """Health of a GPU or node. UNKNOWN (it does not report) is never shown as healthy."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    DRAINING = "draining"
    DRAINED = "drained"
    VALIDATING = "validating"
    REPAIR = "repair"
    UNKNOWN = "unknown"


class WaitsFor(StrEnum):
    """What the return of a drained node waits for."""

    NOTHING = ""
    TELEMETRY = "telemetry"  # values of each GPU that the node has in the fleet file
    FINDING = "finding"  # the end of a condition that a detector still reports
    RESET = "reset"  # a reset of the GPU, or a boot, newer than the fault
    REBOOT = "reboot"  # a boot newer than the fault
    PERSON = "person"  # the agent reports no boots, so a person must confirm


class Withheld(StrEnum):
    """Why a drained node does not return to service although nothing is missing that it waits for."""

    NO = ""
    QUIET = "quiet"  # it passed its probes and had faults since: probed again when the faults end
    REVIEW = "review"  # probes could not judge it and do not run again by themselves: a person must decide


class NoteKind(StrEnum):
    """What a line of an incident's timeline records."""

    OTHER = ""
    OPENED = "opened"
    JOINED = "joined"  # another detector found it too
    CAME_BACK = "came_back"  # reported again after it was closed
    AGAIN = "again"  # reported again, after a pause
    ENDED = "ended"  # for one detector; others may still report it
    CLOSED = "closed"
    REFUTED = "refuted"  # closed: a probe found the hardware healthy
    ABSORBED = "absorbed"  # closed: it is part of another incident now
    NO_LONGER_WANTED = "no_longer_wanted"  # closed: no node of a mass event is to leave service


class DecisionCause(StrEnum):
    """Why a decision is held back or has expired."""

    NONE = ""
    MAINTENANCE = "maintenance"
    UNKNOWN = "unknown"  # a scheduler has not answered yet, so it is not known which nodes are out of service
    RECOVERED = "recovered"  # the node or GPU has answered since the fault
    GUARD = "guard"  # a cap, the pace or the circuit breaker
    UNANSWERED = "unanswered"  # nobody answered in time


class Act(StrEnum):
    """What Drover does to a node."""

    ADVISE = "advise"
    UNADVISE = "unadvise"
    DRAIN = "drain"
    ISOLATE = "isolate"
    RESUME = "resume"
    RESET = "reset"
    REBOOT = "reboot"
    REPAIR = "repair"  # a ticket
    ISOLATE_GPU = "isolate_gpu"  # one GPU goes out of service, its node stays
    RETURN_GPU = "return_gpu"


class ActionState(StrEnum):
    """INTENDED is stored before the act. DONE is verified. UNDONE: somebody else has undone it."""

    INTENDED = "intended"
    DONE = "done"
    FAILED = "failed"
    UNDONE = "undone"


class ProbeReason(StrEnum):
    """Why probes were requested."""

    CONFIRM = "confirm"  # a suspicion
    VALIDATE = "validate"  # of a drained node, before its return
    REPAIRED = "repaired"
    BASELINE = "baseline"  # driver or firmware changed
    ADMIT = "admit"  # before a node is first in service
    IDLE = "idle"  # by a budget, on unused nodes
    PERSON = "person"


SEVERITY_ORDER = tuple(Severity)
WANTED_ORDER = tuple(RecommendedAction)


def stronger(a: RecommendedAction, b: RecommendedAction) -> RecommendedAction:
    return max(a, b, key=WANTED_ORDER.index)


def worse(a: Severity, b: Severity) -> Severity:
    return max(a, b, key=SEVERITY_ORDER.index)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on a node. `id` is stable over resends: node/spool/sequence, or a case's line."""

    id: str
    ts_ms: int
    node: str
    gpu: int | None
    kind: EventKind
    code: str  # the number of an XID or SXid; otherwise a word
    message: str
    source: str = ""  # nvml, kmsg, agent, simulation, case
    backlog: bool = False  # from before the agent's start or the node's boot, or too old to act on
    count: int = 1  # equal lines that this one stands for
    received_ms: int | None = None  # the collector's clock at receipt
    clock_suspect: bool = False  # ts_ms and received_ms disagree
    forgeable: bool = False  # from a place that user space can write: stored, never acted on
    boot: str = ""  # id of the node's boot in which it happened; empty: not known


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a finding: a value and what was expected, or a line of a log."""

    text: str  # a full sentence for the operator
    metric: str | None = None  # catalog name; the console draws it with its peers
    value: float | None = None
    expected: float | None = None  # the peers' median, or the limit
    spread: float | None = None  # robust standard deviation of the peers
    peers: int | None = None  # number of peers
    from_ms: int | None = None
    to_ms: int | None = None
    port: str = ""  # the network port, if it is about one
    key: str = ""  # of evidence without a metric: the newest with a key replaces the older ones

    def __post_init__(self) -> None:
        """Make NaN and infinity unknown: JSON has no form for them."""
        for name in ("value", "expected", "spread"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                object.__setattr__(self, name, None)


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation of one detector."""

    detector: str
    kind: IncidentKind
    cause: str
    scope: str  # gpu, node, rack, leaf, job
    node: str | None
    gpu: int | None
    members: tuple[Member, ...]
    ts_ms: int  # when it was observed
    since_ms: int  # estimated onset
    severity: Severity
    confidence: float  # 0..1
    action: RecommendedAction
    summary: str  # one sentence: what, where, how much
    advice: str  # one sentence: what to do
    evidence: tuple[Evidence, ...] = ()
    job: str | None = None
    cleared: bool = False  # the condition has ended: closes what it opened
    lost_gpus: float | None = None  # work that the fault costs now, in GPUs; None: not known
    waiting_gpus: float | None = None  # work that peers lose now by waiting, in GPUs
    snapshot: Mapping[str, Any] = field(default_factory=dict)  # JSON that its detector needs after a restart


@dataclass(frozen=True, slots=True)
class Note:
    """One line of an incident's timeline."""

    ts_ms: int
    text: str
    kind: NoteKind = NoteKind.OTHER
    detector: str = ""  # the detector that reported it
    incident: str = ""  # id of another incident that it is about
    why: str = ""  # why the incident was closed, if this line closes it


@dataclass(frozen=True, slots=True)
class Incident:
    """Findings that belong together, with a cause. Stored as an append-only history of versions."""

    id: str
    kind: IncidentKind
    cause: str
    scope: str
    node: str | None
    gpu: int | None
    members: tuple[Member, ...]
    opened_ms: int  # first reported
    since_ms: int  # estimated onset
    closed_ms: int | None
    severity: Severity
    confidence: float
    action: RecommendedAction
    summary: str
    advice: str
    evidence: tuple[Evidence, ...] = ()
    timeline: tuple[Note, ...] = ()
    detectors: tuple[str, ...] = ()
    job: str | None = None
    gpu_hours_lost: float | None = None  # by the fault itself; None: not known
    gpu_hours_waited: float | None = None  # by peers that waited
    version: int = 1
    updated_ms: int = 0
    asked: RecommendedAction | None = None  # what its detectors ask for, before policy; None: not stored
    worsened: bool = False  # `summary` begins with something worse than the root cause, which is named after it
    snapshots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # detector -> snapshot of its findings

    def snapshot_of(self, detector: str) -> Mapping[str, Any]:
        """Return the snapshot of a detector's findings, empty if there is none."""
        return self.snapshots.get(detector, {})

    @property
    def end(self) -> Note | None:
        """The line that closed the incident; None: it is open."""
        return self.timeline[-1] if self.closed_ms is not None and self.timeline else None


@dataclass(frozen=True, slots=True)
class GpuRef:
    """One GPU that is taken out of service alone. Its UUID names it: after a boot its slot may hold another board."""

    slot: int
    uuid: str  # "": not known, of a recorded fleet
    refused: bool = False  # its scheduler cannot take it out alone
    order: str = ""  # id of the order for the probes that validate it
    replaced_by: str = ""  # UUID of the board that took its place: its outage is over, and goes on if it comes back


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy made of a recommendation. Decisions that are held back are stored too."""

    id: str
    incident_id: str
    ts_ms: int
    node: str
    wanted: RecommendedAction
    mode: str  # observe, approve, enforce
    outcome: str  # would_act, held, pending_approval, act
    rule: str
    reason: str
    takes: bool = True  # it takes its node out of service; False: the node was out already
    cause: DecisionCause = DecisionCause.NONE  # why it is held or has expired
    save_s: float = 0.0  # how long its jobs have to save themselves first; 0: they are not asked
    gpu: GpuRef | None = None  # only this GPU goes, the node stays in service; None: the node
    forgeable: bool = False  # a user of the node could have written what it rests on, so a person is asked

    @property
    def what(self) -> str:
        """What is to be done, in words."""
        return f"{self.wanted} {self.node}" if self.gpu is None else f"isolate GPU {self.gpu.slot} of {self.node}"


@dataclass(frozen=True, slots=True)
class Action:
    """One act on one node: the intent is stored first, then its outcome. The newest version counts."""

    id: str
    decision_id: str  # "": a person asked for it
    incident_id: str
    node: str
    action: Act
    actuator: str
    state: ActionState
    ts_ms: int
    detail: str = ""  # a sentence for the operator: what was done, or why not
    by: str = "drover"  # or the person, by the name in the certificate
    attempts: int = 0
    why: str = ""  # the cause, as written in the scheduler's reason
    before: str = ""  # of an advice: the old value, to be restored (Slurm: the node's weight)
    forced: bool = False  # a person overrides the guard, and allows a reset where jobs may run
    running: bool = False  # its command was started, and is not known to have ended
    foreign: bool = False  # it failed because somebody else has the node out of service
    saving: Saving | None = None  # its jobs are asked to save themselves first; None: they are not
    gpu: GpuRef | None = None  # of ISOLATE_GPU and RETURN_GPU


# Stages in which a node is out of service.
OUT_STAGES = frozenset({Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR})


@dataclass(frozen=True, slots=True)
class NodeOutage:
    """The stage of a node, or of one GPU of it, that Drover took out of service.

    Append-only histories, of nodes and of GPUs; the newest of a node, or of a GPU by its UUID, counts.
    """

    node: str
    stage: Health  # draining, drained, validating, repair; healthy: back in service
    ts_ms: int
    incident_id: str
    reason: str
    by: str = "drover"
    returns: int = 0  # how often it had returned before and failed again
    asked_ms: int = 0  # when the validating probes were requested; 0: none, as when a person returns it
    waits_for: WaitsFor = WaitsFor.NOTHING  # of a drained node: what its return waits for; `reason` explains it
    withheld: Withheld = Withheld.NO
    passed_before: bool = False  # its return was withheld in this outage although it had passed its probes
    incidents: tuple[str, ...] = ()  # ids of other incidents that keep it out of service
    gpu: GpuRef | None = None  # only this GPU is out of service; None: the node


@dataclass(frozen=True, slots=True)
class Approval:
    """A person's answer to a decision that needs approval."""

    decision_id: str
    ts_ms: int
    by: str
    approved: bool
    why: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Who did what, when and why: approvals, silences, actions by a person, changes of the policy."""

    id: str
    ts_ms: int
    by: str
    what: str  # approve, reject, silence, drain, resume, probe, policy, clock, ...
    subject: str  # incident, node or decision
    why: str
    detail: str = ""
    state: str = ""  # of a policy: its text, with which the next start compares; of a clock: its step in ms


@dataclass(frozen=True, slots=True)
class Silence:
    """Holds back notifications of the incidents that it covers. The newest version of an id counts.

    Each list that is not empty must match. An incident on several nodes is covered only if each of them is, so a
    silence of one node hides nothing of its neighbours.
    """

    id: str
    made_ms: int
    from_ms: int
    until_ms: int
    by: str
    why: str
    node: tuple[str, ...] = ()
    gpu: tuple[int, ...] = ()  # slots
    rack: tuple[str, ...] = ()
    leaf: tuple[str, ...] = ()
    pool: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    incident: tuple[str, ...] = ()  # ids
    maintenance: bool = False  # a maintenance window: Drover does nothing to its nodes either
    ended_by: str = ""  # who ended it early
    event: str = ""  # SOURCE:ID of planned work that others reported; incidents of before it are not silenced


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """A request for probes and its state. An append-only history; the newest version counts."""

    id: str  # the ProbeRequest's
    node: str
    gpus: tuple[int, ...]  # empty: all that no process holds
    level: str
    probes: tuple[str, ...]  # empty: all of the level
    why: ProbeReason
    state: str  # asked, sent, done, failed (refused, not taken, expired, hung...: `detail` says)
    ts_ms: int
    incident_id: str = ""
    by: str = "drover"
    detail: str = ""
    group: str = ""  # id of the nodes that are probed together; each has an order
    members: tuple[str, ...] = ()  # nodes of the group, by number
    addresses: tuple[str, ...] = ()  # of the members, by number; known once the orders are sent
    port: int = 0  # at which the first member listens; known once the orders are sent
    protection: str = ""  # set when it is sent: drained, job, hand, none (no scheduler known)
    job: str = ""  # the scheduler's job that protects it


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """How a finished request judges a node (gpu None) or one of its GPUs."""

    request: str
    node: str
    gpu: int | None
    passed: bool | None  # None: not known, `text` says why
    probe: str  # the probe that decided; "": all passed
    text: str  # a sentence with the figure and what was expected
    ts_ms: int
    why: ProbeReason
    incident_id: str = ""
    value: float | None = None  # of `probe`
    expected: float | None = None  # of `probe`: by its configuration, or as published
    peers: int | None = None  # boards that it was compared with
    good: tuple[str, ...] = ()  # figures that were judged good
    drift: str = ""  # a sentence if it is worse than its own past; not a fault by itself
    drift_since_ms: int | None = None
    end: str = ""  # hung, crashed, wrong: how `probe` ended; "": its figure decided
    measured: tuple[str, ...] = ()  # of a node: figures, each with its configuration
    shifts: tuple[str, ...] = ()  # a sentence for each configuration that became slower with its driver
    shifted: tuple[str, ...] = ()  # the figures of `measured` that `shifts` describes, in the same order


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One figure of a probe, or the closing result of a request: then `end` is set, and there is no value.

    A request has exactly one closing result. `end`: done, stopped (for a job, or on request), hung, crashed, timeout,
    memory (took too much of the host's), refused, not_taken (no probe service runs there), expired (it waited too
    long). `probe` and `gpu` then say where, if that is known.
    """

    id: str  # the same when it is sent again: REQUEST/NUMBER, and REQUEST/end
    node: str
    gpu: int | None  # slot; None: the node's
    probe: str
    ts_ms: int
    ok: bool | None  # for probes with one right result; None for all others
    value: float | None  # None: `detail` says why it could not be measured
    unit: str
    detail: str = ""
    request: str = ""
    peer: int | None = None  # slot of the other GPU of a pair
    spread: float | None = None  # coefficient of variation over `repeats`
    repeats: int = 1
    level: str = ""
    end: str = ""
    seconds: float | None = None  # of a closing result: how long the request took
    device: str = ""  # model of the probed device; "cpu": there is no NVIDIA driver
    tries: int = 1  # of a closing result: how often its probe was run, each time with the same end


@dataclass(frozen=True, slots=True)
class Absence:
    """A metric of one entity that cannot be read, from when, until when (None: still) and why."""

    node: str
    gpu: int | None
    metric: str
    reason: str
    from_ms: int
    to_ms: int | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """A job that holds a GPU from `from_ms` on; job None frees it."""

    node: str
    gpu: int
    job: str | None
    from_ms: int
