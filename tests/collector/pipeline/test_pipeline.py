"""The pipeline around a real store and a real engine, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from drover_collector.actions.gpu_outages import GpuOutageStore
from drover_collector.actions.outage_store import OutageStore
from drover_collector.engine.engine import WINDOW_BUCKETS, Outcome
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.notify import Outbox
from drover_collector.pipeline.pipeline import LEFT_MS, Pipeline, PipelineOptions
from drover_collector.pipeline.restore import history
from drover_collector.policy.policy import Policy
from drover_collector.policy.reload import PolicyWatch
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Event,
    EventKind,
    Health,
    RecommendedAction,
    Severity,
)
from testbed.collected import BUSY, small_index, write_entities, write_ticks
from testbed.pipelines import LAG_MS, T0, Clock, advance, pipeline_of, running, until, xid


@pytest.fixture
def index() -> FleetIndex:
    return small_index()


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
            store.events.write([xid(1)])
            pipeline.take_events([xid(1)])
            await until(lambda: bool(pipeline.incidents), "an incident is shown")
            (incident,) = store.incidents.newest("open")  # what is shown is stored
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
    read = store.buckets.read_past

    def past_buckets(index: FleetIndex, start_ms: int, count: int, *, values: bool = True) -> list[Bucket]:
        asked.append(start_ms)
        if len(asked) == 2:
            assert go_on.wait(120)
            raise StoreError("not now")
        return read(index, start_ms, count, values=values)

    async def scenario() -> None:
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 620_000)
        clock = Clock(T0 + 600_500)
        monkeypatch.setattr(store.buckets, "read_past", past_buckets)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            await until(lambda: len(asked) == 2, "the past is being read")
            pipeline.take_events([xid(1, ts_ms=T0 + 600_400)])
            await until(lambda: bool(store.incidents.newest("open")), "the event is judged and stored")
            assert (pipeline.ticks.done, pipeline.buckets.past is None) == (0, False)
            assert any("minutes before the start are being read" in text for text in pipeline.troubles())
            go_on.set()
            await until(lambda: pipeline.buckets.past is None, "the past is there")
            await advance(pipeline, clock, T0 + 610_000 + LAG_MS)
            assert pipeline.ticks.done == 1
            assert len(pipeline.engine.buckets) == WINDOW_BUCKETS
            assert pipeline.ticks.store_failures == 1
        assert asked[1] == asked[2]
        assert asked[1:] == sorted(asked[1:])
        assert [i.cause for i in store.incidents.newest("open")] == ["xid_79"]

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", ["read_past", "read_closing"])
def test_what_people_set_holds_also_while_no_bucket_can_be_read(
    store: Store, index: FleetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Events are judged meanwhile, and a person who stops Drover then means it."""
    path = tmp_path / "ours.toml"
    path.write_text('mode = "approve"\n')
    clock, asked = Clock(T0), list[int]()

    def fail(*_: object) -> list[Bucket]:
        asked.append(clock.now_ms)
        raise StoreError("not now")

    async def scenario() -> None:
        outbox = Outbox(store, [], "http://console", now_ms=clock)
        pipeline = Pipeline(
            index, store, Policy.load(path), outbox, PipelineOptions(lag_ms=LAG_MS, now_ms=clock, wake_s=0.005,
            watch=PolicyWatch(path)),
        )  # fmt: skip
        await pipeline.start()
        monkeypatch.setattr(store.buckets, fails, fail)
        task = asyncio.create_task(pipeline.run())
        path.write_text('mode = "observe"\n')
        if fails == "read_closing":
            await until(lambda: pipeline.buckets.past is None, "the past is there")
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
    """Of one that counted as judged the engine would say that it was reported already."""
    events, unjudged = store.events.read, store.events.unjudged

    def then_another(read: Callable[..., list[Event]]) -> Callable[..., list[Event]]:
        def reads(*args: int, **more: int) -> list[Event]:
            found = read(*args, **more)
            store.events.write([xid(1)])
            return found

        return reads

    monkeypatch.setattr(store.events, "read", then_another(events))
    monkeypatch.setattr(store.events, "unjudged", then_another(unjudged))
    found = history(store, T0 + 60_000)
    assert (found.judged, [event.id for event in found.unjudged]) == ([], [xid(1).id])


