"""Combine findings about one subject into one incident, headed by the root cause. Pure: no I/O, no clock.

joins       a finding on a GPU joins the open incident of that GPU; on a silent node, that of the node; in a silent
            or hot rack, that of the rack. Information joins what is open and never opens something on top of it.
headline    the strongest by ROOT; severity, action and confidence are the strongest of all.
absorbs     a wider finding (node, rack, leaf, job) takes in the narrower incidents it explains.
explains    a job that became slower as a whole is evidence of the straggler, heat or port behind it, if one is open.
holds back  a job's stragglers right after one of its GPUs or nodes failed: its peers only wait. Not those whose
            own values show why they are slow.
closes      when every detector has reported its end, or has been quiet for its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.correlation import (
    CONSEQUENCES,
    EXPLAIN_NO_OTHERS,
    EXPLAINS_NOTHING,
    NODE_GONE,
    OBJECTIVE,
    OWN_CAUSES,
    ROOT,
    apart,
    explains,
    explains_slowdown,
    fleet_wide,
    foreign_apart,
    goes_on,
    heat_explains,
    width,
)
from drover_collector.incidents.incident import (
    KEEP_CLOSED_MS,
    Record,
    add_consequence,
    closing,
    join,
    noted,
    opened,
    visible,
    was_absorbed,
    was_cleared,
)
from drover_collector.incidents.index import IncidentIndex
from drover_core.model.events import (
    Finding,
    Incident,
    IncidentKind,
    Member,
    Note,
    NoteKind,
    RecommendedAction,
    Severity,
)

REOPEN_MS = 600_000  # the same thing again within this long: the old incident goes on
ABSORB_MS = 600_000  # a wider finding takes in what opened at most this long before it
GONE_BEFORE_MS = 60_000  # a node that goes may lose its GPUs this long before it falls silent
JOB_HELD_MS = 600_000  # after a failure in a job, its GPUs' slowness is a consequence of it
CLEARED_MS = 3_600_000  # what a probe has refuted is no suspicion again for this long; closed ones are kept for it
REFRESH_MS = 300_000  # an open incident without news is stored again this often, with new values
MS_PER_HOUR = 3_600_000


def _order(finding: Finding) -> tuple[object, ...]:
    """Return the order in which findings of one time are taken: the wider first, what others may explain last."""
    slow = finding.kind is IncidentKind.SLOWDOWN
    return not finding.cleared, slow, -width(finding.scope), -ROOT[finding.kind]


class IncidentBook:
    """All open incidents, and those closed in the last hour.

    Args:
        quiet_ms: detector -> how long it must be quiet before its hold ends; None: it says itself when it is over.
        wanted: the policy's word on an incident, given what its detectors ask for.
    """

    def __init__(
        self,
        index: FleetIndex,
        quiet_ms: Mapping[str, int | None],
        wanted: Callable[[Incident, RecommendedAction], RecommendedAction],
    ) -> None:
        self._index = index
        self._quiet_ms = quiet_ms
        self._wanted = wanted
        self.records: dict[str, Record] = {}
        self._near = IncidentIndex(self.subject_of)
        self._ticked_ms = 0  # the last call with `closing`

    def restore(self, incidents: Iterable[Incident]) -> None:
        """Take over what a former run left; its holds count from the last update."""
        for incident in incidents:
            upto_ms = incident.updated_ms
            record = Record(
                incident, counted_to_ms=upto_ms, slowed_to_ms=upto_ms, wanted=incident.asked or incident.action
            )  # fmt: skip
            if incident.closed_ms is None:
                record.holds = dict.fromkeys(incident.detectors, incident.updated_ms)
            self.records[incident.id] = record
            self._near.put(record)

    def open(self) -> list[Record]:
        return [record for record in self.records.values() if record.incident.closed_ms is None]

    def apply(
        self,
        findings: Sequence[Finding],
        now_ms: int,
        closing: bool,
        coverage_ms: Callable[[Member], int] | None = None,
    ) -> list[str]:
        """Take findings in; with `closing` also end what has been quiet. Return ids of the incidents that changed.

        Args:
            coverage_ms: how much of the newest bucket a member reported, in ms; only this time counts as quiet. None:
                all time does.
        """
        changed: dict[str, None] = {}
        before = {id_: record.incident for id_, record in self.records.items()}
        for finding in sorted(findings, key=_order):
            if finding.cleared:
                self._clear(finding)
            else:
                self._take(finding, now_ms)
        if closing and coverage_ms is not None:
            for record in self.open():
                seen_ms = max((coverage_ms(member) for member in record.incident.members), default=0)
                unseen_ms = max(0, now_ms - self._ticked_ms - seen_ms)
                record.holds = {name: min(now_ms, last_ms + unseen_ms) for name, last_ms in record.holds.items()}
        self._ticked_ms = now_ms if closing else self._ticked_ms
        gone = self._gone() if closing else set()
        for record in self.open():
            if not closing and before.get(record.incident.id) is record.incident:
                continue  # a call for events: what they say nothing of waits for the bucket
            self._count(record, now_ms)
            self._set_action(record, now_ms, new=record.incident.id not in before)
            if closing:
                self._close_if_quiet(record, gone, now_ms)
                if record.incident.closed_ms is not None and record.incident.cause in NODE_GONE:
                    gone = self._gone()
        for id_, record in self.records.items():
            old, new = before.get(id_), record.incident
            if not closing and old is new:
                continue
            news = old is None or (old is not new and visible(old) != visible(new))
            if news or (new.closed_ms is None and now_ms - new.updated_ms >= REFRESH_MS):
                version = 1 if old is None else old.version + 1
                record.incident = replace(new, version=version, updated_ms=now_ms)
                changed[id_] = None
        for id_ in [i for i, r in self.records.items() if now_ms - (r.incident.closed_ms or now_ms) > KEEP_CLOSED_MS]:
            self._near.drop(self.records.pop(id_))
        return list(changed)

    def close(self, ids: Iterable[str], line: Note) -> list[str]:
        """Ends what was mended, such as by a validated return. Returns ids of the incidents that changed."""
        known = [id_ for id_ in dict.fromkeys(ids) if id_ in self.records]
        changed = [id_ for id_ in known if self.records[id_].incident.closed_ms is None]
        for id_ in changed:
            record = self.records[id_]
            record.holds.clear()
            closed = replace(record.incident, timeline=noted(record.incident, line), closed_ms=line.ts_ms)
            record.incident = replace(closed, version=closed.version + 1, updated_ms=line.ts_ms)
        return changed

    def note(self, notes: Mapping[str, str], now_ms: int) -> list[str]:
        """A line each for the timelines of incidents, by id. Returns ids of those that changed."""
        changed = [
            id_
            for id_, text in notes.items()
            if id_ in self.records and [line.text for line in self.records[id_].incident.timeline[-1:]] != [text]
        ]  # the same verdicts come again until their outcome is stored
        for id_ in changed:
            record = self.records[id_]
            noted_ = replace(record.incident, timeline=noted(record.incident, Note(now_ms, notes[id_])))
            record.incident = replace(noted_, version=noted_.version + 1, updated_ms=now_ms)
        return changed

    def _take(self, finding: Finding, now_ms: int) -> None:
        if finding.kind is IncidentKind.SLOWDOWN and self._is_explained(finding, now_ms):
            return
        record = self._wider(finding) or self._same(finding, now_ms)
        known = record is not None and record.incident.closed_ms is None
        if not known and (self._held_back(finding, now_ms) or self._refuted(finding, now_ms)):
            return
        if record is None:
            record = self._new(finding, now_ms)
        else:
            join(record, finding, now_ms)
            self._near.put(record)
        self._absorb(record, finding, now_ms)

    def _subject(self, scope: str, node: str | None, gpu: int | None, members: Sequence[tuple[str, int | None]],
                 job: str | None, cause: str) -> tuple[str, str, int | None]:  # fmt: skip
        """What a finding or incident is about: (scope, name, GPU)."""
        if scope in ("gpu", "node"):
            return scope, node or "", gpu
        if scope == "job":
            return scope, f"{job} {cause}" if cause.endswith(OBJECTIVE) else job or "", None
        first = self._index.spec.by_name.get(members[0][0]) if members else None
        name = "" if first is None else first.rack if scope == "rack" else first.leaf
        return scope, cause if fleet_wide(cause) else name, None

    def subject_of(self, thing: Finding | Incident) -> tuple[str, str, int | None]:
        """What it is about: (scope, name, GPU)."""
        return self._subject(thing.scope, thing.node, thing.gpu, thing.members, thing.job, thing.cause)

    def _same(self, finding: Finding, now_ms: int) -> Record | None:
        """The incident about the same thing that this finding goes on with."""
        subject = self.subject_of(finding)
        info = finding.severity is Severity.INFO
        best: Record | None = None
        for record in self._near.of_subject(subject):
            incident = record.incident
            if self.subject_of(incident) != subject:
                continue
            if subject[0] not in ("gpu", "node") and incident.kind is not finding.kind:
                continue
            if apart(finding, incident):
                continue
            if incident.severity is Severity.INFO and (not info or incident.kind is not finding.kind):
                continue  # a real fault is not the sequel of a note
            if incident.closed_ms is not None:
                lately = now_ms - incident.closed_ms <= REOPEN_MS and not was_absorbed(incident)
                same = incident.kind is finding.kind and incident.cause == finding.cause
                if not (lately and same and not info) or best is not None:
                    continue
            if best is not None and goes_on(finding, best.incident):
                continue  # a lost GPU has an incident of its own, next to that of its memory
            if best is None or best.incident.closed_ms is not None or incident.severity is not Severity.INFO:
                best = record
        return best

    def _wider(self, finding: Finding) -> Record | None:
        """An open incident of the node, rack or leaf that explains this finding."""
        if finding.node is None or finding.scope not in ("gpu", "node"):
            return None
        for record in self._near.of_nodes([finding.node]):
            incident = record.incident
            if incident.closed_ms is not None:
                continue
            if width(incident.scope) <= width(finding.scope) or finding.kind not in CONSEQUENCES:
                continue
            if not record.holds:
                continue  # it is over in this very call: what is still so now stands for itself
            if incident.detectors == (EXPLAINS_NOTHING,) or foreign_apart(finding, incident):
                continue
            if (
                incident.kind is finding.kind is IncidentKind.THERMAL
                and finding.action is RecommendedAction.DRAIN
                and incident.scope == "rack"
            ):
                continue  # hot air explains no heat sink that is bad against its own power
            covers = any(node == finding.node for node, _ in incident.members)
            node_gone = incident.scope == "node" and incident.cause in NODE_GONE
            group_fault = incident.kind is finding.kind or heat_explains(incident.kind, finding.kind)
            if covers and (node_gone or group_fault):
                return record
        return None

    def _is_explained(self, finding: Finding, now_ms: int) -> bool:
        """Add a slowdown of a job to the incident that explains it, if there is one, and end its own."""
        nodes = {node for node, _ in finding.members}
        near = (*self._near.of_job(finding.job or ""), *self._near.of_nodes(nodes))
        why = next((each for each in near if explains_slowdown(each.incident, finding)), None)
        if why is None:
            return False
        add_consequence(why, finding, now_ms)
        self._count_slowness(why, finding, now_ms)
        own = self._same(finding, now_ms)
        if own is not None and own.incident.closed_ms is None:
            text = f"incident {why.incident.id} explains it"
            note = Note(now_ms, text, NoteKind.ABSORBED, incident=why.incident.id, why=text)
            own.holds.clear()
            own.incident = replace(own.incident, closed_ms=now_ms, timeline=noted(own.incident, note))
        return True

    def _count_slowness(self, record: Record, finding: Finding, now_ms: int) -> None:
        """Add what a job's slowness takes to the incident behind it, beyond what that counts itself.

        Its detector may see nothing of it: the peers of a slow GPU look busy while they wait.
        """
        incident = record.incident
        if finding.lost_gpus is None or incident.job not in (None, finding.job):
            return
        if incident.job is None:
            if incident.scope not in ("gpu", "node"):
                return  # it hurts more jobs than one
            incident = record.incident = replace(incident, job=finding.job)
            self._near.put(record)
        from_ms = max(record.slowed_to_ms, incident.since_ms, finding.since_ms)
        record.slowed_to_ms = max(now_ms, record.slowed_to_ms)
        more = finding.lost_gpus - (record.lost_gpus or 0.0) - (record.waiting_gpus or 0.0)
        if more > 0 and from_ms < now_ms:
            waited = (incident.gpu_hours_waited or 0.0) + more * (now_ms - from_ms) / MS_PER_HOUR
            record.incident = replace(incident, gpu_hours_waited=waited)

    def _held_back(self, finding: Finding, now_ms: int) -> bool:
        if finding.kind not in (IncidentKind.STRAGGLER, IncidentKind.HANG) or finding.job is None:
            return False
        if finding.cause in OWN_CAUSES:
            return False
        hangs = finding.kind is IncidentKind.HANG
        at_ms = finding.since_ms if hangs else now_ms  # it lasts until somebody ends it
        nodes = {node for node, _ in finding.members} if hangs else set()
        whole_job = not hangs or finding.node is None  # a job whose GPU failed does not wait for another node's
        for record in (*self._near.of_job(finding.job), *self._near.of_nodes(nodes)):
            incident = record.incident
            if (
                incident.closed_ms is None
                and incident.severity is Severity.CRITICAL
                and ((whole_job and incident.job == finding.job) or any(node in nodes for node, _ in incident.members))
                and self.subject_of(incident) != self.subject_of(finding)
                and at_ms - incident.opened_ms <= JOB_HELD_MS
            ):
                return True
        return False

    def _refuted(self, finding: Finding, now_ms: int) -> bool:
        """Whether a probe has cleared this subject of this very suspicion a while ago."""
        if finding.severity is Severity.CRITICAL:
            return False
        subject = self.subject_of(finding)
        return any(
            i.closed_ms is not None
            and now_ms - i.closed_ms <= CLEARED_MS
            and (i.kind, i.cause) == (finding.kind, finding.cause)
            and was_cleared(i)
            and self.subject_of(i) == subject
            for i in (record.incident for record in self._near.of_subject(subject))
        )

    def _new(self, finding: Finding, now_ms: int) -> Record:
        record = opened(finding, self.subject_of(finding), now_ms)
        before = self.records.get(record.incident.id)
        if before is not None:  # the same thing since the same moment, after a longer break: the old incident goes on
            join(before, finding, now_ms)
            record = before
        self.records[record.incident.id] = record
        self._near.put(record)
        return record

    def _absorb(self, record: Record, finding: Finding, now_ms: int) -> None:
        """Close narrower incidents that this wider one explains."""
        if finding.scope == "gpu" or finding.kind in EXPLAIN_NO_OTHERS:
            return
        if finding.scope == "node" and finding.detector == EXPLAINS_NOTHING:
            return
        nodes = {node for node, _ in finding.members}
        for other in self._near.of_nodes(nodes):
            incident = other.incident
            if incident.closed_ms is not None or other is record or width(incident.scope) >= width(finding.scope):
                continue
            if now_ms - incident.opened_ms > ABSORB_MS or not {node for node, _ in incident.members} <= nodes:
                continue
            if foreign_apart(finding, incident):
                continue
            if finding.scope == "job":
                explained = incident.severity is Severity.INFO and set(incident.members) <= set(finding.members)
            elif finding.scope == "node":
                # What began well before is a fault of its own; it waits until the node reports again.
                since = finding.since_ms - GONE_BEFORE_MS
                gone = finding.cause in NODE_GONE and incident.kind in CONSEQUENCES and incident.since_ms >= since
                explained = gone or (finding.severity is not Severity.INFO and explains(finding, incident))
            else:
                explained = explains(finding, incident)
            if explained:
                why = f"part of incident {record.incident.id}"
                note = Note(now_ms, why, NoteKind.ABSORBED, incident=record.incident.id, why=why)
                other.holds.clear()
                other.incident = replace(incident, closed_ms=now_ms, timeline=noted(incident, note))

    def _clear(self, finding: Finding) -> None:
        subject = self.subject_of(finding)
        for record in self._near.of_subject(subject):
            incident = record.incident
            if incident.closed_ms is not None or finding.detector not in record.holds:
                continue
            if self.subject_of(incident) != subject:
                continue
            if subject[0] not in ("gpu", "node") and incident.kind is not finding.kind:
                continue
            del record.holds[finding.detector]
            note = Note(finding.ts_ms, f"{finding.detector}: over", NoteKind.ENDED, finding.detector)
            record.incident = replace(incident, timeline=noted(incident, note))

    def _close_if_quiet(self, record: Record, gone: Set[str], now_ms: int) -> None:
        incident = record.incident
        if incident.members and incident.members[0][0] in gone and incident.cause not in NODE_GONE:
            return  # its node says nothing now: silence is no recovery
        for detector, last_ms in list(record.holds.items()):
            quiet_ms = self._quiet_ms.get(detector)
            if quiet_ms is not None and now_ms - last_ms >= quiet_ms:
                del record.holds[detector]
        if not record.holds:
            note = closing(now_ms, "the condition has ended")
            record.incident = replace(incident, closed_ms=now_ms, timeline=noted(incident, note))

    def _gone(self) -> set[str]:
        """Nodes that open incidents say are gone."""
        gone = (r.incident for r in self.open() if r.incident.cause in NODE_GONE)
        return {node for incident in gone for node, _ in incident.members}

    def _set_action(self, record: Record, now_ms: int, new: bool) -> None:
        incident = record.incident
        action = self._wanted(incident, record.wanted)
        if incident.asked is not record.wanted:
            incident = record.incident = replace(incident, asked=record.wanted)
        if action is not incident.action:
            note = Note(now_ms, f"wanted now: {action.value} (was {incident.action.value})")
            timeline = incident.timeline if new else noted(incident, note)
            record.incident = replace(incident, action=action, timeline=timeline)

    def _count(self, record: Record, now_ms: int) -> None:
        hours = max(0, now_ms - record.counted_to_ms) / MS_PER_HOUR
        record.counted_to_ms = max(now_ms, record.counted_to_ms)
        lost, waited = record.incident.gpu_hours_lost, record.incident.gpu_hours_waited
        if record.lost_gpus is not None:
            lost = (lost or 0.0) + hours * record.lost_gpus
        if record.waiting_gpus is not None:
            waited = (waited or 0.0) + hours * record.waiting_gpus
        if record.lost_gpus is not None or record.waiting_gpus is not None:
            record.incident = replace(record.incident, gpu_hours_lost=lost, gpu_hours_waited=waited)
