"""What happens to a fleet, as frozen values: Event, Finding, Incident, Decision, Action, ProbeResult.

They are stored and sent as JSON through `to_json` and `from_json`; unknown keys from a newer version are ignored.
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
from drover_core.model.kinds import EventKind as EventKind
from drover_core.model.kinds import Severity as Severity

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


class RecommendedAction(StrEnum):
    """What a finding asks for, before the guard; in order of strength."""

    NONE = "none"
    WATCH = "watch"
    ADVISE = "advise"
    PROBE = "probe"
    DRAIN = "drain"
    ISOLATE = "isolate"


class Health(StrEnum):
    """Health of a GPU or node. UNKNOWN (nothing heard) is never shown as healthy."""

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
    TELEMETRY = "telemetry"  # values of every GPU that the fleet file gives the node
    FINDING = "finding"  # the end of a condition that a detector still reports
    RESET = "reset"  # a reset of the GPU, or a boot, newer than the fault
    REBOOT = "reboot"  # a boot newer than the fault
    PERSON = "person"  # the agent reports no boots: only a person knows


class Withheld(StrEnum):
    """Why a drained node does not come back although nothing that it waits for is missing."""

    NO = ""
    QUIET = "quiet"  # it passed its probes, and faults came since: probed once more when no more come
    REVIEW = "review"  # a person must look: probes could not judge it, and do not run again by themselves


class NoteKind(StrEnum):
    """What a line of an incident's timeline records."""

    OTHER = ""
    OPENED = "opened"
    JOINED = "joined"  # another detector found it too
    CAME_BACK = "came_back"  # after it was closed
    AGAIN = "again"  # reported again, after a pause
    ENDED = "ended"  # for one detector; others may still report it
    CLOSED = "closed"
    REFUTED = "refuted"  # closed: a probe found the hardware healthy
    ABSORBED = "absorbed"  # closed: it goes on as part of another incident
    NO_LONGER_WANTED = "no_longer_wanted"  # closed: no node of a mass event is to leave service


class DecisionCause(StrEnum):
    """What holds a decision back, or why it expired."""

    NONE = ""
    MAINTENANCE = "maintenance"
    UNKNOWN = "unknown"  # a scheduler has not answered yet: who is out of service is not known
    RECOVERED = "recovered"  # the node or GPU answers again since the fault
    GUARD = "guard"  # a cap, the pace or the circuit breaker
    UNANSWERED = "unanswered"  # nobody answered in time


class Act(StrEnum):
    """What is done to a node's service."""

    ADVISE = "advise"
    UNADVISE = "unadvise"
    DRAIN = "drain"
    ISOLATE = "isolate"
    RESUME = "resume"
    RESET = "reset"
    REBOOT = "reboot"
    REPAIR = "repair"  # a ticket


class ActionState(StrEnum):
    """INTENDED is stored before anything is done; DONE is verified; UNDONE: somebody else has undone it since."""

    INTENDED = "intended"
    DONE = "done"
    FAILED = "failed"
    UNDONE = "undone"


class ProbeReason(StrEnum):
    """Why probes were asked for."""

    CONFIRM = "confirm"  # a suspicion
    VALIDATE = "validate"  # after a drain, before its end
    REPAIRED = "repaired"
    BASELINE = "baseline"  # driver or firmware changed
    ADMIT = "admit"  # before a node first serves
    IDLE = "idle"  # by a budget, on nodes that nothing uses
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
    code: str  # the number of an XID or SXid; else a word
    message: str
    source: str = ""  # nvml, kmsg, agent, simulation, case
    backlog: bool = False  # history: of before the agent's start or the node's boot, or too old to be acted on
    count: int = 1  # equal lines collapsed into this one
    received_ms: int | None = None  # the collector's clock at receipt
    clock_suspect: bool = False  # ts_ms and received_ms disagree
    forgeable: bool = False  # came from a place that user space can write (kept, never acted on)
    boot: str = ""  # of its node, in which it happened; empty: not known


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a finding: a value against what was expected of it, or a line of a log."""

    text: str  # a full sentence for the operator
    metric: str | None = None  # catalog name; the console draws it with its peers
    value: float | None = None
    expected: float | None = None  # the peers' median, or the limit
    spread: float | None = None  # robust standard deviation of the peers
    peers: int | None = None  # how many there were
    from_ms: int | None = None
    to_ms: int | None = None
    port: str = ""  # the network port that it is about
    key: str = ""  # of what has no metric and a changing value: the newest of a key replaces the older ones

    def __post_init__(self) -> None:
        """A number that is none (NaN of an absent value) is unknown: JSON has no form for it."""
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
    lost_gpus: float | None = None  # GPUs' worth of work lost to the fault itself, now; None when it cannot be told
    waiting_gpus: float | None = None  # GPUs' worth of work lost by peers that wait for it, now
    snapshot: Mapping[str, Any] = field(default_factory=dict)  # what its detector needs to go on after a restart: JSON


@dataclass(frozen=True, slots=True)
class Note:
    """One line of an incident's timeline."""

    ts_ms: int
    text: str
    kind: NoteKind = NoteKind.OTHER
    detector: str = ""  # that said it
    incident: str = ""  # the id of another one that it is about
    why: str = ""  # of a line that closes the incident