def test_a_restart_raises_no_second_alarm(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 120_000, silent=["n2"])
        clock = Clock()
        store.events.write([xid(1)])
        async with running(pipeline_of(store, index, clock)) as first:
            clock.now_ms = T0 + 1500
            first.take_events([xid(1)])
            await advance(first, clock, T0 + 60_000 + LAG_MS)
            before = {i.id: i for i in store.incidents.newest("open")}
            assert before
        again = Clock(clock.now_ms + 2000)
        async with running(pipeline_of(store, index, again)) as second:
            assert set(second.incidents) == set(before)
            second.take_events([xid(1)])  # sent again by the agent, whose acknowledgement was lost
            await advance(second, again, T0 + 120_000 + LAG_MS)
            assert {i.id for i in store.incidents.newest("all") if i.cause == "xid_79"} == {
                i.id for i in before.values() if i.cause == "xid_79"
            }

    asyncio.run(scenario())


def test_an_event_that_a_crash_left_unjudged_is_judged_after_the_restart(store: Store, index: FleetIndex) -> None:
    """Stored and acknowledged, then kill -9: the agent will not send it again, so nobody else would report it."""

    async def scenario() -> None:
        day = 86_400_000
        store.events.write([xid(1), xid(2, "n2", T0 - day), xid(3, "n3", T0 - 30 * day)])
        async with running(pipeline_of(store, index, Clock(T0 + 5000))):
            await until(lambda: len(store.incidents.newest("open")) == 2, "what was left over is judged")
            assert {(i.node, i.severity) for i in store.incidents.newest("open")} == {
                ("n1", Severity.CRITICAL), ("n2", Severity.INFO)
            }, "what is a day old is noted, what is a month old not even that"  # fmt: skip
        assert store.events.unjudged(T0 + 5000, 10) == []
        versions = {i.id: i.version for i in store.incidents.newest("all")}
        async with running(pipeline_of(store, index, Clock(T0 + 9000))):
            pass
        assert {i.id: i.version for i in store.incidents.newest("all")} == versions, "once is enough"

    asyncio.run(scenario())


@pytest.mark.parametrize("rebooted", [False, True])
def test_what_a_crash_left_some_minutes_ago_is_judged_when_its_node_reports(
    store: Store, index: FleetIndex, rebooted: bool
) -> None:
    """By then it is known whether the node has booted since: a fresh fault is not lost, a mended node not closed."""

    async def scenario() -> None:
        began_ms = T0 + 180_000
        clock = Clock(began_ms)
        write_entities(store, index)
        store.events.write([replace(xid(1), boot="A")])
        async with running(pipeline_of(store, index, clock)) as pipeline:
            boot = "B" if rebooted else "A"
            started = Event(
                "n1/spool/2", began_ms, "n1", None, EventKind.LIFECYCLE, "agent_started", "", received_ms=began_ms,
                boot=boot,
            )  # fmt: skip
            store.events.write([started])
            pipeline.take_events([started])
            assert store.incidents.newest("open") == []
            write_ticks(store, index, began_ms, began_ms + 10_000, changed={("n1", 1): dict.fromkeys(BUSY, np.nan)})
            await advance(pipeline, clock, began_ms + 20_000 + LAG_MS)
            await until(lambda: len(store.incidents.newest("open")) == 1, "it is judged")
        (found,) = store.incidents.newest("open")
        assert (found.node, found.severity) == ("n1", Severity.INFO if rebooted else Severity.CRITICAL)
        assert store.events.unjudged(clock.now_ms, 10) == []

    asyncio.run(scenario())


