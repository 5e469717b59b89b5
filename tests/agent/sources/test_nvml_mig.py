"""MIG switched on and off and instances recreated while the agent runs; process ids for who asks which job it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml.device import MPS_MS
from drover_agent.sources.nvml.fields import SLOW_METRICS
from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Absent
from testbed.nvml import PROFILE, FakeNvml

START = 1_700_000_000_000


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def source(fake_nvml: FakeNvml, gpus: Gpus) -> Iterator[NvmlSource]:
    source = NvmlSource("node-1", gpus)
    yield source
    source.close()


def instances(reading: Reading) -> list[str]:
    return [entity.mig for entity, _ in reading.rows if entity.mig]


def whole(reading: Reading, gpu: int) -> dict[str, float]:
    return next(dict(values) for entity, values in reading.rows if entity.gpu == gpu and not entity.mig)


def test_mig_mode_is_switched_on_and_off_while_the_agent_runs(
    fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus
) -> None:
    before = source.read(START)
    assert instances(before) == []
    assert whole(before, 4)["memory_util_ratio"] == pytest.approx(0.55)
    fake_nvml.mig(4, [0, 1])
    on = source.read(START + 10_000)
    assert len(instances(on)) == 2
    assert on.inventory["gpu4.mig_mode"] == "on"
    assert "memory_util_ratio" not in whole(on, 4)
    assert all(gpus.find(uuid=uuid) for uuid in instances(on))
    between = source.read(START + 11_000)
    assert len(instances(between)) == 2  # in every tick, as their GPU, and what is slow of it is slow of them
    assert not SLOW_METRICS & {name for entity, values in between.rows if entity.mig for name in values}
    fake_nvml.no_mig(4)
    off = source.read(START + 20_000)
    assert instances(off) == []
    assert off.inventory["gpu4.mig_mode"] == "off"
    assert whole(off, 4)["memory_util_ratio"] == pytest.approx(0.55)  # at once: what was refused is asked again
    assert not any(gpus.find(uuid=uuid) for uuid in instances(on))
    assert len(gpus.all()) == 8


def test_instances_are_recreated(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    """Other instances at the same places, between two looks: until the next look their rows say what they can."""
    fake_nvml.mig(0, [0, 2])
    old = instances(source.read(START))
    fake_nvml.mig(0, [2, 3], fresh="1")
    source.read(START + 1000)
    new = instances(source.read(START + 10_000))
    assert len(new) == 2
    assert not set(new) & set(old)
    assert [entity.mig for uuid in new if (entity := gpus.find(uuid=uuid))] == new
    assert not any(gpus.find(uuid=uuid) for uuid in old)


def test_an_instance_that_was_destroyed_since_the_last_look_is_lost_and_its_gpu_is_not(
    fake_nvml: FakeNvml, source: NvmlSource
) -> None:
    fake_nvml.mig(0, [0, 2])
    gone = instances(source.read(START))[1]
    fake_nvml.mig(0, [0])
    reading = source.read(START + 1000)
    assert {why for entity, _, why in reading.absent if entity.mig == gone} == {Absent.LOST}
    assert whole(reading, 0)["power_w"] > 0
    assert reading.events == []


def test_instances_stay_when_their_mode_cannot_be_read_for_a_moment(
    fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus
) -> None:
    fake_nvml.mig(0, [0, 2])
    uuids = instances(source.read(START))
    fake_nvml.error(0, "nvmlDeviceGetMigMode", "TIMEOUT")
    reading = source.read(START + 10_000)
    assert instances(reading) == uuids
    assert all(gpus.find(uuid=uuid) for uuid in uuids)


def test_instances_are_lost_with_their_gpu_and_absent_while_nvml_is_closed(
    fake_nvml: FakeNvml, source: NvmlSource
) -> None:
    fake_nvml.mig(0, [0, 2])
    uuids = instances(source.read(START))
    fake_nvml.lose(0)
    lost = source.read(START + 1000)
    assert {(e.mig, why) for e, _, why in lost.absent if e.mig} == {(uuid, Absent.LOST) for uuid in uuids}
    assert {name for e, name, _ in lost.absent if e.mig} >= {"framebuffer_used_bytes", "sm_active_ratio"}
    fake_nvml.recover(0)
    assert instances(source.read(START + 2000)) == uuids
    source.release(START + 60_000)
    closed = source.read(START + 3000)
    assert {(e.mig, why) for e, _, why in closed.absent if e.mig} == {(uuid, Absent.ERROR) for uuid in uuids}


def test_what_an_instance_does_not_have_is_absent_for_it_alone(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.mig(0, [0])
    source.read(START)
    reading = source.read(START + 10_000)
    absent = {name: why for entity, name, why in reading.absent if entity.mig}
    assert absent["nvlink_tx_bytes_per_s"] is Absent.UNSUPPORTED
    assert whole(reading, 0)["nvlink_tx_bytes_per_s"] > 0
    [(entity, values)] = [row for row in reading.rows if row[0].mig]
    assert entity.model.endswith(PROFILE)
    assert set(values) == {
        "framebuffer_used_bytes",
        "framebuffer_total_bytes",
        "compute_processes",
        "gpu_util_ratio",
        "sm_active_ratio",
    }


def test_compute_instances_that_share_a_gpu_instance_have_no_profiling(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """GPM counts the GPU instance: given to both, its traffic would be counted twice."""
    fake_nvml.mig(0, [0, 1])
    fake_nvml.set(0, "mig.1.gi", 7)  # as the first one's
    source.read(START)
    reading = source.read(START + 10_000)
    assert all("sm_active_ratio" not in values for entity, values in reading.rows if entity.mig)
    assert sum(name == "sm_active_ratio" and why is Absent.UNSUPPORTED for _, name, why in reading.absent) == 2


def test_another_reader_of_the_profiling_counters_has_them_for_itself(
    fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus
) -> None:
    """Not read, and no news: DCGM reports them. After its end the first value is of the last second, not the pause."""
    fake_nvml.mig(0, [0])
    source.read(START)
    gpus.profiled_elsewhere = True
    fake_nvml.count_calls(fake_nvml.script.with_name("calls"))
    reading = source.read(START + 10_000)
    named = {name for _, values in reading.rows for name in values} | {name for _, name, _ in reading.absent}
    assert not named & {"sm_active_ratio", "pcie_tx_bytes_per_s"}
    assert not {name for name in fake_nvml.calls() if "Gpm" in name or "Throughput" in name}
    gpus.profiled_elsewhere = False
    assert "sm_active_ratio" not in whole(source.read(START + 11_000), 1)
    assert "sm_active_ratio" in whole(source.read(START + 12_000), 1)


def test_process_ids_of_each_gpu_are_reported(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    fake_nvml.set(2, "nvmlDeviceGetComputeRunningProcesses", 3)
    fake_nvml.set(3, "nvmlDeviceGetComputeRunningProcesses", 0)
    reading = source.read(START)
    assert gpus.pids()[2] == (3000, 3001, 3002)
    assert gpus.pids()[3] == ()
    assert whole(reading, 2)["compute_processes"] == 3
    fake_nvml.error(2, "nvmlDeviceGetComputeRunningProcesses_v3", "NO_PERMISSION")
    source.read(START + 10_000)
    assert 2 not in gpus.pids()  # unknown, not none
    assert gpus.pids()[4] == (5000,)


def test_more_processes_than_there_was_room_for(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    fake_nvml.set(0, "nvmlDeviceGetComputeRunningProcesses", 300)
    source.read(START)
    assert len(gpus.pids()[0]) == 300


def test_clients_of_mps_hold_the_gpu_too(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    """They are looked for rarely while there are none, and each time once there are some."""
    source.read(START)
    assert gpus.pids()[0] == (1000,)
    fake_nvml.set(0, "nvmlDeviceGetMPSComputeRunningProcesses", 2)
    source.read(START + MPS_MS)
    assert gpus.pids()[0] == (1000, 1500, 1501)
    fake_nvml.set(0, "nvmlDeviceGetMPSComputeRunningProcesses", 1)
    source.read(START + MPS_MS + 10_000)
    assert gpus.pids()[0] == (1000, 1500)


def test_a_lost_gpu_has_no_processes_that_are_known(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    source.read(START)
    fake_nvml.lose(1)
    source.read(START + 1000)
    assert sorted(gpus.pids()) == [0, 2, 3, 4, 5, 6, 7]
