"""Eight GPUs through nvidia-ml-py on one schedule: what a call that never returns costs the other seven."""

from __future__ import annotations

import asyncio

from drover_agent.clock import SystemClock
from drover_agent.sampling.scheduler import Sampler
from drover_agent.sources.base import Reading
from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Absent
from testbed.nvml import FakeNvml
from testbed.waiting import until

T = 1_800_000_000_000


def test_a_call_that_blocks_for_ever_costs_its_own_gpu_alone(fake_nvml: FakeNvml) -> None:
    async def scenario() -> None:
        received: list[tuple[int, Reading]] = []
        nvml = NvmlSource("node-1")
        nvml.open(T)
        sampler = Sampler(lambda ts, reading: received.append((ts, reading)), 1.0, SystemClock())
        for device in nvml.devices:
            sampler.add(device)

        def have(second: int) -> set[int | None]:
            return {
                e.gpu for ts, r in received for e, values in r.rows if ts == T + second * 1000 and "power_w" in values
            }

        await sampler.tick(T)
        assert have(0) == set(range(8))
        fake_nvml.block(3, "nvmlDeviceGetFieldValues")
        for second in (1, 2):
            await sampler.tick(T + second * 1000)
            assert have(second) == set(range(8)) - {3}
        events = [(event.code, event.gpu) for _, r in received for event in r.events]
        assert events == [("driver_hung", 3)]
        gone = {(e.gpu, why) for ts, r in received for e, name, why in r.absent if ts > T and name == "power_w"}
        assert gone == {(3, Absent.TIMEOUT)}
        fake_nvml.unblock(3, "nvmlDeviceGetFieldValues")
        await until(lambda: not sampler.stats["nvml:3"].hung, "the call returned")
        missed = {name for ts, r in received for e, name, why in r.absent if e.gpu == 3 and why is Absent.TIMEOUT}
        await sampler.tick(T + 2500)  # before its slow metrics are due
        back = [values.keys() for ts, r in received for e, values in r.rows if ts == T + 2500 and e.gpu == 3]
        reported = {name for ts, r in received for e, name, _ in r.absent if ts == T + 2500 and e.gpu == 3}
        assert "nvlink_crc_errors" in missed
        assert missed <= set().union(*back) | reported
        await sampler.tick(T + 4000)
        assert have(4) == set(range(8))
        nvml.close()  # or the next test of this process finds NVML open
        sampler.close()

    asyncio.run(scenario())
