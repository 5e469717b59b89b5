"""Sources that share one thread: what one that hangs, fails or is slow costs the others, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from drover_agent.clock import SystemClock
from drover_agent.sampled import ANSWERED, FAILED, FAILING_READS, LOG_S, OVERRAN, STABLE_S
from drover_agent.sampler import OUTCOME_ROWS, OWN_VALUES_MS, PATIENCE_S, READ_LIMIT_S, READ_ROWS, Sampler
from drover_agent.sources import POLLED, Off
from drover_agent.sources.base import Entity, Reading
from drover_proto.catalog import BY_NAME, Absent, Scope
from drover_proto.events import LIFECYCLE_CODES
from testbed.clock import ManualClock, settle
from testbed.waiting import until

T = 1_800_000_000_000


class Part:
    """A source whose reads a test holds, fails or counts."""

    def __init__(self, name: str, interval_s: float = 1.0) -> None:
        self.name, self.interval_s = name, interval_s
        self.entity = Entity(Scope.GPU, name, int(name[5:])) if name.startswith("nvml:") else Entity(Scope.NODE, "n1")
        self.free = threading.Event()
        self.free.set()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.threads: list[threading.Thread] = []
        self.closed = threading.Event()

    def read(self, now_ms: int) -> Reading:
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.free.wait(30)
        if self.error:
            raise self.error
        return Reading(rows=[(self.entity, {"power_w" if self.entity.gpu is not None else "load1": 1.0})])

    def close(self) -> None:
        self.closed.set()


class Bench:
    """A sampler on a clock that the test turns."""

    def __init__(self, *parts: Part, node: str | None = None) -> None:
        self.clock = ManualClock(T)
        self.heard: list[tuple[int, Reading]] = []
        self.sampler = Sampler(lambda ts, reading: self.heard.append((ts, reading)), 1.0, self.clock, node=node)
        self.parts = parts
        for part in parts:
            self.sampler.add(part)

    async def tick(self, second: int) -> None:
        """One that all sources answer."""
        async with asyncio.timeout(20):
            await self.sampler.tick(T + second * 1000)

    def have(self, name: str) -> list[int]:
        """Seconds at which this source gave values."""
        return [(ts - T) // 1000 for ts, r in self.heard for e, _ in r.rows if e.key == name]

    def events(self) -> list[tuple[str, int | None]]:
        return [(event.code, event.gpu) for _, r in self.heard for event in r.events]


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def hang(bench: Bench, part: Part, second: int) -> asyncio.Task[None]:
    """A tick in which this source's read does not return; gives the tick, which waits for it."""
    part.free.clear()
    part.begun.clear()
    tick = asyncio.create_task(bench.sampler.tick(T + second * 1000))
    await until(part.begun.is_set, f"{part.name} is read")
    await settle()
    return tick


async def overrun(bench: Bench, tick: asyncio.Task[None]) -> None:
    """Let the limit of a tick pass, with time for those that answer to do so when its patience ends."""
    await bench.clock.advance(PATIENCE_S)
    answering = [part for part in bench.parts if part.free.is_set()]
    ticks = max(len(part.threads) for part in bench.parts)
    stats = bench.sampler.stats
    await until(lambda: all(stats[part.name].reads == ticks for part in answering), "all others answer")
    await bench.clock.advance(READ_LIMIT_S - PATIENCE_S)
    await until(tick.done)


def test_sources_that_answer_share_one_thread_tick_after_tick() -> None:
    async def scenario() -> None:
        bench = Bench(*(Part(f"nvml:{slot}") for slot in range(8)))
        for second in range(3):
            await bench.tick(second)
        assert all(bench.have(part.name) == [0, 1, 2] for part in bench.parts)
        assert len({thread for part in bench.parts for thread in part.threads}) == 1

    play(scenario)


def test_sources_behind_one_that_hangs_are_read_in_the_same_tick_when_patience_ends() -> None:
    async def scenario() -> None:
        bench = Bench(*(Part(f"nvml:{slot}") for slot in range(8)))
        await bench.tick(0)
        tick = await hang(bench, bench.parts[3], 1)
        assert [part.name for part in bench.parts if bench.have(part.name) == [0, 1]] == []
        await bench.clock.advance(PATIENCE_S)
        others = [part for part in bench.parts if part is not bench.parts[3]]
        await until(lambda: all(bench.have(part.name) == [0, 1] for part in others), "the others are read")
        assert not tick.done()
        assert bench.events() == []
        await bench.clock.advance(READ_LIMIT_S - PATIENCE_S)
        await tick
        assert bench.events() == [("driver_hung", 3)]
        assert bench.have("nvml:3") == [0]
        for second in (2, 3):
            await bench.tick(second)
        assert all(bench.have(part.name) == [0, 1, 2, 3] for part in others)
        absent = [(ts - T, name, why) for ts, r in bench.heard for _, name, why in r.absent]
        assert absent == [(second * 1000, "power_w", Absent.TIMEOUT) for second in (1, 2, 3)]
        bench.parts[3].free.set()
        await until(lambda: ("driver_back", 3) in bench.events())
        await bench.tick(4)
        assert bench.have("nvml:3") == [0, 4]

    play(scenario)