@dataclass(frozen=True, slots=True)
class Incident:
    """Findings about the same thing, with a cause. Stored as an append-only history of versions."""

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
    gpu_hours_lost: float | None = None  # by the fault itself; None when it cannot be told
    gpu_hours_waited: float | None = None  # by peers that waited for it
    version: int = 1
    updated_ms: int = 0
    asked: RecommendedAction | None = None  # what its detectors ask for, whatever the policy wants; None: not noted
    worsened: bool = False  # `summary` begins with something worse than the root cause, which follows
    snapshots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # detector -> what its findings carried

    def snapshot_of(self, detector: str) -> Mapping[str, Any]:
        """What its findings of a detector carried; empty where they carried nothing."""
        return self.snapshots.get(detector, {})

    @property
    def end(self) -> Note | None:
        """The line that closed it; None: it is open."""
        return self.timeline[-1] if self.closed_ms is not None and self.timeline else None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy wants for an incident, and what became of the wish. Held-back ones are stored too."""

    id: str
    incident_id: str
    ts_ms: int
    node: str
    wanted: RecommendedAction
    mode: str  # observe, approve, enforce
    outcome: str  # would_act, held, pending_approval, act
    rule: str
    reason: str
    takes: bool = True  # its node leaves service by it; False: it was out already, for something else
    cause: DecisionCause = DecisionCause.NONE  # of one that is held or has expired


@dataclass(frozen=True, slots=True)
class Action:
    """One effect on the scheduler: the intent is stored first, then its outcome. The newest version counts."""

    id: str
    decision_id: str  # "" of what a person asked for by hand
    incident_id: str
    node: str
    action: Act
    actuator: str
    state: ActionState
    ts_ms: int
    detail: str = ""  # a sentence for the operator: what was done, or why not
    by: str = "drover"  # or the person, as the certificate names them
    attempts: int = 0
    why: str = ""  # the cause, as it stands in the scheduler's reason
    before: str = ""  # of an advice: what there was, to be put back (Slurm: the node's weight)
    forced: bool = False  # a person wants it past the guard, and a reset where jobs may run
    running: bool = False  # its command was started, and has not ended as far as is known
    foreign: bool = False  # it failed because somebody else has the node out, and was left alone


# Stages in which a node is out of service.
OUT_STAGES = frozenset({Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR})


@dataclass(frozen=True, slots=True)
class NodeOutage:
    """How far a node is that Drover took out of service. An append-only history; the newest of a node counts."""

    node: str
    stage: Health  # draining, drained, validating, repair; healthy: back in service
    ts_ms: int
    incident_id: str
    reason: str
    by: str = "drover"
    returns: int = 0  # how often it had come back before, and failed again
    asked_ms: int = 0  # when the probes were asked for that validate it, or did; 0: none, as when a person puts it back
    waits_for: WaitsFor = WaitsFor.NOTHING  # of a drained node: what its return waits for; `reason` says it in words
    withheld: Withheld = Withheld.NO
    passed_before: bool = False  # its return was withheld in this outage although it had passed its probes
    incidents: tuple[str, ...] = ()  # ids of other incidents that keep it out


@dataclass(frozen=True, slots=True)
class Approval:
    """A person's answer to a decision that waited for one."""

    decision_id: str
    ts_ms: int
    by: str
    approved: bool
    why: str


