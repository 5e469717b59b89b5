"""The pipeline around a real store where something fails: a defect, the store, a flood; and its rollups."""

from __future__ import annotations

import asyncio
import contextlib
from operator import attrgetter

import pytest

from drover_collector.engine.engine import Engine, Outcome
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.pipeline.bucket_loop import MAX_BEHIND
from drover_collector.pipeline.restore import MAX_EVENTS
from drover_collector.store import Store, StoreError
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Incident
from testbed.collected import small_index, write_entities, write_ticks
from testbed.pipelines import LAG_MS, T0, Clock, advance, pipeline_of, running, until, xid


@pytest.fixture
def index() -> FleetIndex:
    return small_index()


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
        pipeline.buckets.pauses.awake_ms = clock.now_ms  # awake all the time, with a store that was slow
        task = asyncio.create_task(pipeline.run())
        await until(lambda: pipeline.buckets.next_ms > late and not pipeline.buckets.busy, "caught up")
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
        self.incidents = RefusingIncidents(store, times)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class RefusingIncidents:
    def __init__(self, store: Store, times: int) -> None:
        self._table = store.incidents
        self.times = times

    def __getattr__(self, name: str) -> object:
        return getattr(self._table, name)

    def write(self, incidents: list[Incident]) -> None:
        if incidents and self.times:
            self.times -= 1
            raise StoreError("disk full")
        self._table.write(incidents)


def test_what_the_store_refuses_is_written_at_the_next_tick(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock(T0)
        refusing = Refusing(store, 1)
        async with running(pipeline_of(refusing, index, clock)) as pipeline:  # type: ignore[arg-type]  # a store but for one method
            pipeline.take_events([xid(1)])
            await until(lambda: refusing.incidents.times == 0, "refused once")
            await until(lambda: "The store fails: disk full." in pipeline.troubles(), "said so")
            assert store.incidents.newest() == []
            await advance(pipeline, clock, T0 + BUCKET_MS + LAG_MS)
            await until(lambda: len(store.incidents.newest()) == 1, "written")
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
            await until(lambda: len(store.incidents.newest()) == 2, "the next is stored")

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["buckets.pauses.notice", "judge_events", "buckets.tick"])
def test_a_defect_ends_no_task(store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def scenario() -> None:
        clock = Clock(T0 + BUCKET_MS + LAG_MS)
        pipeline = pipeline_of(store, index, clock)
        pipeline.buckets.next_ms = T0
        async with running(pipeline):
            with monkeypatch.context() as patched:

                def wrong(*_: object) -> None:
                    raise KeyError("a bug")

                of, _, name = where.rpartition(".")
                patched.setattr(attrgetter(of)(pipeline) if of else pipeline, name, wrong)
                pipeline.take_events([xid(1)])
                await until(lambda: pipeline.ticks.failures > 0, "it failed")
                assert any("KeyError" in text for text in pipeline.troubles())
            clock.now_ms += 1000
            pipeline.take_events([xid(2, "n2")])
            await until(lambda: len(store.incidents.newest()) >= 1, "events are judged")
            await until(lambda: pipeline.buckets.next_ms > T0, "buckets are looked at")
            await until(lambda: pipeline.buckets.pauses.awake_ms == clock.now_ms, "the heart beats")

    asyncio.run(scenario())


def test_a_flood_of_events_is_bounded_and_said(store: Store, index: FleetIndex) -> None:
    pipeline = pipeline_of(store, index, Clock())
    pipeline.take_events([xid(1)] * (MAX_EVENTS + 5))
    assert pipeline.ticks.lost_events == 5
    assert "5 events came faster" in pipeline.troubles()[0]


def rolled_up(store: Store) -> set[int]:
    """Starts of the 10 s that are rolled up, in seconds after T0."""
    found = store.rows.fold(Scope.GPU, [(T0 - 600_000, T0 + 600_000)], 10_000, level="10s", metrics=["power_w"])
    return {(start - T0) // 1000 for start in found.start_ms.tolist()}


def test_judged_buckets_are_rolled_up_and_those_of_a_pause_later(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 150_000)
        pipeline = pipeline_of(store, index, clock)
        store.dirty_ranges.settle_ms = 0
        async with running(pipeline):
            await advance(pipeline, clock, T0 + 30_000 + LAG_MS)
            assert rolled_up(store) == {0, 10, 20}
            clock.now_ms = T0 + 90_000 + LAG_MS  # this process stood still: nothing is judged, nothing is lost
            await until(
                lambda: pipeline.buckets.next_ms >= T0 + 90_000 and not pipeline.buckets.busy, "on with the newest"
            )
            await advance(pipeline, clock, T0 + 150_000 + LAG_MS + 3000)
            await until(
                lambda: rolled_up(store) == set(range(0, 150, 10)) and not store.dirty_ranges.all(), "all made up for"
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
        store.dirty_ranges.settle_ms = 0
        async with running(pipeline):
            with monkeypatch.context() as patched:
                patched.setattr(store.rollups, "_write", full)
                await advance(pipeline, clock, T0 + 20_000 + LAG_MS)
            assert (pipeline.ticks.done, pipeline.ticks.store_failures) == (2, 2)
            await advance(pipeline, clock, T0 + 40_000 + LAG_MS + 3000)
            await until(lambda: rolled_up(store) == {0, 10, 20, 30}, "made up for")

    asyncio.run(scenario())
