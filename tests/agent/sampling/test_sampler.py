"""The schedule and the watchdog, with sources that hang, fail, are slow, and come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from drover_agent.clock import SystemClock
from drover_agent.sampling.scheduler import Sampler
from drover_agent.sources.base import Entity, Reading
from drover_core.metrics.catalog import Absent, Scope
from testbed.clock import ManualClock, settle
from testbed.waiting import until

T = 1_800_000_000_000


class Device:
    """A GPU whose reads can be blocked or made to fail."""

    interval_s = 1.0

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.name = f"nvml:{slot}"
        self.entity = Entity(Scope.GPU, f"SN{slot}", slot)
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None
        self.threads: set[int] = set()
        self.reads = 0

    def read(self, now_ms: int) -> Reading:
        self.reads += 1
        self.threads.add(threading.get_ident())
        self.free.wait(120)
        if self.error:
            raise self.error
        return Reading(rows=[(self.entity, {"power_w": float(self.slot)})])

    def close(self) -> None:
        self.free.set()


class Received:
    """What the sampler delivered."""

    def __init__(self) -> None:
        self.readings: list[tuple[int, Reading]] = []

    def __call__(self, ts_ms: int, reading: Reading) -> None:
        self.readings.append((ts_ms, reading))

    def values(self, gpu: int) -> list[int]:
        return [ts for ts, r in self.readings for e, _ in r.rows if e.gpu == gpu]

    def absent(self, gpu: int) -> list[tuple[int, str, Absent]]:
        return [(ts, name, why) for ts, r in self.readings for e, name, why in r.absent if e.gpu == gpu]

    def codes(self) -> list[tuple[str, int | None]]:
        return [(event.code, event.gpu) for _, r in self.readings for event in r.events]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_a_hung_gpu_costs_itself_alone_and_is_reported_and_comes_back() -> None:
    async def scenario() -> None:
        received, devices = Received(), [Device(0), Device(1)]
        sampler = Sampler(received, 1.0, SystemClock(), limit_s=0.2)
        for device in devices:
            sampler.add(device)
        await sampler.tick(T)
        devices[0].free.clear()
        for second in range(1, 5):
            await sampler.tick(T + second * 1000)
        assert received.values(0) == [T]
        assert received.values(1) == [T + second * 1000 for second in range(5)]
        assert received.absent(0) == [(T + second * 1000, "power_w", Absent.TIMEOUT) for second in range(1, 5)]
        assert received.codes() == [("driver_hung", 0)]
        assert (devices[0].reads, len(devices[0].threads)) == (2, 1)
        assert (sampler.stats["nvml:0"].timeouts, sampler.stats["nvml:0"].skipped) == (1, 3)
        devices[0].free.set()
        await until(lambda: ("driver_back", 0) in received.codes())
        await sampler.tick(T + 9_000)
        assert received.values(0) == [T, T + 9_000]
        sampler.close()

    play(scenario())


def test_a_gpu_that_hangs_in_its_first_read_is_reported_by_its_slot() -> None:
    async def scenario() -> None:
        received, device = Received(), Device(3)
        device.free.clear()
        sampler = Sampler(received, 1.0, SystemClock(), limit_s=0.05)
        sampler.add(device)
        await sampler.tick(T)
        assert received.codes() == [("driver_hung", 3)]
        device.free.set()
        await until(lambda: ("driver_back", 3) in received.codes())
        sampler.close()

    play(scenario())


def test_a_failing_source_is_absent_with_error_and_the_others_go_on() -> None:
    async def scenario() -> None:
        received, devices = Received(), [Device(0), Device(1)]
        sampler = Sampler(received, 1.0, SystemClock())
        for device in devices:
            sampler.add(device)
        await sampler.tick(T)
        devices[0].error = RuntimeError("broken")
        await sampler.tick(T + 1_000)
        devices[0].error = None
        await sampler.tick(T + 2_000)
        assert received.absent(0) == [(T + 1_000, "power_w", Absent.ERROR)]
        assert received.values(0) == [T, T + 2_000]
        assert received.values(1) == [T, T + 1_000, T + 2_000]
        assert sampler.stats["nvml:0"].failures == 1
        sampler.close()

    play(scenario())


def test_a_hung_host_source_is_no_event_of_the_driver() -> None:
    class Host(Device):
        def __init__(self) -> None:
            super().__init__(0)
            self.name = "host"
            del self.slot
            self.entity = Entity(Scope.NODE, "n1")

        def read(self, now_ms: int) -> Reading:
            self.free.wait(120)
            return Reading(rows=[(self.entity, {"load1": 1.0})])

    async def scenario() -> None:
        received, host = Received(), Host()
        sampler = Sampler(received, 1.0, SystemClock(), limit_s=0.05)
        sampler.add(host)
        await sampler.tick(T)
        host.free.clear()
        await sampler.tick(T + 1_000)
        assert received.codes() == []
        assert [(ts, name, why) for ts, r in received.readings for _, name, why in r.absent] == [
            (T + 1_000, "load1", Absent.TIMEOUT)
        ]
        host.free.set()
        sampler.close()

    play(scenario())


class Ticking(Sampler):
    """Notes its ticks."""

    def __init__(self, interval_s: float, clock: ManualClock) -> None:
        super().__init__(lambda ts, reading: None, interval_s, clock)
        self.ticked: list[int] = []

    async def tick(self, ts_ms: int) -> None:
        self.ticked.append(ts_ms)


async def _run(sampler: Sampler) -> asyncio.Task[None]:
    task = asyncio.create_task(sampler.run())
    await settle()
    return task


def test_ticks_are_multiples_of_the_interval() -> None:
    async def scenario() -> None:
        clock = ManualClock(T + 370)
        sampler = Ticking(1.0, clock)
        task = await _run(sampler)
        await clock.advance(4.0)
        assert sampler.ticked == [T + 1_000, T + 2_000, T + 3_000, T + 4_000]
        task.cancel()

    play(scenario())


def test_a_suspended_machine_makes_up_for_nothing() -> None:
    async def scenario() -> None:
        clock = ManualClock(T)
        sampler = Ticking(1.0, clock)
        task = await _run(sampler)
        await clock.advance(2.0)
        clock.jump(3_600_000)
        await clock.advance(2.0)
        assert sampler.ticked == [T + 1_000, T + 2_000, T + 3_603_000, T + 3_604_000]
        assert sampler.missed_ticks == 3_600
        clock.jump(-7_200_000)
        await clock.advance(2.0)
        assert sampler.ticked[-2:] == [T - 3_595_000, T - 3_594_000]
        task.cancel()

    play(scenario())


def test_slow_sources_sit_out_ticks() -> None:
    async def scenario() -> None:
        received, device = Received(), Device(0)
        device.interval_s = 5.0
        sampler = Sampler(received, 1.0, SystemClock())
        sampler.add(device)
        for second in range(11):
            await sampler.tick(T + second * 1_000)
        assert received.values(0) == [T, T + 5_000, T + 10_000]
        sampler.close()

    play(scenario())


def test_a_gpu_that_reports_its_serial_later_leaves_no_ghost() -> None:
    async def scenario() -> None:
        received, device = Received(), Device(0)
        sampler = Sampler(received, 1.0, SystemClock())
        sampler.add(device)
        device.entity = Entity(Scope.GPU, "n1/gpu0", 0)
        await sampler.tick(T)
        device.entity = Entity(Scope.GPU, "SN0", 0)
        await sampler.tick(T + 1_000)
        device.error = RuntimeError("broken")
        await sampler.tick(T + 2_000)
        keys = {e.key for ts, r in received.readings for e, _, _ in r.absent if ts == T + 2_000}
        assert keys == {"SN0"}
        sampler.close()

    play(scenario())
