"""The desk that works decisions off: intent stored, then the act, its verification, its outcome stored.

Every effect asks the store's fence first, so that a collector that is not the active one does nothing. A stop between
any two steps leaves an intent, which the next start takes up: acts are idempotent and look before they do anything, so
each is done once; one that is not wanted any more, or that cannot be told (a command that was running), is reported.

Each actuator has a thread of its own (`worker.py`); a slow scheduler delays neither detection nor another one. Intents
are stored in another thread (`intents.py`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from drover_collector.actions.base import ActError, Actuator, NodeState
from drover_collector.actions.intents import ACT_OF, Intents, never_begun, wish
from drover_collector.actions.node_outage import is_out, mark_of_duty
from drover_collector.actions.operator_commands import Commands
from drover_collector.actions.return_to_service import Returning, Validator
from drover_collector.actions.settings import MODES, ActConfig, TicketConfig
from drover_collector.actions.ticket import Ticket
from drover_collector.actions.worker import Worker
from drover_collector.engine.node_state import NodeNow, Survey
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Health,
    Incident,
    NodeOutage,
    WaitsFor,
)

log = logging.getLogger(__name__)

ADVICES = (Act.ADVISE, Act.UNADVISE)
MOST_MADE = 20_000  # actions remembered: a decision may be handed over again until all of its outcome is stored
UNBEGUN_MS = 3_600_000  # a decision older than this that a stop left without an intent is not begun any more, but told
LOOKED_BACK_MS = 30 * 86_400_000  # for those, and for actions that failed
STALE_S = 180.0  # a scheduler that was not heard for three of its surveys: who is out is not known any more
STOP_S = 15.0  # for an effect under way

OBSERVES = 'this collector only observes; set act.mode to "approve" or "enforce", and an actuator'


class ActionDispatcher(Returning):
    """`take` and the calls for people may be used from any thread, between `start` and `stop`.

    Args:
        actuator_of: who has a node; None: nobody, so that nothing can be done to it.
        incidents: open ones and those that have just closed, by id.
        nodes: of the fleet, to be looked at whoever closed them.
        step: called between the steps of an action with their names; for tests of crashes.
    Attributes:
        duties: node -> its newest; replaced, never changed.
        advices: (node, incident) -> the advice that stands.
        on_duties: each is called with `duties` when one has changed, in a worker's thread.
        on_survey: each is called with what all schedulers say of their nodes, when that has changed; likewise.
        on_failed: each is called with actions that failed, those of before the start too; likewise.
        troubles: what goes wrong, each a sentence.
        lowered: asked right before an act why it is not wanted any more by who decided it; "": it is.
        held: asked right before a node is closed why the guard holds it, given nodes whose turn comes later; "": it
            does not.
        now_of: what is known of a node now; None: nothing, and Drover puts nothing back.
        asked: nodes that people ask to have taken out, while the guard is asked and their intents are stored.
    """

    def __init__(
        self,
        store: Store,
        config: ActConfig,
        actuators: Sequence[Actuator],
        actuator_of: Callable[[str], Actuator | None],
        *,
        incidents: Callable[[], Mapping[str, Incident]] = dict,
        nodes: Sequence[str] = (),
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        look_s: float = 5.0,
        step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.store, self.config, self.now_ms, self.step = store, config, now_ms, step
        self.incidents, self.actuator_of = incidents, actuator_of
        self.validator: Validator | None = None
        self.duties: Mapping[str, NodeOutage] = {}
        self.advices: dict[tuple[str, str], Action] = {}
        self.on_duties: list[Callable[[Mapping[str, NodeOutage]], None]] = []
        self.on_survey: list[Callable[[Survey], None]] = []
        self.on_failed: list[Callable[[Sequence[Action]], None]] = []
        self.troubles: dict[str, str] = {}
        self.lowered: Callable[[Action], str] = lambda _: ""
        self.held: Callable[[Action, Set[str]], str] = lambda *_: ""
        self.now_of: Callable[[str], NodeNow | None] = lambda _: None
        self.asked: dict[str, None] = {}
        self.nodes = tuple(nodes)
        self._surveys: dict[str, tuple[Survey, float]] = {}  # by actuator; when, time.monotonic
        self._lock = threading.RLock()
        self._ended = threading.Condition()
        self._outcomes: dict[str, Action] = {}
        self._actuators, self._look_s = tuple(actuators), look_s
        self._recheck_s = 2 * look_s
        self._rechecks = {}
        # In observe mode nothing is opened, and no setting of it may stop the collector.
        webhook = TicketConfig() if config.mode == "observe" else config.repair_webhook
        self._commands, self._ticket = Commands(config), Ticket(webhook)
        self._workers: dict[str, Worker] = {}
        self._intents: Intents | None = None  # while this one acts
        self._made: dict[str, Action] = {}  # actions by id, as they were made since the start
        self._began_ms = 0

    # ---- life

    def start(self, mode: str = "enforce") -> None:
        """Takes up what a stop left, and begins to act.

        Args:
            mode: the policy's strongest now. A decision of a stronger one that nothing was begun of is let go.

        Raises:
            StoreError: the store cannot be read.
        """
        self.stop()
        if self.config.mode == "observe":
            return
        self.duties = self.store.outages.current()
        self._began_ms = self.now_ms()
        self._made.clear()
        self.advices.clear()
        self._surveys.clear()  # who judges does not know it yet
        self._rechecks.clear()
        for action in self.store.actions.newest(acts=ADVICES):
            self._note_advice(action)
        workers = {a.name: Worker(self, a, self._look_s) for a in (*self._actuators, *self._own)}
        left = self.store.actions.intended()
        most = min(MODES.index(mode), MODES.index(self.config.mode))
        began_ms = self._began_ms
        decided = self.store.decisions.without_action(began_ms - LOOKED_BACK_MS)
        found = self.store.decisions.without_action(
            began_ms - UNBEGUN_MS
        )  # by itself: that one may be cut off at its limit
        acted = self.store.actions.newest(acts=tuple(ACT_OF.values()), since_ms=began_ms - LOOKED_BACK_MS)
        self._tell_failed([a for a in acted if a.state is ActionState.FAILED])
        old = [decision for decision in decided if decision.ts_ms < began_ms - UNBEGUN_MS]
        self._report(never_begun(old, [*acted, *left], self._open_ids()))
        unbegun = [decision for decision in found if MODES.index(decision.mode) <= most]
        if len(unbegun) < len(found):
            log.warning(
                "%d decisions of a stronger mode than %s are let go: the mode was lowered before anything was done",
                len(found) - len(unbegun), MODES[most],
            )  # fmt: skip
        intents = Intents(lambda wished: self.intend(*wished), self.troubles)
        with self._lock:
            self._workers, self._intents = workers, intents
            for action in left:
                self._queue(action)
            self.take(unbegun)
        if left or unbegun:
            log.info("%d actions and %d decisions had been left over", len(left), len(unbegun))
        for worker in workers.values():
            worker.start()
        intents.start()

    def _open_ids(self) -> set[str]:
        return {id_ for id_, incident in self.incidents().items() if incident.closed_ms is None}

    def _report(self, decisions: Sequence[Decision]) -> None:
        """Too old to be begun now: who decides looks at it anew. Raises StoreError."""
        why = "not done: the collector was stopped before it was begun, and was away for too long"
        failed = []
        for d in decisions:
            act, now_ms = ACT_OF[d.wanted], self.now_ms()
            failed.append(
                Action(
                    _id_of(d.id, d.node, act), d.id, d.incident_id, d.node, act, "", ActionState.FAILED, now_ms, why,
                    why=d.reason,
                )
            )  # fmt: skip
            log.error("%s %s failed: %s", act, d.node, why)
        if failed:
            self.store.actions.write(failed)
            self._tell_failed(failed)

    def _tell_failed(self, actions: Sequence[Action]) -> None:
        for told in self.on_failed if actions else ():
            told(actions)

    def stop(self) -> None:
        """Ends after the effect under way; what is not done stays intended, or decided, in the store."""
        gone, self._workers = self._workers, {}  # without the lock: a store that hangs may hold it
        intents, self._intents = self._intents, None
        for worker in gone.values():
            worker.ask_to_stop()
        if intents is not None:
            intents.ask_to_stop()
            intents.join()
        for worker in gone.values():
            worker.join(STOP_S)

    @property
    def _own(self) -> tuple[Commands | Ticket, ...]:
        """What no scheduler does."""
        return self._commands, self._ticket

    @property
    def acting(self) -> bool:
        return bool(self._workers)

    @property
    def leaving(self) -> set[str]:
        """Nodes that are to be taken out, and are not yet: a scheduler may be slow, or away."""
        return {a.node for w in self._workers.values() for a in w.waiting() if a.action in (Act.DRAIN, Act.ISOLATE)}

    def going(self) -> set[str]:
        """Those, and who has left: who judges is told of a duty a moment after it is set."""
        waiting = self.asked.keys() | self.leaving  # before the duties: who is not there any more stands in these
        return waiting | {node for node, duty in self.duties.items() if is_out(duty)}

    def later(self, action: Action) -> set[str]:
        """Nodes that the guard lets go after that of `action`, by any scheduler: of two that wait for room one must go
        first, or each waits for the other. What a person forces waits for nobody."""
        mine = action.ts_ms, action.id
        waiting = [a for w in self._workers.values() for a in w.waiting() if a.action in (Act.DRAIN, Act.ISOLATE)]
        return {a.node for a in waiting if not a.forced and (a.ts_ms, a.id) > mine}

    def under_way(self, node: str) -> list[Action]:
        """What is to be done to a node, and has not ended."""
        return [a for w in self._workers.values() for a in w.waiting() if a.node == node]

    # ---- what is to be done

    def take(self, decisions: Iterable[Decision], incidents: Iterable[Incident] = ()) -> None:
        """Begin each decision to act, soon; returns at once. Safe to call again with the same ones.

        Args:
            decisions: stored already, so that the next start finds those that a stop left without an intent.
            incidents: that have just changed, in their newest version.

        Raises:
            StoreError: too many wait; call again with the same decisions.
        """
        intents = self._intents
        if intents is None:
            return
        fresh, known = {i.id: i for i in incidents}, self.incidents()
        wishes = [wish(d, fresh.get(d.incident_id) or known.get(d.incident_id)) for d in decisions]
        intents.put([wished for wished in wishes if wished is not None])

    def intend(
        self, node: str, act: Act, seed: str, incident: str, why: str, by: str, since_ms: int = 0, forced: bool = False
    ) -> Action:
        """The action of this `seed` (a decision's id, or what else makes it one); it is begun if it is new.

        Args:
            since_ms: when that was made: of what was made since the start only this process knows.
        Raises:
            StoreError: it could not be stored, or this collector is not the active one.
        """
        id_ = _id_of(seed, node, act)
        with self._lock:
            workers = self._workers
            if not workers:  # else it would be stored as one that nobody can do, and never be done
                raise StoreError("this collector does not act any more")
            worker = self._worker_of(node, act, workers)
            found = self._made.get(id_)
            if found is None and since_ms <= self._began_ms:
                found = next(iter(self.store.actions.history(id_)[-1:]), None)
            if found is not None:
                return found
            # Not that of another incident, nor a person's: it is not done when that incident ends before.
            # Nor is a return that a person wants at once that of Drover's own, which news may withhold.
            key = node, act, incident
            alike = [a for a in (worker.waiting() if worker else ()) if (a.node, a.action, a.incident_id) == key]
            same = next((a for a in alike if (act is not Act.RESUME or a.by == by) and a.forced >= forced), None)
            if same is not None:
                return same
            actuator = "" if worker is None else worker.actuator.name
            decision = seed if incident and by == "drover" and act in ACT_OF.values() else ""
            made = Action(
                id_,
                decision,
                incident,
                node,
                act,
                actuator,
                ActionState.INTENDED,
                self.now_ms(),
                by=by,
                why=why,
                forced=forced,
            )
            self.step("decided")
            if worker is None:
                made = replace(made, state=ActionState.FAILED, detail="no actuator has this node's pool")
                self.store.actions.write([made])
                self._tell_failed([made])
                return self._remember(made)
            self.store.actions.write([made])
            self._remember(made)
            self.step("intended")
            worker.add(made, fresh=True)
        return made

    def _remember(self, made: Action) -> Action:
        self._made[made.id] = made
        if len(self._made) > MOST_MADE:
            del self._made[next(iter(self._made))]
        return made

    def drain(self, node: str, act: Act, why: str, by: str, forced: bool = False) -> Action:
        """What a person asks for: drain, isolate, reset or reboot. Raises StoreError."""
        self._must_act(node)
        if why_not := self.hindrance(act):
            raise ActError(why_not)
        return self.intend(node, act, f"{by} {self.now_ms()}", "", why, by, forced=forced)

    def check(self, node: str) -> None:
        """Raises ActError: this collector can do nothing to the node, whatever the guard says."""
        self._must_act(node)

    def hindrance(self, act: Act) -> str:
        """Why the settings do not let it be done; "" where they do."""
        off = act in (Act.RESET, Act.REBOOT) and not self._commands.knows(act)
        return f"no command for it: set act.{act}_command in the collector's settings" if off else ""

    # ---- for the workers

    def set_duty(self, duty: NodeOutage) -> None:
        """Raises StoreError: it is as before then."""
        if duty.stage is not Health.DRAINED:
            duty = replace(duty, waits_for=WaitsFor.NOTHING)
        with self._lock:
            self.store.outages.write([duty])
            self.duties = {**self.duties, duty.node: duty}
        log.info("%s is %s (%s): %s", duty.node, duty.stage, mark_of_duty(duty), duty.reason)
        for told in self.on_duties:
            told(self.duties)

    def set_survey(self, actuator: str, survey: Survey) -> None:
        """Note what the scheduler of an actuator says of all its nodes."""
        with self._lock:
            before = self._whole_survey()
            self._surveys[actuator] = survey, time.monotonic()
            after = self._whole_survey()
        for told in self.on_survey if before != after else ():
            told(after)

    def note_stale(self) -> None:
        """Forget what a scheduler said that has not answered for long: others may have closed nodes since."""
        with self._lock:
            before, oldest = self._whole_survey(), time.monotonic() - STALE_S
            self._surveys = {name: told for name, told in self._surveys.items() if told[1] >= oldest}
            after = self._whole_survey()
        for told in self.on_survey if before != after else ():
            told(after)

    def _whole_survey(self) -> Survey:
        """Of all schedulers. Who is closed is unknown until each of them has answered."""
        found = [survey for survey, _ in self._surveys.values()]
        known = all(a.name in self._surveys for a in self._actuators if a.surveys)
        closed = frozenset[str]().union(*(s.closed or () for s in found)) if known else None
        return Survey(closed, {node: answer for s in found for node, answer in s.answers.items()})

    @property
    def surveys(self) -> bool:
        """Whether it acts, and some scheduler can be asked who is out of service."""
        return self.config.mode != "observe" and any(a.surveys for a in self._actuators)

    def observed(self, node: str) -> NodeState:
        """A node as its scheduler sees it now, asked in the thread of its actuator.

        Raises:
            LaterError: it does not answer. ActError: it cannot be asked.
        """
        actuator = self.actuator_of(node)
        worker = None if actuator is None else self._workers.get(actuator.name)
        if actuator is None or worker is None:
            raise ActError(f"no actuator has {node}")
        return worker.ask(lambda: actuator.observe(node))

    def before_advice(self, node: str) -> str:
        """What the first advice of those that stand on a node has replaced: a later one finds the advice itself."""
        return next((a.before for a in list(self.advices.values()) if a.node == node and a.before), "")

    def end(self, action: Action) -> None:
        """Its outcome is stored: who waits for it is told."""
        self._note_advice(action)
        log.info("%s %s: %s: %s", action.action, action.node, action.state, action.detail)
        with self._ended:
            self._outcomes[action.id] = action
            for id_ in list(self._outcomes)[:-1000]:
                del self._outcomes[id_]
            self._ended.notify_all()
        if action.state is ActionState.FAILED:
            self._tell_failed([action])

    def wait(self, action: Action, seconds: float) -> Action:
        """Its newest version, when it has ended or this time is over."""
        if action.state is not ActionState.INTENDED:
            return action
        with self._ended:
            self._ended.wait_for(lambda: action.id in self._outcomes, seconds)
            return self._outcomes.get(action.id, action)

    def _note_advice(self, action: Action) -> None:
        if action.action is Act.ADVISE and action.state is ActionState.DONE:
            self.advices[action.node, action.incident_id] = action
        elif action.action is Act.UNADVISE and action.state is not ActionState.INTENDED:
            for key in [key for key in self.advices if key[0] == action.node]:
                del self.advices[key]

    def _worker_of(self, node: str, act: Act, workers: Mapping[str, Worker]) -> Worker | None:
        own = next((own for own in self._own if own.knows(act)), None)
        actuator = own or self.actuator_of(node)
        return None if actuator is None else workers.get(actuator.name)

    def _queue(self, action: Action) -> None:
        worker = self._worker_of(action.node, action.action, self._workers)
        if worker is not None:
            worker.add(action)
            return
        gone = "not done: no actuator has this node's pool any more"
        failed = replace(action, state=ActionState.FAILED, running=False, detail=gone, ts_ms=self.now_ms())
        self.store.actions.write([failed])
        self._tell_failed([failed])

    def acts_not(self, node: str) -> str:
        """Return why nothing can be done to this node here; "": it can."""
        if self.config.mode == "observe":
            return OBSERVES
        if not self.acting:
            return "this collector is not the active one; ask the one that is"
        if self.actuator_of(node) is None:
            return f"no actuator has {node}: see act.slurm, act.kubernetes and act.command in the settings"
        return ""

    def _must_act(self, node: str) -> None:
        if why := self.acts_not(node):
            raise ActError(why)


def _id_of(seed: str, node: str, act: Act) -> str:
    return hashlib.blake2b(f"{seed} {node} {act}".encode(), digest_size=8).hexdigest()
