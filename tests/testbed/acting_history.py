"""Random histories for `acting_world`, what must never be in them, and the shortest history that shows it.

What must never be follows from the true world alone: which node has which fault since when, who has closed what in its
scheduler, and what each cap allows. Each line of `Checked.violations` begins with the property's letter:

    a  a healthy node is closed for a fault that is over, or that its scheduler contradicts
    b  a node returns while a fault that wants it out has no proven end
    c  a cap, the pace or the breaker is passed, or a scheduler has not said yet who is out
    d  what a person keeps closed is opened
    e  a person is refused for what only would have been done
    f  a node with a running job is reset or rebooted
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drover_collector.actions.base import mark_of
from drover_collector.api import actions as api_actions
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.detectors import Detector
from drover_collector.ingest.stats import IngestStats
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.policy import Policy
from drover_collector.store import StoreError
from drover_core.model.events import (
    Act,
    ActionState,
    Approval,
    Audit,
    Decision,
    RecommendedAction,
)
from drover_proto import fleet_pb2 as pb
from testbed.acting_episodes import EPISODES, noise
from testbed.acting_world import INDEX, NAMES, STEP_S, Crash, Fault, Scheduler, World
from testbed.deciding import OPEN
from testbed.detecting import only

# What finds the faults of `World.fail` and `World.die`. All thirteen detectors cost four times as much CPU.
FEW = only("xid", "liveness", "memory")
CLOSINGS = (Act.DRAIN, Act.ISOLATE)
FRESH_S = 120
OWN_S, OTHERS_S = 15, 60 + STEP_S  # how old the word of schedulers may be, right before an effect
HOUR_MS = 3_600_000
BEFORE_SHOWN_MS = 30_000  # from when a reset could be known until a bucket has shown it

QUICK = frozenset({"bob opens", "bob closes", "job", "away", "back"})  # what comes next comes at the same moment

Step = tuple[str, int, int]  # what, a node or another number, a number


@dataclass(frozen=True)
class Plan:
    mode: str  # the policy's
    limits: dict[str, float]
    steps: tuple[Step, ...]

    @property
    def guard(self) -> GuardLimits:
        return replace(OPEN, **self.limits)  # type: ignore[arg-type]  # each as its field has it


class Checked(World):
    def __init__(self, plan: Plan) -> None:
        self.guard = plan.guard
        policy = replace(Policy.named("nvidia"), mode=plan.mode, guard=plan.guard)
        super().__init__(policy, "enforce")
        self.violations: list[str] = []
        self.closed_ms: dict[str, int] = {}  # by people, in the scheduler
        self.ours: set[str] = set()  # closed, by Drover
        self.asked: dict[str, str] = {}  # node -> the action of the person who drained it with Drover
        self.forced: set[str] = set()
        self.decided: dict[tuple[str, str], tuple[int, Decision]] = {}
        self.went: list[tuple[int, str, str]] = []  # decided when, node, cause: of Drover's own closings
        self.rejected: set[str] = set()
        self.exempt: set[str] = set()  # nodes of a mass event that a person has let go
        self.kept.on_decisions = self._note

    def _note(self, decisions: Sequence[Decision]) -> None:
        for d in decisions:
            if d.outcome == "act" and d.wanted in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE):
                self.decided[d.incident_id, d.node] = (self.true_ms, d)

    def broken(self, letter: str, text: str) -> None:
        self.violations.append(f"{letter}: at {self.true_ms // 1000} s: {text}")

    # ---- c, a

    def on_close(self, scheduler: Scheduler, node: str, reason: str) -> None:
        if node in scheduler.closed():
            self.broken("d", f"{node} is closed again over what stands there")
            return
        mark = mark_of(reason) or ""
        by_hand = mark == "hand"
        if not (by_hand and node in self.forced):
            self._within_caps(scheduler, node)
        if not by_hand:
            self._in_its_time(node, mark)
            self._for_a_fault(scheduler, node, mark)
        self.ours.add(node)

    def _out(self, scheduler: Scheduler) -> set[str]:
        """Who is out, as Drover must know it: what it has closed itself, and what others had closed a while ago."""
        found = {node for node in self.ours if node in self.scheduler(node).closed()}
        for one in self.schedulers:
            until_ms = self.true_ms - (OWN_S if one is scheduler else OTHERS_S) * 1000
            if one.away:
                until_ms = min(until_ms, self.surveyed.get(one.name, -1))
            found |= {n for n in one.closed() if n not in self.ours and self.closed_ms[n] < until_ms}
        return found

    def _within_caps(self, scheduler: Scheduler, node: str) -> None:
        unheard = [one.name for one in self.schedulers if one.name not in self.surveyed]
        if unheard:
            self.broken("c", f"{node} is closed, and {unheard[0]} has not said yet who is out")
        out = self._out(scheduler)
        if not self.nodes[node].alive:
            out &= self.ours
        for group, name, members in groups_of(node):
            most = self.guard.allowed(group, len(members))
            if len((out | {node}) & members) > most:
                self.broken(
                    "c", f"{node} is closed: {sorted((out | {node}) & members)} of {group} {name}, {most} may be"
                )

    def _in_its_time(self, node: str, mark: str) -> None:
        when_ms, decision = self.decided.get((mark, node), (self.true_ms, None))
        versions = self.kept.incident_history(mark)
        cause = versions[-1].cause if versions else ""
        approved = decision is not None and "approved" in decision.reason
        self.went.append((when_ms, node, cause))
        hour = {n for at_ms, n, _ in self.went if at_ms > when_ms - HOUR_MS}
        if self.guard.per_hour and len(hour) > self.guard.per_hour:
            self.broken("c", f"{node} is closed: {sorted(hour)} within an hour, {self.guard.per_hour} may be")
        since_ms = when_ms - round(self.guard.mass_window_s * 1000)
        alike = {n for at_ms, n, why in self.went if at_ms > since_ms and why == cause} - self.exempt
        if self.guard.mass_nodes and len(alike) >= self.guard.mass_nodes and not approved:
            self.broken("c", f"{node} is closed: {sorted(alike)} for {cause}, and the breaker stays closed")

    def _for_a_fault(self, scheduler: Scheduler, node: str, mark: str) -> None:
        when_ms, decision = self.decided.get((mark, node), (self.true_ms, None))
        it = self.nodes[node]
        if not self.healthy(node) or (decision is not None and "approved" in decision.reason):
            return
        if any(justified(fault, when_ms) for fault in it.faults):
            return
        versions = self.kept.incident_history(mark)
        cause = versions[-1].cause if versions else mark
        reached = "" if "NOT_RESPONDING" in scheduler.held[node].states else ", which its scheduler reaches"
        self.broken("a", f"{node} is well{reached}, and is closed for {cause}, decided at {when_ms // 1000} s")

    # ---- b, d

    def on_open(self, scheduler: Scheduler, node: str) -> None:
        del scheduler
        by = self.actor
        if node not in self.ours:
            self.broken("d", f"{node} is opened by {by}, and a person has closed it")
        self.ours.discard(node)
        if by != "drover":
            return
        asked = self.kept.kept_actions.get(self.asked.get(node, ""), [])
        failed = bool(asked) and asked[-1].state is ActionState.FAILED
        if node in self.asked and not failed:
            self.broken("d", f"{node} is opened, and ann keeps it out")
        it = self.nodes[node]
        if it.quiet_since_ms is not None and self.true_ms - it.quiet_since_ms > (FRESH_S + STEP_S) * 1000:
            self.broken("b", f"{node} is opened, and is silent since {it.quiet_since_ms // 1000} s")
        for fault in it.open() if node not in self.rejected else ():
            known = fault.received_ms is not None and not fault.late
            if known or (fault.seen_ms or self.true_ms) < self.true_ms:
                self.broken(
                    "b", f"{node} is opened, and its GPU {fault.gpu} has {fault.code} since {fault.at_ms // 1000} s"
                )

    # ---- f

    def on_command(self, node: str, act: str) -> None:
        if self.scheduler(node).running[node] and node not in self.forced:
            self.broken("f", f"{act} of {node}, where {self.scheduler(node).running[node]} run")

    # ---- people

    def act(self, node: str, act: str, force: bool = False) -> None:
        if self.collector is None:
            return
        facts = ApiSnapshot(self.collector.pipeline, IngestStats(), CollectorConfig())
        if force and act != "resume":
            self.forced.add(node)
        try:
            reply = api_actions.act_on_node(facts, pb.ActRequest(node=node, act=act, why="fan", force=force), "ann")
        except (RefusalError, StoreError) as refusal:
            if act == "drain" and not force and "holds it back" in str(refusal) and "not answered" not in str(refusal):
                self._rightly_refused(node, str(refusal))
            return
        if act == "drain":
            self.asked[node] = reply.action_id
        elif act == "resume":
            self.asked.pop(node, None)
        self.collector.turn()
        if act == "drain" and self.kept.kept_actions[reply.action_id][-1].state is not ActionState.INTENDED:
            self.forced.discard(node)

    def _rightly_refused(self, node: str, text: str) -> None:
        assert self.collector is not None
        out = set(self.ours) | self.collector.desk.context.outages.leaving
        for one in self.schedulers:
            out |= {n for n in one.closed() if self.closed_ms.get(n, 0) <= self.true_ms}
        out |= {n.name for n in self.nodes.values() if not n.alive}
        out |= {name for one in self.schedulers for name, held in one.held.items() if "NOT_RESPONDING" in held.states}
        for group, _, members in groups_of(node):
            if len((out | {node}) & members) > self.guard.allowed(group, len(members)):
                return
        self.broken("e", f"ann may not drain {node}: {text}")

    def answer(self, approved: bool) -> None:
        if self.collector is None:
            return
        standing = self.collector.pipeline.engine.decider.standing
        found = next((d for d in standing.values() if d.outcome == "pending_approval"), None)
        if found is None:
            return
        events = self.collector.pipeline.engine.decider.breaker._nodes
        members = {found.node} | (set() if found.node else events[found.incident_id])
        if approved:
            self.exempt |= members
        else:
            self.rejected |= members
        now_ms = self.now_ms()
        self.collector.pipeline.answer(
            Approval(found.id, now_ms, "ann", approved, "why"),
            Audit(f"answer {now_ms}", now_ms, "ann", "answer", found.node, "why", ""),
        )
        self.collector.turn()

    def closes(self, node: str) -> None:
        """In the scheduler, also over a drain of Drover's."""
        self.scheduler(node).drain_by(node, "bob", "cables")
        self.ours.discard(node)
        self.closed_ms[node] = self.true_ms

    def opens(self, node: str) -> None:
        self.scheduler(node).resume_by_hand(node)
        self.ours.discard(node)
        self.asked.pop(node, None)

    # ---- one step

    def play(self, what: str, number: int, more: int) -> None:
        node = NAMES[number % len(NAMES)]
        it, scheduler = self.nodes[node], self.schedulers[number % 2]
        steps: dict[str, Callable[[], object]] = {
            "xid79": lambda: self.fail(node, "79", more % 2),
            "xid119": lambda: self.fail(node, "119", more % 2),
            "gone": lambda: self.fail(node, "gone", more % 2),
            "remap": lambda: self.fail(node, "remap", more % 2),
            "mass": lambda: [self.fail(NAMES[(number + n) % 12], "79", 0) for n in range(2 + more % 8)],
            "die": lambda: self.die(node),
            "agent stops": lambda: setattr(it, "agent", False),
            "agent starts": lambda: setattr(it, "agent", it.alive),
            "link lost": lambda: setattr(it, "linked", False),
            "link back": lambda: setattr(it, "linked", True),
            "reboot": lambda: self.reboot(node),
            "reset": lambda: self.mend(node),
            "repair": lambda: self.repair(node),
            "drain": lambda: self.act(node, "drain"),
            "drain force": lambda: self.act(node, "drain", force=True),
            "resume": lambda: self.act(node, "resume"),
            "resume force": lambda: self.act(node, "resume", force=True),
            "drover reboot": lambda: self.act(node, "reboot"),
            "drover reset": lambda: self.act(node, "reset"),
            "bob closes": lambda: self.closes(node),
            "bob opens": lambda: self.opens(node),
            "job": lambda: None if node in self.scheduler(node).closed() else self.scheduler(node).start(node, "j"),
            "job ends": lambda: self.scheduler(node).finish(node),
            "approve": lambda: self.answer(True),
            "reject": lambda: self.answer(False),
            "pass": lambda: self.collector and self.collector.probed(node, True),
            "fail": lambda: self.collector and self.collector.probed(node, False),
            "no verdict": lambda: self.collector and self.collector.probed(node, None),
            "away": lambda: setattr(scheduler, "away", True),
            "back": lambda: setattr(scheduler, "away", False),
            "stop": self.stop,
            "crash": self.crash,
            "crash soon": lambda: setattr(self, "crash_in", more % 6),
            "stored": self._stored,
            "lost": self._lost,
            "start": lambda: self.start() if self.collector is None else None,
            "failover": self._failover,
            "clock": lambda: self.set_clock((3600, -3600, 86_400)[more % 3]),
            "wait": lambda: self.wait(more),
            "later": lambda: self.away(more) if self.collector is None else self.wait(more % 600),
        }
        steps[what]()

    def _stored(self) -> None:
        """Events come and are stored, and then the collector is killed before it has judged them."""
        if self.collector is not None:
            self.collector.take = self.collector.store  # type: ignore[method-assign]
            self.deliver()
            self.crash()

    def _lost(self) -> None:
        """The collector is gone, and its store too."""
        self.crash()
        before, self.kept = self.kept, type(self.kept)()
        self.kept.buckets, self.kept.inventory_reports = before.buckets, before.inventory_reports
        self.went.clear()  # nobody can know it
        self.asked = self._hand_drains()
        self.kept.on_decisions = self._note

    def _hand_drains(self) -> dict[str, str]:
        """What stands in the schedulers as drained by a person with Drover; a store that is lost no longer knows it."""
        return {n: "hand" for n in self.ours if mark_of(self.scheduler(n).held[n].reason) == "hand"}

    def _failover(self) -> None:
        """Another one takes over, and the one before thinks for a moment that it may act."""
        before = self.collector
        self.start()
        if before is not None:
            effects = [list(one.effects) for one in self.schedulers]
            before.turn()
            if effects != [one.effects for one in self.schedulers]:
                self.broken("c", "a collector without the lease has done something")