def test_a_driver_that_hangs_for_all_gpus_is_told_of_each_within_one_limit() -> None:
    async def scenario() -> None:
        bench = Bench(Part("host"), *(Part(f"nvml:{slot}") for slot in range(8)))
        await bench.tick(0)
        gpus = bench.parts[1:]
        for part in gpus[1:]:
            part.free.clear()
        tick = await hang(bench, gpus[0], 1)
        await bench.clock.advance(PATIENCE_S)
        await until(lambda: all(len(part.threads) == 2 for part in gpus), "each is tried, in a thread of its own")
        assert len({part.threads[-1] for part in gpus}) == 8
        await bench.clock.advance(READ_LIMIT_S - PATIENCE_S)
        await tick
        assert sorted(bench.events()) == [("driver_hung", slot) for slot in range(8)]
        assert bench.have("n1") == [0, 1]
        stats = bench.sampler.stats
        assert [stats[f"nvml:{slot}"].timeouts for slot in range(8)] == [1] * 8
        for part in gpus:
            part.free.set()
        await until(lambda: bench.events().count(("driver_back", 7)) == 1)

    play(scenario)


def test_a_thread_that_was_left_behind_ends_when_its_read_returns_and_reads_nothing_more() -> None:
    async def scenario() -> None:
        bench = Bench(Part("nvml:0"), Part("nvml:1"))
        await bench.tick(0)
        first = bench.parts[0].threads[0]
        tick = await hang(bench, bench.parts[0], 1)
        await overrun(bench, tick)
        bench.parts[0].free.set()
        await until(lambda: not first.is_alive(), "the thread ended")
        await bench.tick(2)
        assert first not in (bench.parts[0].threads[2], bench.parts[1].threads[2])
        assert len(bench.parts[1].threads) == 3

    play(scenario)


def test_a_slow_source_is_read_apart_until_it_is_quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        times = iter([0.0, 0.3])  # the first read takes 0.3 s
        monkeypatch.setattr("drover_agent.watchdog.time", Steps(times))
        slow, quick = Part("pages"), Part("host")
        bench = Bench(slow, quick)
        for second in range(3):
            await bench.tick(second)
        assert slow.threads[0] == quick.threads[0] == quick.threads[1]
        assert slow.threads[1] != quick.threads[1]
        assert slow.threads[2] == quick.threads[2]
        assert bench.sampler.stats["pages"].max_s == pytest.approx(0.3)

    play(scenario)


class Steps:
    """Stands for `time` in the watchdog: what it is told, then no time passes any more."""

    def __init__(self, times: Any) -> None:
        self._times = times

    def perf_counter(self) -> float:
        return float(next(self._times, 1.0))


def test_sources_that_are_read_often_come_first() -> None:
    async def scenario() -> None:
        order: list[str] = []
        parts = [Part("inventory", 60.0), Part("jobs", 5.0), Part("host"), Part("nvml:0")]
        bench = Bench(*parts)
        bench.sampler._deliver = lambda ts, reading: None
        for part in parts:
            read = part.read

            def noted(now_ms: int, part: Part = part, read: Callable[[int], Reading] = read) -> Reading:
                order.append(part.name)
                return read(now_ms)

            part.read = noted  # type: ignore[method-assign]  # stands in for it
        await bench.tick(0)
        assert order == ["host", "nvml:0", "jobs", "inventory"]

    play(scenario)


def test_a_source_that_fails_is_told_once_and_its_return_once_it_lasted() -> None:
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
        (event,) = [event for _, r in bench.heard for event in r.events]
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


def test_a_source_that_hangs_and_is_not_the_drivers_is_told_after_three_ticks() -> None:
    async def scenario() -> None:
        part, other = Part("dcgm"), Part("host")
        part.entity = Entity(Scope.GPU, "SN0", 0)  # it tells of GPUs too, but is no driver
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


