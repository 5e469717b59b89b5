"""What the sampler reports of its sources: failures, hangs, times, as events and as values of the node."""

from __future__ import annotations

import asyncio
import logging

import pytest

from drover_agent.clock import SystemClock
from drover_agent.polled_sources import Off
from drover_agent.sampling.scheduled_source import (
    ANSWERED,
    FAILED,
    FAILING_READS,
    LOG_S,
    OVERRAN,
    STABLE_S,
)
from drover_agent.sampling.scheduler import (
    OWN_VALUES_MS,
    PATIENCE_S,
    READ_LIMIT_S,
    Sampler,
)
from drover_agent.sources.base import Entity, Reading
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_core.model.events import LIFECYCLE_CODES
from testbed.clock import settle
from testbed.sampler_bench import Bench, Part, T, hang, overrun, play
from testbed.waiting import until


def test_a_source_that_fails_is_reported_once_and_its_return_once_it_lasted() -> None:
    async def scenario() -> None:
        part = Part("jobs")
        bench = Bench(part)
        await bench.tick(0)
        second = 1
        for number in range(20):  # it comes and goes
            part.error = RuntimeError(f"squeue ended with {number}")
            for _ in range(FAILING_READS):
                await bench.tick(second)
                await bench.clock.advance(1.0)
                second += 1
            part.error = None
            await bench.tick(second)
            await bench.clock.advance(1.0)
            second += 1
        assert bench.events() == [("source_failing", None)]
        (event,) = [event for _, r in bench.received for event in r.events]
        assert event.message == "3 reads of jobs in a row gave nothing: RuntimeError: squeue ended with 0"
        await bench.clock.advance(STABLE_S)
        await bench.tick(second)
        assert bench.events() == [("source_failing", None), ("source_back", None)]
        assert {code for code, _ in bench.events()} <= LIFECYCLE_CODES.keys()

    play(scenario)


def test_fewer_failures_in_a_row_are_no_event() -> None:
    async def scenario() -> None:
        part = Part("jobs")
        bench = Bench(part)
        for second in range(12):
            part.error = RuntimeError("x") if second % FAILING_READS else None
            await bench.tick(second)
        assert bench.sampler.stats["jobs"].failures == 8
        assert bench.events() == []

    play(scenario)


def test_a_source_that_hangs_and_is_not_the_drivers_is_reported_after_three_ticks() -> None:
    async def scenario() -> None:
        part, other = Part("dcgm"), Part("host")
        part.entity = Entity(Scope.GPU, "SN0", 0)  # it reads GPUs too, but is not the driver
        bench = Bench(part, other)
        await bench.tick(0)
        tick = await hang(bench, part, 1)
        await overrun(bench, tick)
        assert bench.events() == []
        await bench.tick(2)
        await bench.tick(3)
        assert bench.events() == [("source_failing", None)]
        assert bench.sampler.stats["dcgm"].hung
        part.free.set()
        await until(lambda: not bench.sampler.stats["dcgm"].hung)

    play(scenario)


def test_failures_that_differ_each_time_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        part = Part("jobs")
        bench = Bench(part)
        with caplog.at_level(logging.ERROR, "drover_agent"):
            for second in range(3 * round(LOG_S)):
                part.error = RuntimeError(f"at {second}")
                await bench.tick(second)
                await bench.clock.advance(1.0)
        assert len(caplog.records) == 3
        assert bench.sampler.stats["jobs"].last_error == f"RuntimeError: at {3 * round(LOG_S) - 1}"

    play(scenario)


def test_how_the_ticks_went_is_reported_as_values_of_the_node() -> None:
    async def scenario() -> None:
        good, bad = Part("host"), Part("jobs")
        bench = Bench(good, bad, Part("nvml:0"), node="n1")
        await bench.tick(0)
        assert [values for _, r in bench.received for _, values in r.rows if "agent_tick_s" in values] == []
        bad.error = RuntimeError("x")
        for second in (1, 2):
            await bench.tick(second)
        tick = await hang(bench, bench.parts[2], 3)
        await overrun(bench, tick)
        bench.sampler.missed_ticks = 4
        for second in range(4, 21):
            await bench.tick(second)
        reported = [(ts, v) for ts, r in bench.received for e, v in r.rows if "agent_tick_s" in v and e.key == "n1"]
        assert [ts for ts, _ in reported] == [T + OWN_VALUES_MS, T + 2 * OWN_VALUES_MS]
        assert {name: value for name, value in reported[0][1].items() if not name.startswith("source_")} == {
            "agent_tick_s": READ_LIMIT_S,
            "agent_slowest_read_s": READ_LIMIT_S,
            "agent_sources_failing": 1.0,
            "agent_sources_hung": 1.0,
            "agent_read_failures": 10.0,  # nine of jobs before this tick, one that hung
            "agent_missed_ticks": 4.0,
        }
        assert reported[1][1]["agent_tick_s"] == 0.0  # of these ten seconds, not of all
        assert all(BY_NAME[name].scope is Scope.NODE for name in reported[0][1])
        bench.parts[2].free.set()

    play(scenario)


