"""What a return to service waits for: a boot or a reset newer than a fault, values of every GPU, an end of findings.

    reboot, reset   the XID tables say that only this mends the fault, and no newer one is known
    telemetry       the node, or a GPU that the fleet file gives it, has reported no values lately
    finding         a detector still says that something is wrong there
    person          the agent reports no boots: nobody but a person knows

Pure. Times are those of receipt, by the collector's clock. An XID that names its boot is compared by that. One that
does not name it, was spooled before a boot and arrives after it counts as newer than that boot: then the node waits for
a person. Nothing is put back on a guess.

A pass of its probes speaks only for what was known when they were asked for. `new_evidence` finds what came since and
speaks against an incident's node as strongly as a drain: an incident that opened, an XID (a burst is one finding, its
later lines are none), and what a detector has reported again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drover_collector.actions.base import ActError
from drover_collector.detectors.xid import detector as xid
from drover_collector.detectors.xid.verdicts import Remedy, judge
from drover_collector.engine.node_state import NodeNow
from drover_collector.incidents.incident import was_cleared
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    Incident,
    RecommendedAction,
    Severity,
    WaitsFor,
    Withheld,
)
from drover_core.times import iso

SAID_MS = 60_000  # a detector repeats a condition with each bucket; one that still holds was reported this lately
# Detectors whose conditions show on a node without work. Probes refute what shows only under load.
UNLOADED = frozenset({"liveness", "memory"})
# What a driver asks for (`catalog.RECOVERY_ACTIONS`). Probes that pass do not refute it.
ASKS = {1: Remedy.RESET, 2: Remedy.REBOOT, 4: Remedy.RESET}
NAMED = 3  # faults, GPUs and incidents in a sentence
CLOSES = frozenset({RecommendedAction.DRAIN, RecommendedAction.ISOLATE})


@dataclass(frozen=True, slots=True)
class Lack:
    """What a return waits for. `text` says so, without a full stop; `incidents` are the ids of those it is about."""

    waits_for: WaitsFor
    text: str
    incidents: tuple[str, ...] = ()
    withheld: Withheld = Withheld.NO


class LackError(ActError):
    """A return is refused, because something is missing."""

    def __init__(self, lack: Lack) -> None:
        super().__init__(lack.text)
        self.lack = lack


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that only a reset or a reboot mends."""

    gpu: int | None
    name: str  # such as XID 79
    at_ms: int
    remedy: Remedy
    boot: str = ""  # in which it happened; empty: not known

    @property
    def text(self) -> str:
        where = "" if self.gpu is None else f" on GPU {self.gpu}"
        return f"{self.name}{where} at {iso(self.at_ms)}"


def faults_of(events: Iterable[Event]) -> list[Fault]:
    """Return the newest fault of each GPU and code that needs a reset or a reboot, oldest first.

    A line "recovery action changed to None" (XID 154) ends the GPU's earlier faults that a reset mends.
    """
    found: dict[tuple[int | None, str], Fault] = {}
    for event in sorted(events, key=_at):
        if event.kind not in (EventKind.XID, EventKind.SXID) or event.backlog or event.forgeable:
            continue
        verdict = judge(event)
        if verdict is None:
            continue
        if verdict.recovered:
            over = [key for key, fault in found.items() if key[0] == event.gpu and fault.remedy is Remedy.RESET]
            for key in over:
                del found[key]
        elif verdict.remedy is not None and verdict.severity is Severity.CRITICAL:
            word = "SXid" if event.kind is EventKind.SXID else "XID"
            name = f"{word} {verdict.code}"
            found[event.gpu, name] = Fault(event.gpu, name, _at(event), verdict.remedy, event.boot)
    return sorted(found.values(), key=lambda fault: fault.at_ms)