def justified(fault: Fault, decided_ms: int) -> bool:
    """Whether what was known of the fault when it was decided asks for its node's drain."""
    if fault.received_ms is None and fault.seen_ms is None:
        return False
    if fault.late and fault.seen_ms is None:
        return False
    if fault.known_over_ms is None or decided_ms <= fault.known_over_ms:
        return True
    # Of an error from before its end, what was held may still be done until a bucket has shown the end.
    known_ms = fault.received_ms or fault.seen_ms or 0
    return known_ms <= fault.known_over_ms < decided_ms <= fault.known_over_ms + BEFORE_SHOWN_MS


def groups_of(node: str) -> list[tuple[str, str, set[str]]]:
    place = INDEX.spec.by_name[node]
    found = [("fleet", "", set(NAMES))]
    for group in ("pool", "rack", "leaf"):
        name = getattr(place, group)
        found.append((group, name, {n.name for n in INDEX.nodes if getattr(n, group) == name}))
    return found


def play(plan: Plan, detectors: Sequence[Detector] = FEW) -> list[str]:
    """What was broken in it; it ends with the first."""
    world = Checked(plan)
    world.detectors = detectors
    with world.playing():
        world.start()
        world.wait(40)
        for step in plan.steps:
            try:
                world.play(*step)
                if world.collector is not None and step[0] not in QUICK:
                    world.wait(STEP_S)
            except Crash:
                world.crash()
            if world.violations:
                break
    return world.violations


