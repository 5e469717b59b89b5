"""What happens with data once it is in: events and closed buckets are judged, what comes of it is stored and told.

All calls into the engine and all writes of its outcomes happen in one thread, in order; reads of buckets in another,
so that an event does not wait for a slow read. The gRPC servers run in the event loop and wait for neither.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from drover_collector.buckets import BUCKET_MS, Bucket
from drover_collector.engine import Engine, Outcome
from drover_collector.fleet_index import FleetIndex
from drover_collector.looks import HEARD_MS, Looks
from drover_collector.notify import Outbox
from drover_collector.policy import Policy
from drover_collector.store import Store, StoreError
from drover_collector.ticks import Rate, Ticks
from drover_proto.events import Event, Incident
from drover_proto.times import iso

log = logging.getLogger(__name__)

RESTORED_MS = 3_600_000  # how far back incidents and events are read at a start
RESTORED_BUCKETS = 60  # ten minutes: what the detectors' windows and baselines need to go on where they were
LATE_SETTLE_MS = 60_000  # a fleet that is behind tells late rows all the time; rolling up again after each is too dear
MAX_BEHIND = 30  # buckets; further behind, the oldest are left out
MAX_EVENTS = 100_000  # waiting for the engine; they are in the store already
MAX_UNSAVED = 1_000  # outcomes waiting for a store that does not take them
LATE_S = 0.5  # at a stretch, of each second: for rollups of what came late or was left out
PAUSE_MS = 5_000  # a loop that wakes every second and was away for this long: the process stood still
SETTLE_MS = 30_000  # after that, agents need this long to be back: their reconnect backoff


class Pipeline:
    """Engine, store and outbox of one fleet. `start`, then `run` until cancelled, then `stop`."""

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
    ) -> None:
        self.index = index
        self.store = store
        self.policy = policy
        self.outbox = outbox
        self.started_ms = now_ms()
        self.engine = Engine(index, policy, self.started_ms)
        self.leading = False  # detects; set by `start`, and ended by `stop` and `give_up`
        self.role: Callable[[], str] = lambda: "active"
        self.began_ms = self.started_ms  # to judge
        self._looks = Looks(store, index, now_ms)
        self.ticks = Ticks()
        self.rate = Rate()  # of samples taken in
        self.newest: Bucket | None = None
        self.incidents: Mapping[str, Incident] = {}  # the engine's, as of its newest call: for other threads to read
        self.now_ms = now_ms
        self.lag_ms = store.lag_ms = lag_ms
        store.settle_ms = LATE_SETTLE_MS
        self._wake_s = wake_s
        self._judge = ThreadPoolExecutor(1, "engine")
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsaved: deque[tuple[Outcome, Sequence[Event]]] = deque()  # with the events that were judged
        self.next_ms = self.started_ms // BUCKET_MS * BUCKET_MS  # a replay of an export begins with this one too
        self.busy = False  # a bucket is being read or judged
        self.awake_ms = self.started_ms
        self._followed = False  # another collector detected before this one
        self._pause: tuple[int, int] | None = None  # the newest time this process stood still

    async def start(self) -> None:
        """Takes up the history: open incidents, the newest buckets and events, messages not yet delivered.

        Raises:
            StoreError: the store cannot be read.
        """
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._judge, self._restore)
        self.leading = True
        self._arrived.set()  # for events that a crash left unjudged

    async def follow(self) -> None:
        """Instead of `start` and `run`: takes in what another collector found, and who reports.

        Raises:
            StoreError: the store cannot be read.
        """
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._judge, self._follow)

    async def give_up(self) -> None:
        """After `run`: another may judge. What is not stored is dropped; events that wait rest in the store."""
        self.leading = False
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._judge, self._forget)
        await loop.run_in_executor(None, self.outbox.stop)

    async def run(self) -> None:
        """Until cancelled; what goes wrong with one tick or event is logged and counted, and the next goes on."""
        async with asyncio.TaskGroup() as group:
            works = [self._run_heartbeat, self._run_events, self._run_buckets]
            if self.store.shared:
                works.append(lambda: self._looks.run(self._queue, self._store_failed))
            for work in works:
                group.create_task(self._keep_on(work))

    async def stop(self) -> None:
        """Judges the events that wait, stores what is unsaved, ends deliveries. The store stays open."""
        loop = asyncio.get_running_loop()
        if self.leading:
            await loop.run_in_executor(self._judge, self.judge_events)
            await loop.run_in_executor(self._judge, self._save)
            await loop.run_in_executor(None, self.outbox.stop)
            self.leading = False
        self._judge.shutdown()
        for outcome, _ in self._unsaved:
            log.error("not stored at the end: %d incidents, %d findings", len(outcome.incidents), len(outcome.findings))

    def take_events(self, events: Sequence[Event]) -> None:
        """Events that ingest has stored. May be called from any thread; returns at once.

        Of a store that other collectors write to as well they are all read from there, each once.
        """
        if self.store.shared:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._looks.wake.set)
            return
        self._queue(events)

    def take_unstored(self, events: Sequence[Event]) -> None:
        """Events that the store keeps waiting: they are judged all the same, and not again when they are stored.
        Otherwise like `take_events`."""
        if self.leading:
            self._looks.know(events)
            self._queue(events)

    def _queue(self, events: Sequence[Event]) -> None:
        room = MAX_EVENTS - len(self._events)
        if room < len(events):
            self.ticks.lost_events += len(events) - max(room, 0)
            self.ticks.troubles["events"] = (
                f"{self.ticks.lost_events} events came faster than they could be judged; they are stored, not judged."
            )
        self._events.extend(events[: max(room, 0)])
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._arrived.set)

    @property
    def waiting_events(self) -> int:
        """Events that are not judged yet."""
        return len(self._events)

    @property
    def waiting_outcomes(self) -> int:
        """Results that the store has not taken yet."""
        return len(self._unsaved)

    def troubles(self) -> list[str]:
        """Troubles of Drover itself, each a sentence."""
        return [*list(self.ticks.troubles.values()), *self.outbox.troubles]

    def _follow(self) -> None:
        now_ms = self.now_ms()
        self.store.refresh_entities()
        incidents = self.store.incidents("all", now_ms - RESTORED_MS)
        self._followed = True
        engine = Engine(self.index, self.policy, self.started_ms)
        engine.follow(incidents, self.store.heard(self.index, now_ms - HEARD_MS, HEARD_MS))
        self.engine, self.incidents = engine, engine.incidents
        self.newest = None

    def _forget(self) -> None:
        self._events.clear()
        self._unsaved.clear()
        self._looks.forget()
        self._pause = None
        self.ticks.troubles.clear()

    def _restore(self) -> None:
        now_ms = self.now_ms() if self.store.shared else self.started_ms
        if self.store.shared:
            self.store.catch_up()
            self.store.refresh_entities()
            self._forget()
            self.engine = Engine(self.index, self.policy, now_ms)
            self.next_ms = now_ms // BUCKET_MS * BUCKET_MS
            self.began_ms = now_ms
            if self._followed:  # agents of the one that is gone need a while to come to others
                self._pause = (now_ms, now_ms)
        incidents = self.store.incidents("open") + [
            i for i in self.store.incidents("closed", now_ms - RESTORED_MS) if i.closed_ms is not None
        ]
        unjudged = self.store.unjudged_events(now_ms, MAX_EVENTS)
        left = {e.id for e in unjudged}
        events = [e for e in self.store.events(now_ms - RESTORED_MS, now_ms, limit=MAX_EVENTS) if e.id not in left]
        self.newest = None
        self.engine.restore(incidents, self._recent(), sorted(events, key=lambda e: e.ts_ms))
        self._events.extend(unjudged)
        self._looks.know(unjudged)
        self.incidents = self.engine.incidents
        if self.store.shared:
            self.awake_ms = self.now_ms()  # not what this took
        self.outbox.start()
        told = self.outbox.enqueue(incidents)
        if incidents or self.newest:
            log.info(
                "restored %d incidents and %d events; %d events and %d messages had been left over",
                len(incidents), len(events), len(unjudged), told,
            )  # fmt: skip

    def _recent(self) -> Iterator[Bucket]:
        """Buckets of the last minutes; the newest that heard anything becomes `newest`."""
        for back in range(RESTORED_BUCKETS, 0, -1):
            bucket = self.store.bucket(self.index, self.next_ms - back * BUCKET_MS)
            self.newest = bucket if _heard(bucket) else self.newest
            # A time when no collector ran is no silence of the nodes. The last bucket goes in all the same: it tells
            # how old the rest is, so that what was healthy then is unknown now.
            if _heard(bucket) or back == 1:
                yield bucket

    async def _keep_on(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  # a defect must neither end detection nor go unseen
                self._failed(error)
                await asyncio.sleep(self._wake_s)

    async def _run_events(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await loop.run_in_executor(self._judge, self.judge_events)

    async def _run_heartbeat(self) -> None:
        while True:
            self._notice_pause(self.now_ms())
            await asyncio.sleep(self._wake_s)

    async def _run_buckets(self) -> None:
        while True:
            now_ms = self.now_ms()
            self._notice_pause(now_ms)
            due_ms = self.next_ms + BUCKET_MS + self.lag_ms
            if now_ms < due_ms:
                if due_ms - now_ms > 2 * BUCKET_MS + self.lag_ms:
                    self._clock_went_back(now_ms)
                if due_ms - now_ms > LATE_S * 2000:
                    await self._roll(lambda: self.store.roll_up_late(LATE_S))
                await asyncio.sleep(min(self._wake_s, (due_ms - now_ms) / 1000))
                continue
            self.busy = True
            try:
                await self._tick(now_ms, due_ms)
            finally:
                self.busy = False

    async def _tick(self, now_ms: int, due_ms: int) -> None:
        behind = (now_ms - due_ms) // BUCKET_MS
        if behind > MAX_BEHIND:
            skip = behind - MAX_BEHIND
            log.warning("%d buckets behind; %d from %s on are left out", behind, skip, iso(self.next_ms))
            self.ticks.skipped += skip
            self.next_ms += skip * BUCKET_MS
        if behind > 1:
            self.ticks.troubles["behind"] = f"Detection is {behind * BUCKET_MS // 1000} s behind; it is catching up."
        else:
            self.ticks.troubles.pop("behind", None)
        start_ms = self.next_ms
        self.next_ms += BUCKET_MS
        if self._stood_still(start_ms):
            log.info("bucket %s left out: this collector was not listening then", iso(start_ms))
            return
        began = time.perf_counter()
        try:
            bucket = await asyncio.to_thread(self.store.closing_bucket, self.index, start_ms)
        except StoreError as error:
            self._store_failed(error)
            return
        except Exception as error:  # noqa: BLE001  # nor may one unreadable bucket
            self._failed(error)
            return
        read = time.perf_counter()
        self.ticks.read_seconds += read - began
        await asyncio.get_running_loop().run_in_executor(self._judge, self.judge_bucket, bucket)
        self.ticks.judge_seconds += time.perf_counter() - read
        self.ticks.seconds = time.perf_counter() - began
        await self._roll(self.store.roll_up)

    async def _roll(self, work: Callable[[], object]) -> None:
        """Rollups; what fails is marked, and made later."""
        began = time.perf_counter()
        try:
            await asyncio.to_thread(work)
        except StoreError as error:
            self._store_failed(error)
        finally:
            self.ticks.roll_seconds += time.perf_counter() - began

    def judge_events(self) -> None:
        events = [self._events.popleft() for _ in range(len(self._events))]
        for at_ms, group in groupby(events, self._event_due_ms):
            self._judge_together(at_ms, list(group))
        if events:
            self.ticks.troubles.pop("events", None)

    def _event_due_ms(self, event: Event) -> int:
        """When an event is judged: at its receipt, as in a replay; what a crash left over, when judging began."""
        return self.now_ms() if event.received_ms is None else max(event.received_ms, self.began_ms)

    def _judge_together(self, at_ms: int, events: list[Event]) -> None:
        self._guarded(lambda: self.engine.on_events(events, at_ms), events)

    def judge_bucket(self, bucket: Bucket) -> None:
        # The time at which this bucket was due, so that one judged late is judged as it would have been in time.
        self._guarded(lambda: self.engine.on_bucket(bucket, bucket.end_ms + self.lag_ms))
        self.newest = bucket
        self.ticks.newest_end_ms = bucket.end_ms
        self.ticks.done += 1

    def _guarded(self, call: Callable[[], Outcome], events: Sequence[Event] = ()) -> None:
        try:
            outcome = call()
        except Exception as error:  # noqa: BLE001  # one bad tick must not end detection for the whole fleet
            self._failed(error)
            return
        if events or outcome.findings or outcome.incidents or outcome.decisions or outcome.health:
            self._unsaved.append((outcome, events))
        self._tell_detectors()
        self._save()
        self.incidents = self.engine.incidents  # only now: what has been shown must survive a crash

    def _failed(self, error: Exception) -> None:
        self.ticks.failures += 1
        log.error("detection failed", exc_info=error)
        self.ticks.troubles["engine"] = (
            f"Detection failed {self.ticks.failures} times, last at {iso(self.now_ms())} with"
            f" {type(error).__name__}; see the collector's log."
        )

    def _tell_detectors(self) -> None:
        for name, trouble in self.engine.troubles.items():
            text = (
                f"Detector {name} failed {trouble.count} times, last with {trouble.newest}; the others go on."
                " Please report it."
            )
            if self.ticks.troubles.get(f"detector {name}") != text:
                self.ticks.troubles[f"detector {name}"] = text
                log.error("%s", text)

    def _save(self) -> None:
        """Stores outcomes in order. One that fails stays first in line; writing one twice changes nothing."""
        try:
            while self._unsaved:
                outcome, events = self._unsaved[0]
                self.store.write_findings(list(outcome.findings))
                self.store.write_incidents(list(outcome.incidents))
                self.store.write_decisions(list(outcome.decisions))
                self.store.write_health([dataclasses.asdict(change) for change in outcome.health])
                self.outbox.enqueue(outcome.incidents)
                self.store.write_judged(events)
                self._unsaved.popleft()
            self.ticks.troubles.pop("store", None)
        except StoreError as error:
            self._store_failed(error)
            if self._unsaved:  # those before it were told when they came
                self._tell_unstored(self._unsaved[-1][0])
            if len(self._unsaved) > MAX_UNSAVED:
                self._give_up_oldest()
        except Exception as error:  # noqa: BLE001  # a defect: it would fail for ever, and keep back all after it
            self._failed(error)
            self._give_up_oldest()

    def _tell_unstored(self, outcome: Outcome) -> None:
        try:
            self.outbox.enqueue_unstored(outcome.incidents)
        except Exception as error:  # noqa: BLE001  # nor may this end detection
            self._failed(error)

    def _give_up_oldest(self) -> None:
        lost, _ = self._unsaved.popleft()
        self.ticks.lost_outcomes += 1
        self.ticks.troubles["outcomes"] = (
            f"{self.ticks.lost_outcomes} results of detection could not be stored, last at {iso(self.now_ms())};"
            " see the collector's log."
        )
        log.error("given up: %d incidents, %d findings", len(lost.incidents), len(lost.findings))

    def _store_failed(self, error: StoreError) -> None:
        self.ticks.store_failures += 1
        self.ticks.troubles["store"] = f"The store fails: {error}."
        log.warning("store: %s", error)

    def _notice_pause(self, now_ms: int) -> None:
        """A process that was stopped, or a machine that slept, heard nobody: that is no silence of the nodes."""
        if now_ms - self.awake_ms > PAUSE_MS:
            self._pause = (self.awake_ms, now_ms)
            log.warning("this process stood still from %s to %s", iso(self.awake_ms), iso(now_ms))
        self.awake_ms = now_ms

    def _stood_still(self, start_ms: int) -> bool:
        """Whether silence in a bucket may be this process's own: it was paused, or agents were still coming back."""
        if self._pause is None:
            return False
        paused_ms, resumed_ms = self._pause
        return start_ms + BUCKET_MS > paused_ms and start_ms < resumed_ms + SETTLE_MS

    def _clock_went_back(self, now_ms: int) -> None:
        self.next_ms = now_ms // BUCKET_MS * BUCKET_MS
        self.ticks.troubles["clock"] = f"The collector's clock went back at {iso(now_ms)}; check its time service."
        log.warning("the clock went back; going on with the bucket of %s", iso(self.next_ms))


def _heard(bucket: Bucket) -> bool:
    return bool(bucket.node_rows.any() or bucket.gpu_rows.any())