def test_how_the_ticks_went_is_told_as_values_of_the_node() -> None:
    async def scenario() -> None:
        good, bad = Part("host"), Part("jobs")
        bench = Bench(good, bad, Part("nvml:0"), node="n1")
        await bench.tick(0)
        assert [values for _, r in bench.heard for _, values in r.rows if "agent_tick_s" in values] == []
        bad.error = RuntimeError("x")
        for second in (1, 2):
            await bench.tick(second)
        tick = await hang(bench, bench.parts[2], 3)
        await overrun(bench, tick)
        bench.sampler.missed_ticks = 4
        for second in range(4, 21):
            await bench.tick(second)
        told = [(ts, v) for ts, r in bench.heard for e, v in r.rows if "agent_tick_s" in v and e.key == "n1"]
        assert [ts for ts, _ in told] == [T + OWN_VALUES_MS, T + 2 * OWN_VALUES_MS]
        assert {name: value for name, value in told[0][1].items() if not name.startswith("source_")} == {
            "agent_tick_s": READ_LIMIT_S,
            "agent_slowest_read_s": READ_LIMIT_S,
            "agent_sources_failing": 1.0,
            "agent_sources_hung": 1.0,
            "agent_read_failures": 10.0,  # nine of jobs before this tick, one that hung
            "agent_missed_ticks": 4.0,
        }
        assert told[1][1]["agent_tick_s"] == 0.0  # of these ten seconds, not of all
        assert all(BY_NAME[name].scope is Scope.NODE for name in told[0][1])
        bench.parts[2].free.set()

    play(scenario)


def test_a_read_that_hung_is_an_overrun_of_the_ten_seconds_in_which_it_returned_too() -> None:
    async def scenario() -> None:
        gpu = Part("nvml:0")
        bench = Bench(gpu, node="n1")
        await bench.tick(0)
        await overrun(bench, await hang(bench, gpu, 1))
        await bench.tick(10)  # tells of the first ten seconds
        await bench.clock.advance(9.0)
        gpu.free.set()
        await until(lambda: not bench.sampler.stats["nvml:0"].hung)
        for second in (19, 20, 30):
            await bench.tick(second)
        told = [v for _, r in bench.heard for _, v in r.rows if "source_nvml_outcome" in v]
        assert [v["source_nvml_outcome"] for v in told] == [OVERRAN, OVERRAN, ANSWERED]
        assert [v["source_nvml_read_s"] for v in told[:2]] == [READ_LIMIT_S, READ_LIMIT_S + 9.0]

    play(scenario)


def test_duration_and_outcome_of_every_source_are_told_as_values_of_the_node() -> None:
    """The worst of ten seconds, so that no read that overran goes unseen; a read that hangs counts for as long as it
    does; a source that the settings turn off is absent, and so is one that has not been read."""

    async def scenario() -> None:
        host, jobs, gpus = Part("host"), Part("jobs"), [Part(f"nvml:{slot}") for slot in range(2)]
        bench = Bench(host, jobs, *gpus, node="n1")
        bench.sampler.add(Off("dcgm"))
        state: list[int | None] = [None]
        bench.sampler.beside["kmsg"] = lambda: state[0]
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
            for _, r in bench.heard
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


def test_a_read_that_goes_on_hanging_is_told_with_its_time_so_far() -> None:
    async def scenario() -> None:
        bench = Bench(Part("host"), Part("nvml:0"), node="n1")
        await bench.tick(0)
        await overrun(bench, await hang(bench, bench.parts[1], 1))
        await bench.clock.advance(3600.0)
        await bench.tick(3600)
        [values] = [values for _, r in bench.heard for _, values in r.rows if "agent_tick_s" in values]
        assert values["source_nvml_read_s"] == 3600 + READ_LIMIT_S
        assert values["source_nvml_outcome"] == OVERRAN
        bench.parts[1].free.set()

    play(scenario)


@pytest.mark.parametrize("name", sorted(POLLED.keys() - {"simulated"} | {"nvml", "kmsg"}))
def test_every_source_has_its_rows_in_the_catalog(name: str) -> None:
    assert name in OUTCOME_ROWS
    assert name in READ_ROWS or name == "kmsg"  # which waits for lines


def test_a_source_that_is_replaced_tells_no_more() -> None:
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
        assert well.closed.wait(20)
        hung.free.set()
        assert not hung.closed.is_set()

    play(scenario)


def test_threads_of_a_real_clock_do_the_same() -> None:
    """Nothing of the above hangs on the clock of the tests."""

    async def scenario() -> None:
        parts = [Part(f"nvml:{slot}") for slot in range(3)]
        heard: list[tuple[int, Reading]] = []
        sampler = Sampler(lambda ts, reading: heard.append((ts, reading)), 1.0, SystemClock(), limit_s=0.1)
        for part in parts:
            sampler.add(part)
        parts[0].free.clear()
        await sampler.tick(T)
        assert {e.gpu for _, r in heard for e, _ in r.rows} == {1, 2}
        assert [event.code for _, r in heard for event in r.events] == ["driver_hung"]
        parts[0].free.set()

    play(scenario)