def shrunk(plan: Plan, letter: str) -> Plan:
    """The same without the steps that it does not need."""
    size = max(1, len(plan.steps) // 2)
    while True:
        at = 0
        while at < len(plan.steps):
            fewer = replace(plan, steps=plan.steps[:at] + plan.steps[at + size :])
            found = play(fewer)
            if found and found[0].startswith(letter):
                plan = fewer
            else:
                at += size
        if size == 1:
            return plan
        size //= 2


def random_plan(seed: int, only: str = "") -> Plan:
    """`only`: episodes of this name alone, and nothing in between."""
    rng = random.Random(f"{seed} {only}")
    mode = rng.choice(["observe"] if only == "trial" else ["enforce"] * 6 + ["approve"] * 2 + ["observe"] * 2)
    limits: dict[str, float] = dict(rng.sample(LIMITS, rng.randrange(3)))
    if only == "pace":
        limits["per_hour"] = 3
    steps: list[Step] = []
    for _ in range(1 if only else rng.randrange(2, 5)):
        for step in (EPISODES[only] if only else rng.choice(list(EPISODES.values())))(rng):
            steps.append(step)
            if not only and rng.random() < 0.25:
                steps.append(noise(rng))
        steps += [("back", 0, 0), ("back", 1, 0), ("start", 0, 0), ("wait", 0, rng.choice([40, 100, 300]))]
    return Plan(mode, limits, tuple(steps))


LIMITS: list[tuple[str, float]] = [
    ("fleet_nodes", 2), ("fleet_nodes", 3), ("pool_nodes", 2), ("rack_ratio", 0.4), ("rack_nodes", 1),
    ("leaf_nodes", 2), ("per_hour", 2), ("per_hour", 3), ("mass_nodes", 3), ("cooldown_s", 600.0),
]  # fmt: skip