def remedy_lack(
    faults: Iterable[Fault],
    boots: Sequence[tuple[int, str]],
    reset_ms: Mapping[int | None, int],
) -> Lack | None:
    """Return which reboot or reset is missing; None: none.

    Args:
        boots: (when, boot id) of each boot that the node reported, oldest first; "" or none: its agent reports none.
        reset_ms: GPU (None: all of the node) -> when it was last reset, where known.
    """
    waiting = []
    for fault in faults:
        if rebooted_since(boots, fault.at_ms, fault.boot):
            continue
        reset = max(reset_ms.get(fault.gpu, 0), reset_ms.get(None, 0)) > fault.at_ms
        if fault.remedy is Remedy.RESET and reset:
            continue
        waiting.append(fault)
    if not waiting:
        return None
    reboot = any(fault.remedy is Remedy.REBOOT for fault in waiting)
    mine = [fault for fault in waiting if fault.remedy is Remedy.REBOOT] if reboot else waiting
    named = "; ".join(fault.text for fault in mine[:NAMED]) + (f"; {len(mine) - NAMED} more" if mine[NAMED:] else "")
    need = "needs" if len(mine) == 1 else "need"
    if reboot and not any(id_ for _, id_ in boots):
        text = f"held for a person: {named} {need} a reboot, and the node's agent reports no boots"
        return Lack(WaitsFor.PERSON, text)
    if reboot:
        known = any(at_ms <= mine[-1].at_ms and id_ for at_ms, id_ in boots)
        last = "the node's last boot is older" if known else "no boot of the node is known to be newer"
        return Lack(WaitsFor.REBOOT, f"held for a reboot: {named} {need} a reboot; {last}")
    return Lack(WaitsFor.RESET, f"held for a GPU reset: {named} {need} a reset; no newer reset or boot is known")


def asked_lack(asked: Mapping[int, int]) -> Lack | None:
    """Return which reset or reboot the driver asks for now; None: none. Its XID may have been lost, or come back."""
    asks = {gpu: ASKS[number] for gpu, number in sorted(asked.items()) if number in ASKS}
    if not asks:
        return None
    reboot = Remedy.REBOOT in asks.values()
    gpus = [f"GPU {gpu}" for gpu, remedy in asks.items() if not reboot or remedy is Remedy.REBOOT]
    named = ", ".join(gpus[:NAMED]) + (f" and {len(gpus) - NAMED} more" if gpus[NAMED:] else "")
    if reboot:
        return Lack(WaitsFor.REBOOT, f"held for a reboot: the driver asks for one now, for {named}")
    return Lack(WaitsFor.RESET, f"held for a GPU reset: the driver asks for one now, of {named}")


def rebooted_since(boots: Sequence[tuple[int, str]], at_ms: int, boot: str = "") -> bool:
    """Return whether the node reported two boots, the newer of them after `at_ms`. An unknown boot proves nothing.

    Args:
        boot: the boot it was in then, where known: the answer is then whether another followed it.
    """
    known = [id_ for _, id_ in boots if id_]
    if boot in known:
        return known[-1] != boot
    before = ""
    for reported_ms, id_ in boots:
        if before and id_ and id_ != before and reported_ms > at_ms:
            return True
        before = id_ or before
    return False


def telemetry_lack(now: NodeNow | None, now_ms: int, since_ms: int = 0) -> Lack | None:
    """Return which values are missing, of the node or of a GPU that the fleet file gives it; None: none.

    Args:
        since_ms: older values prove nothing.
    """
    if now is None or not _fresh(now, now.values_ms, now_ms, since_ms):
        return Lack(WaitsFor.TELEMETRY, "held for telemetry: the node reports no values now")
    silent = [gpu for gpu, at_ms in enumerate(now.gpus_ms) if not _fresh(now, at_ms, now_ms, since_ms)]
    if not silent:
        return None
    named = ", ".join(f"GPU {gpu}" for gpu in silent[:NAMED])
    named += f" and {len(silent) - NAMED} more" if silent[NAMED:] else ""
    gives = "gives" if len(silent) == 1 else "give"
    there = len(now.gpus_ms) - len(silent)
    return Lack(
        WaitsFor.TELEMETRY,
        f"held for telemetry: {named} {gives} no values; {there} of the {len(now.gpus_ms)} GPUs of the fleet file do",
    )


