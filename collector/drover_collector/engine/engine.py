"""The engine: buckets and events in; findings, incidents, decisions and health changes out. Pure: no I/O, no clock.

The live pipeline and `drover replay` both drive it, so that a recorded run gives the same answers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drover_collector.detectors import DETECTORS, Detector, idle
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.detectors.risk import detector as risk
from drover_collector.detectors.risk.model import Risk
from drover_collector.detectors.xid import detector as xid
from drover_collector.detectors.xid import state as xid_state
from drover_collector.engine import probe_evidence as proof
from drover_collector.engine.detector_runner import WINDOW_BUCKETS, DetectorContext, DetectorRunner
from drover_collector.engine.late_events import Boots, dealt_with
from drover_collector.engine.node_state import NodeNow, Survey
from drover_collector.engine.warmup import LAG_MS, DetectorWarmup, note_return
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents import health
from drover_collector.incidents.book import IncidentBook
from drover_collector.incidents.health import HealthChange
from drover_collector.incidents.incident import closing
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.policy.decider import UNSEEN, Decider, LiveFleet, came_back, hold_gpu
from drover_collector.policy.guard import Census, hold
from drover_collector.policy.one_gpu import Board, share_of
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    OUT_STAGES,
    Action,
    Approval,
    Decision,
    Event,
    Finding,
    Health,
    Incident,
    NodeOutage,
    Note,
    NoteKind,
    ProbeVerdict,
)

__all__ = ["LAG_MS", "WINDOW_BUCKETS", "Engine", "HealthChange", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call made: new findings, changed incidents (newest version), new decisions, health changes."""

    findings: tuple[Finding, ...] = ()
    incidents: tuple[Incident, ...] = ()
    decisions: tuple[Decision, ...] = ()
    health: tuple[HealthChange, ...] = ()


