"""Ticks in which all calls are made in a row and taken afterwards: they give what a read gives, and hide no fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from drover_agent.sampling.abandonable_worker import Read, Round, Worker
from drover_agent.sources.base import Reading
from drover_agent.sources.nvml.device import STAGGERED
from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Absent
from testbed.nvml import FakeNvml
from testbed.nvml_values import GPUS
from testbed.waiting import until

START = 1_700_000_000_000
BETWEEN = START + 1000 * (STAGGERED + 10)  # no GPU is due for its slow calls then, nor a second later


@pytest.fixture
def source(fake_nvml: FakeNvml) -> Iterator[NvmlSource]:
    source = NvmlSource("node-1")
    for tick in range(STAGGERED + 10):
        source.read(START + 1000 * tick)
    yield source
    source.close()


def test_what_is_asked_in_a_row_gives_the_reading_that_a_read_gives(source: NvmlSource) -> None:
    taken = [device.ask(BETWEEN) for device in source.devices]
    asked = [take() for take in taken if take is not None]
    read = [device.read(BETWEEN + 1000) for device in source.devices]
    assert len(asked) == GPUS
    assert asked == read
    assert all({"power_w", "gpu_temp_c", "sm_active_ratio"} <= reading.rows[0][1].keys() for reading in asked)


@pytest.mark.parametrize(
    ("slot", "after_ms"), [(3, 2_000 + 3_000), (1, 60_000), (1, 300_000)], ids=["slow calls", "identity", "inventory"]
)
def test_what_is_due_more_rarely_is_left_to_a_read(source: NvmlSource, slot: int, after_ms: int) -> None:
    assert source.devices[slot].ask(BETWEEN) is not None
    assert source.devices[slot].ask(BETWEEN + after_ms) is None


@pytest.mark.parametrize(
    ("what", "code", "why"),
    [
        ("nvmlDeviceGetTemperatureV(GPU)", "UNKNOWN", ("gpu_temp_c", Absent.ERROR)),
        ("FI_DEV_MEMORY_TEMP", "NO_PERMISSION", ("memory_temp_c", Absent.NO_PERMISSION)),
        ("nvmlDeviceGetFieldValues", "GPU_IS_LOST", ("power_w", Absent.LOST)),
        ("nvmlGpmSampleGet", "GPU_IS_LOST", ("sm_active_ratio", Absent.LOST)),
    ],
)
def test_a_call_that_fails_sends_the_gpu_back_to_a_read(
    fake_nvml: FakeNvml, source: NvmlSource, what: str, code: str, why: tuple[str, Absent]
) -> None:
    fake_nvml.error(2, what, code)
    assert [device.slot for device in source.devices if device.ask(BETWEEN) is None] == [2]
    absent = {name: reason for _, name, reason in source.devices[2].read(BETWEEN).absent}
    assert absent[why[0]] is why[1]


def test_profiling_that_fails_for_once_is_absent_and_the_rest_is_there(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.error(2, "nvmlGpmSampleGet", "UNKNOWN")
    take = source.devices[2].ask(BETWEEN)
    assert take is not None
    reading = take()
    assert ("sm_active_ratio", Absent.ERROR) in [(name, why) for _, name, why in reading.absent]
    assert "power_w" in reading.rows[0][1]


def test_one_answer_of_profiling_that_is_missing_is_absent_alone(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.error(2, "GPM_METRIC_FP16_UTIL", "UNKNOWN")
    take = source.devices[2].ask(BETWEEN)
    assert take is not None
    reading = take()
    assert [(name, why) for _, name, why in reading.absent] == [("fp16_active_ratio", Absent.ERROR)]
    assert "sm_active_ratio" in reading.rows[0][1]


def test_a_gpu_that_is_lost_after_it_was_asked_has_its_values_still(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    take = source.devices[2].ask(BETWEEN)
    assert take is not None
    source.close()
    assert take().rows[0][1]["power_w"] > 0


class Asked:
    """A source that is asked; it may hang there."""

    interval_s = 1.0

    def __init__(self, name: str, hangs: threading.Event | None = None) -> None:
        self.name, self.hangs = name, hangs

    def ask(self, now_ms: int) -> Callable[[], Reading]:
        if self.hangs:
            assert self.hangs.wait(120)
        return lambda: Reading(inventory={self.name: str(now_ms)})

    def read(self, now_ms: int) -> Reading:
        raise AssertionError

    def close(self) -> None: ...


def test_a_source_that_hangs_while_it_is_asked_costs_the_others_nothing() -> None:
    async def scenario() -> None:
        go_on = threading.Event()
        reads = [Read(name, Asked(name, hangs), 7) for name, hangs in (("a", None), ("b", go_on), ("c", None))]
        whole = Round(Worker("test"), reads)
        await until(lambda: len(whole._left) == 1, "the second one is begun")
        rest = whole.take_rest()
        assert [read.owner for read in rest] == ["c"]
        assert [read.outcome is not None for read in reads] == [True, False, False]
        assert reads[0].outcome and reads[0].outcome.reading == Reading(inventory={"a": "7"})
        go_on.set()
        await whole.done
        assert reads[1].outcome and reads[1].outcome.reading == Reading(inventory={"b": "7"})

    asyncio.run(scenario())