@dataclass(frozen=True, slots=True)
class Audit:
    """One line of who did what, when and why: approvals, silences, actions by hand, changes of the policy."""

    id: str
    ts_ms: int
    by: str
    what: str  # approve, reject, silence, drain, resume, probe, policy, clock, ...
    subject: str  # incident, node or decision
    why: str
    detail: str = ""
    state: str = ""  # of a policy: all of it, by which the next start tells what has changed; of a clock: its step, ms


@dataclass(frozen=True, slots=True)
class Silence:
    """Nobody is told of the incidents that it covers, from a moment to another. The newest version of an id counts.

    Each list that is not empty has to fit. An incident on several nodes is covered when each of them is, so that a
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
    maintenance: bool = False  # nothing is done to its nodes meanwhile, either
    ended_by: str = ""  # who ended it before its time


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """A request for probes and how far it is. An append-only history; the newest version counts."""

    id: str  # the ProbeRequest's
    node: str
    gpus: tuple[int, ...]  # none: all that no process holds
    level: str
    probes: tuple[str, ...]  # none: all of the level
    why: ProbeReason
    state: str  # asked, sent, done, failed (refused, not taken, expired, hung...: `detail` says)
    ts_ms: int
    incident_id: str = ""
    by: str = "drover"
    detail: str = ""
    group: str = ""  # of several nodes that are probed together: one order each
    members: tuple[str, ...] = ()  # of the group, by number
    addresses: tuple[str, ...] = ()  # likewise, where each is reached; known once they are sent
    port: int = 0  # at which the first one listens, likewise
    protection: str = ""  # once it is sent: drained, job, hand, none (no scheduler known)
    job: str = ""  # the scheduler's job that protects it


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What a finished request proves of a node (gpu None) or of one of its GPUs."""

    request: str
    node: str
    gpu: int | None
    passed: bool | None  # None: cannot be told, `text` says why
    probe: str  # that decided it; "" when all passed
    text: str  # a sentence with figure and expectation
    ts_ms: int
    why: ProbeReason
    incident_id: str = ""
    value: float | None = None  # of `probe`
    expected: float | None = None  # likewise: what its configuration gives, or what is published
    peers: int | None = None  # boards it was held against
    good: tuple[str, ...] = ()  # figures that were judged to be as they should
    drift: str = ""  # a sentence where it has become worse than it was itself; no proof against it
    drift_since_ms: int | None = None
    end: str = ""  # hung, crashed, wrong: what `probe` did; "" where its figure decided
    measured: tuple[str, ...] = ()  # of a node: figures, each with its configuration
    shifts: tuple[str, ...] = ()  # what a whole configuration has lost with its driver, a sentence each
    shifted: tuple[str, ...] = ()  # the figures of `measured` that `shifts` are about, in the same order


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One figure of a micro-benchmark, or how a request for some ended: then `end` is set, and there is no value.

    A request ends in exactly one such result. `end`: done, stopped (gave way to a job, or was told to), hung, crashed,
    timeout, memory (took too much of the host's), refused, not_taken (no probe service runs there), expired (it waited
    for too long); `probe` and `gpu` then say in what, where that is known.
    """

    id: str  # stable over resends: REQUEST/NUMBER, and REQUEST/end
    node: str
    gpu: int | None  # slot; None: the node's
    probe: str
    ts_ms: int
    ok: bool | None  # of probes that only one answer is right of; None of all others
    value: float | None  # None: `detail` says why it could not be measured
    unit: str
    detail: str = ""
    request: str = ""
    peer: int | None = None  # the other GPU of a pair
    spread: float | None = None  # coefficient of variation over `repeats`
    repeats: int = 1
    level: str = ""
    end: str = ""
    seconds: float | None = None  # that the request took, of the closing result
    device: str = ""  # model of what was probed; "cpu" where there is no NVIDIA driver: no figure of a GPU then
    tries: int = 1  # of a closing result: how often what it names was run, each time with the same end


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
    """A job that holds a GPU from a moment on; job None frees it."""

    node: str
    gpu: int
    job: str | None
    from_ms: int