def finding_lack(
    said: Mapping[str, Mapping[str, int]],
    names: Mapping[str, str],
    now_ms: int,
    since_ms: int | None = None,
    held: bool = False,
) -> Lack | None:
    """Return which open incidents of the node contradict a return; None: none.

    Args:
        names: the incidents that count -> what to call each.
        since_ms: what any detector has reported after this contradicts; None: only what shows without work.
        held: a finding has contradicted it before: what any detector has reported lately contradicts too.
    """
    found: dict[str, str] = {}
    for incident in sorted(names):
        for detector, at_ms in said.get(incident, {}).items():
            lasts = (detector in UNLOADED or (held and detector != xid.NAME)) and now_ms - at_ms <= SAID_MS
            if lasts or (since_ms is not None and detector != xid.NAME and at_ms > since_ms):
                found[incident] = names[incident]
                break
    if not found:
        return None
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    some = "; ".join(list(found.values())[:NAMED])
    return Lack(WaitsFor.FINDING, f"held for a finding: {some}{more} still holds", tuple(found))


def _fresh(now: NodeNow, at_ms: int, now_ms: int, since_ms: int) -> bool:
    return at_ms > since_ms and now_ms - at_ms <= now.fresh_ms


def _at(event: Event) -> int:
    return event.ts_ms if event.received_ms is None else event.received_ms


@dataclass(frozen=True, slots=True)
class NewEvidence:
    """What has come, as a part of a sentence, and the ids of the incidents that it is about."""

    text: str
    incidents: tuple[str, ...]


def new_evidence(
    node: str, since_ms: int, incidents: Iterable[Incident], events: Iterable[Event], findings: Iterable[Finding]
) -> NewEvidence | None:
    """Return what has come since `since_ms`; None: nothing.

    Args:
        incidents: open ones, and those that have just closed. events, findings: of the node, since then.
    """
    events, findings = list(events), list(findings)
    found: dict[str, str] = {}
    for incident in sorted(incidents, key=lambda i: (i.opened_ms, i.id)):
        if incident.node != node or incident.action not in CLOSES or was_cleared(incident):
            continue
        if incident.opened_ms > since_ms:
            found[incident.id] = f"{name_of(incident)} was found"
        elif incident.closed_ms is None and (
            any(_recurred(event, incident, since_ms) for event in events)
            or any(f.ts_ms > since_ms and _repeats(f, incident) for f in findings)
        ):
            found[incident.id] = f"{name_of(incident)} was reported again"
    if not found:
        return None
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return NewEvidence("; ".join(list(found.values())[:NAMED]) + more, tuple(found))


def name_of(incident: Incident) -> str:
    """Return what to call an incident in a sentence."""
    gpu = "" if incident.gpu is None else f" of GPU {incident.gpu}"
    return f"{incident.kind}/{incident.cause}{gpu} (incident {incident.id})"


def _recurred(event: Event, incident: Incident, since_ms: int) -> bool:
    """Return whether a critical XID of the incident's GPU came since. With a wrong clock its receipt counts."""
    if event.kind not in (EventKind.XID, EventKind.SXID) or event.backlog or event.forgeable:
        return False
    at_ms = event.received_ms if event.clock_suspect and event.received_ms is not None else event.ts_ms
    if at_ms <= since_ms or xid.NAME not in incident.detectors or incident.gpu not in (None, event.gpu):
        return False
    verdict = judge(event)
    return verdict is not None and not verdict.recovered and verdict.severity is Severity.CRITICAL


def _repeats(finding: Finding, incident: Incident) -> bool:
    """Return whether a finding is about the incident, reported with each bucket or now and then."""
    if finding.cleared or finding.severity is Severity.INFO or finding.detector not in incident.detectors:
        return False
    if (finding.scope, finding.node, finding.gpu) != (incident.scope, incident.node, incident.gpu):
        return False
    return finding.action in CLOSES or (finding.kind, finding.cause) == (incident.kind, incident.cause)
