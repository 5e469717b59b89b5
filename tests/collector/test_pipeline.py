"""The pipeline around a real store and a real engine, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from drover_collector.arrivals import MAX_EVENTS
from drover_collector.buckets import BUCKET_MS, Bucket
from drover_collector.engine import WINDOW_BUCKETS, Engine, Outcome
from drover_collector.fleet_index import FleetIndex
from drover_collector.notify import Outbox
from drover_collector.pauses import PAUSE_MS
from drover_collector.pipeline import MAX_BEHIND, Pipeline
from drover_collector.pipeline_history import history
from drover_collector.policy import Policy
from drover_collector.policy_reload import PolicyWatch
from drover_collector.store import Store, StoreError
from drover_proto.catalog import Scope
from drover_proto.events import Act, Action, ActionState, Decision, Event, EventKind, Health, Incident, Severity, Wanted
from testbed.collected import small_index, write_entities, write_ticks

T0 = 1_800_000_000_000
LAG_MS = 7000


class Clock:
    def __init__(self, now_ms: int = T0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def index() -> FleetIndex:
    return small_index()


def pipeline_of(store: Store, index: FleetIndex, clock: Clock) -> Pipeline:
    outbox = Outbox(store, [], "http://console", now_ms=clock)
    return Pipeline(index, store, Policy.load(), outbox, lag_ms=LAG_MS, now_ms=clock, wake_s=0.005)


@contextlib.asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[Pipeline]:
    await pipeline.start()
    task = asyncio.create_task(pipeline.run())
    try:
        yield pipeline
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pipeline.stop()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        await asyncio.sleep(0.005)


async def advance(pipeline: Pipeline, clock: Clock, to_ms: int) -> None:
    """Move the clock as real time does, in steps shorter than a pause, and let every bucket be judged."""
    while clock.now_ms < to_ms:
        clock.now_ms = min(to_ms, clock.now_ms + PAUSE_MS - 1000)
        await until(lambda: pipeline.pauses.awake_ms == clock.now_ms, "the heartbeat saw the time")
    due = (to_ms - LAG_MS) // BUCKET_MS * BUCKET_MS
    if due > T0:
        await until(lambda: pipeline.next_ms >= due and not pipeline.busy, "all due buckets judged")


def xid(number: int, node: str = "n1", ts_ms: int = T0 + 1000) -> Event:
    return Event(
        f"{node}/spool/{number}", ts_ms, node, 1, EventKind.XID, "79", "GPU has fallen off the bus.", "kmsg",
        received_ms=ts_ms,
    )  # fmt: skip


def test_a_healthy_fleet_becomes_healthy_and_raises_nothing(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 60_000)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            assert pipeline.engine.health_of("n1", 1)[0] is Health.UNKNOWN
            await advance(pipeline, clock, T0 + 60_000 + LAG_MS)
            assert pipeline.ticks.done == 6
            assert pipeline.ticks.newest_end_ms == T0 + 60_000
            assert pipeline.engine.health_of("n1", 1) == (Health.HEALTHY, "")
            assert dict(pipeline.incidents) == {}
            assert pipeline.troubles() == []

    asyncio.run(scenario())


def test_an_event_becomes_a_stored_incident_at_once(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock(T0 + 1500)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            store.write_events([xid(1)])
            pipeline.take_events([xid(1)])
            await until(lambda: bool(pipeline.incidents), "an incident is told")
            (incident,) = store.incidents("open")  # what is told is stored
            assert (incident.node, incident.gpu, incident.cause) == ("n1", 1, "xid_79")
            assert incident.severity is Severity.CRITICAL
            assert pipeline.incidents[incident.id] == incident
            assert pipeline.ticks.done == 0

    asyncio.run(scenario())


def test_an_event_does_not_wait_for_the_past_to_be_read(
    store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minutes before the start, which take a while of a large fleet: meanwhile events are judged, and buckets wait.
    A store that fails is asked again."""
    go_on, asked = threading.Event(), list[int]()
    read = store.past_buckets

    def past_buckets(index: FleetIndex, start_ms: int, count: int, *, values: bool = True) -> list[Bucket]:
        asked.append(start_ms)
        if len(asked) == 2:
            assert go_on.wait(30)
            raise StoreError("not now")
        return read(index, start_ms, count, values=values)

    async def scenario() -> None:
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 620_000)
        clock = Clock(T0 + 600_500)
        monkeypatch.setattr(store, "past_buckets", past_buckets)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            await until(lambda: len(asked) == 2, "the past is being read")
            pipeline.take_events([xid(1, ts_ms=T0 + 600_400)])
            await until(lambda: bool(store.incidents("open")), "the event is judged and stored")
            assert (pipeline.ticks.done, pipeline.past is None) == (0, False)
            assert any("is judged in a moment" in text for text in pipeline.troubles())
            go_on.set()
            await until(lambda: pipeline.past is None, "the past is there")
            await advance(pipeline, clock, T0 + 610_000 + LAG_MS)
            assert pipeline.ticks.done == 1
            assert len(pipeline.engine.buckets) == WINDOW_BUCKETS
            assert pipeline.ticks.store_failures == 1
        assert asked[1] == asked[2]
        assert asked[1:] == sorted(asked[1:])
        assert [i.cause for i in store.incidents("open")] == ["xid_79"]

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", ["past_buckets", "closing_bucket"])
def test_what_people_set_holds_also_while_no_bucket_can_be_read(
    store: Store, index: FleetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Events are judged meanwhile, and whoever stops Drover then means it."""
    path = tmp_path / "ours.toml"
    path.write_text('mode = "approve"\n')
    clock, asked = Clock(T0), list[int]()

    def fail(*_: object) -> list[Bucket]:
        asked.append(clock.now_ms)
        raise StoreError("not now")

    async def scenario() -> None:
        outbox = Outbox(store, [], "http://console", now_ms=clock)
        pipeline = Pipeline(
            index, store, Policy.load(path), outbox, lag_ms=LAG_MS, now_ms=clock, wake_s=0.005,
            watch=PolicyWatch(path),
        )  # fmt: skip
        await pipeline.start()
        monkeypatch.setattr(store, fails, fail)
        task = asyncio.create_task(pipeline.run())
        path.write_text('mode = "observe"\n')
        if fails == "closing_bucket":
            await until(lambda: pipeline.past is None, "the past is there")
            await advance(pipeline, clock, T0 + 3 * BUCKET_MS + LAG_MS)
        await until(lambda: pipeline.policy.mode == "observe", "the policy is taken")
        assert asked
        assert pipeline.ticks.done == 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pipeline.stop()

    asyncio.run(scenario())


def test_an_event_that_another_collector_stores_during_a_start_is_still_to_be_judged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that counted as judged the engine would say that it was told already."""
    events, unjudged = store.events, store.unjudged_events

    def then_another(read: Callable[..., list[Event]]) -> Callable[..., list[Event]]:
        def reads(*args: int, **more: int) -> list[Event]:
            found = read(*args, **more)
            store.write_events([xid(1)])
            return found

        return reads

    monkeypatch.setattr(store, "events", then_another(events))
    monkeypatch.setattr(store, "unjudged_events", then_another(unjudged))
    found = history(store, T0 + 60_000)
    assert (found.judged, [event.id for event in found.unjudged]) == ([], [xid(1).id])


def test_a_restart_raises_no_second_alarm(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 120_000, silent=["n2"])
        clock = Clock()
        store.write_events([xid(1)])
        async with running(pipeline_of(store, index, clock)) as first:
            clock.now_ms = T0 + 1500
            first.take_events([xid(1)])
            await advance(first, clock, T0 + 60_000 + LAG_MS)
            before = {i.id: i for i in store.incidents("open")}
            assert before
        again = Clock(clock.now_ms + 2000)
        async with running(pipeline_of(store, index, again)) as second:
            assert set(second.incidents) == set(before)
            second.take_events([xid(1)])  # sent again by the agent, whose acknowledgement was lost
            await advance(second, again, T0 + 120_000 + LAG_MS)
            assert {i.id for i in store.incidents("all") if i.cause == "xid_79"} == {
                i.id for i in before.values() if i.cause == "xid_79"
            }

    asyncio.run(scenario())


def test_an_event_that_a_crash_left_unjudged_is_judged_after_the_restart(store: Store, index: FleetIndex) -> None:
    """Stored and acknowledged, then kill -9: the agent will not send it again, so nobody else would tell."""

    async def scenario() -> None:
        day = 86_400_000
        store.write_events([xid(1), xid(2, "n2", T0 - day), xid(3, "n3", T0 - 30 * day)])
        async with running(pipeline_of(store, index, Clock(T0 + 5000))):
            await until(lambda: len(store.incidents("open")) == 2, "what was left over is judged")
            assert {i.node for i in store.incidents("open")} == {"n1", "n2"}, "what is a month old alarms nobody"
        assert store.unjudged_events(T0 + 5000, 10) == []
        versions = {i.id: i.version for i in store.incidents("all")}
        async with running(pipeline_of(store, index, Clock(T0 + 9000))):
            pass
        assert {i.id: i.version for i in store.incidents("all")} == versions, "once is enough"

    asyncio.run(scenario())


def test_events_count_as_judged_only_when_their_outcome_is_stored(
    store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise StoreError("no space left")

    async def scenario() -> None:
        store.write_events([xid(1)])
        with monkeypatch.context() as patched:
            patched.setattr(store, "write_incidents", full)
            async with running(pipeline_of(store, index, Clock(T0 + 5000))) as pipeline:
                await until(lambda: pipeline.ticks.store_failures > 0, "the store refuses")
        assert [e.id for e in store.unjudged_events(T0 + 5000, 10)] == [xid(1).id]

    asyncio.run(scenario())


class Desk:
    """As much of the desk that acts as the pipeline asks for; what is given to it before its start is not taken."""

    def __init__(self) -> None:
        self.on_duties: list[object] = []
        self.on_away: list[object] = []
        self.on_failed: list[object] = []
        self.troubles: dict[str, str] = {}
        self.acting = False
        self.taken: list[str] = []

    def start(self, _mode: str) -> None:
        self.acting = True

    def stop(self) -> None:
        self.acting = False

    def going(self) -> set[str]:
        return set()

    def take(self, decisions: Sequence[Decision], _incidents: object) -> None:
        if self.acting:
            self.taken += [d.id for d in decisions]


def test_what_a_start_decides_is_acted_on(store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Decision("d1", "inc1", T0, "n1", Wanted.DRAIN, "enforce", "act", "xid", "out of service so far")

    async def scenario() -> None:
        pipeline, desk = pipeline_of(store, index, Clock()), Desk()
        pipeline.act_by(desk)  # type: ignore[arg-type]  # as much of a desk as is asked for
        monkeypatch.setattr(pipeline.engine, "on_duties", lambda *_: Outcome(decisions=(made,)))
        await pipeline.start()
        await pipeline.stop()
        assert desk.taken == ["d1"]

    asyncio.run(scenario())


def test_an_action_that_failed_is_known_to_who_decides_and_told(store: Store, index: FleetIndex) -> None:
    made = Decision("d1", "inc1", T0, "n1", Wanted.DRAIN, "enforce", "act", "xid", "it fell off")
    failed = Action("a1", "d1", "inc1", "n1", Act.DRAIN, "slurm", ActionState.FAILED, T0 + 1, "given up")

    async def scenario() -> None:
        pipeline, desk = pipeline_of(store, index, Clock()), Desk()
        pipeline.act_by(desk)  # type: ignore[arg-type]  # as much of a desk as is asked for
        await pipeline.start()
        pipeline.engine.decider.standing["inc1", "n1"] = made
        for told in desk.on_failed:
            told([failed])  # type: ignore[operator]  # a callable
        await pipeline.stop()
        assert pipeline.engine.decider.out() == set()
        assert [t for t in pipeline.troubles() if "1 actions failed" in t and t.endswith("drain n1 first: given up")]

    asyncio.run(scenario())


def test_a_pause_of_this_process_is_no_silence_of_the_nodes(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        resumed = T0 + 200_000
        write_ticks(store, index, T0, T0 + 40_000)
        write_ticks(store, index, resumed + 5_000, resumed + 100_000)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            await advance(pipeline, clock, T0 + 40_000 + LAG_MS)
            clock.now_ms = resumed  # SIGSTOP, SIGCONT
            await advance(pipeline, clock, resumed + 90_000 + LAG_MS)
            assert pipeline.ticks.newest_end_ms == resumed + 90_000
            assert [i.summary for i in store.incidents("all")] == []

    asyncio.run(scenario())


def test_a_node_that_falls_silent_is_found(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 40_000)
        write_ticks(store, index, T0 + 40_000, T0 + 100_000, silent=["n3"])
        async with running(pipeline_of(store, index, clock)) as pipeline:
            await advance(pipeline, clock, T0 + 100_000 + LAG_MS)
        (incident,) = store.incidents("open")
        assert (incident.node, incident.cause) == ("n3", "silent")

    asyncio.run(scenario())


def test_a_node_whose_agent_sends_too_late_for_its_buckets_is_not_silent(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 40_000)
        write_ticks(store, index, T0 + 40_000, T0 + 100_000, silent=["n3"])
        pipeline = pipeline_of(store, index, clock)
        pipeline.spoke_ms = lambda: {"n3": clock.now_ms - 1000}
        async with running(pipeline):
            await advance(pipeline, clock, T0 + 100_000 + LAG_MS)
            assert pipeline.newest is not None
            assert pipeline.newest.late == {"n3"}
            assert pipeline.engine.health_of("n3")[0] is Health.UNKNOWN
        assert store.incidents("all") == []

    asyncio.run(scenario())


def test_after_a_long_stop_what_was_healthy_is_unknown(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 60_000)
        soon, late = Clock(T0 + 65_000), Clock(T0 + 300_000)
        async with running(pipeline_of(store, index, soon)) as pipeline:
            await until(lambda: pipeline.past is None, "the past is there")
            assert pipeline.engine.health_of("n1", 1)[0] is Health.HEALTHY
            assert pipeline.newest is not None
        async with running(pipeline_of(store, index, late)) as pipeline:
            await until(lambda: pipeline.past is None, "the past is there")
            assert pipeline.engine.health_of("n1", 1)[0] is Health.UNKNOWN
            assert store.incidents() == []

    asyncio.run(scenario())


class Failing(Engine):
    """An engine with a bug in one call."""

    failures = 1

    def on_bucket(self, bucket: Bucket, now_ms: int) -> Outcome:
        if self.failures:
            self.failures -= 1
            raise KeyError("a bug")
        return super().on_bucket(bucket, now_ms)


def test_a_failing_tick_is_counted_and_shown_and_the_next_goes_on(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        pipeline = pipeline_of(store, index, clock)
        pipeline.engine = Failing(index, pipeline.policy, T0)
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 20_000)
        async with running(pipeline):
            await advance(pipeline, clock, T0 + 20_000 + LAG_MS)
            assert (pipeline.ticks.failures, pipeline.ticks.done) == (1, 2)
            assert any("KeyError" in text for text in pipeline.troubles())

    asyncio.run(scenario())


def test_far_behind_the_oldest_buckets_are_left_out(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        pipeline = pipeline_of(store, index, clock)
        late = T0 + 100 * BUCKET_MS
        await pipeline.start()
        clock.now_ms = late + BUCKET_MS + LAG_MS
        pipeline.pauses.awake_ms = clock.now_ms  # awake all the time, with a store that was slow
        task = asyncio.create_task(pipeline.run())
        await until(lambda: pipeline.next_ms > late and not pipeline.busy, "caught up")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pipeline.stop()
        assert pipeline.ticks.skipped == 100 - MAX_BEHIND
        assert pipeline.ticks.newest_end_ms == late + BUCKET_MS

    asyncio.run(scenario())


class Refusing:
    """Stands before a store and refuses the next writes of incidents."""

    def __init__(self, store: Store, times: int) -> None:
        self._store = store
        self.times = times

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def write_incidents(self, incidents: list[Incident]) -> None:
        if self.times:
            self.times -= 1
            raise StoreError("disk full")
        self._store.write_incidents(incidents)


def test_what_the_store_refuses_is_written_at_the_next_tick(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock(T0)
        refusing = Refusing(store, 1)
        async with running(pipeline_of(refusing, index, clock)) as pipeline:  # type: ignore[arg-type]  # a store but for one method
            pipeline.take_events([xid(1)])
            await until(lambda: refusing.times == 0, "refused once")
            await until(lambda: bool(pipeline.troubles()), "said so")
            assert pipeline.troubles() == ["The store fails: disk full."]
            assert store.incidents() == []
            await advance(pipeline, clock, T0 + BUCKET_MS + LAG_MS)
            await until(lambda: len(store.incidents()) == 1, "written")
            await until(lambda: pipeline.troubles() == [], "and nothing is wrong any more")

    asyncio.run(scenario())


def test_an_outcome_that_cannot_be_stored_keeps_back_no_other(
    store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clock = Clock(T0)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            with monkeypatch.context() as patched:

                def wrong(_incidents: object) -> int:
                    raise KeyError("a bug")

                patched.setattr(pipeline.outbox, "enqueue", wrong)
                pipeline.take_events([xid(1)])
                await until(lambda: pipeline.ticks.lost_outcomes == 1, "given up")
            assert any("could not be stored" in text for text in pipeline.troubles())
            pipeline.take_events([xid(2, "n2")])
            await until(lambda: len(store.incidents()) == 2, "the next is stored")

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["pauses.notice", "judge_events", "_tick"])
def test_a_defect_ends_no_task(store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def scenario() -> None:
        clock = Clock(T0 + BUCKET_MS + LAG_MS)
        pipeline = pipeline_of(store, index, clock)
        pipeline.next_ms = T0
        async with running(pipeline):
            with monkeypatch.context() as patched:

                def wrong(*_: object) -> None:
                    raise KeyError("a bug")

                patched.setattr(
                    pipeline.pauses if where == "pauses.notice" else pipeline, where.rpartition(".")[2], wrong
                )
                pipeline.take_events([xid(1)])
                await until(lambda: pipeline.ticks.failures > 0, "it failed")
                assert any("KeyError" in text for text in pipeline.troubles())
            clock.now_ms += 1000
            pipeline.take_events([xid(2, "n2")])
            await until(lambda: len(store.incidents()) >= 1, "events are judged")
            await until(lambda: pipeline.next_ms > T0, "buckets are looked at")
            await until(lambda: pipeline.pauses.awake_ms == clock.now_ms, "the heart beats")

    asyncio.run(scenario())


def test_a_flood_of_events_is_bounded_and_said(store: Store, index: FleetIndex) -> None:
    pipeline = pipeline_of(store, index, Clock())
    pipeline.take_events([xid(1)] * (MAX_EVENTS + 5))
    assert pipeline.ticks.lost_events == 5
    assert "5 events came faster" in pipeline.troubles()[0]


def rolled_up(store: Store) -> set[int]:
    """Starts of the 10 s that are rolled up, in seconds after T0."""
    found = store.fold(Scope.GPU, [(T0 - 600_000, T0 + 600_000)], 10_000, level="10s", metrics=["power_w"])
    return {(start - T0) // 1000 for start in found.start_ms.tolist()}


def test_judged_buckets_are_rolled_up_and_those_of_a_pause_later(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 150_000)
        pipeline = pipeline_of(store, index, clock)
        store.settle_ms = 0
        async with running(pipeline):
            await advance(pipeline, clock, T0 + 30_000 + LAG_MS)
            assert rolled_up(store) == {0, 10, 20}
            clock.now_ms = T0 + 90_000 + LAG_MS  # this process stood still: nothing is judged, nothing is lost
            await until(lambda: pipeline.next_ms >= T0 + 90_000 and not pipeline.busy, "on with the newest")
            await advance(pipeline, clock, T0 + 150_000 + LAG_MS + 3000)
            await until(
                lambda: rolled_up(store) == set(range(0, 150, 10)) and not store.open_marks(), "all made up for"
            )

    asyncio.run(scenario())


def test_rollups_that_fail_stop_no_detection(store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 40_000)

        def full(*_: object) -> None:
            raise StoreError("disk full")

        pipeline = pipeline_of(store, index, clock)
        store.settle_ms = 0
        async with running(pipeline):
            with monkeypatch.context() as patched:
                patched.setattr(store, "_write", full)
                await advance(pipeline, clock, T0 + 20_000 + LAG_MS)
            assert (pipeline.ticks.done, pipeline.ticks.store_failures) == (2, 2)
            await advance(pipeline, clock, T0 + 40_000 + LAG_MS + 3000)
            await until(lambda: rolled_up(store) == {0, 10, 20, 30}, "made up for")

    asyncio.run(scenario())