def test_what_a_crash_left_of_a_node_that_stays_silent_is_judged_all_the_same(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock(T0 + 180_000)
        write_entities(store, index)
        store.events.write([xid(1)])
        async with running(pipeline_of(store, index, clock)) as pipeline:
            await advance(pipeline, clock, T0 + 180_000 + LEFT_MS + 10_000 + LAG_MS)
            await until(lambda: any(i.cause == "xid_79" for i in store.incidents.newest("open")), "it is judged")
        assert {i.severity for i in store.incidents.newest("open") if i.node == "n1"} == {Severity.CRITICAL}

    asyncio.run(scenario())


def test_events_count_as_judged_only_when_their_outcome_is_stored(
    store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise StoreError("no space left")

    async def scenario() -> None:
        store.events.write([xid(1)])
        with monkeypatch.context() as patched:
            patched.setattr(store.incidents, "write", full)
            async with running(pipeline_of(store, index, Clock(T0 + 5000))) as pipeline:
                await until(lambda: pipeline.ticks.store_failures > 0, "the store refuses")
        assert [e.id for e in store.events.unjudged(T0 + 5000, 10)] == [xid(1).id]

    asyncio.run(scenario())


class Desk:
    """As much of the desk that acts as the pipeline asks for; what is given to it before its start is not taken."""

    def __init__(self) -> None:
        nothing = cast(Store, None)
        self.context = SimpleNamespace(outages=OutageStore(nothing), gpus=GpuOutageStore(nothing), troubles={})
        self.surveys = False
        self.acting = False
        self.taken: list[str] = []

    def start(self, _mode: str) -> None:
        self.acting = True

    def stop(self) -> None:
        self.acting = False

    def take(self, decisions: Sequence[Decision], _incidents: object) -> None:
        if self.acting:
            self.taken += [d.id for d in decisions]


def test_what_a_start_decides_is_acted_on(store: Store, index: FleetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Decision("d1", "inc1", T0, "n1", RecommendedAction.DRAIN, "enforce", "act", "xid", "out of service so far")

    async def scenario() -> None:
        pipeline, desk = pipeline_of(store, index, Clock()), Desk()
        pipeline.act_by(desk)  # type: ignore[arg-type]  # as much of a desk as is asked for
        monkeypatch.setattr(pipeline.engine, "on_duties", lambda *_: Outcome(decisions=(made,)))
        await pipeline.start()
        await pipeline.stop()
        assert desk.taken == ["d1"]

    asyncio.run(scenario())


def test_an_action_that_failed_is_known_to_who_decides_and_sent(store: Store, index: FleetIndex) -> None:
    made = Decision("d1", "inc1", T0, "n1", RecommendedAction.DRAIN, "enforce", "act", "xid", "it fell off")
    failed = Action("a1", "d1", "inc1", "n1", Act.DRAIN, "slurm", ActionState.FAILED, T0 + 1, "given up")

    async def scenario() -> None:
        pipeline, desk = pipeline_of(store, index, Clock()), Desk()
        pipeline.act_by(desk)  # type: ignore[arg-type]  # as much of a desk as is asked for
        await pipeline.start()
        pipeline.engine.decider.standing["inc1", "n1"] = made
        pipeline.take_failed([failed])
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
            assert [i.summary for i in store.incidents.newest("all")] == []

    asyncio.run(scenario())


def test_a_node_that_falls_silent_is_found(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 40_000)
        write_ticks(store, index, T0 + 40_000, T0 + 300_000, silent=["n3"])
        async with running(pipeline_of(store, index, clock)) as pipeline:
            await advance(pipeline, clock, T0 + 300_000 + LAG_MS)
        (incident,) = store.incidents.newest("open")
        assert (incident.node, incident.cause) == ("n3", "silent")
        assert pipeline.engine.decider._live, "the scheduler's word on it counts, or that there is none"

    asyncio.run(scenario())


def test_a_node_whose_agent_sends_too_late_for_its_buckets_is_not_silent(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        clock = Clock()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 40_000)
        write_ticks(store, index, T0 + 40_000, T0 + 100_000, silent=["n3"])
        pipeline = pipeline_of(store, index, clock)
        pipeline.buckets.spoke_ms = lambda: {"n3": clock.now_ms - 1000}
        async with running(pipeline):
            await advance(pipeline, clock, T0 + 100_000 + LAG_MS)
            assert pipeline.buckets.newest is not None
            assert pipeline.buckets.newest.late == {"n3"}
            assert pipeline.engine.health_of("n3")[0] is Health.UNKNOWN
        assert store.incidents.newest("all") == []

    asyncio.run(scenario())


def test_after_a_long_stop_what_was_healthy_is_unknown(store: Store, index: FleetIndex) -> None:
    async def scenario() -> None:
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 60_000)
        soon, late = Clock(T0 + 65_000), Clock(T0 + 300_000)
        async with running(pipeline_of(store, index, soon)) as pipeline:
            await until(lambda: pipeline.buckets.past is None, "the past is there")
            assert pipeline.engine.health_of("n1", 1)[0] is Health.HEALTHY
            assert pipeline.buckets.newest is not None
        async with running(pipeline_of(store, index, late)) as pipeline:
            await until(lambda: pipeline.buckets.past is None, "the past is there")
            assert pipeline.engine.health_of("n1", 1)[0] is Health.UNKNOWN
            assert store.incidents.newest() == []

    asyncio.run(scenario())