def test_a_read_that_hung_is_an_overrun_of_the_ten_seconds_in_which_it_returned_too() -> None:
    async def scenario() -> None:
        gpu = Part("nvml:0")
        bench = Bench(gpu, node="n1")
        await bench.tick(0)
        await overrun(bench, await hang(bench, gpu, 1))
        await bench.tick(10)  # reports the first ten seconds
        await bench.clock.advance(9.0)
        gpu.free.set()
        await until(lambda: not bench.sampler.stats["nvml:0"].hung)
        for second in (19, 20, 30):
            await bench.tick(second)
        reported = [v for _, r in bench.received for _, v in r.rows if "source_nvml_outcome" in v]
        assert [v["source_nvml_outcome"] for v in reported] == [OVERRAN, OVERRAN, ANSWERED]
        assert [v["source_nvml_read_s"] for v in reported[:2]] == [READ_LIMIT_S, READ_LIMIT_S + 9.0]

    play(scenario)


def test_duration_and_outcome_of_every_source_are_reported_as_values_of_the_node() -> None:
    """The worst of ten seconds, so that no read that overran goes unseen; a read that hangs counts for as long as it
    does; a source that the settings turn off is absent, and so is one that has not been read."""

    async def scenario() -> None:
        host, jobs, gpus = Part("host"), Part("jobs"), [Part(f"nvml:{slot}") for slot in range(2)]
        bench = Bench(host, jobs, *gpus, node="n1")
        bench.sampler.add(Off("dcgm"))
        state: list[int | None] = [None]
        bench.sampler.unscheduled["kmsg"] = lambda: state[0]
        await bench.tick(0)
        jobs.error = RuntimeError("x")
        await bench.tick(1)
        jobs.error = None
        await overrun(bench, await hang(bench, gpus[1], 2))
        for second in (3, 4, 10):
            await bench.tick(second)
        state[0] = FAILED
        gpus[1].free.set()
        await until(lambda: not bench.sampler.stats["nvml:1"].hung)
        await bench.clock.advance(60.0)
        for second in (11, 20, 30):
            await bench.tick(second)
        first, _, second_ = (
            (values, {name for _, name, why in r.absent if why is Absent.UNSUPPORTED})
            for _, r in bench.received
            for _, values in r.rows
            if "agent_tick_s" in values
        )
        outcomes = {name: v for name, v in first[0].items() if name.endswith("_outcome")}
        assert outcomes == {"source_host_outcome": 0, "source_jobs_outcome": FAILED, "source_nvml_outcome": OVERRAN}
        assert first[0]["source_nvml_read_s"] == READ_LIMIT_S  # its clock stood still since
        assert first[0]["source_host_read_s"] < PATIENCE_S
        assert first[1] >= {"source_dcgm_read_s", "source_dcgm_outcome", "source_inference_outcome"}
        assert not any("kmsg" in name for name in first[1])
        outcomes = {name: v for name, v in second_[0].items() if name.endswith("_outcome")}
        assert outcomes == {
            "source_host_outcome": 0,
            "source_jobs_outcome": 0,
            "source_nvml_outcome": 0,
            "source_kmsg_outcome": FAILED,
        }
        assert second_[0]["source_nvml_read_s"] < READ_LIMIT_S
        assert {BY_NAME[name].scope for name in first[0].keys() | first[1]} == {Scope.NODE}

    play(scenario)


def test_a_read_that_goes_on_hanging_is_reported_with_its_time_so_far() -> None:
    async def scenario() -> None:
        bench = Bench(Part("host"), Part("nvml:0"), node="n1")
        await bench.tick(0)
        await overrun(bench, await hang(bench, bench.parts[1], 1))
        await bench.clock.advance(3600.0)
        await bench.tick(3600)
        [values] = [values for _, r in bench.received for _, values in r.rows if "agent_tick_s" in values]
        assert values["source_nvml_read_s"] == 3600 + READ_LIMIT_S
        assert values["source_nvml_outcome"] == OVERRAN
        bench.parts[1].free.set()

    play(scenario)


def test_a_source_that_is_replaced_reports_nothing() -> None:
    async def scenario() -> None:
        old, new = Part("nvml:0"), Part("nvml:0")
        bench = Bench(old)
        await bench.tick(0)
        tick = await hang(bench, old, 1)
        bench.sampler.add(new)
        later = asyncio.create_task(bench.sampler.tick(T + 2000))
        await settle()
        await bench.clock.advance(PATIENCE_S)
        await until(later.done, "the new one is read though the thread of both is stuck")
        await bench.clock.advance(READ_LIMIT_S)
        await until(tick.done)
        old.free.set()
        assert bench.have("nvml:0") == [0, 2]
        assert bench.events() == []

    play(scenario)


def test_closing_waits_for_nothing_and_leaves_out_what_hangs() -> None:
    async def scenario() -> None:
        hung, well = Part("nvml:0"), Part("nvml:1")
        bench = Bench(hung, well)
        await bench.tick(0)
        await overrun(bench, await hang(bench, hung, 1))
        bench.sampler.close()
        assert well.closed.wait(120)
        hung.free.set()
        assert not hung.closed.is_set()

    play(scenario)


def test_threads_of_a_real_clock_do_the_same() -> None:
    """Nothing of the above hangs on the clock of the tests."""

    async def scenario() -> None:
        parts = [Part(f"nvml:{slot}") for slot in range(3)]
        received: list[tuple[int, Reading]] = []
        sampler = Sampler(lambda ts, reading: received.append((ts, reading)), 1.0, SystemClock(), limit_s=0.1)
        for part in parts:
            sampler.add(part)
        parts[0].free.clear()
        await sampler.tick(T)
        assert {e.gpu for _, r in received for e, _ in r.rows} == {1, 2}
        assert [event.code for _, r in received for event in r.events] == ["driver_hung"]
        parts[0].free.set()

    play(scenario)
