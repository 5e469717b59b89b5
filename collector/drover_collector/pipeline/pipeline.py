"""Detection of one collector: events and closed buckets are judged; the outcomes are stored and reported.

All calls into the engine happen in one thread, in order. `outcome_writer.py` writes outcomes in another, and
`bucket_loop.py` reads buckets in others, so that an event does not wait for a slow read. The gRPC servers run in the
event loop and wait for none of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

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
    IncidentUpdate,
    of_actions,
    of_decisions,
    of_outages,
)
from drover_collector.notify.silences import KEPT_MS as SILENCES_MS
from drover_collector.pipeline.bucket_loop import BucketLoop, BucketTiming
from drover_collector.pipeline.lease import LeaderLease
from drover_collector.pipeline.outcome_writer import OutcomeWriter
from drover_collector.pipeline.restore import (
    CLOCK,
    MAX_EVENTS,
    RESTORED_MS,
    Past,
    history,
)
from drover_collector.pipeline.start_line import start_line
from drover_collector.pipeline.stats import Rate, Ticks
from drover_collector.pipeline.store_follower import REPORTING_MS, StoreFollower
from drover_collector.pipeline.value_origins import ValueOrigins
from drover_collector.policy import diff as policy_diff
from drover_collector.policy.decider import LiveFleet
from drover_collector.policy.policy import Policy
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

UNANSWERED = Survey(closed=None)  # before the schedulers have answered
LATE_SETTLE_MS = 60_000  # a fleet that is behind sends late rows all the time; rolling up after each costs too much
STEP_MS = 10_000  # a step of the clock: the wall clock gained or lost this much against the time since boot
PROMPT_MS = 60_000  # events that a crash left for no longer than this are judged at once: no node boots so fast
LEFT_MS = 120_000  # how long older ones wait for their node: agents reconnect within half a minute of a start
STORM_MOMENTS = 16  # with events of more times than this at once, those within STORM_MS are judged together
STORM_MS = 250  # a storm's events wait for each other this long on their way into the store
ANSWER_S = 20.0  # for the outcome of a person's answer: a tick that is under way goes first


def moments(events: Sequence[Event], due_ms: Callable[[Event], int]) -> list[tuple[int, list[Event]]]:
    """Return events grouped by the time at which they are judged.

    In a storm, times that lie close together become the newest of them: each call of the engine reads all open
    incidents, and each outcome is several writes, so 1,000 calls for 1,000 events take more than 10 s.
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


