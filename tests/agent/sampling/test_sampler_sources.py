"""Sources that share one thread: what one that hangs, fails or is slow costs the others, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from drover_agent.sampling.scheduler import PATIENCE_S, READ_LIMIT_S
from drover_agent.sources.base import Reading
from drover_core.metrics.catalog import Absent
from testbed.sampler_bench import Bench, Part, T, hang, overrun, play
from testbed.waiting import until


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
        absent = [(ts - T, name, why) for ts, r in bench.received for _, name, why in r.absent]
        assert absent == [(second * 1000, "power_w", Absent.TIMEOUT) for second in (1, 2, 3)]
        bench.parts[3].free.set()
        await until(lambda: ("driver_back", 3) in bench.events())
        await bench.tick(4)
        assert bench.have("nvml:3") == [0, 4]

    play(scenario)


def test_a_driver_that_hangs_for_all_gpus_is_reported_of_each_within_one_limit() -> None:
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
        monkeypatch.setattr("drover_agent.sampling.abandonable_worker.time", Steps(times))
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
    """Stands for `time` in the watchdog: the given times, then no time passes."""

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
