"""The thread that judges, and what others ask of it: the engine is called and what comes of it handed on, in order.

Reads of buckets are in `pipeline.py`, which drives this, so that an event does not wait for a slow read.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from drover_collector.actions.base import LaterError
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.detectors._lib.inventory import InventoryReport
from drover_collector.engine.engine import Engine, Outcome
from drover_collector.engine.late_events import HISTORY_MS
from drover_collector.engine.node_state import Survey
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.notify import Outbox
from drover_collector.notify.incident_updates import (
    OLD_MS,
    News,
    of_actions,
    of_decisions,
    of_duties,
)
from drover_collector.notify.silences import KEPT_MS as SILENCES_MS
from drover_collector.pipeline.arrivals import Arrivals
from drover_collector.pipeline.inventories import Inventories
from drover_collector.pipeline.outcome_writer import OutcomeWriter
from drover_collector.pipeline.pauses import Pauses
from drover_collector.pipeline.restore import (
    CLOCK,
    RESTORED_MS,
    Past,
    history,
)
from drover_collector.pipeline.stats import Rate, Ticks
from drover_collector.pipeline.store_follower import HEARD_MS, StoreFollower
from drover_collector.policy import diff as policy_diff
from drover_collector.policy.policy import Policy, least_mode
from drover_collector.policy.reload import PolicyWatch
from drover_collector.store import Store
from drover_core.model.events import (
    Action,
    Approval,
    Audit,
    Event,
    Health,
    Incident,
    NodeOutage,
    Silence,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

LATE_SETTLE_MS = 60_000  # a fleet that is behind tells late rows all the time; rolling up again after each is too dear
STEP_MS = 10_000  # between two looks the wall clock went so much more, or less, than the time since boot
PROMPT_MS = 60_000  # what a crash left over for no longer than this is judged at once: no node boots in that time
LEFT_MS = 120_000  # how long the rest waits for its node: agents come back within half a minute of a start
STORM_MOMENTS = 16  # with events of more times than this at once, those within STORM_MS are judged together
STORM_MS = 250  # as long as a storm's events wait for each other on their way into the store
ANSWER_S = 20.0  # for what comes of a person's answer: a tick that is under way goes first


def moments(events: Sequence[Event], due_ms: Callable[[Event], int]) -> list[tuple[int, list[Event]]]:
    """Events with the time at which they are judged, those of one time together.

    In a storm, times that lie close together become the newest of them: each call of the engine looks at all open
    incidents, and each outcome is several writes, so that 1,000 calls for 1,000 events take 10 s and more.
    """
    found = [(at_ms, list(group)) for at_ms, group in groupby(events, due_ms)]
    if len(found) <= STORM_MOMENTS:
        return found
    merged: list[tuple[int, list[Event]]] = []
    first_ms = 0
    for at_ms, group in found:
        if merged and merged[-1][0] <= at_ms <= first_ms + STORM_MS:
            merged[-1] = at_ms, merged[-1][1]
            merged[-1][1].extend(group)
        else:
            merged.append((at_ms, group))
            first_ms = at_ms
    return merged


@dataclass(frozen=True, slots=True)
class LeaseState:
    """`holder`: this collector's name in it; `ttl_s` 0: the lock on an embedded store's folder, which has no end."""

    holder: str = "embedded"
    ttl_s: float = 0.0
    left_s: float | None = None  # None: it has no end, or this one may not hold it


class EngineThread:
    """Engine, store and outbox of one fleet, and the thread in which all calls into the engine are made."""

    def __init__(
        self,
        index: FleetIndex,
        store: Store,
        policy: Policy,
        outbox: Outbox,
        *,
        lag_ms: int,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        wake_s: float = 1.0,
        ceiling: str = "observe",
        watch: PolicyWatch | None = None,
        boot_ms: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            boot_ms: a clock that no one sets; by it a step of `now_ms` is noticed. None: none is.
            ceiling: the mode beyond which no policy goes, `[act] mode` of the settings.
            watch: of the policy's file.
        """
        self.index = index
        self.store = store
        self.policy = policy
        self.outbox = outbox
        self.started_ms = now_ms()
        self.ceiling = ceiling
        self._watch = watch or PolicyWatch(None)
        self._policy_state = policy_diff.state_of(policy, ceiling)  # that the audit knows
        self.desk: ActionDispatcher | None = None  # acts while this one leads; set by `act_by`
        self.engine = self._engine(self.started_ms)
        self.leading = False  # detects; set by `start`, and ended by `stop` and `give_up`
        self.role: Callable[[], str] = lambda: "active"
        self.lease: Callable[[], LeaseState] = LeaseState
        self.began_ms = self.started_ms  # to judge
        self._looks = StoreFollower(store, index, now_ms)
        self.ticks = Ticks()
        self.rate = Rate()  # of samples taken in
        self.newest: Bucket | None = None
        self.incidents: Mapping[str, Incident] = {}  # the engine's, as of its newest call: for other threads to read
        self.now_ms = now_ms
        self.lag_ms = store.dirty_ranges.lag_ms = lag_ms
        store.dirty_ranges.settle_ms = LATE_SETTLE_MS
        self._boot_ms, self._clocks = boot_ms, (0, 0)  # both clocks as of the newest look
        self._wake_s = wake_s
        self._judge = ThreadPoolExecutor(1, "engine")
        self._arrivals = Arrivals(self.ticks)
        self.saving = OutcomeWriter(store, outbox, self.ticks, now_ms)
        self.saving.known = lambda: self.incidents
        self._inventories = Inventories(store)
        self._left: list[Event] = []  # by a crash, and not judged yet; see `judge_left`
        self._told: Sequence[InventoryReport] = ()  # of inventories, for the next bucket
        self.next_ms = self.started_ms // BUCKET_MS * BUCKET_MS  # a replay of an export begins with this one too
        self.busy = False  # a bucket is being read or judged
        self.pauses = Pauses(self.started_ms)
        self.past: Past | None = None  # of before the start, until it is taken up
        self._followed = False  # another collector detected before this one

    def act_by(self, desk: ActionDispatcher) -> None:
        """Before `start`: decisions to act are worked off by `desk`, from when this one leads."""
        self.desk = desk
        desk.on_duties.append(self.take_duties)
        desk.on_survey.append(self.take_survey)
        desk.on_failed.append(self.take_failed)
        desk.lowered = self._lowered
        desk.held = self._held
        self.engine.decider.away = None if desk.surveys else frozenset()
        desk.now_of = lambda node: self.engine.now_of(node)  # a start may make another engine
        self.saving.takers.append(lambda outcome: desk.take(outcome.decisions, outcome.incidents))
        # A return is withheld for what was found since its probes were asked for: nothing of that may be left out.
        self.saving.watched = lambda: {n for n, d in desk.duties.items() if d.stage is Health.VALIDATING}

    def take_events(self, events: Sequence[Event]) -> None:
        """Events that ingest has stored. May be called from any thread; returns at once.

        Of a store that other collectors write to as well they are all read from there, each once.
        """
        if self.store.shared:
            if self._arrivals.loop is not None:
                self._arrivals.loop.call_soon_threadsafe(self._looks.wake.set)
            return
        self._arrivals.put(events)

    def take_unstored(self, events: Sequence[Event]) -> None:
        """Events that the store keeps waiting: they are judged all the same, and not again when they are stored.
        Otherwise like `take_events`."""
        if self.leading:
            self._looks.know(events)
            self._arrivals.put(events)

    @property
    def waiting_events(self) -> int:
        """Events that are not judged yet."""
        return len(self._arrivals)

    @property
    def waiting_outcomes(self) -> int:
        """Results that the store has not taken yet."""
        return len(self.saving)

    def troubles(self) -> list[str]:
        """Troubles of Drover itself, each a sentence."""
        acting = [] if self.desk is None else list(self.desk.troubles.values())
        undone = list(self.engine.decider.failed.copy().values())
        if undone:
            first = f"{undone[0].action} {undone[0].node} first: {undone[0].detail}"
            acting.append(
                f"{len(undone)} actions failed; each is tried again hourly if its node is in service; {first}"
            )
        return [*list(self.ticks.troubles.values()), *self.outbox.troubles, *acting]

    def answer(self, approval: Approval, audit: Audit) -> Outcome:
        """A person's answer to a decision; returns when what follows from it is stored, or waits for the store.

        From any thread but the one that judges.

        Raises:
            StoreError: the answer could not be stored, and nothing follows.
            TimeoutError: detection is too busy.
        """
        self.store.decisions.write_approvals([approval])  # here: a store that hangs must not hold judging up
        self.store.audit.write([audit])
        outcome = self._judge.submit(self._answer, approval).result(ANSWER_S)
        if not any(d.outcome in ("approved", "rejected") for d in outcome.decisions):  # the same line, mended
            self.store.audit.write([replace(audit, what=f"{audit.what} (too late)")])
        return outcome

    def _answer(self, approval: Approval) -> Outcome:
        outcomes: list[Outcome] = []

        def take() -> Outcome:
            outcomes.append(self.engine.on_approval(approval, self.now_ms()))
            return outcomes[0]

        self._guarded(take)
        return outcomes[0] if outcomes else Outcome()

    def take_silence(self, silence: Silence, audit: Audit) -> None:
        """A silence that a person made, or has ended. From any thread but the one that judges.

        Raises:
            StoreError: it could not be stored, and does not hold.
        """
        self.store.audit.write([audit])
        self.store.silences.write([silence])
        self.outbox.silences.take(silence)
        self._judge.submit(self._note_maintenance)

    def of_engine(self, call: Callable[[Engine], T]) -> T:
        """What `call` finds in the engine, asked in the thread that judges. From any other thread.

        Raises:
            TimeoutError: detection is too busy.
        """
        return self._judge.submit(call, self.engine).result(ANSWER_S)

    def take_duties(self, duties: Mapping[str, NodeOutage]) -> None:
        """How far nodes are that were taken out of service. From any thread; returns at once."""

        def take() -> None:
            known = self.engine.duties
            news = of_duties(duty for node, duty in duties.items() if known.get(node) != duty)
            self._guarded(lambda: self.engine.on_duties(duties, self.now_ms()), news=news)

        self._judge.submit(take)

    def take_survey(self, survey: Survey) -> None:
        """What the schedulers say of all their nodes. From any thread; returns at once."""
        self._judge.submit(lambda: self.engine.on_survey(survey))

    def take_failed(self, actions: Sequence[Action]) -> None:
        """Actions that failed. From any thread; returns at once."""

        def take() -> None:
            self.engine.on_failed(actions)
            self._tell(of_actions(actions))

        self._judge.submit(take)

    def _tell(self, news: Sequence[News]) -> None:
        """Once each, whoever tells it again: but nothing old, as at a start."""
        after_ms = self.now_ms() - OLD_MS
        self.saving.put(Outcome(), (), news=[piece for piece in news if piece.ts_ms >= after_ms])

    def judge_now(self, call: Callable[[Engine], Outcome]) -> bool:
        """Whether what came of it is stored. Not from the event loop. Raises RuntimeError: this collector stops."""
        self._judge.submit(self._guarded, lambda: call(self.engine)).result()
        return not len(self.saving)

    def judge_events(self) -> None:
        events = self._arrivals.take()
        for at_ms, group in moments(events, self._event_due_ms):
            self._judge_together(at_ms, group)
        if events:
            self.ticks.troubles.pop("events", None)

    def _event_due_ms(self, event: Event) -> int:
        """When an event is judged: at its receipt, as in a replay; what a crash left over, when judging began, which a
        clock that went back since has put in the future."""
        now_ms = self.now_ms()
        return now_ms if event.received_ms is None else max(event.received_ms, min(self.began_ms, now_ms))

    def _judge_together(self, at_ms: int, events: list[Event]) -> None:
        self._guarded(lambda: self.engine.on_events(events, at_ms), events)

    def judge_left(self, bucket: Bucket | None = None) -> None:
        """Judge what a crash left over, once the node is heard again: whether it has booted since, and which of its
        GPUs answer, must be known. What is not heard for `LEFT_MS` is judged without. `bucket`: the newest."""
        if not self._left:
            return
        now_ms = self.now_ms()
        all_ = not self.began_ms <= now_ms < self.began_ms + LEFT_MS
        heard = frozenset() if bucket is None else self._heard(bucket)
        due = [event for event in self._left if all_ or event.node in heard]
        if due:
            self._left = [event for event in self._left if not (all_ or event.node in heard)]
            self._judge_together(now_ms, due)

    def _heard(self, bucket: Bucket) -> frozenset[str]:
        rows = bucket.node_rows + np.bincount(self.index.gpu_node, bucket.gpu_rows, self.index.node_count)
        return frozenset(self.index.nodes[n].name for n in np.flatnonzero(rows > 0).tolist())

    def judge_nothing(self) -> None:
        """There is no bucket to be had."""
        self.note_settings()
        self.judge_left()

    def judge_bucket(self, bucket: Bucket) -> None:
        for ts_ms, node, facts in self._told:
            self.engine.on_inventory(node, facts, ts_ms)
        self._told = ()
        self.note_settings()
        # The time at which this bucket was due, so that one judged late is judged as it would have been in time.
        self._guarded(lambda: self.engine.on_bucket(bucket, bucket.end_ms + self.lag_ms))
        self.judge_left(bucket)
        self.newest = bucket
        self.ticks.newest_end_ms = bucket.end_ms
        self.ticks.done += 1

    def _guarded(self, call: Callable[[], Outcome], events: Sequence[Event] = (), news: Sequence[News] = ()) -> None:
        try:
            self._note_step()
            outcome = call()
        except Exception as error:  # noqa: BLE001  # one bad tick must not end detection for the whole fleet
            self.ticks.failed(error, self.now_ms())
            return
        self.saving.put(outcome, events, news=news)
        self.ticks.tell_detectors(self.engine.troubles)
        self.incidents = self.engine.incidents  # only now: what has been shown must survive a crash

    def _note_step(self) -> None:
        """Tell the engine before it judges that this machine's clock was set; the audit too, for the next start."""
        if self._boot_ms is None:
            return
        (wall_ms, boot_ms), self._clocks = self._clocks, (self.now_ms(), self._boot_ms())
        passed_ms = self._clocks[1] - boot_ms
        step_ms = self._clocks[0] - wall_ms - passed_ms
        if not wall_ms or abs(step_ms) < STEP_MS:
            return
        # Between the two looks: what was noted before the step has an earlier time, what was noted since a later one.
        at_ms = self._clocks[0] - (min(passed_ms, step_ms) if step_ms > 0 else 0)
        self.engine.on_clock_set(at_ms, step_ms)
        text = f"this collector's clock was set by {step_ms / 1000:+.0f} s; the guard counts the time that passed"
        log.warning("%s", text)
        self.saving.put(Outcome(), (), [Audit(f"clock {at_ms}", at_ms, "drover", CLOCK, "", text, state=str(step_ms))])

    def _engine(self, started_ms: int) -> Engine:
        engine = Engine(self.index, self.policy, started_ms, ceiling=self.ceiling)
        engine.decider.live = True
        if self.desk is not None and self.desk.surveys:
            engine.decider.away = None  # until the schedulers have answered
        engine.decider.leaving = lambda: frozenset() if self.desk is None else self.desk.going()
        return engine

    def _held(self, action: Action, later: Set[str]) -> str:
        """Why the guard does not let an action close its node now; from any thread but the one that judges.

        Raises:
            LaterError: detection is too busy to say.
        """
        try:
            return self.of_engine(lambda engine: engine.held(action, later))
        except TimeoutError:
            raise LaterError("detection is too busy to ask the guard") from None

    def _lowered(self, action: Action) -> str:
        """Why what was decided is not to be done any more though its incident is open: less is wanted of it, or the
        mode was lowered.

        From any thread.
        """
        if not action.decision_id:
            return ""
        if less := self.engine.decider.wants_no_more(action):
            return less
        mode = least_mode(self.policy.most_mode, self.ceiling)
        found = self.engine.decider.standing.get((action.incident_id, action.node))
        if found is None or found.wanted.value != action.action.value:
            return f"the policy's mode is {mode} since" if mode == "observe" else ""
        if found.outcome not in ("act", "approved"):  # the latter for a moment, while an answer is taken in
            return f"it is not decided so any more: {found.outcome}: {found.reason}"
        return "" if least_mode(found.mode, mode) == found.mode else f"the policy's mode is {mode} since"

    def note_settings(self) -> None:
        """What people have set meanwhile, for events too: with each bucket, or when there is none to be had."""
        self._poll_policy()
        self._note_maintenance()

    def _note_maintenance(self) -> None:
        """The engine knows no clock: which nodes are in maintenance it is told."""
        self.engine.decider.maintenance = self.outbox.silences.held(self.now_ms())

    def _poll_policy(self) -> None:
        """A changed policy holds from here on; a bad file is told and changes nothing."""
        try:
            policy = self._watch.poll()
        except Exception as error:  # noqa: BLE001  # nor may a defect cost the bucket that waits to be judged
            self.ticks.failed(error, self.now_ms())
            return
        if self._watch.trouble:
            self.ticks.troubles["policy"] = self._watch.trouble
        elif policy is not None:
            self.ticks.troubles.pop("policy", None)
            self.policy = policy
            self.engine.set_policy(policy)
            self._note_policy("the policy's file", "the file has changed")

    def _note_policy(self, by: str, why: str) -> None:
        """In the audit, if it is another one than before."""
        made = policy_diff.line(by, why, self._policy_state, self.policy, self.ceiling, self.now_ms())
        if made is not None:
            self._policy_state = made.state
            self.saving.put(Outcome(), (), [made])  # not here: a store that hangs must not hold judging up

    def _follow(self) -> None:
        now_ms = self.now_ms()
        self.store.entities.refresh()
        incidents = self.store.incidents.newest("all", now_ms - RESTORED_MS)
        self._followed = True
        self.outbox.silences.load(self.store.silences.newest(now_ms - SILENCES_MS))
        engine = self._engine(self.started_ms)
        engine.follow(incidents, self.store.buckets.row_counts(self.index, now_ms - HEARD_MS, HEARD_MS))
        self.engine, self.incidents = engine, engine.incidents
        self.newest = None

    def _forget(self) -> None:
        self._arrivals.forget()
        self._left = []
        self.saving.forget()
        self._looks.forget()
        self.pauses.newest = None
        self.ticks.troubles.clear()

    def _restore(self) -> None:
        now_ms = self.now_ms() if self.store.shared else self.started_ms
        if self.store.shared:
            self.store.catch_up()
            self.store.entities.refresh()
            self._forget()
            self.engine = self._engine(now_ms)
            self.next_ms = now_ms // BUCKET_MS * BUCKET_MS
            self.began_ms = now_ms
            if self._followed:  # agents of the one that is gone need a while to come to others
                self.pauses.newest = (now_ms, now_ms)
        found = history(self.store, now_ms)
        self.past = Past(self.store, self.index, self._inventories, self.next_ms, now_ms)
        self.newest = None
        self._clocks = (0, 0)
        for at_ms, step_ms in found.steps:
            if at_ms <= now_ms:
                self.engine.on_clock_set(at_ms, step_ms)
        self.engine.begin(found.incidents, found.judged, found.decisions, found.duties, self.past.held)
        waits = {e.id for e in found.unjudged if PROMPT_MS < now_ms - (e.received_ms or now_ms) <= HISTORY_MS}
        self._left = [e for e in found.unjudged if e.id in waits]
        self._arrivals.resume([e for e in found.unjudged if e.id not in waits])
        self._looks.know(found.unjudged)
        self.incidents = self.engine.incidents
        if self.store.shared:
            self.pauses.awake_ms = self.now_ms()  # not what this took
        self.outbox.silences.load(self.store.silences.newest(now_ms - SILENCES_MS))
        self._note_maintenance()
        self.outbox.start()
        told = self.outbox.enqueue(found.incidents)
        self._policy_state = next((line.state for line in self.store.audit.read(what="policy", limit=1)), "")
        self._note_policy("the collector's start", "in force from this start on")
        self._tell([*of_decisions(self.engine.decider.standing.values()), *of_duties(found.duties.values())])
        if self.desk is not None:  # before anything is decided below: it must take that
            self.desk.start(self.policy.most_mode)
        self._guarded(functools.partial(self.engine.on_duties, found.duties, now_ms))
        for approval in found.approvals:  # one whose decision still waits: a stop came in between
            self._guarded(functools.partial(self.engine.on_approval, approval, now_ms))
        if found.incidents or self.newest:
            log.info(
                "restored %d incidents and %d events; %d events and %d messages had been left over",
                len(found.incidents), len(found.judged), len(found.unjudged), told,
            )  # fmt: skip
