"""NVML calls that block, events, and another process: what the sampler's threads rely on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from drover_agent.sources.base import NodeEvent
from drover_agent.sources.nvml.source import NvmlSource
from testbed.nvml import FakeNvml

START = 1_700_000_000_000
DEADLINE_S = 120


@pytest.fixture
def source(fake_nvml: FakeNvml) -> Iterator[NvmlSource]:
    source = NvmlSource("node-1")
    source.read(START)
    yield source
    source.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_call_that_blocks_holds_up_one_gpu_and_not_the_interpreter(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.block(2, "nvmlDeviceGetTemperatureV")
    readings = []
    stuck = start(lambda: readings.append(source.devices[2].read(START + 1000)))
    for tick in range(1, 20):  # would never end if the blocked call held the GIL or a lock
        for device in source.devices:
            if device.slot != 2:
                assert device.read(START + 1000 * tick).rows
    assert stuck.is_alive()
    assert readings == []
    fake_nvml.unblock(2, "nvmlDeviceGetTemperatureV")
    stuck.join(DEADLINE_S)
    assert readings[0].rows[0][1]["gpu_util_ratio"] == pytest.approx(0.99)


def test_a_gpu_that_hangs_from_the_start_does_not_keep_nvml_from_opening(fake_nvml: FakeNvml) -> None:
    fake_nvml.block(0, "nvmlDeviceGetSerial")
    source = NvmlSource("node-1")
    source.open(START)
    stuck = start(lambda: source.devices[0].read(START))
    assert all(device.read(START).rows for device in source.devices[1:])
    assert stuck.is_alive()
    fake_nvml.unblock(0, "nvmlDeviceGetSerial")
    stuck.join(DEADLINE_S)
    source.close()


@pytest.fixture
def xids(source: NvmlSource) -> Iterator[list[NodeEvent]]:
    """What the watcher has delivered so far; it runs in a thread as in the sampler."""
    watcher, seen, done = source.xids, [], threading.Event()
    assert watcher is not None

    def watch() -> None:
        while not done.is_set():
            seen.extend(watcher.read(time.time_ns() // 1_000_000).events)

    thread = start(watch)
    until(lambda: watcher.watching == frozenset(range(8)))
    yield seen
    done.set()
    watcher.close()
    thread.join(DEADLINE_S)


def test_xids_arrive_with_gpu_code_and_meaning(fake_nvml: FakeNvml, xids: list[NodeEvent]) -> None:
    begun = time.time_ns() // 1_000_000
    with fake_nvml.batch():
        fake_nvml.xid(5, 79)
        fake_nvml.xid(2, 48)
        fake_nvml.xid(2, 64999)
    until(lambda: len(xids) == 3)
    assert [(e.gpu, e.kind, e.code, e.source) for e in xids] == [
        (5, "xid", "79", "nvml"),
        (2, "xid", "48", "nvml"),
        (2, "xid", "64999", "nvml"),
    ]
    assert xids[0].message.startswith("XID 79: ") and len(xids[0].message) > 20
    assert xids[2].message == "XID 64999"
    assert all(begun <= event.ts_ms <= time.time_ns() // 1_000_000 for event in xids)


def test_xids_of_the_others_arrive_while_one_gpu_is_lost_and_of_it_when_it_is_back(
    fake_nvml: FakeNvml, source: NvmlSource, xids: list[NodeEvent]
) -> None:
    watcher, device = source.xids, source.devices[3]
    assert watcher is not None
    with fake_nvml.batch():
        fake_nvml.xid(3, 79)  # its last word
        fake_nvml.lose(3)
    device.read(START + 1000)
    until(lambda: watcher.watching == frozenset(range(8)) - {3})
    fake_nvml.xid(4, 48)
    until(lambda: len(xids) == 2)
    fake_nvml.recover(3)
    device.read(START + 2000)
    until(lambda: watcher.watching == frozenset(range(8)))
    fake_nvml.xid(3, 94)
    until(lambda: len(xids) == 3)
    assert [(event.gpu, event.code) for event in xids] == [(3, "79"), (4, "48"), (3, "94")]


def test_a_gpu_without_events_does_not_keep_the_others_from_being_watched(fake_nvml: FakeNvml) -> None:
    fake_nvml.error(0, "nvmlDeviceRegisterEvents", "NOT_SUPPORTED")
    source = NvmlSource("node-1")
    source.read(START)
    watcher = source.xids
    assert watcher is not None
    fake_nvml.xid(1, 13)  # before the set: not reported
    seen: list[NodeEvent] = []
    thread = start(lambda: seen.extend(watcher.read(START).events))
    until(lambda: watcher.watching == frozenset(range(1, 8)))
    fake_nvml.xid(1, 48)
    thread.join(DEADLINE_S)
    assert [event.code for event in seen] == ["48"]
    source.close()


def test_another_process_finds_the_stand_in_through_its_environment(fake_nvml: FakeNvml) -> None:
    program = (
        "from drover_agent.sources.nvml.source import NvmlSource\n"
        "reading = NvmlSource('n').read(0)\n"
        "print(len(reading.rows), reading.inventory['gpu3.serial'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | fake_nvml.env(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["8", "1654023000003"]


def test_a_machine_without_the_library_says_what_to_do() -> None:
    """In a process that has no stand-in: the loader itself finds nothing (or, on a machine with GPUs, the real one)."""
    program = (
        "from drover_agent.sources.nvml.source import NvmlSource\n"
        "reading = NvmlSource('n').read(0)\n"
        "print(reading.inventory['no_gpu_reason'] if not reading.rows else 'libnvidia-ml.so.1 was found')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "libnvidia-ml.so.1 was" in done.stdout
