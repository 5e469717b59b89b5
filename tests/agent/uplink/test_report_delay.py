"""How soon a collector receives that a driver hangs or a GPU vanishes, by a clock that the test moves.

The whole agent: nvidia-ml-py on the C stand-in, its threads, the spool on disk, a stream. Threads, disk and stream take
what they take of real time while the clock stands still; limits and ticks go by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from drover_agent.app import NodeRuntime
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.sampling.scheduler import READ_LIMIT_S
from drover_proto import telemetry_pb2 as pb
from testbed.clock import ManualClock
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

WITHIN_MS = 5_000
STEP_S = 0.25
GPUS = 8


class Node:
    """An agent, its collector and the time of both."""

    def __init__(self, runtime: NodeRuntime, clock: ManualClock, server: TelemetryServer) -> None:
        self.runtime, self.clock, self.server = runtime, clock, server

    def reading(self) -> set[str]:
        """Sources in whose reads threads are now, and those that wait behind them."""
        return {name for name, one in self.runtime.sampler._scheduled.items() if one.busy}

    async def pass_until(self, condition: Callable[[], object], what: str, hanging: int = 0) -> None:
        """Turn the clock until it is so. Between two steps it stands still until threads are back from their reads (all
        but so many that hang) and all that was reported has arrived."""
        spool = self.runtime.agent.spool
        for _ in range(int(60 / STEP_S)):
            if condition():
                return
            await self.clock.advance(STEP_S)
            with contextlib.suppress(AssertionError):  # behind a call that hangs they wait for the clock
                await until(lambda: len(self.reading()) <= hanging, "reads", 0.1 if hanging else 20)
            if self.runtime.agent.connected_to:
                await until(lambda: spool.pending()[0] == 0, "what was reported arrives")
        raise AssertionError(what)

    def reported(self, code: str) -> dict[int | None, pb.Event]:
        events = self.server.events.values()
        return {event.gpu if event.HasField("gpu") else None: event for event in events if event.code == code}


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Node]:
    clock, server = ManualClock(), TelemetryServer()
    server._now_ms = clock.now_ms  # type: ignore[method-assign]  # its clock is right
    config = AgentConfig(
        node="n1",
        collectors=(await server.start(),),
        hardware="nvml",
        kmsg_enabled=False,
        spool=SpoolConfig(dir=str(folder / "spool")),
    )
    runtime = NodeRuntime(config, clock)
    node = Node(runtime, clock, server)
    task = asyncio.create_task(runtime.run())
    try:
        await node.pass_until(lambda: runtime.gpus.all() and len(runtime.gpus.all()) == GPUS, "the GPUs are read")
        await until(lambda: runtime.agent.connected_to, "a stream")
        ticks = runtime.sampler.ticks
        await node.pass_until(lambda: runtime.sampler.ticks == ticks + 1, "one more tick")  # which is over
        yield node
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert runtime._nvml
        runtime._nvml.nvml.close()  # or the next test of this process finds NVML open


@pytest.mark.parametrize("slots", [(3,), tuple(range(GPUS))], ids=["one", "all"])
def test_a_call_that_hangs_is_reported_within_five_seconds_of_the_drivers_last_answer(
    tmp_path: Path, fake_nvml: FakeNvml, slots: tuple[int, ...]
) -> None:
    """It begins to hang right after a tick's reads, so that the next tick meets it: the longest way there is."""

    async def scenario() -> None:
        async with running(tmp_path) as node:
            began_ms = node.clock.now_ms()
            with fake_nvml.batch():
                for slot in slots:
                    fake_nvml.block(slot, "nvmlDeviceGetFieldValues")
            hung = lambda: set(node.reported("driver_hung")) == set(slots)  # noqa: E731  # short, and used only here
            await node.pass_until(hung, "it is reported", len(slots))
            assert READ_LIMIT_S * 1000 <= node.clock.now_ms() - began_ms <= WITHIN_MS
            with fake_nvml.batch():
                for slot in slots:
                    fake_nvml.unblock(slot, "nvmlDeviceGetFieldValues")
            await until(lambda: set(node.reported("driver_back")) == set(slots), "its answer")

    play(scenario())


def test_a_gpu_that_vanishes_is_reported_within_five_seconds_and_its_return_too(
    tmp_path: Path, fake_nvml: FakeNvml
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            for code, change in (("gpu_lost", fake_nvml.lose), ("gpu_back", fake_nvml.recover)):
                changed_ms = node.clock.now_ms()
                change(5)
                await node.pass_until(lambda code=code: set(node.reported(code)) == {5}, "it is reported")
                assert node.clock.now_ms() - changed_ms <= WITHIN_MS

    play(scenario())


def test_a_driver_that_hangs_as_it_is_opened_is_reported_within_five_seconds(
    tmp_path: Path, fake_nvml: FakeNvml
) -> None:
    """The driver is away, and its next start hangs: from then on."""

    async def scenario() -> None:
        async with running(tmp_path) as node:
            fake_nvml.down()
            await node.pass_until(lambda: node.reported("driver_missing"), "the driver is gone")
            fake_nvml.count_calls(tmp_path / "calls")
            with fake_nvml.batch():
                fake_nvml.up()
                fake_nvml.block(0, "nvmlInitWithFlags")
            await node.pass_until(lambda: "nvmlInitWithFlags" in fake_nvml.calls(), "it is opened again")
            began_ms = node.clock.now_ms()
            await node.pass_until(lambda: node.reported("driver_hung"), "it is reported")
            assert node.clock.now_ms() - began_ms <= WITHIN_MS
            fake_nvml.unblock(0, "nvmlInitWithFlags")
            await until(lambda: len(node.reported("driver_back")) == 1, "its answer")

    play(scenario())