class EventQueue:
    """Events on their way to the engine. `put` from any thread; `take` in the thread that judges.

    Attributes:
        arrived: set in `loop`, once there is one, when events wait.
    """

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self._events: deque[Event] = deque()
        self.arrived = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._events)

    def put(self, events: Sequence[Event]) -> None:
        room = MAX_EVENTS - len(self._events)
        if room < len(events):
            self._ticks.lost_events += len(events) - max(room, 0)
            self._ticks.troubles["events"] = (
                f"{self._ticks.lost_events} events came faster than they could be judged; they are stored, not judged."
            )
        self._events.extend(events[: max(room, 0)])
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.arrived.set)

    def resume(self, events: Sequence[Event]) -> None:
        """Add what a crash left unjudged. The caller sets `arrived`."""
        self._events.extend(events)

    def take(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def forget(self) -> None:
        self._events.clear()


class StepClock:
    """Notices that somebody sets this machine's clock.

    Args:
        boot_ms: a clock that nobody sets. None: no step is noticed.
    """

    def __init__(self, now_ms: Callable[[], int], boot_ms: Callable[[], int] | None) -> None:
        self._now_ms, self._boot_ms = now_ms, boot_ms
        self._newest = (0, 0)  # both clocks, when they were last read

    def reset(self) -> None:
        self._newest = (0, 0)

    def step(self) -> tuple[int, int] | None:
        """Return (at_ms, step_ms) if the clock was set since the last call.

        `at_ms` lies between the two calls: what was noted before the step has an earlier time, what came since a
        later one.
        """
        if self._boot_ms is None:
            return None
        (wall_ms, boot_ms), self._newest = self._newest, (self._now_ms(), self._boot_ms())
        passed_ms = self._newest[1] - boot_ms
        step_ms = self._newest[0] - wall_ms - passed_ms
        if not wall_ms or abs(step_ms) < STEP_MS:
            return None
        return self._newest[0] - (min(passed_ms, step_ms) if step_ms > 0 else 0), step_ms


class PolicyInForce:
    """The policy, changes of its file, and the audit line of each change.

    Attributes:
        ceiling: the mode beyond which no policy goes.
        origins: of the values that are judged.
        audited: the policy that the audit shows, as `policy_diff.state_of` writes it.
    """

    def __init__(self, policy: Policy, ceiling: str, watch: PolicyWatch, origins: ValueOrigins) -> None:
        self.policy, self.ceiling, self._watch, self.origins = policy, ceiling, watch, origins
        self.audited = policy_diff.state_of(policy, ceiling)

    @property
    def trouble(self) -> str:
        """What is wrong with the file; "": nothing."""
        return self._watch.trouble

    def poll(self) -> Policy | None:
        """Return the policy if its file has changed, and is good."""
        policy = self._watch.poll()
        if policy is not None and not self._watch.trouble:
            self.policy = policy
        return policy

    def audit_line(self, by: str, why: str, now_ms: int) -> Audit | None:
        """Return the audit line of the policy in force; None: the audit shows it already."""
        made = policy_diff.line(by, why, self.audited, self.policy, self.ceiling, now_ms)
        if made is not None:
            self.audited = made.state
        return made


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """
    Attributes:
        lag_ms, wake_s, spoke_ms: see `BucketTiming`.
        ceiling: the mode beyond which no policy goes, `[act] mode` of the settings.
        watch: of the policy's file. None: it has none.
        origins: of the values that are judged. None: agents alone send them.
        boot_ms: see `StepClock`.
        lease: None: there is no other collector.
    """

    lag_ms: int
    wake_s: float = 1.0
    ceiling: str = "observe"
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    boot_ms: Callable[[], int] | None = None
    watch: PolicyWatch | None = None
    origins: ValueOrigins | None = None
    lease: LeaderLease | None = None
    spoke_ms: Callable[[], Mapping[str, int]] = dict


class Pipeline:
    """Engine, store and outbox of one fleet, and the thread in which all calls into the engine are made.

    `start`, then `run` until cancelled, then `stop`.

    Attributes:
        incidents: the engine's, as of its newest call. Other threads may read them.
        dispatcher: acts while this collector leads; None: nothing acts.
        leading: this collector detects.
        began_ms: when it began to.
        buckets: reads buckets, and has them judged here.
    """

    def __init__(
        self, index: FleetIndex, store: Store, policy: Policy, outbox: Outbox, options: PipelineOptions
    ) -> None:
        now_ms = options.now_ms
        self.index = index
        self.store = store
        self.outbox = outbox
        self.now_ms = now_ms
        self.started_ms = self.began_ms = now_ms()
        self.lag_ms = store.dirty_ranges.lag_ms = options.lag_ms
        store.dirty_ranges.settle_ms = LATE_SETTLE_MS
        self.lease = options.lease or LeaderLease()
        self.in_force = PolicyInForce(
            policy, options.ceiling, options.watch or PolicyWatch(None), options.origins or ValueOrigins(index)
        )
        self.dispatcher: ActionDispatcher | None = None
        self.engine = self._engine(self.started_ms)
        self.leading = False
        self.ticks = Ticks()
        self.rate = Rate()  # of samples taken in
        self.incidents: Mapping[str, Incident] = {}
        self.saving = OutcomeWriter(store, outbox, self.ticks, now_ms, lambda: self.incidents, self._validating)
        timing = BucketTiming(options.lag_ms, options.wake_s, options.spoke_ms)
        self.buckets = BucketLoop(store, index, self.ticks, now_ms, timing)
        self._clock = StepClock(now_ms, options.boot_ms)
        self._judge = ThreadPoolExecutor(1, "engine")
        self._events = EventQueue(self.ticks)
        self._follower = StoreFollower(store, index, now_ms)
        self._left: list[Event] = []  # by a crash, and not judged yet; see `_judge_left`
        self._followed = False  # another collector detected before this one

    @property
    def policy(self) -> Policy:
        return self.in_force.policy

    @property
    def ceiling(self) -> str:
        """The mode beyond which no policy goes."""
        return self.in_force.ceiling

    # ---- life

    async def start(self) -> None:
        """Take up the history: open incidents, the newest buckets and events, messages not yet delivered.

        Raises:
            StoreError: the store cannot be read.
        """
        self._events.loop = asyncio.get_running_loop()
        await self.in_engine_thread(self._restore)
        self.leading = True
        self._events.arrived.set()  # for events that a crash left unjudged

    async def follow(self) -> None:
        """Take in what another collector found, and who reports; instead of `start` and `run`.

        Raises:
            StoreError: the store cannot be read.
        """
        self._events.loop = asyncio.get_running_loop()
        await self.in_engine_thread(self._follow)

    async def give_up(self) -> None:
        """Let another collector judge, after `run`. What is not stored is dropped; waiting events stay in the store."""
        self.leading = False
        loop = asyncio.get_running_loop()
        if self.dispatcher is not None:
            await loop.run_in_executor(None, self.dispatcher.stop)
        await self.in_engine_thread(self._forget)
        await loop.run_in_executor(None, self.outbox.stop)

    async def run(self) -> None:
        """Run until cancelled. A tick or event that fails is logged and counted, and the next goes on."""
        async with asyncio.TaskGroup() as group:
            works = [self._run_heartbeat, self._run_events, lambda: self.buckets.run(self)]
            if self.store.shared:
                works.append(lambda: self._follower.run(self._events.put, self.ticks.store_failed))
            for work in works:
                group.create_task(self._keep_on(work))

    async def stop(self) -> None:
        """Judge the events that wait, store what is unsaved, end deliveries. The store stays open."""
        loop = asyncio.get_running_loop()
        if self.leading:
            await self.in_engine_thread(self.judge_events)
            await loop.run_in_executor(None, self.saving.stop)
            if self.dispatcher is not None:
                await loop.run_in_executor(None, self.dispatcher.stop)
            await loop.run_in_executor(None, self.outbox.stop)
            self.leading = False
        self._judge.shutdown()

    async def in_engine_thread(self, call: Callable[..., object], *args: object) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._judge, call, *args)

    async def _keep_on(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  # a defect must neither end detection nor go unseen
                self.ticks.failed(error, self.now_ms())
                await asyncio.sleep(self.buckets.wake_s)

    async def _run_events(self) -> None:
        while True:
            await self._events.arrived.wait()
            self._events.arrived.clear()
            await self.in_engine_thread(self.judge_events)

    async def _run_heartbeat(self) -> None:
        while True:
            self.buckets.pauses.notice(self.now_ms())
            await asyncio.sleep(self.buckets.wake_s)

    # ---- what others hand in

    def act_by(self, dispatcher: ActionDispatcher) -> None:
        """Hand decisions to act to `dispatcher`, while this collector leads. Call it before `start`."""
        self.dispatcher = dispatcher
        dispatcher.context.outages.subscribe(self.take_outages)
        dispatcher.context.gpus.subscribe(self._take_gpu_outages)
        if dispatcher.surveys:
            self.engine.on_survey(UNANSWERED)
        # First of all: what a drain needs must not wait for others that fail.
        self.saving.takers.insert(0, lambda outcome: dispatcher.take(outcome.decisions, outcome.incidents))

    def _validating(self) -> Set[str]:
        """Return the nodes under validation, or with a GPU under it.

        Their findings may withhold the return, so every one of them is stored.
        """
        if self.dispatcher is None:
            return frozenset()
        context = self.dispatcher.context
        outages = (*context.outages.current.values(), *context.gpus.current.values())
        return {outage.node for outage in outages if outage.stage is Health.VALIDATING}

    def _leaving(self) -> Set[str]:
        return frozenset() if self.dispatcher is None else self.dispatcher.context.outages.out_or_leaving()

    def _held(self) -> Mapping[str, str]:
        return {} if self.dispatcher is None else self.dispatcher.context.outages.held

    def _leaving_gpus(self) -> Set[tuple[str, str]]:
        return frozenset() if self.dispatcher is None else self.dispatcher.context.gpus.leaving()

    def _gpu_hindrance(self, node: str) -> str:
        return "" if self.dispatcher is None else self.dispatcher.context.actuators.gpu_hindrance(node)

    def take_events(self, events: Sequence[Event]) -> None:
        """Judge events that ingest has stored, soon. From any thread; returns at once.

        If other collectors write to the same store, all events are read from there, each once.
        """
        if self.store.shared:
            if self._events.loop is not None:
                self._events.loop.call_soon_threadsafe(self._follower.wake.set)
            return
        self._events.put(events)

    def take_unstored(self, events: Sequence[Event]) -> None:
        """Judge events that wait for a slow store, and not again when they are stored. From any thread."""
        if self.leading:
            self._follower.know(events)
            self._events.put(events)

    @property
    def waiting_events(self) -> int:
        """How many events are not judged yet."""
        return len(self._events)

    @property
    def waiting_outcomes(self) -> int:
        """How many outcomes are not stored yet."""
        return len(self.saving)

    def troubles(self) -> list[str]:
        """Return the troubles of Drover itself, each a sentence."""
        acting = [] if self.dispatcher is None else list(self.dispatcher.context.troubles.values())
        undone = list(self.engine.decider.failed.copy().values())
        if undone:
            first = f"{undone[0].action} {undone[0].node} first: {undone[0].detail}"
            acting.append(
                f"{len(undone)} actions failed; each is tried again hourly if its node is in service; {first}"
            )
        return [*list(self.ticks.troubles.values()), *self.outbox.delivery.troubles.values(), *acting]

    def answer(self, approval: Approval, audit: Audit) -> Outcome:
        """Take a person's answer to a decision; return when its outcome is stored, or waits for the store.

        From any thread but the engine's.

        Raises:
            StoreError: the answer could not be stored, and has no effect.
            TimeoutError: detection is too busy.
        """
        self.store.decisions.write_approvals([approval])  # here: a store that hangs must not hold judging up
        self.store.audit.write([audit])
        outcome = self._judge.submit(self._answer, approval).result(ANSWER_S)
        if not any(d.outcome in ("approved", "rejected") for d in outcome.decisions):  # the same line, corrected
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
        """Store a silence that a person made or ended, and apply it. From any thread but the engine's.

        Raises:
            StoreError: it could not be stored, and has no effect.
        """
        self.store.audit.write([audit])
        self.store.silences.write([silence])
        self.outbox.silences.take(silence)
        self._judge.submit(self._note_maintenance)

    def of_engine(self, call: Callable[[Engine], T]) -> T:
        """Return what `call` finds in the engine, made in its thread. From any other thread.

        Raises:
            TimeoutError: detection is too busy.
        """
        return self._judge.submit(call, self.engine).result(ANSWER_S)

    def take_outages(self, outages: Mapping[str, NodeOutage]) -> None:
        """Judge changed outages: node -> its newest. From any thread; returns at once."""

        def take() -> None:
            known = self.engine.duties
            news = of_outages(outage for node, outage in outages.items() if known.get(node) != outage)
            self._guarded(lambda: self.engine.on_duties(outages, self.now_ms()), news=news)

        self._judge.submit(take)

    def _take_gpu_outages(self, outages: Mapping[str, NodeOutage]) -> None:
        """Judge changed outages of single GPUs: UUID -> its newest. From any thread; returns at once."""

        def take() -> None:
            known = self.engine.decider.gpus.outages
            news = of_outages(outage for uuid, outage in outages.items() if known.get(uuid) != outage)
            self._guarded(lambda: self.engine.on_duties(self.engine.duties, self.now_ms(), outages), news=news)

        self._judge.submit(take)

    def take_survey(self, survey: Survey) -> None:
        """Judge what the schedulers say of their nodes. From any thread; returns at once."""
        self._judge.submit(lambda: self.engine.on_survey(survey))

    def take_failed(self, actions: Sequence[Action]) -> None:
        """Judge actions that failed, and report them. From any thread; returns at once."""

        def take() -> None:
            self.engine.on_failed(actions)
            self._report(of_actions(actions))

        self._judge.submit(take)

    def _report(self, news: Sequence[IncidentUpdate]) -> None:
        """Report news, each piece once; nothing old, as after a start."""
        after_ms = self.now_ms() - OLD_MS
        self.saving.put(Outcome(), (), news=[piece for piece in news if piece.ts_ms >= after_ms])

    def judge_now(self, call: Callable[[Engine], Outcome]) -> bool:
        """Make a call of the engine; return whether its outcome is stored. Blocks: not from the event loop.

        Raises:
            RuntimeError: this collector stops.
        """
        self._judge.submit(self._guarded, lambda: call(self.engine)).result()
        return not len(self.saving)

    def judge_events(self) -> None:
        events = self._events.take()
        for at_ms, group in moments(events, self._event_due_ms):
            self._judge_together(at_ms, group)
        if events:
            self.ticks.troubles.pop("events", None)

    def _event_due_ms(self, event: Event) -> int:
        """Return when an event is judged: at its receipt, as in a replay.

        What a crash left is judged when judging began, or now if the clock has gone back behind that.
        """
        now_ms = self.now_ms()
        return now_ms if event.received_ms is None else max(event.received_ms, min(self.began_ms, now_ms))

    def _judge_together(self, at_ms: int, events: list[Event]) -> None:
        self.in_force.origins.take_events(events, at_ms)
        self._guarded(lambda: self.engine.on_events(events, at_ms), events)

    def _judge_left(self, bucket: Bucket | None = None) -> None:
        """Judge what a crash left, once its node reports again: it may have booted since, or lost GPUs.

        After `LEFT_MS` the events of silent nodes are judged too. `bucket`: the newest.
        """
        if not self._left:
            return
        now_ms = self.now_ms()
        all_ = not self.began_ms <= now_ms < self.began_ms + LEFT_MS
        reporting = frozenset() if bucket is None else self._reporting(bucket)
        due = [event for event in self._left if all_ or event.node in reporting]
        if due:
            self._left = [event for event in self._left if not (all_ or event.node in reporting)]
            self._judge_together(now_ms, due)

    def _reporting(self, bucket: Bucket) -> frozenset[str]:
        rows = bucket.node_rows + np.bincount(self.index.gpu_node, bucket.gpu_rows, self.index.node_count)
        return frozenset(self.index.nodes[n].name for n in np.flatnonzero(rows > 0).tolist())

    def judge_nothing(self) -> None:
        """Do what is due with each bucket, when none can be read."""
        self._note_settings()
        self._judge_left()

    def judge_bucket(self, bucket: Bucket, inventories: Sequence[InventoryReport] = ()) -> None:
        for ts_ms, node, facts in inventories:
            self.engine.on_inventory(node, facts, ts_ms)
        self._note_settings()
        self.in_force.origins.take_bucket(bucket)
        # At the time when this bucket was due, so that a late call judges as one in time would.
        self._guarded(lambda: self.engine.on_bucket(bucket, bucket.end_ms + self.lag_ms))
        self._judge_left(bucket)
        self.buckets.newest = bucket
        self.ticks.newest_end_ms = bucket.end_ms
        self.ticks.done += 1

    def _guarded(
        self, call: Callable[[], Outcome], events: Sequence[Event] = (), news: Sequence[IncidentUpdate] = ()
    ) -> None:
        try:
            self._note_step()
            outcome = call()
        except Exception as error:  # noqa: BLE001  # one bad tick must not end detection for the fleet
            self.ticks.failed(error, self.now_ms())
            return
        self.saving.put(outcome, events, news=news)
        self.ticks.note_detector_errors(self.engine.errors)
        self.incidents = self.engine.incidents  # only now: what has been shown must survive a crash

    def _note_step(self) -> None:
        """Report a step of this machine's clock to the engine before it judges, and to the audit for the next start."""
        step = self._clock.step()
        if step is None:
            return
        at_ms, step_ms = step
        self.engine.on_clock_set(at_ms, step_ms)
        text = f"this collector's clock was set by {step_ms / 1000:+.0f} s; the guard counts the time that passed"
        log.warning("%s", text)
        self.saving.put(Outcome(), (), [Audit(f"clock {at_ms}", at_ms, "drover", CLOCK, "", text, state=str(step_ms))])

    def _engine(self, started_ms: int) -> Engine:
        live = LiveFleet(
            self._leaving,
            self._gpu_hindrance,
            unproven=self.in_force.origins.is_unproven,
            leaving_gpus=self._leaving_gpus,
            held=self._held,
        )
        engine = Engine(self.index, self.policy, started_ms, ceiling=self.ceiling, live=live)
        if self.dispatcher is not None and self.dispatcher.surveys:
            engine.on_survey(UNANSWERED)
        return engine

    def _note_settings(self) -> None:
        """Apply what people have set meanwhile: policy and maintenance."""
        self._poll_policy()
        self._note_maintenance()

    def _note_maintenance(self) -> None:
        """Set which nodes are in maintenance now: the engine has no clock."""
        silences, now_ms = self.outbox.silences, self.now_ms()
        self.engine.decider.maintenance = silences.held(now_ms)
        self.engine.context.maintained = silences.held_since(now_ms)

    def _poll_policy(self) -> None:
        """Put a changed policy in force. A bad file is reported, and changes nothing."""
        try:
            policy = self.in_force.poll()
        except Exception as error:  # noqa: BLE001  # a defect must not cost the bucket that waits to be judged
            self.ticks.failed(error, self.now_ms())
            return
        if self.in_force.trouble:
            self.ticks.troubles["policy"] = self.in_force.trouble
        elif policy is not None:
            self.ticks.troubles.pop("policy", None)
            self.engine.set_policy(policy)
            self._audit_policy("the policy's file", "the file has changed")

    def _audit_policy(self, by: str, why: str) -> None:
        line = self.in_force.audit_line(by, why, self.now_ms())
        if line is not None:
            self.saving.put(Outcome(), (), [line])  # not here: a store that hangs must not hold judging up

    def _follow(self) -> None:
        now_ms = self.now_ms()
        self.store.entities.refresh()
        incidents = self.store.incidents.newest("all", now_ms - RESTORED_MS)
        self._followed = True
        self.outbox.silences.load(self.store.silences.newest(now_ms - SILENCES_MS))
        self.outbox.notes.load(self.store.audit.notes())
        engine = self._engine(self.started_ms)
        engine.follow(incidents, self.store.buckets.row_counts(self.index, now_ms - REPORTING_MS, REPORTING_MS))
        self.engine, self.incidents = engine, engine.incidents
        self.buckets.newest = None

    def _forget(self) -> None:
        self._events.forget()
        self._left = []
        self.saving.forget()
        self._follower.forget()
        self.buckets.pauses.newest = None
        self.ticks.troubles.clear()

    def _restore(self) -> None:
        now_ms = self.now_ms() if self.store.shared else self.started_ms
        if self.store.shared:
            self.store.catch_up()
            self.store.entities.refresh()
            self._forget()
            self.engine = self._engine(now_ms)
            self.buckets.next_ms = now_ms // BUCKET_MS * BUCKET_MS
            self.began_ms = now_ms
            if self._followed:  # agents of the collector that is gone need a while to reconnect
                self.buckets.pauses.newest = (now_ms, now_ms)
        found = history(self.store, now_ms)
        self.buckets.past = past = Past(self.store, self.index, self.buckets.inventories, self.buckets.next_ms, now_ms)
        self.buckets.newest = None
        self._clock.reset()
        for at_ms, step_ms in found.steps:
            if at_ms <= now_ms:
                self.engine.on_clock_set(at_ms, step_ms)
        self.engine.begin(found.incidents, found.judged, found.decisions, found.duties, past.held)
        self._guarded(functools.partial(self.engine.on_duties, self.engine.duties, now_ms, found.gpu_outages))
        waits = {e.id for e in found.unjudged if PROMPT_MS < now_ms - (e.received_ms or now_ms) <= HISTORY_MS}
        self._left = [e for e in found.unjudged if e.id in waits]
        self._events.resume([e for e in found.unjudged if e.id not in waits])
        self._follower.know(found.unjudged)
        self.incidents = self.engine.incidents
        if self.store.shared:
            self.buckets.pauses.awake_ms = self.now_ms()  # not what this took
        self.outbox.silences.load(self.store.silences.newest(now_ms - SILENCES_MS))
        self.outbox.notes.load(self.store.audit.notes())
        self._note_maintenance()
        self.outbox.start()
        messages = self.outbox.enqueue(found.incidents)
        self.in_force.audited = next((line.state for line in self.store.audit.read(what="policy", limit=1)), "")
        self._audit_policy("the collector's start", "in force from this start on")
        self.saving.put(Outcome(), (), [start_line(self.store, self.now_ms())])
        self._report([*of_decisions(self.engine.decider.standing.values()), *of_outages(found.duties.values())])
        if self.dispatcher is not None:  # before the decisions below, which it must take
            self.dispatcher.start(self.policy.most_mode)
        self._guarded(functools.partial(self.engine.on_duties, found.duties, now_ms))
        for approval in found.approvals:  # whose decision still waits: a stop came in between
            self._guarded(functools.partial(self.engine.on_approval, approval, now_ms))
        if found.incidents or self.buckets.newest:
            log.info(
                "restored %d incidents and %d events; %d events and %d messages had been left over",
                len(found.incidents), len(found.judged), len(found.unjudged), messages,
            )  # fmt: skip
