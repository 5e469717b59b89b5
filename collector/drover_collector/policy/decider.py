"""Decide on each open incident: what the policy wants, and what the guard allows. Pure: no I/O, no clock.

    would_act          observe mode: this would be done
    held               the guard refuses it; decided again with each call
    pending_approval   a person is asked; expires after the policy's time
    approved           the person's yes, with its reason; `act` follows, or `held` while the guard refuses it
    rejected           the person's no: not asked again until more is wanted
    expired            nobody answered, or nothing is left to answer
    act                to be done now; decided again `AGAIN_MS` after its action failed, if it is still wanted

A person's decision keeps the id of the one it answers: the newest version of an id is its state.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents import health
from drover_collector.policy.circuit_breaker import Breaker
from drover_collector.policy.guard import Census, Pace, hold
from drover_collector.policy.guard_clock import ClockSteps
from drover_collector.policy.one_gpu import Boards, SingleGpus, described, share_of
from drover_collector.policy.policy import Policy, Verdict, least_mode
from drover_core.model.events import (
    OUT_STAGES,
    WANTED_ORDER,
    Act,
    Action,
    ActionState,
    Approval,
    Decision,
    DecisionCause,
    GpuRef,
    Health,
    Incident,
    NodeOutage,
    RecommendedAction,
)
from drover_core.times import iso

JobNodes = Callable[[Incident], Mapping[str, Set[str]]]  # job on the incident's node -> all nodes of the job
Key = tuple[str, str]  # (incident id, node)
CensusOf = Callable[[bool], Census]  # the argument: whether what observe mode announced counts too

DISRUPTIVE = frozenset({RecommendedAction.DRAIN, RecommendedAction.ISOLATE})
WANTED_OF = {
    Act.ADVISE: RecommendedAction.ADVISE,
    Act.DRAIN: RecommendedAction.DRAIN,
    Act.ISOLATE: RecommendedAction.ISOLATE,
    Act.ISOLATE_GPU: RecommendedAction.DRAIN,
}
LAST = ("act", "would_act", "held")  # these follow an answer of the same time
SILENT = "silent"  # cause of incidents whose nodes are dead, or cut off from us: their scheduler says which
DEAD = frozenset({"driver_hung", "driver_lost"})  # causes of incidents whose nodes do no work
ALONE = (liveness.NAME,)  # detectors of an incident that is about the silence and nothing else
AGAIN_MS = 3_600_000  # after an action failed, until it is decided again
UNSEEN = "the scheduler has not answered yet: who is out of service is not known"
PERSON_MS = 4 * 3_600_000  # a node that a person put back: Drover asks before it takes it out again


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """What only a running collector has, not a recorded fleet.

    Attributes:
        leaving: returns the nodes that are out or about to go out.
        hindrance: returns why the scheduler of a node cannot take out one GPU alone; "": it can.
        board: returns the board in a node's slot. None: slots hold what they held.
        unproven: returns whether others than root could have written what is known of a node.
        leaving_gpus: returns node and UUID of each GPU that is about to go out alone.
        held: returns the nodes that were to go, and that the guard held back when it was asked again, each with why.
    """

    leaving: Callable[[], Set[str]] = frozenset
    hindrance: Callable[[str], str] = lambda _: ""
    board: Boards | None = None
    unproven: Callable[[str], bool] = lambda _: False
    leaving_gpus: Callable[[], Set[tuple[str, str]]] = frozenset
    held: Callable[[], Mapping[str, str]] = dict


class Decider:
    """Keeps the state of each decision, so that only what has changed is decided again.

    Args:
        ceiling: the mode beyond which no policy goes: `[act] mode` of the settings.
        live: None: the fleet is recorded. Its schedulers cannot be asked, so silence alone means that a node is dead.
        back: returns since when all members of an incident answer again; None: they do not.

    Attributes:
        standing: (incident, node) -> its newest decision.
        failed: (incident, node) -> the failed action of its standing decision to act: that did not take it out.
        duties: node -> its newest outage.
        away: nodes that their scheduler gives no work, no matter who closed them. None: unknown, as not every
            scheduler has answered; then no node is closed.
        answers: node -> whether its slurmd or kubelet answers its scheduler; a node that is missing: unknown.
        maintenance: nodes that people work on now, each with a sentence that says so: nothing is done to them.
        breaker: the guard's memory of mass events.
        gpus: single GPUs that are out of service while their nodes stay.
    """

    def __init__(
        self,
        index: FleetIndex,
        policy: Policy,
        ceiling: str = "observe",
        live: LiveFleet | None = None,
        back: Callable[[Incident], int | None] = lambda _: None,
    ) -> None:
        self.index = index
        self.policy = policy
        self.ceiling = ceiling
        self.standing: dict[Key, Decision] = {}
        self.failed: dict[Key, Action] = {}
        self.duties: dict[str, NodeOutage] = {}
        self.away: Set[str] | None = frozenset()
        self.answers: Mapping[str, bool] = {}
        self.maintenance: Mapping[str, str] = {}
        self._live, self._back = live, back
        known = live or LiveFleet()
        self.gpus = SingleGpus(index, known.board, known.hindrance, known.leaving_gpus)
        self._steps = ClockSteps()  # of the clock
        self.breaker = Breaker(index, self._steps)
        self.pace = Pace(self._steps)
        self._approved: dict[Key, Decision] = {}
        self._verdicts: dict[str, tuple[tuple[object, ...], Verdict]] = {}  # of open incidents, and on what they rest
        self._reporting: Bools | None = None

    def judge(self, incident: Incident, asked: RecommendedAction) -> Verdict:
        """Return the policy's verdict, in the mode that the settings allow."""
        about = (
            self.policy, self.ceiling, incident.kind, incident.cause, incident.scope, incident.severity,
            incident.confidence, incident.detectors, incident.node, incident.members, asked, self._is_dead(incident),
            self._choose_gpu(incident),
        )  # fmt: skip
        before, verdict = self._verdicts.get(incident.id, (None, None))
        if verdict is None or before != about:  # seldom: each call judges an open incident twice
            verdict = self._judge(incident, asked)
            self._verdicts[incident.id] = about, verdict
        return verdict

    def _choose_gpu(self, incident: Incident) -> tuple[GpuRef | None, str]:
        """Return the GPU that goes alone where a rule wants that; None: the node goes, and why."""
        if not self.policy.isolates:
            return None, ""
        node = incident.node or ""
        duty = self.duties.get(node)
        out = node in (self.away or ()) or (duty is not None and duty.stage in OUT_STAGES)
        return self.gpus.choose(incident, self.standing.get((incident.id, node)), out)

    def why_less(self, action: Action) -> str:
        """Return why the policy's newest verdict asks for less than this; "": it does not. Any thread."""
        _, verdict = self._verdicts.get(action.incident_id, (None, None))
        return "" if verdict is None else _less(verdict, action)

    def why_less_now(self, incident: Incident, asked: RecommendedAction, action: Action) -> str:
        """Do the same with a verdict of now: a scheduler may have reported since then that the node answers."""
        verdict = self.judge(incident, asked)
        if less := _less(verdict, action):
            return less
        found = self.standing.get((action.incident_id, action.node))
        if found is None or found.wanted is not WANTED_OF.get(action.action):
            return ""
        if least_mode(found.mode, verdict.mode) == found.mode:
            return ""
        return f"the policy asks a person first now ({verdict.rule})"

    def _judge(self, incident: Incident, asked: RecommendedAction) -> Verdict:
        names = [incident.node] if incident.node is not None else [node for node, _ in incident.members[:1]]
        place = self.index.spec.by_name.get(names[0]) if names else None
        verdict = self.policy.judge(incident, asked, place)
        mode = least_mode(verdict.mode, self.ceiling)
        dead = self._is_dead(incident)
        if verdict.save_s and not self._can_save(incident, verdict):
            verdict = replace(verdict, save_s=0.0)
        if verdict.one_gpu:
            gpu, why = self._choose_gpu(incident)
            rule = verdict.rule if gpu is not None else f"{verdict.rule}, the node: {why}"
            verdict = replace(verdict, gpu=gpu, rule=rule)
        if dead is True or verdict.wanted not in DISRUPTIVE:
            return verdict if mode == verdict.mode else replace(verdict, mode=mode)
        if dead is False and incident.detectors == ALONE:
            return Verdict(
                RecommendedAction.ADVISE, f"{verdict.rule}, at most advise: its scheduler reaches the node", mode
            )
        why = "its scheduler reaches the node" if dead is False else "no scheduler says whether the node runs"
        rule = f"{verdict.rule}, only after asking: {why}"
        return Verdict(verdict.wanted, rule, least_mode(mode, "approve"), verdict.save_s)

    @staticmethod
    def _can_save(incident: Incident, verdict: Verdict) -> bool:
        """Return whether the node's jobs may still answer: a drain of a dead node cannot wait."""
        return verdict.wanted in DISRUPTIVE and incident.cause not in DEAD and incident.cause != SILENT

    def _is_dead(self, incident: Incident) -> bool | None:
        """Return whether the node of an incident about silence is dead by its scheduler; None: unknown.

        True for other incidents, which do not rest on silence.
        """
        if incident.cause != SILENT or incident.node is None or self._live is None:
            return True
        answers = self.answers.get(incident.node)
        return None if answers is None else not answers

    def out(self, really: bool = False, said: bool = True) -> set[str]:
        """Return the nodes that are out of service by decisions and outages, would be, or wait to go out.

        Args:
            really: without those that would be, or wait. said: with those that would be, as observe mode announced.
        """
        outcomes = ("act", "would_act") if said and not really else ("act",)
        gone = {node for node, duty in self.duties.items() if duty.stage in OUT_STAGES}
        gone |= frozenset() if really or self._live is None else self._live.leaving()
        for key, decision in self.standing.items():
            if decision.gpu is None and decision.wanted in DISRUPTIVE and decision.outcome in outcomes:
                if key in self.failed:
                    continue
                node = key[1]
                duty = self.duties.get(node)
                if duty is None or duty.ts_ms < decision.ts_ms:  # else its outage shows the result
                    gone.add(node)
        return gone

    def held_back(self) -> Mapping[str, str]:
        """Return the nodes that the guard held back right before they went, each with why."""
        return {} if self._live is None else self._live.held()

    def decide(
        self,
        recommended: Iterable[tuple[Incident, RecommendedAction]],
        fold: health.HealthFold,
        job_nodes: JobNodes,
        now_ms: int,
        reporting: Bools | None = None,
        only: Set[str] | None = None,
    ) -> tuple[list[Decision], list[Incident]]:
        """Return new decisions, and mass events that are new or changed.

        Args:
            recommended: open incidents, each with what its detectors ask for.
            fold: health of all, as of the call before.
            reporting: bool [N], which nodes reported lately; None: unknown.
            only: ids of incidents that may be decided now; the others keep their decisions; None: all.
        """
        judged = [(incident, self.judge(incident, asked)) for incident, asked in recommended]
        self._verdicts = {i.id: self._verdicts[i.id] for i, _ in judged}
        wanted = [
            (i, v)
            for i, v in judged
            if i.node is not None and _rank(v.wanted) >= WANTED_ORDER.index(RecommendedAction.ADVISE)
        ]
        made = self._forget(wanted, now_ms)
        limits = self.policy.guard
        leaving = [
            i for i, v in wanted if v.wanted in DISRUPTIVE and i.node not in self.maintenance and not self._gone(i)
        ]
        events = [*self._note_silence(reporting, now_ms), *self.breaker.note(leaving, now_ms, limits)]
        events += self.breaker.end({i.node or "" for i in leaving}, now_ms) + self.breaker.end_gaps(now_ms, limits)
        made += self._ask_about(events, now_ms)
        made += self._hold_unbegun(now_ms)
        if wanted:
            census = cache(lambda said: self.census(fold, [i for i, _ in judged], said))  # seldom asked for
            for incident, verdict in wanted:
                if only is not None and incident.id not in only:
                    continue
                made += self._decide(incident, verdict, census, job_nodes, now_ms)
        return made, events

    def _gone(self, incident: Incident) -> bool:
        """Return whether its node is out of service for something else: then this incident takes no node away.

        GPUs of nodes in repair are reset and lost by the dozen.
        """
        duty = self.duties.get(incident.node or "")
        return duty is not None and duty.stage in OUT_STAGES and duty.incident_id != incident.id

    def answer(
        self,
        approval: Approval,
        incidents: Mapping[str, Incident],
        fold: health.HealthFold,
        job_nodes: JobNodes,
        now_ms: int,
    ) -> tuple[list[Decision], list[Incident]]:
        """Return what follows from a person's answer.

        Nothing if the decision no longer waits for one; `expired` alone if the answer came too late.
        """
        found = next((d for d in self.standing.values() if d.id == approval.decision_id), None)
        if found is None or found.outcome != "pending_approval":
            return [], []
        yes = "approved" if approval.approved else "rejected"
        text = f"{yes} by {approval.by}: {approval.why}"
        at_ms = max(approval.ts_ms, found.ts_ms + 1)  # of one that a stop left unanswered: when it was given
        late = self._steps.age_ms(at_ms, found.ts_ms) >= self.policy.approval_expires_s * 1000
        if late and found.incident_id not in self.breaker.events:
            return [self._keep(replace(found, ts_ms=at_ms, outcome="expired", reason=f"too late, {text}"))], []
        answered = self._keep(replace(found, ts_ms=at_ms, outcome=yes, reason=text, cause=DecisionCause.NONE))
        made, events = [answered], []
        if event := self.breaker.events.get(found.incident_id):
            if not approval.approved:
                made += self._leave_alone(event, incidents, text, now_ms)
            events.append(self.breaker.answer(event.id, now_ms, text))
            self.standing.pop((found.incident_id, found.node), None)
        elif approval.approved and (incident := incidents.get(found.incident_id)) is not None:
            # Of a question from before a restart the policy may have been lowered since.
            mode = least_mode(found.mode, self.ceiling, self.policy.most_mode)
            verdict = Verdict(
                found.wanted, found.rule, mode, found.save_s, found.gpu is not None, found.gpu, found.forgeable
            )
            census = cache(lambda said: self.census(fold, incidents.values(), said))
            made += self._decide(incident, verdict, census, job_nodes, max(now_ms, answered.ts_ms))
        return made, events

    def take_duties(self, duties: Mapping[str, NodeOutage]) -> list[NodeOutage]:
        """Take in outages; return those that are new."""
        new = [duty for node, duty in duties.items() if self.duties.get(node) != duty]
        self.duties = dict(duties)
        for duty in new:
            self.pace.note_outage(duty)
        return new

    def take_failed(self, actions: Iterable[Action]) -> None:
        """Take in actions that failed, live or read again after a restart, in any order."""
        for action in actions:
            key = action.incident_id, action.node
            decision, before = self.standing.get(key), self.failed.get(key)
            self.gpus.note_failed(action)
            if decision is None or decision.outcome != "act" or decision.wanted is not WANTED_OF.get(action.action):
                continue
            if (decision.gpu is None) != (action.gpu is None):
                continue
            # An action may be for a later decision too, which wanted the same while it waited.
            mine = action.decision_id == decision.id or action.ts_ms >= decision.ts_ms
            if action.state is ActionState.FAILED and mine and (before is None or before.ts_ms <= action.ts_ms):
                self.failed[key] = action

    def forget(self, incidents: Iterable[str]) -> None:
        """Drop the decisions of these incidents: they are over."""
        over = set(incidents)
        self.standing = {key: d for key, d in self.standing.items() if key[0] not in over}

    def clock_set(self, at_ms: int, step_ms: int) -> None:
        """Note that the clock was set by `step_ms`. After a step forward, older times are below `at_ms`."""
        self._steps.note(at_ms, step_ms)
        if step_ms < 0:
            self.breaker.went_back(at_ms)

    def restore(self, decisions: Iterable[Decision], incidents: Sequence[Incident]) -> None:
        """After a restart: how all stood. `decisions`: of open incidents, and all of the last hour; in any order."""
        self.breaker.restore(incidents)
        open_ids = {i.id: i for i in incidents if i.closed_ms is None}
        for decision in sorted(decisions, key=lambda d: (d.ts_ms, d.outcome in LAST, d.id)):
            self._keep(decision)
            if decision.wanted in DISRUPTIVE and decision.incident_id in open_ids:
                self.breaker.remember(open_ids[decision.incident_id], decision.node, decision.ts_ms)
        self.standing = {key: d for key, d in self.standing.items() if key[0] in open_ids}
        self._approved = {key: d for key, d in self._approved.items() if key[0] in open_ids}

    def _forget(self, wanted: Sequence[tuple[Incident, Verdict]], now_ms: int) -> list[Decision]:
        """Drop what is no longer wanted; a question to a person about it expires."""
        keys = {(i.id, i.node or "") for i, _ in wanted} | {(event, "") for event in self.breaker.events}
        gone = [self.standing.pop(key) for key in list(self.standing) if key not in keys]
        self._approved = {key: d for key, d in self._approved.items() if key in keys}
        self.failed = {key: action for key, action in self.failed.items() if key in self.standing}
        return [
            replace(
                d,
                ts_ms=max(now_ms, d.ts_ms + 1),
                outcome="expired",
                reason="over: nothing is wanted any more",
                cause=DecisionCause.NONE,
            )
            for d in gone
            if d.outcome == "pending_approval"
        ]

    def _note_silence(self, reporting: Bools | None, now_ms: int) -> list[Incident]:
        before, self._reporting = self._reporting, reporting
        if reporting is None:
            self._reporting = before
        if reporting is None or before is None:
            return []
        names = (self.index.nodes[n].name for n in (before & ~reporting).nonzero()[0].tolist())
        gone = [name for name in names if name not in self.maintenance]
        return self.breaker.note_silence(gone, now_ms, self.policy.guard)

    def _ask_about(self, events: Sequence[Incident], now_ms: int) -> list[Decision]:
        """Ask a person about each mass event; the question expires when the event is over."""
        made = []
        for event in events:
            last = self.standing.get((event.id, ""))
            if last is None and event.closed_ms is None:
                made.append(
                    self._new(
                        event,
                        "",
                        Verdict(RecommendedAction.NONE, "guard", self._mode()),
                        "pending_approval",
                        event.summary,
                        now_ms,
                    )
                )
            elif last is not None and event.closed_ms is not None:
                over = replace(last, ts_ms=max(now_ms, last.ts_ms + 1), outcome="expired", reason="over by itself")
                made.append(over)
                del self.standing[(event.id, "")]
        return made

    def _leave_alone(
        self, event: Incident, incidents: Mapping[str, Incident], text: str, now_ms: int
    ) -> list[Decision]:
        nodes = {node for node, _ in event.members}
        held = [d for (id_, node), d in self.standing.items() if node in nodes and id_ in incidents]
        return [
            self._keep(
                replace(d, ts_ms=max(now_ms, d.ts_ms + 1), outcome="rejected", reason=text, cause=DecisionCause.NONE)
            )
            for d in held
            if d.outcome in ("held", "pending_approval") and d.wanted in DISRUPTIVE
        ]

    def _hold_unbegun(self, now_ms: int) -> list[Decision]:
        """Hold what was decided just before the breaker opened and has not closed its node yet.

        A queue of drains must not go on behind it. Each is decided again when the breaker lets its node go.
        """
        held = []
        open_now = any(event.closed_ms is None for event in self.breaker.events.values())
        for key, decision in list(self.standing.items()) if open_now else ():
            if decision.wanted in DISRUPTIVE and decision.outcome == "act" and key not in self.failed:
                why = self._unbegun(decision) and self.breaker.hold(decision.node, now_ms, self.policy.guard)
                if why:
                    at_ms = max(now_ms, decision.ts_ms + 1)
                    held.append(
                        self._keep(
                            replace(decision, ts_ms=at_ms, outcome="held", reason=why, cause=DecisionCause.GUARD)
                        )
                    )
        return held

    def _unbegun(self, decision: Decision) -> bool:
        """Return whether its node has not gone out since."""
        gpu = decision.gpu
        duty = self.duties.get(decision.node) if gpu is None else self.gpus.outages.get(gpu.uuid)
        return duty is None or duty.ts_ms < decision.ts_ms

    def _decide(
        self, incident: Incident, verdict: Verdict, census: CensusOf, job_nodes: JobNodes, now_ms: int
    ) -> list[Decision]:
        node, policy = incident.node or "", self.policy
        key = (incident.id, node)
        last = self.standing.get(key)
        approved = self._approved.get(key)
        if approved is not None and self._steps.now_of(approved.ts_ms) > now_ms:  # the clock went back: as of now
            approved = self._approved[key] = replace(approved, ts_ms=now_ms)
        if approved is not None and (
            (approved.wanted, approved.gpu) != (verdict.wanted, verdict.gpu)  # a yes to one GPU is none to its node
            or self._steps.age_ms(now_ms, approved.ts_ms) >= policy.approval_expires_s * 1000
        ):
            approved = self._approved.pop(key) and None
        if last is not None and last.outcome == "act" and key not in self.failed and _asks(last, verdict, verdict.mode):
            return []  # it was decided when nobody had to be asked
        verdict = self._asking(node, verdict, last, now_ms)
        mode = verdict.mode
        same = last is not None and _asks(last, verdict, mode)
        if last is not None and same:
            if last.outcome in ("act", "would_act") and not self._again(key, now_ms):
                return []
            if last.outcome == "pending_approval":
                if self._steps.age_ms(now_ms, last.ts_ms) < policy.approval_expires_s * 1000:
                    return []
                text = f"nobody answered within {policy.approval_expires_s / 60:.0f} min"
                expired = replace(last, outcome="expired", reason=text, cause=DecisionCause.UNANSWERED)
                return [self._keep(replace(expired, ts_ms=now_ms))]
            if last.outcome == "expired" and self._steps.age_ms(now_ms, last.ts_ms) < policy.approval_again_s * 1000:
                return []
        if last is not None and last.outcome == "rejected" and _rank(verdict.wanted) <= _rank(last.wanted):
            return []
        hold = self._held(incident, verdict, census, job_nodes, now_ms)
        cause = DecisionCause.NONE if hold is None else hold.cause
        done = f"{_act(verdict, node)} for {incident.kind.value}/{incident.cause}"
        if hold is not None:
            outcome, text = "held", hold.text
        elif mode == "observe":
            outcome, text = "would_act", f"would {done}"
        elif mode == "enforce" or approved is not None or verdict.wanted is RecommendedAction.PROBE:
            outcome, text = "act", f"{approved.reason}: {done}" if approved is not None else done
        else:
            outcome, text = "pending_approval", self._question(done, verdict.forgeable, now_ms)
        if same and last is not None and outcome == "held" == last.outcome and _alike(cause, last.cause):
            return []  # the first reason stands
        if verdict.wanted in DISRUPTIVE and outcome in ("act", "would_act"):
            self._count(census(True), node, verdict)
            if outcome == "act":
                self._count(census(False), node, verdict)
        return [self._new(incident, node, verdict, outcome, text, now_ms, cause)]

    def _count(self, census: Census, node: str, verdict: Verdict) -> None:
        if verdict.gpu is None:
            census.take(node)
        else:
            census.take_gpu(node, share_of(self.index, node))

    def _again(self, key: Key, now_ms: int) -> bool:
        """Return whether a failed decision is due again.

        Not soon, not while its node is out of service anyway, and not if somebody else had the node out: they may have
        mended it since.
        """
        action, node = self.failed.get(key), key[1]
        if action is None or action.foreign:
            return False
        if self._steps.now_of(action.ts_ms) > now_ms:  # the clock went back: take it for now, or it would wait for ever
            action = self.failed[key] = replace(action, ts_ms=now_ms)
        duty = self.duties.get(node)
        out = node in (self.away or ()) or (duty is not None and duty.stage in OUT_STAGES)
        return not out and self._steps.age_ms(now_ms, action.ts_ms) >= AGAIN_MS

    def _asking(self, node: str, verdict: Verdict, last: Decision | None, now_ms: int) -> Verdict:
        """Return the verdict with the mode for this node.

        Drover asks before it takes out what a person put back, or a node whose values a user of it could have written.
        The latter stays so while the incident is open: an agent that comes later has not seen what they say.

        Args:
            last: the newest decision about the incident.
        """
        if verdict.mode == "observe" or verdict.wanted not in DISRUPTIVE:
            return verdict
        if self._unproven(node) or (last is not None and last.forgeable):
            return replace(verdict, mode="approve", forgeable=True)
        if verdict.mode == "enforce" and any(
            duty.by != "drover" and self._steps.age_ms(now_ms, duty.ts_ms) < PERSON_MS
            for duty in self.pace.returned_of(node, verdict.gpu)
        ):
            return replace(verdict, mode="approve")
        return verdict

    def _question(self, done: str, forgeable: bool, now_ms: int) -> str:
        until = iso(round(now_ms + self.policy.approval_expires_s * 1000))
        why = " (others than root could have written its values)" if forgeable else ""
        return f"asks to {done}{why}; expires at {until}"

    def _unproven(self, node: str) -> bool:
        return self._live is not None and self._live.unproven(node)

    def _held(
        self, incident: Incident, verdict: Verdict, asked: CensusOf, job_nodes: JobNodes, now_ms: int
    ) -> Hold | None:
        """Return why it is held back: any act by maintenance, closings also by the guard; None: it is not.

        What observe mode announced counts in observe mode only.
        """
        node = incident.node or ""
        if node in self.maintenance:
            return Hold(DecisionCause.MAINTENANCE, self.maintenance[node])
        if verdict.wanted not in DISRUPTIVE:
            return None
        if (back_ms := self._back(incident)) is not None:
            return Hold(DecisionCause.RECOVERED, came_back(node, back_ms))
        said = verdict.mode == "observe"
        if self.away is None and not said:
            return Hold(DecisionCause.UNKNOWN, UNSEEN)
        census = asked(said)
        if node in census.out:
            if said or node in census.really:
                return None
            census.give_back(node)  # it waits and is not out: a real closing must pass the guard
        limits = self.policy.guard
        share = None if verdict.gpu is None else share_of(self.index, node)
        why = (
            self.breaker.hold(node, now_ms, limits)
            or hold(node, job_nodes(incident), census, limits, share)
            or self.pace.hold(node, now_ms, limits, said, verdict.gpu)
        )
        return None if why is None else Hold(DecisionCause.GUARD, why)

    def census(self, fold: health.HealthFold, incidents: Iterable[Incident], said: bool = False) -> Census:
        """Return which nodes are out of service, with dead nodes and those that others took out.

        Args:
            incidents: open ones. said: with the nodes that would be out, as observe mode announced.
        """
        closed = self.away or frozenset()
        open_ = [i for i in incidents if i.closed_ms is None]
        dead = {node for i in open_ if i.cause in DEAD for node, _ in i.members}
        silent = {node for i in open_ if i.cause == SILENT for node, _ in i.members} - dead - closed
        if self._live is not None:
            # A node that its scheduler reaches is in service. If unknown, the worse case counts for others.
            doubtful = {node for node in silent if node not in self.answers}
            silent = {node for node in silent if not self.answers.get(node, False)}
        else:
            doubtful = set()
        away = {node for node in dead | silent | closed if node in self.index.node_number}
        maintained = {node for node in self.maintenance if node in self.index.node_number}
        codes = np.bincount(fold.node, minlength=len(health.HEALTHS)).tolist()
        healthy, unknown = (health.HEALTHS.index(h) for h in (Health.HEALTHY, Health.UNKNOWN))
        theirs = Counter(int(fold.node[self.index.node_number[node]]) for node in away)
        known = self.index.node_count - codes[unknown] + theirs[unknown]
        found = Census(
            self.index,
            self.out(said=said),
            codes[healthy] - theirs[healthy],
            known,
            away | maintained,  # nobody can use them; whether they are healthy is not known from that
            self.out(really=True),
            doubtful,
        )
        for node, _ in self.isolating(said):
            found.take_gpu(node, share_of(self.index, node))
        return found

    def isolating(self, said: bool = False) -> set[tuple[str, str]]:
        """Return node and UUID of the GPUs that the census counts; `said`: with what observe mode announced."""
        return self.gpus.out(self.standing.values(), lambda d: (d.incident_id, d.node) in self.failed, said)

    def _mode(self) -> str:
        return least_mode(self.policy.mode, self.ceiling)

    def _new(
        self,
        incident: Incident,
        node: str,
        verdict: Verdict,
        outcome: str,
        reason: str,
        now_ms: int,
        cause: DecisionCause = DecisionCause.NONE,
    ) -> Decision:
        seed = f"{incident.id} {node} {verdict.wanted} {outcome} {now_ms}"
        decision = Decision(
            hashlib.blake2b(seed.encode(), digest_size=8).hexdigest(), incident.id, now_ms, node, verdict.wanted,
            verdict.mode, outcome, verdict.rule, reason, takes=not self._gone(incident), cause=cause,
            save_s=verdict.save_s, gpu=verdict.gpu, forgeable=verdict.forgeable,
        )  # fmt: skip
        return self._keep(decision)

    def _keep(self, decision: Decision) -> Decision:
        """Take in a decision that is new, or read again after a restart."""
        key = (decision.incident_id, decision.node)
        self.standing[key] = decision
        self.failed.pop(key, None)
        if decision.outcome == "approved":
            self._approved[key] = decision
        if decision.wanted in DISRUPTIVE and decision.outcome in ("act", "would_act") and decision.takes:
            self.pace.note_taken(decision.node, decision.ts_ms, decision.outcome == "would_act")
        return decision


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a decision is held back."""

    cause: DecisionCause
    text: str


def hold_gpu(decider: Decider, node: str, uuid: str, census: Census, jobs: Mapping[str, Set[str]]) -> str:
    """Return why the guard's caps would not let a GPU of a node go out alone now; "": they would.

    Args:
        jobs: those that may run on the node, each with its nodes.
    """
    if uuid in decider.gpus.isolated(node):
        return ""  # it takes nothing more away
    share = share_of(decider.index, node)
    if (node, uuid) in decider.isolating():  # it waits to go, and counts already
        census.give_back_gpu(node, share)
    return hold(node, jobs, census, decider.policy.guard, share) or ""


def _alike(a: DecisionCause, b: DecisionCause) -> bool:
    """Return whether both, or neither, hold for maintenance, and the same for a scheduler's missing answer.

    When that is over, the guard's own reason is given.
    """
    return all((a is cause) == (b is cause) for cause in (DecisionCause.MAINTENANCE, DecisionCause.UNKNOWN))


def _act(verdict: Verdict, node: str) -> str:
    return f"{verdict.wanted} {node}" if verdict.gpu is None else f"isolate {described(verdict.gpu, node)}"


def _asks(last: Decision, verdict: Verdict, mode: str) -> bool:
    """Return whether a decision was for the same."""
    same = (last.wanted, last.rule, last.mode) == (verdict.wanted, verdict.rule, mode)
    return same and (last.gpu, last.forgeable) == (verdict.gpu, verdict.forgeable)


def _less(verdict: Verdict, action: Action) -> str:
    if (gpu := action.gpu) is not None and (verdict.gpu is None or verdict.gpu.uuid != gpu.uuid):
        return f"the policy does not want GPU {gpu.slot} out alone now ({verdict.rule})"
    if action.gpu is None and action.action is Act.DRAIN and verdict.gpu is not None:
        return f"the policy wants GPU {verdict.gpu.slot} out alone now, not the node ({verdict.rule})"
    if _rank(verdict.wanted) >= _rank(WANTED_OF[action.action]):
        return ""
    return f"the policy wants {verdict.wanted} now, not {action.action} ({verdict.rule})"


def _rank(wanted: RecommendedAction) -> int:
    return WANTED_ORDER.index(wanted)


def came_back(node: str, back_ms: int) -> str:
    """Return why nothing is done for a fault whose GPUs have been reset, or whose node has booted, since."""
    return f"{node} answers again since {iso(back_ms)}, after its fault: it is closed if the fault comes again"