class Engine:
    """Detectors, incidents, decisions and health of one fleet. One thread at a time, unless a method says otherwise.

    Attributes:
        errors: detector -> what it raised, and how often.
        seconds: detector -> time spent in it. Metrics only.
        context: what all detectors read.
    """

    def __init__(
        self,
        index: FleetIndex,
        policy: Policy,
        started_ms: int,
        detectors: Sequence[Detector] = DETECTORS,
        ceiling: str = "observe",
        live: LiveFleet | None = None,
    ) -> None:
        self.index = index
        self.context = DetectorContext(started_ms, Inventory(index), seconds={d.name: 0.0 for d in detectors})
        self.errors, self.seconds = self.context.errors, self.context.seconds
        self._runner = DetectorRunner(index, detectors, self.context)
        self._boots = Boots(index)
        self._warmup: DetectorWarmup | None = None
        if live is not None:
            live = replace(live, board=self._board_of)
        self.decider = decider = Decider(index, policy, ceiling, live, self._back_ms)
        self._book = IncidentBook(
            index,
            {d.name: d.quiet_ms for d in detectors},
            lambda incident, asked: decider.judge(incident, asked).wanted,
        )
        self._fold = health.unknown(index)
        self._unseen: list[Finding] = []  # what ended, or fell due, while no collector judged; until the first bucket
        self._from_before = False  # until the first bucket: incidents of before a restart may be over

    @property
    def started_ms(self) -> int:
        """When this engine began to watch. Before it nothing counts as silent."""
        return self.context.started_ms

    @started_ms.setter
    def started_ms(self, at_ms: int) -> None:
        self.context.started_ms = at_ms

    @property
    def incidents(self) -> dict[str, Incident]:
        """Open incidents and those closed in the last hour, by id, with the guard's mass events."""
        return {id_: record.incident for id_, record in self._book.records.items()} | self.decider.breaker.events

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The newest ones, oldest first. Other threads may read them."""
        return self._runner.buckets.all()

    @property
    def policy(self) -> Policy:
        return self.decider.policy

    @property
    def duties(self) -> Mapping[str, NodeOutage]:
        """Node -> its newest outage."""
        return self.decider.duties

    def set_policy(self, policy: Policy) -> None:
        """Decide by another policy from the next call on."""
        self.decider.policy = policy

    @property
    def health_codes(self) -> tuple[health.Codes, health.Codes]:
        """int8 [N] and [G]: indices into `health.HEALTHS`."""
        return self._fold.node, self._fold.gpu

    def health_of(self, node: str, gpu: int | None = None) -> tuple[Health, str]:
        """Return health and its reason ("" when healthy); unknown for a node or slot that the fleet does not have."""
        n = self.index.node_number.get(node)
        g = None if gpu is None else self.index.gpu(node, gpu)
        if n is None or (gpu is not None and g is None):
            return Health.UNKNOWN, "not in the fleet file"
        return health.reason_of(self._fold, n, g)[:2]

    def on_events(self, events: Sequence[Event], now_ms: int) -> Outcome:
        """Judge events at once."""
        if not events:
            return Outcome()
        returned, window = self.decider.pace.returned, self._runner.window(False)
        for event in events:
            self._boots.note(event)
        news = tuple(dealt_with(event, now_ms, returned, window, self._boots) for event in events)
        if self._warmup is not None:
            self._warmup.judged(now_ms, news)
        return self._judge(self._runner.window(False, news), now_ms)

    def on_bucket(self, bucket: Bucket, now_ms: int) -> Outcome:
        """Judge the newest closed bucket; buckets come in order of time."""
        self._runner.add_bucket(bucket)
        return self._judge(self._runner.window(True), now_ms)

    def on_inventory(self, node: str, facts: Mapping[str, str], now_ms: int) -> None:
        """Take in a node's report of its hardware and settings. It is judged with the next bucket."""
        self.context.inventory.update(node, facts, now_ms)

    @property
    def inventory(self) -> Inventory:
        """What nodes reported of their hardware and settings. The engine's thread adds to it."""
        return self.context.inventory

    def _board_of(self, node: str, slot: int) -> Board | None:
        """Return the board in a slot, as its node last reported it; None: it has not."""
        g = self.index.gpu(node, slot)
        found = None if g is None else self.context.inventory.boards.get(g)
        return None if found is None else Board(*found)

    def on_verdicts(self, verdicts: Sequence[ProbeVerdict], now_ms: int) -> Outcome:
        """Judge probes: a failed one is a finding, a passed one clears the suspicions that it can refute."""
        evidence = proof.read(verdicts, (record.incident for record in self._book.open()), now_ms)
        changed = self._book.note(evidence.noted, now_ms)
        for id_, text in evidence.refuted.items():
            changed += self._book.close([id_], Note(now_ms, text, NoteKind.REFUTED, why=text))
        return self._settle(evidence.findings, changed, now_ms)

    def on_duties(
        self, duties: Mapping[str, NodeOutage], now_ms: int, gpus: Mapping[str, NodeOutage] | None = None
    ) -> Outcome:
        """Take in outages: node -> its newest, of all nodes that have one.

        A node or GPU that is back in service is well: the incidents that it went out for are over. Those that its
        validation does not speak for stay open, and are decided again.

        Args:
            gpus: UUID -> its newest, of GPUs that went out alone; None: as before.
        """
        new = self.decider.take_duties(duties)
        alone = [] if gpus is None else self.decider.gpus.take_outages(gpus)
        changed: list[str] = []
        newer: list[str] = []
        for outage in (*new, *alone):
            where = outage.node if outage.gpu is None else f"GPU {outage.gpu.slot} of {outage.node}"
            why = f"{where} is back in service: {outage.reason} (by {outage.by})"
            over, since = self._over(outage)
            changed += self._book.close(over, closing(now_ms, why))
            newer += since
            if outage.gpu is not None:
                self.decider.pace.note_outage(outage)
                self._forget_errors(over)
            elif outage.stage is Health.HEALTHY:
                note_return(self._runner, outage.node, now_ms)
                self._forget_errors(over)
                if self._warmup is not None:
                    self._warmup.returned(now_ms, outage.node)
        self.decider.forget([*changed, *newer])  # so that one that opens again, or is open, is decided again
        if not new and not alone:
            return Outcome()
        return self._moved(now_ms, [self._book.records[id_].incident for id_ in changed], [])

    def _forget_errors(self, over: Sequence[str]) -> None:
        """Drop the XID detector's errors of incidents that a return has ended. It reports again what still holds."""
        errors = self._runner.states.get(xid.NAME)
        for incident in (self._book.records[id_].incident for id_ in over if id_ in self._book.records):
            if isinstance(errors, xid_state.XidState) and incident.node is not None:
                errors.open.pop((incident.node, incident.gpu), None)

    def _over(self, outage: NodeOutage) -> tuple[list[str], list[str]]:
        """Return the open incidents that a return to service ends, and those that it does not.

        It ends those that the node went out for and that nothing was decided for since, unless they opened after the
        probes were asked for that it has passed.
        """
        if outage.stage is not Health.HEALTHY:
            return [], []
        uuid = None if outage.gpu is None else outage.gpu.uuid
        decided = {
            id_: d
            for (id_, node), d in self.decider.standing.items()
            if node == outage.node and (None if d.gpu is None else d.gpu.uuid) == uuid
        }
        ids = [outage.incident_id, *(id_ for id_, d in decided.items() if d.outcome == "act")]
        open_ = {record.incident.id: record.incident for record in self._book.open()}
        known = [
            id_
            for id_ in dict.fromkeys(ids)
            if id_ in open_ and (decided[id_].ts_ms if id_ in decided else open_[id_].opened_ms) <= outage.ts_ms
        ]
        newer = [id_ for id_ in known if outage.asked_ms and open_[id_].opened_ms > outage.asked_ms]
        return [id_ for id_ in known if id_ not in newer], newer

    def on_survey(self, survey: Survey) -> None:
        """Note what the schedulers say of all their nodes, for the guard's count."""
        self.decider.away = None if survey.closed is None else frozenset(survey.closed)
        self.decider.answers = dict(survey.answers)

    def held(self, action: Action, later: Set[str]) -> str:
        """Return why the guard's caps would not let the node of an action go now; "": they would.

        Pace and breaker were asked when it was decided.

        Args:
            later: nodes, and UUIDs of single GPUs, whose turn comes after this one.
        """
        if self.decider.away is None:
            return UNSEEN
        record = self._book.records.get(action.incident_id)
        if (
            action.decision_id
            and record is not None
            and (less := self.decider.why_less_now(record.incident, record.wanted, action))
        ):
            return less
        if action.decision_id and record is not None and (back_ms := self._back_ms(record.incident)) is not None:
            return came_back(action.node, back_ms)
        census, duties, gpu = self.census(), self.decider.duties, action.gpu
        for node in {action.node, *later} if gpu is None else later:
            if (duty := duties.get(node)) is None or duty.stage not in OUT_STAGES:
                census.give_back(node)
        for node, uuid in self.decider.gpus.leaving():
            if uuid in later and uuid not in self.decider.gpus.isolated(node):
                census.give_back_gpu(node, share_of(self.index, node))
        if gpu is not None:
            return hold_gpu(self.decider, action.node, gpu.uuid, census, self.jobs_on(action.node))
        return hold(action.node, self.jobs_on(action.node), census, self.policy.guard) or ""

    def _back_ms(self, incident: Incident) -> int | None:
        """Return since when every member of an incident answers again after a reset or a boot.

        None: one does not, or another detector than that of XIDs holds the incident.
        """
        record, errors = self._book.records.get(incident.id), self._runner.states.get(xid.NAME)
        if record is None or not isinstance(errors, xid_state.XidState) or set(record.holds) != {xid.NAME}:
            return None
        found = [errors.open.get(member) for member in incident.members]
        times = [one.back_ms for one in found if one is not None and one.back_ms is not None]
        return max(times) if found and len(times) == len(found) else None

    def on_clock_set(self, at_ms: int, step_ms: int) -> None:
        """Note that the collector's clock was set, so that the guard counts the time that passes."""
        self.decider.clock_set(at_ms, step_ms)

    def on_failed(self, actions: Iterable[Action]) -> None:
        """Take in actions that failed: each is decided again later, while its incident is open and wants it."""
        self.decider.take_failed(actions)

    def census(self) -> Census:
        """Return which nodes are out of service, as the guard counts."""
        return self.decider.census(self._fold, (record.incident for record in self._book.open()))

    def on_approval(self, approval: Approval, now_ms: int) -> Outcome:
        """Take a person's answer to a decision. The outcome is empty if the decision no longer waits for one."""
        known = {record.incident.id: record.incident for record in self._book.open()}
        decisions, events = self.decider.answer(approval, known, self._fold, self._jobs_of, now_ms)
        return Outcome((), tuple(events), tuple(decisions), ())

    def _moved(self, now_ms: int, incidents: Sequence[Incident], decisions: Sequence[Decision]) -> Outcome:
        before, self._fold = self._fold, self._folded()
        return Outcome(
            (), tuple(incidents), tuple(decisions), tuple(health.changes(self.index, before, self._fold, now_ms))
        )

    def now_of(self, node: str) -> NodeNow | None:
        """Return what is known of a node now; None: the fleet does not have it.

        Any thread may call it: each access to what the engine's thread changes is a single step.
        """
        n = self.index.node_number.get(node)
        if n is None:
            return None
        liveness_state = self._runner.states.get(liveness.NAME)
        errors = self._runner.states.get(xid.NAME)
        first, end = int(self.index.first_gpu[n]), int(self.index.first_gpu[n + 1])
        said = {
            r.incident.id: dict(r.holds)
            for r in list(self._book.records.values())
            if r.incident.node == node and r.incident.closed_ms is None
        }
        held = dict(errors.open) if isinstance(errors, xid_state.XidState) else {}
        resets = {gpu: one.back_ms for (name, gpu), one in held.items() if name == node and one.back_ms is not None}
        late_ms, asked = self._runner.late_ms(n), self._asked(first, end)
        known = self.context.inventory.boards
        boards = {slot: known[g][0] for slot, g in enumerate(range(first, end)) if g in known}
        if not isinstance(liveness_state, liveness.LivenessState):
            return NodeNow(0, (0,) * (end - first), said, resets, late_ms, asked, boards)
        answered = tuple(liveness_state.answered_ms[first:end].tolist())
        return NodeNow(int(liveness_state.seen_ms[n]), answered, said, resets, late_ms, asked, boards)

    def _asked(self, first: int, end: int) -> dict[int, int]:
        """Return what the drivers of a node's GPUs ask for, by their newest values: slot -> number, where not 0."""
        newest = np.full(end - first, np.nan)
        for bucket in reversed(self._runner.buckets.all()):
            values = bucket.gpu.get("recovery_action")
            if values is not None:
                newest = np.where(np.isnan(newest), values[first:end], newest)
            if not np.isnan(newest).any():
                break
        return {gpu: int(newest[gpu]) for gpu in np.flatnonzero(newest > 0).tolist()}

    @property
    def risks(self) -> list[Risk]:
        """All nodes, the likeliest to fail within a week first; empty before the detector has run."""
        state = self._runner.states.get(risk.NAME)
        return state.ranking if isinstance(state, risk.RiskState) else []

    @property
    def idle_ms(self) -> npt.NDArray[np.int64] | None:
        """int64 [G]: how long each GPU has been held and idle without a break; None before the detector has run."""
        state = self._runner.states.get(idle.NAME)
        return (
            state.idle_ms if isinstance(state, idle.IdleState) and len(state.idle_ms) == self.index.gpu_count else None
        )

    def remember(self, incidents: Iterable[Incident], now_ms: int) -> None:
        """Take in what nodes went through in the last months, for the risk of each. Opens nothing."""
        self.context.history.take(incidents, now_ms)

    def restore(
        self,
        incidents: Sequence[Incident],
        buckets: Iterable[Bucket],
        events: Sequence[Event],
        decisions: Iterable[Decision] = (),
        duties: Mapping[str, NodeOutage] | None = None,
    ) -> None:
        """Take over incidents after a restart, and let the detectors see the recent past without reporting it.

        Args:
            buckets: in order of time; taken one by one, because those of a large fleet are 40 MB each.
            decisions: of open incidents, and all of the last hour.
            duties: node -> its newest outage.
        """
        self.begin(incidents, events, decisions, duties)
        for bucket in buckets:
            self.recall(bucket)
        self.recalled()

    def begin(
        self,
        incidents: Sequence[Incident],
        events: Sequence[Event],
        decisions: Iterable[Decision] = (),
        duties: Mapping[str, NodeOutage] | None = None,
        held: Iterable[Bucket] | None = None,
    ) -> None:
        """Do what `restore` does in steps. After this, events are judged.

        Then call `recall` with each bucket in order of time, and `recalled`; meanwhile no bucket is judged.

        Args:
            held: those buckets, whose rows and jobs alone are read; None: no event is judged before the end.
        """
        self.decider.restore(decisions, incidents)
        for event in sorted(events, key=lambda e: e.received_ms or e.ts_ms):
            self._boots.note(event)
        incidents = [incident for incident in incidents if not of_guard(incident)]
        returned = {node: duty for node, duty in (duties or {}).items() if duty.stage is Health.HEALTHY}
        self._warmup = DetectorWarmup(self._runner.reset_copy(), incidents, events, returned, self._book.subject_of)
        if held is not None:
            first = DetectorWarmup(self._runner, incidents, events, returned, self._book.subject_of)
            for bucket in held:
                first.add_placement(bucket)
            first.finish()
        self._book.restore(incidents)
        self._from_before = True
        # `on_duties` with all outages still ends the incidents of a return that a stop left open.
        self.decider.take_duties({node: duty for node, duty in (duties or {}).items() if not any(self._over(duty))})
        self._fold = self._folded()

    def recall(self, bucket: Bucket) -> None:
        """Let the detectors see a bucket of before the restart, the oldest first."""
        assert self._warmup is not None
        self._warmup.add_bucket(bucket)

    def recalled(self) -> None:
        """End the warm-up: buckets are judged from here on."""
        warmup, self._warmup = self._warmup, None
        assert warmup is not None
        warmup.finish()
        self._runner, self._unseen = warmup.runner, [*warmup.over.values(), *warmup.missed.values()]
        self._fold = self._folded()

    def follow(self, incidents: Sequence[Incident], reports: Bucket) -> None:
        """Show what another collector found, and who reports. This one does not judge."""
        self._runner.add_bucket(reports)
        self.decider.restore((), incidents)
        self._book.restore(incident for incident in incidents if not of_guard(incident))
        self._fold = self._folded()

    def could_not_judge(self) -> list[str]:
        """Return what the newest bucket lacks for the detectors, each a sentence."""
        window = self._runner.window(True)
        if not window.buckets:
            return ["anything: no telemetry came"]
        return [f"{d.name}: {text}" for d in self._runner.detectors for text in d.could_not_judge(window)]

    def _judge(self, window: Window, now_ms: int) -> Outcome:
        findings = self._runner.detect(window, now_ms)
        if window.fresh and self._unseen:
            findings = [*(replace(f, ts_ms=now_ms) for f in self._unseen), *findings]
            self._unseen = []
        self._from_before &= not window.fresh
        return self._settle(findings, [], now_ms, window.fresh)

    def _settle(self, findings: Sequence[Finding], changed: list[str], now_ms: int, fresh: bool = False) -> Outcome:
        """Make incidents, decisions and health of findings. `changed`: ids of incidents that changed already."""
        changed += self._book.apply(findings, now_ms, closing=fresh, coverage_ms=self._runner.coverage_ms)
        self.context.history.take(
            (self._book.records[id_].incident for id_ in changed if id_ in self._book.records), now_ms
        )
        asked = [(record.incident, record.wanted) for record in self._book.open()]
        decisions, events = self.decider.decide(
            asked,
            self._fold,
            self._jobs_of,
            now_ms,
            self._runner.reporting()[0] if fresh else None,
            set(changed) if self._from_before else None,
        )
        before, self._fold = self._fold, self._folded()
        moved = health.changes(self.index, before, self._fold, now_ms)
        known = self._book.records
        return Outcome(
            tuple(findings),
            (*(known[id_].incident for id_ in dict.fromkeys(changed) if id_ in known), *events),
            tuple(decisions),
            tuple(moved),
        )

    def _jobs_of(self, incident: Incident) -> dict[str, Set[str]]:
        return self.jobs_on(incident.node or "")

    def jobs_on(self, node: str) -> dict[str, Set[str]]:
        """Return the jobs that hold a GPU of a node, by the newest bucket, each with all of its nodes."""
        newest, n = self._runner.buckets.all()[-1:], self.index.node_number.get(node)
        if not newest or n is None:
            return {}
        jobs, names = newest[0].jobs, newest[0].job_names
        here = np.unique(jobs[int(self.index.first_gpu[n]) : int(self.index.first_gpu[n + 1])])
        return {
            names[code]: {self.index.nodes[m].name for m in np.unique(self.index.gpu_node[jobs == code]).tolist()}
            for code in here[here >= 0].tolist()
        }

    def _folded(self) -> health.HealthFold:
        incidents = [record.incident for record in self._book.open()]
        decider = self.decider
        isolated = decider.gpus.outages.values()
        return health.fold(self.index, incidents, *self._runner.reporting(), decider.duties, isolated)
