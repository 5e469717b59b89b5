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
from drover_collector.detectors.risk.model import Risk, Troubles
from drover_collector.detectors.xid import detector as xid
from drover_collector.detectors.xid import state as xid_state
from drover_collector.engine import probe_evidence as proof
from drover_collector.engine.detector_runner import WINDOW_BUCKETS, DetectorRunner, Trouble
from drover_collector.engine.late_events import Boots, dealt_with
from drover_collector.engine.node_state import NodeNow, Survey
from drover_collector.engine.warmup import LAG_MS, DetectorWarmup, back
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents import health
from drover_collector.incidents.book import IncidentBook
from drover_collector.incidents.health import HealthChange
from drover_collector.incidents.incident import closing
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.policy.decider import UNSEEN, Decider, came_back
from drover_collector.policy.guard import Census, hold
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

__all__ = ["LAG_MS", "WINDOW_BUCKETS", "Engine", "HealthChange", "Outcome", "Trouble"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call brought: new findings, changed incidents (newest version), new decisions, health changes."""

    findings: tuple[Finding, ...] = ()
    incidents: tuple[Incident, ...] = ()
    decisions: tuple[Decision, ...] = ()
    health: tuple[HealthChange, ...] = ()


class Engine:
    """
    Attributes:
        troubles: detector -> what went wrong inside it, and how often.
        seconds: detector -> time spent in it, for metrics; nothing is judged by it.
    """

    def __init__(
        self,
        index: FleetIndex,
        policy: Policy,
        started_ms: int,
        detectors: Sequence[Detector] = DETECTORS,
        ceiling: str = "observe",
    ) -> None:
        self.index = index
        self.troubles: dict[str, Trouble] = {}
        self.seconds: dict[str, float] = {d.name: 0.0 for d in detectors}
        self._inventory = Inventory(index)
        self._past = Troubles()
        self._senses = DetectorRunner(
            index, detectors, started_ms, self._inventory, self._past, self.troubles, self.seconds
        )
        self._boots = Boots(index)
        self._recall: DetectorWarmup | None = None
        self.decider = decider = Decider(index, policy, ceiling)
        decider.back = self._back_ms
        self._book = IncidentBook(
            index,
            {d.name: d.quiet_ms for d in detectors},
            lambda incident, asked: decider.judge(incident, asked).wanted,
        )
        self._fold = health.unknown(index)
        self._unseen: list[Finding] = []  # what ended, or fell due, while nobody judged, until the first bucket
        self._from_before = False  # until then: incidents of before a restart may be over

    @property
    def started_ms(self) -> int:
        """When this engine began to watch; before it nothing can be called silent."""
        return self._senses.started_ms

    @started_ms.setter
    def started_ms(self, at_ms: int) -> None:
        self._senses.started_ms = at_ms

    @property
    def incidents(self) -> dict[str, Incident]:
        """Open incidents and those closed in the last hour, by id; mass events of the guard among them."""
        return {id_: record.incident for id_, record in self._book.records.items()} | self.decider.breaker.events

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The newest ones, oldest first. Other threads may read them."""
        return self._senses.buckets.all()

    @property
    def policy(self) -> Policy:
        return self.decider.policy

    @property
    def duties(self) -> Mapping[str, NodeOutage]:
        """Node -> how far it is that Drover took out of service, the newest."""
        return self.decider.duties

    def set_policy(self, policy: Policy) -> None:
        """Another policy, from the next call on."""
        self.decider.policy = policy

    @property
    def health_codes(self) -> tuple[health.Codes, health.Codes]:
        """int8 [N] and [G]: indices into `health.HEALTHS`."""
        return self._fold.node, self._fold.gpu

    def health_of(self, node: str, gpu: int | None = None) -> tuple[Health, str]:
        """Health and its reason ("" when healthy). A node or slot that the fleet does not have is unknown."""
        n = self.index.node_number.get(node)
        g = None if gpu is None else self.index.gpu(node, gpu)
        if n is None or (gpu is not None and g is None):
            return Health.UNKNOWN, "not in the fleet file"
        return health.reason_of(self._fold, n, g)[:2]

    def on_events(self, events: Sequence[Event], now_ms: int) -> Outcome:
        """Judge events at once."""
        if not events:
            return Outcome()
        returned, window = self.decider.pace.returned, self._senses.window(False)
        for event in events:
            self._boots.note(event)
        news = tuple(dealt_with(event, now_ms, returned, window, self._boots) for event in events)
        if self._recall is not None:
            self._recall.judged(now_ms, news)
        return self._judge(self._senses.window(False, news), now_ms)

    def on_bucket(self, bucket: Bucket, now_ms: int) -> Outcome:
        """Judge the newest closed bucket; buckets come in order of time."""
        self._senses.hear(bucket)
        return self._judge(self._senses.window(True), now_ms)

    def on_inventory(self, node: str, told: Mapping[str, str], now_ms: int) -> None:
        """Take in all that a node tells of what it is made of; judged with the next bucket."""
        self._inventory.update(node, told, now_ms)

    @property
    def inventory(self) -> Inventory:
        """What nodes told of themselves so far; the thread that judges adds to it."""
        return self._inventory

    def on_verdicts(self, verdicts: Sequence[ProbeVerdict], now_ms: int) -> Outcome:
        """What probes prove: a failed one is a finding, a passed one clears the suspicions that it can refute."""
        word = proof.read(verdicts, (record.incident for record in self._book.open()), now_ms)
        changed = self._book.note(word.noted, now_ms)
        for id_, text in word.refuted.items():
            changed += self._book.close([id_], Note(now_ms, text, NoteKind.REFUTED, why=text))
        return self._settle(word.findings, changed, now_ms)

    def on_duties(self, duties: Mapping[str, NodeOutage], now_ms: int) -> Outcome:
        """How far nodes are that were taken out of service: node -> its newest duty, of all that have one.

        One that is back in service is well: the incidents that it went out for are over. What its validation does not
        speak for stays open, and is decided anew.
        """
        new = self.decider.take_duties(duties)
        changed: list[str] = []
        newer: list[str] = []
        for duty in new:
            why = f"{duty.node} is back in service: {duty.reason} (by {duty.by})"
            over, since = self._over(duty)
            changed += self._book.close(over, closing(now_ms, why))
            newer += since
            if duty.stage is Health.HEALTHY:
                back(self._senses, duty.node, now_ms)
                self._let_go(over)
                if self._recall is not None:
                    self._recall.returned(now_ms, duty.node)
        self.decider.forget([*changed, *newer])  # so that one that opens again, or is open, is decided again
        return self._moved(now_ms, [self._book.records[id_].incident for id_ in changed], []) if new else Outcome()

    def _let_go(self, over: Sequence[str]) -> None:
        """What the XID detector holds of incidents that a return has ended: it says anew what is still so."""
        errors = self._senses.states.get(xid.NAME)
        for incident in (self._book.records[id_].incident for id_ in over if id_ in self._book.records):
            if isinstance(errors, xid_state.XidState) and incident.node is not None:
                errors.open.pop((incident.node, incident.gpu), None)

    def _over(self, duty: NodeOutage) -> tuple[list[str], list[str]]:
        """Of a return to service: open incidents that it ends, those it went out for and nothing decided since; and
        those it does not, as they opened after the probes were asked for that it has passed."""
        if duty.stage is not Health.HEALTHY:
            return [], []
        decided = {id_: d for (id_, node), d in self.decider.standing.items() if node == duty.node}
        ids = [duty.incident_id, *(id_ for id_, d in decided.items() if d.outcome == "act")]
        open_ = {record.incident.id: record.incident for record in self._book.open()}
        known = [
            id_
            for id_ in dict.fromkeys(ids)
            if id_ in open_ and (decided[id_].ts_ms if id_ in decided else open_[id_].opened_ms) <= duty.ts_ms
        ]
        newer = [id_ for id_ in known if duty.asked_ms and open_[id_].opened_ms > duty.asked_ms]
        return [id_ for id_ in known if id_ not in newer], newer

    def on_survey(self, survey: Survey) -> None:
        """Note what the schedulers say of all their nodes: for the guard's count."""
        self.decider.away = None if survey.closed is None else frozenset(survey.closed)
        self.decider.answers = dict(survey.answers)

    def held(self, action: Action, later: Set[str]) -> str:
        """Why the guard's caps would not let the node of an action go now; "": they would. Its pace and its breaker had
        their say when it was decided.

        Args:
            later: nodes that are to go too, after this one.
        """
        if self.decider.away is None:
            return UNSEEN
        record = self._book.records.get(action.incident_id)
        if (
            action.decision_id
            and record is not None
            and (less := self.decider.wants_no_more_of(record.incident, record.wanted, action))
        ):
            return less
        if action.decision_id and record is not None and (back_ms := self._back_ms(record.incident)) is not None:
            return came_back(action.node, back_ms)
        census, duties = self.census(), self.decider.duties
        for node in (action.node, *later):
            if (duty := duties.get(node)) is None or duty.stage not in OUT_STAGES:
                census.give_back(node)
        return hold(action.node, self.jobs_on(action.node), census, self.policy.guard) or ""

    def _back_ms(self, incident: Incident) -> int | None:
        """Since when everything that an incident is about answers again after a reset or a boot; None: it does not, or
        another detector than that of XIDs holds the incident.
        """
        record, errors = self._book.records.get(incident.id), self._senses.states.get(xid.NAME)
        if record is None or not isinstance(errors, xid_state.XidState) or set(record.holds) != {xid.NAME}:
            return None
        found = [errors.open.get(member) for member in incident.members]
        times = [one.back_ms for one in found if one is not None and one.back_ms is not None]
        return max(times) if found and len(times) == len(found) else None

    def on_clock_set(self, at_ms: int, step_ms: int) -> None:
        """The collector's clock was set: the guard goes on to count the time that passes."""
        self.decider.clock_set(at_ms, step_ms)

    def on_failed(self, actions: Iterable[Action]) -> None:
        """Actions of decisions that failed: each is decided again later, while its incident is open and wants it."""
        self.decider.take_failed(actions)

    def census(self) -> Census:
        """Who is out of service, as the guard counts."""
        return self.decider.census(self._fold, (record.incident for record in self._book.open()))

    def on_approval(self, approval: Approval, now_ms: int) -> Outcome:
        """A person's answer to a decision that waits for one; nothing comes of one that waits no more."""
        known = {record.incident.id: record.incident for record in self._book.open()}
        decisions, events = self.decider.answer(approval, known, self._fold, self._jobs_of, now_ms)
        return Outcome((), tuple(events), tuple(decisions), ())

    def _moved(self, now_ms: int, incidents: Sequence[Incident], decisions: Sequence[Decision]) -> Outcome:
        before, self._fold = self._fold, self._folded()
        return Outcome(
            (), tuple(incidents), tuple(decisions), tuple(health.changes(self.index, before, self._fold, now_ms))
        )

    def now_of(self, node: str) -> NodeNow | None:
        """What is known of a node now; None: the fleet does not have it. Any thread may call it, and each of its calls
        on what the judging thread changes is a single step."""
        n = self.index.node_number.get(node)
        if n is None:
            return None
        heard = self._senses.states.get(liveness.NAME)
        errors = self._senses.states.get(xid.NAME)
        first, end = int(self.index.first_gpu[n]), int(self.index.first_gpu[n + 1])
        said = {
            r.incident.id: dict(r.holds)
            for r in list(self._book.records.values())
            if r.incident.node == node and r.incident.closed_ms is None
        }
        held = dict(errors.open) if isinstance(errors, xid_state.XidState) else {}
        resets = {gpu: one.back_ms for (name, gpu), one in held.items() if name == node and one.back_ms is not None}
        late_ms, asked = self._senses.late_ms(n), self._asked(first, end)
        if not isinstance(heard, liveness.LivenessState):
            return NodeNow(0, (0,) * (end - first), said, resets, late_ms, asked)
        answered = tuple(heard.answered_ms[first:end].tolist())
        return NodeNow(int(heard.seen_ms[n]), answered, said, resets, late_ms, asked)

    def _asked(self, first: int, end: int) -> dict[int, int]:
        """What the drivers of a node's GPUs ask for, by their newest values: slot -> number, where it is not 0."""
        newest = np.full(end - first, np.nan)
        for bucket in reversed(self._senses.buckets.all()):
            values = bucket.gpu.get("recovery_action")
            if values is not None:
                newest = np.where(np.isnan(newest), values[first:end], newest)
            if not np.isnan(newest).any():
                break
        return {gpu: int(newest[gpu]) for gpu in np.flatnonzero(newest > 0).tolist()}

    @property
    def risks(self) -> list[Risk]:
        """All nodes, the likeliest to fail within a week first, as of the newest look; empty before the first."""
        state = self._senses.states.get(risk.NAME)
        return state.ranking if isinstance(state, risk.RiskState) else []

    @property
    def idle_ms(self) -> npt.NDArray[np.int64] | None:
        """int64 [G]: for how long each GPU has been held and idle without a break; None before the first look."""
        state = self._senses.states.get(idle.NAME)
        return (
            state.idle_ms if isinstance(state, idle.IdleState) and len(state.idle_ms) == self.index.gpu_count else None
        )

    def remember(self, incidents: Iterable[Incident], now_ms: int) -> None:
        """What nodes went through in the last months, for the risk of each; opens nothing."""
        self._past.take(incidents, now_ms)

    def restore(
        self,
        incidents: Sequence[Incident],
        buckets: Iterable[Bucket],
        events: Sequence[Event],
        decisions: Iterable[Decision] = (),
        duties: Mapping[str, NodeOutage] | None = None,
    ) -> None:
        """After a restart: take over incidents, and let the detectors see the recent past without raising anything.

        Args:
            buckets: in order of time; taken one by one, because those of a large fleet are 40 MB each.
            decisions: of open incidents, and all of the last hour.
            duties: node -> its newest.
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
        """The same in steps: after this events are judged. Then `recall` is called with each bucket in order of time,
        then `recalled`; meanwhile no bucket is judged.

        Args:
            held: those buckets, of which only rows and jobs are looked at; None: no event is judged before the end.
        """
        self.decider.restore(decisions, incidents)
        for event in sorted(events, key=lambda e: e.received_ms or e.ts_ms):
            self._boots.note(event)
        incidents = [incident for incident in incidents if not of_guard(incident)]
        returned = {node: duty for node, duty in (duties or {}).items() if duty.stage is Health.HEALTHY}
        self._recall = DetectorWarmup(self._senses.afresh(), incidents, events, returned, self._book.subject_of)
        if held is not None:
            first = DetectorWarmup(self._senses, incidents, events, returned, self._book.subject_of)
            for bucket in held:
                first.place(bucket)
            first.finish()
        self._book.restore(incidents)
        self._from_before = True
        # A return whose incidents a stop left open is news still: `on_duties` with all of them ends those.
        self.decider.take_duties({node: duty for node, duty in (duties or {}).items() if not any(self._over(duty))})
        self._fold = self._folded()

    def recall(self, bucket: Bucket) -> None:
        """A bucket of before the restart, the oldest first. Those of a large fleet are 40 MB each."""
        assert self._recall is not None
        self._recall.hear(bucket)

    def recalled(self) -> None:
        """The detectors know again what they knew, and buckets are judged from here on."""
        recall, self._recall = self._recall, None
        assert recall is not None
        recall.finish()
        self._senses, self._unseen = recall.senses, [*recall.over.values(), *recall.missed.values()]
        self._fold = self._folded()

    def follow(self, incidents: Sequence[Incident], heard: Bucket) -> None:
        """The picture of one that does not judge: incidents that another found, and who reports."""
        self._senses.hear(heard)
        self.decider.restore((), incidents)
        self._book.restore(incident for incident in incidents if not of_guard(incident))
        self._fold = self._folded()

    def could_not_judge(self) -> list[str]:
        """What the newest bucket lacks for the detectors, each a sentence."""
        window = self._senses.window(True)
        if not window.buckets:
            return ["anything: no telemetry came"]
        return [f"{d.name}: {text}" for d in self._senses.detectors for text in d.could_not_judge(window)]

    def _judge(self, window: Window, now_ms: int) -> Outcome:
        findings = self._senses.detect(window, now_ms)
        if window.fresh and self._unseen:
            findings = [*(replace(f, ts_ms=now_ms) for f in self._unseen), *findings]
            self._unseen = []
        self._from_before &= not window.fresh
        return self._settle(findings, [], now_ms, window.fresh)

    def _settle(self, findings: Sequence[Finding], changed: list[str], now_ms: int, fresh: bool = False) -> Outcome:
        """From findings to incidents, decisions and health. `changed`: ids of incidents that changed already."""
        changed += self._book.apply(findings, now_ms, closing=fresh, heard_ms=self._senses.heard_ms)
        self._past.take((self._book.records[id_].incident for id_ in changed if id_ in self._book.records), now_ms)
        wishes = [(record.incident, record.wanted) for record in self._book.open()]
        decisions, events = self.decider.decide(
            wishes,
            self._fold,
            self._jobs_of,
            now_ms,
            self._senses.heard_lately()[0] if fresh else None,
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
        """Jobs that hold a GPU of a node, as of the newest bucket, each with all of its nodes."""
        newest, n = self._senses.buckets.all()[-1:], self.index.node_number.get(node)
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
        return health.fold(self.index, incidents, *self._senses.heard_lately(), self.decider.duties)
