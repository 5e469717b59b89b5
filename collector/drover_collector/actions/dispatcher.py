"""Carry out decisions: the intent is stored, then comes the act and its verification, then its outcome is stored.

Every effect asks the store's fence first, so a collector that is not the active one does nothing. A stop between any
two steps leaves an intent, which the next start takes up: acts are idempotent and observe before they change anything,
so each is done once. One that is no longer wanted, or whose effect is unknown (a command that was running), is reported
as failed.

Each actuator has a thread of its own (`worker.py`), which stores the intents of its actions too: neither a slow
scheduler nor a store that hangs delays detection.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TypeVar

from drover_collector.actions.base import ActError, Actuator, NodeState
from drover_collector.actions.command import OperatorCommands
from drover_collector.actions.context import ActionContext
from drover_collector.actions.gpu_returns import GpuReturns, Returns
from drover_collector.actions.node_outage import RESETS
from drover_collector.actions.return_to_service import NodeReturns, Validator
from drover_collector.actions.saving import Saver
from drover_collector.actions.settings import MODES, TicketConfig
from drover_collector.actions.ticket import Ticket
from drover_collector.actions.withdrawals import Withdrawals
from drover_collector.actions.worker import Worker
from drover_collector.store import StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    GpuRef,
    Incident,
    NodeOutage,
    ProbeVerdict,
    RecommendedAction,
)
from drover_core.model.saving import Saving

log = logging.getLogger(__name__)
T = TypeVar("T")

ACT_OF = {
    RecommendedAction.ADVISE: Act.ADVISE,
    RecommendedAction.DRAIN: Act.DRAIN,
    RecommendedAction.ISOLATE: Act.ISOLATE,
}
DECIDED = (*ACT_OF.values(), Act.ISOLATE_GPU)  # acts that follow from decisions
ADVICES = (Act.ADVISE, Act.UNADVISE)
MAX_DECISIONS = 10_000  # that wait for their intents to be stored
MAX_MADE = 20_000  # actions in memory: a decision may be handed over again until all of its outcome is stored
MAX_OUTCOMES = 1_000
UNBEGUN_MS = 3_600_000  # an older decision that a stop left without an intent is reported, not begun
LOOKED_BACK_MS = 30 * 86_400_000  # for those, and for actions that failed
STOP_S = 15.0  # for an effect under way

OBSERVES = 'this collector only observes; set act.mode to "approve" or "enforce", and an actuator'


class ActionDispatcher:
    """`take` and the calls for people may be used from any thread, between `start` and `stop`."""

    def __init__(self, context: ActionContext, validator: Validator | None = None) -> None:
        """`validator`: None: nodes are put back without probes."""
        self.context = context
        config = context.config
        # In observe mode no ticket is opened, and no setting of it may stop the collector.
        webhook = TicketConfig() if config.mode == "observe" else config.repair_webhook
        self._commands, self._ticket = OperatorCommands(config), Ticket(webhook)

        def repairs() -> bool:
            return self._own_actuator(Act.REPAIR) is not None

        self.returns = NodeReturns(context, self.intend, repairs, validator)
        self.gpu_returns = GpuReturns(context, self._intend_gpu, repairs, validator)
        self.withdrawals = Withdrawals(
            context, self.under_way, self.wait, lambda node: self._worker_of(node, Act.DRAIN, self._workers)
        )
        self._lock = context.outages.lock  # one lock: an outage that is judged must be the newest when an act follows
        self._ended = threading.Condition()
        self._outcomes: dict[str, Action] = {}
        self._workers: dict[str, Worker] = {}
        self._made: dict[str, Action] = {}  # actions by id, made since the start
        self._began_ms = 0

    # ---- life

    def start(self, mode: str = "enforce") -> None:
        """Take up what a stop left, and begin to act.

        Args:
            mode: the policy's strongest now. A decision of a stronger one is dropped if nothing of it was begun.

        Raises:
            StoreError: the store cannot be read.
        """
        self.stop()
        context = self.context
        if context.config.mode == "observe":
            return
        context.outages.load()
        context.gpus.load()
        self._began_ms = context.now_ms()
        self._made.clear()
        context.advices.current.clear()
        context.surveys.clear()
        self.returns.restart()
        for action in context.store.actions.newest(acts=ADVICES):
            context.advices.note(action)
        actuators = (*context.actuators.all, self._commands, self._ticket)
        returns = Returns(self.returns, self.gpu_returns)
        workers = {a.name: Worker(context, a, self, returns) for a in actuators}
        left = context.store.actions.intended()
        unbegun = self._unbegun_decisions(left, mode)
        with self._lock:
            self._workers = workers
            for action in left:
                self._queue(action)
            self.take(unbegun)
        if left or unbegun:
            log.info("%d actions and %d decisions were left by the last stop", len(left), len(unbegun))
        for worker in workers.values():
            worker.start()

    def _unbegun_decisions(self, left: Sequence[Action], mode: str) -> list[Decision]:
        """Return the decisions to act that have no intent, and report those that are too old. Raises StoreError.

        Args:
            left: actions that have not ended.
        """
        store, began_ms = self.context.store, self._began_ms
        decided = store.decisions.without_action(began_ms - LOOKED_BACK_MS)
        found = store.decisions.without_action(
            began_ms - UNBEGUN_MS
        )  # not of `decided`, which may be cut off at its limit
        acted = store.actions.newest(acts=DECIDED, since_ms=began_ms - LOOKED_BACK_MS)
        self._report_failed([a for a in acted if a.state is ActionState.FAILED])
        incidents = self.context.detection.incidents
        open_ids = {id_ for id_, incident in incidents.items() if incident.closed_ms is None}
        old = [decision for decision in decided if decision.ts_ms < began_ms - UNBEGUN_MS]
        self._fail_unbegun(never_begun(old, [*acted, *left], open_ids))
        most = min(MODES.index(mode), MODES.index(self.context.config.mode))
        unbegun = [decision for decision in found if MODES.index(decision.mode) <= most]
        if len(unbegun) < len(found):
            log.warning(
                "%d decisions of a stronger mode than %s are dropped: the mode was lowered before anything was done",
                len(found) - len(unbegun), MODES[most],
            )  # fmt: skip
        return unbegun

    def _fail_unbegun(self, decisions: Sequence[Decision]) -> None:
        """Store decisions that are too old to begin as failed actions: they are decided again. Raises StoreError."""
        why = "not done: the collector was stopped before it was begun, and was away for too long"
        failed = []
        for d in decisions:
            act, now_ms = act_of(d), self.context.now_ms()
            failed.append(
                Action(
                    _id_of(d.id, d.node, act), d.id, d.incident_id, d.node, act, "", ActionState.FAILED, now_ms, why,
                    why=d.reason, gpu=d.gpu,
                )
            )  # fmt: skip
            log.error("%s %s failed: %s", act, d.node, why)
        if failed:
            self.context.store.actions.write(failed)
            self._report_failed(failed)

    def _report_failed(self, actions: Sequence[Action]) -> None:
        if actions:
            self.context.detection.take_failed(actions)

    def stop(self) -> None:
        """End after the effect under way; what is not done stays intended, or decided, in the store."""
        workers, self._workers = self._workers, {}  # without the lock: a store that hangs may hold it
        for worker in workers.values():
            worker.ask_to_stop()
        self.context.outages.clear_closings()
        self.context.gpus.clear_isolations()
        for worker in workers.values():
            worker.join(STOP_S)

    @property
    def acting(self) -> bool:
        return bool(self._workers)

    @property
    def surveys(self) -> bool:
        """Whether it acts, and some scheduler can be asked who is out of service."""
        return self.context.config.mode != "observe" and any(a.surveys for a in self.context.actuators.all)

    # ---- decisions and requests

    def take(self, decisions: Iterable[Decision], incidents: Iterable[Incident] = ()) -> None:
        """Begin each decision to act, soon; returns at once. Safe to call again with the same ones.

        Args:
            decisions: stored already, so that the next start finds those that a stop left without an intent.
            incidents: that have just changed, in their newest version.

        Raises:
            StoreError: too many wait; call again with the same decisions.
        """
        workers = self._workers
        to_act = [d for d in decisions if d.outcome == "act" and d.wanted in ACT_OF]
        if not workers or not to_act:
            return
        waiting = sum(worker.waiting_decisions for worker in workers.values())
        if waiting + len(to_act) > MAX_DECISIONS:
            raise StoreError(f"{waiting} decisions wait for the store already")
        fresh, known = {i.id: i for i in incidents}, self.context.detection.incidents
        for d in to_act:
            incident = fresh.get(d.incident_id) or known.get(d.incident_id)
            why = d.reason if incident is None else f"{incident.kind}/{incident.cause}: {incident.summary}"
            worker = self._worker_of(d.node, act_of(d), workers)
            (worker or workers[self._commands.name]).add_decision(d, why)

    def begin(self, decision: Decision, why: str) -> None:
        """Store the intent of a decision to act, and queue it. Raises StoreError."""
        d = decision
        self.intend(d.node, act_of(d), d.id, d.incident_id, why, "drover", since_ms=d.ts_ms, save_s=d.save_s, gpu=d.gpu)

    def _intend_gpu(self, outage: NodeOutage, act: Act, seed: str, why: str, by: str) -> Action:
        return self.intend(outage.node, act, seed, outage.incident_id, why, by, gpu=outage.gpu)

    def intend(
        self, node: str, act: Act, seed: str, incident: str, why: str, by: str, since_ms: int = 0, forced: bool = False,
        save_s: float = 0.0, gpu: GpuRef | None = None,
    ) -> Action:  # fmt: skip
        """Store an intent and queue it, unless there is one already; return the action.

        Args:
            seed: makes the action's id: a decision's id, or what else makes it one of its kind.
            since_ms: when the seed was made. Only this process knows those of after its start.
            save_s: how long its jobs have to save themselves first. gpu: it is about this GPU of the node alone.
        Raises:
            StoreError: it could not be stored, or this collector is not the active one.
        """
        id_ = _id_of(seed, node, act)
        gpu = None if act is Act.REPAIR else gpu  # a ticket is about the node, and changes no outage
        with self._lock:
            workers = self._workers
            if not workers:  # else it would be stored as one that nobody can do, and never be done
                raise StoreError("this collector does not act any more")
            worker = self._worker_of(node, act, workers)
            if (found := self._find(id_, since_ms)) is not None:
                return found
            if (
                worker is not None
                and (same := _alike(worker.waiting(), (node, act, incident, gpu), by, forced, save_s)) is not None
            ):
                return same
            actuator = "" if worker is None else worker.actuator.name
            decision = seed if incident and by == "drover" and act in DECIDED else ""
            made = Action(
                id_, decision, incident, node, act, actuator, ActionState.INTENDED, self.context.now_ms(), by=by,
                why=why, forced=forced, saving=Saving(save_s) if save_s else None, gpu=gpu,
            )  # fmt: skip
            self.context.crash_test_hook("decided")
            if worker is None:
                made = replace(made, state=ActionState.FAILED, detail="no actuator has this node's pool")
                self.context.store.actions.write([made])
                self._report_failed([made])
                return self._remember(made)
            self.context.store.actions.write([made])
            self._remember(made)
            self.context.crash_test_hook("intended")
            worker.add(made, fresh=True)
        return made

    def _find(self, id_: str, since_ms: int) -> Action | None:
        found = self._made.get(id_)
        if found is None and since_ms <= self._began_ms:
            found = next(iter(self.context.store.actions.history(id_)[-1:]), None)
        return found

    def _remember(self, made: Action) -> Action:
        self._made[made.id] = made
        if len(self._made) > MAX_MADE:
            del self._made[next(iter(self._made))]
        return made

    def drain(self, node: str, act: Act, why: str, by: str, forced: bool = False, save_s: float = 0.0) -> Action:
        """Store what a person asks for: drain, isolate, reset or reboot. Raises ActError, StoreError.

        `save_s`: how long its jobs have to save themselves first; 0: they are not asked.
        """
        self.check(node)
        if hindrance := self.hindrance(act):
            raise ActError(hindrance)
        actuator = self.context.actuators.of(node)
        if save_s and actuator is not None and not isinstance(actuator, Saver):
            raise ActError(f"{actuator.name} cannot ask jobs to save themselves; drain without --save-first")
        return self.intend(
            node, act, f"{by} {self.context.now_ms()}", "", why, by, forced=forced, save_s=save_s
        )  # fmt: skip

    def resume(self, node: str, why: str, by: str, force: bool) -> tuple[Action | None, str]:
        """Put a node back for a person; see `NodeReturns.resume`. Raises ActError, StoreError."""
        self.check(node)
        return self.returns.resume(node, why, by, force)

    def resume_gpu(self, node: str, which: int | str, why: str, by: str, force: bool) -> tuple[Action | None, str]:
        """Put a GPU back that is out alone; see `GpuReturns.resume`. Raises ActError, StoreError."""
        self.check(node)
        return self.gpu_returns.resume(node, which, why, by, force)

    def on_verdicts(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """Take the verdicts of validations. Raises StoreError: call again with the same ones."""
        if self.acting:
            self.returns.take_verdicts(verdicts)
            self.gpu_returns.take_verdicts(verdicts)

    def check(self, node: str) -> None:
        """Raises ActError: this collector can do nothing to the node, whatever the guard says."""
        if why := self.acts_not(node):
            raise ActError(why)

    def acts_not(self, node: str) -> str:
        """Return why nothing can be done to this node here; "": it can."""
        if self.context.config.mode == "observe":
            return OBSERVES
        if not self.acting:
            return "this collector is not the active one; ask the one that is"
        if self.context.actuators.of(node) is None:
            return f"no actuator has {node}: see act.slurm, act.kubernetes and act.command in the settings"
        return ""

    def hindrance(self, act: Act) -> str:
        """Return why the settings do not let an act be done; "": they do."""
        off = act in RESETS and not self._commands.knows(act)
        return f"no command for it: set act.{act}_command in the collector's settings" if off else ""

    def wait(self, action: Action, seconds: float) -> Action:
        """Return its newest version, when it has ended or this time is over."""
        if action.state is not ActionState.INTENDED:
            return action
        with self._ended:
            self._ended.wait_for(lambda: action.id in self._outcomes, seconds)
            return self._outcomes.get(action.id, action)

    # ---- for the workers

    def under_way(self, node: str) -> list[Action]:
        """Return the actions on a node that have not ended."""
        return [a for w in self._workers.values() for a in w.waiting() if a.node == node]

    def observe(self, node: str) -> NodeState:
        """Return a node as its scheduler sees it now, asked in the thread of its actuator.

        Raises:
            LaterError: it does not answer. ActError: it cannot be asked.
        """
        return self.ask(node, lambda actuator: actuator.observe(node))

    def ask(self, node: str, call: Callable[[Actuator], T]) -> T:
        """Return what `call` finds, made in the thread of the actuator that has a node. Raises as `observe`."""
        actuator = self.context.actuators.of(node)
        worker = None if actuator is None else self._workers.get(actuator.name)
        if actuator is None or worker is None:
            raise ActError(f"no actuator has {node}")
        return worker.ask(lambda: call(actuator))

    def end(self, action: Action) -> None:
        """Publish the stored outcome of an action."""
        self.context.advices.note(action)
        log.info("%s %s: %s: %s", action.action, action.node, action.state, action.detail)
        with self._ended:
            self._outcomes[action.id] = action
            for id_ in list(self._outcomes)[:-MAX_OUTCOMES]:
                del self._outcomes[id_]
            self._ended.notify_all()
        if action.state is ActionState.FAILED:
            self._report_failed([action])

    @property
    def opens_tickets(self) -> bool:
        """Return whether a node that goes to repair gets a ticket."""
        return self._own_actuator(Act.REPAIR) is not None

    def _own_actuator(self, act: Act) -> OperatorCommands | Ticket | None:
        """Return the command or webhook of the settings that does an act which no scheduler does."""
        return next((own for own in (self._commands, self._ticket) if own.knows(act)), None)

    def _worker_of(self, node: str, act: Act, workers: Mapping[str, Worker]) -> Worker | None:
        actuator = self._own_actuator(act) or self.context.actuators.of(node)
        return None if actuator is None else workers.get(actuator.name)

    def _queue(self, action: Action) -> None:
        worker = self._worker_of(action.node, action.action, self._workers)
        if worker is not None:
            worker.add(action)
            return
        gone = "not done: no actuator has this node's pool any more"
        now_ms = self.context.now_ms()
        failed = replace(action, state=ActionState.FAILED, running=False, detail=gone, ts_ms=now_ms)
        self.context.store.actions.write([failed])
        self._report_failed([failed])


def never_begun(decisions: Iterable[Decision], acted: Sequence[Action], open_ids: Set[str]) -> list[Decision]:
    """Return the decisions to act of open incidents that have no action, and that no later action was done for.

    Args:
        acted: actions; one may be for a later decision too, that wanted the same while it waited.
    """
    until: dict[tuple[str, str, Act], float] = {}
    for a in acted:
        key, at_ms = (a.node, a.incident_id, a.action), a.ts_ms
        until[key] = max(until.get(key, 0), float("inf") if a.state is ActionState.INTENDED else at_ms)
    wanted = [d for d in decisions if d.incident_id in open_ids and d.wanted in ACT_OF]
    return [d for d in wanted if until.get((d.node, d.incident_id, act_of(d)), 0) < d.ts_ms]


def act_of(decision: Decision) -> Act:
    """Return what carries out a decision to act."""
    return ACT_OF[decision.wanted] if decision.gpu is None else Act.ISOLATE_GPU


def _alike(
    waiting: Iterable[Action], what: tuple[str, Act, str, GpuRef | None], by: str, forced: bool, save_s: float
) -> Action | None:
    """Return the waiting action that does the same for the same incident. `what`: node, act, incident, GPU.

    Not that of another incident or of a person: it is dropped if that incident ends before. And a return that a person
    wants at once is not Drover's own, which new evidence may withhold. One that goes at once is not one whose jobs are
    asked to save themselves first.
    """
    returns = what[1] in (Act.RESUME, Act.RETURN_GPU)
    same = [
        a for a in waiting
        if (a.node, a.action, a.incident_id, a.gpu) == what and (save_s > 0 or by == "drover" or a.saving is None)
    ]  # fmt: skip
    return next((a for a in same if (not returns or a.by == by) and a.forced >= forced), None)


def _id_of(seed: str, node: str, act: Act) -> str:
    return hashlib.blake2b(f"{seed} {node} {act}".encode(), digest_size=8).hexdigest()
