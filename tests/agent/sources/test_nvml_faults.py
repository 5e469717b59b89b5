"""The faults of NVIDIA's driver, one test each: what the user then sees. The real nvidia-ml-py on the C stand-in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml.fields import RARE_MS
from drover_agent.sources.nvml.metrics import REFUSED_MS
from drover_agent.sources.nvml.source import ALL_LOST_MS, RETRY_MS, NvmlSource
from drover_core.metrics.catalog import Absent
from testbed.nvml import FakeNvml
from testbed.nvml_values import READ_BY_NVML

START = 1_700_000_000_000
DEADLINE_S = 120
NAMES = {metric.name for metric in READ_BY_NVML}


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def source(fake_nvml: FakeNvml, gpus: Gpus) -> Iterator[NvmlSource]:
    source = NvmlSource("node-1", gpus)
    source.read(START)
    yield source
    source.close()


def values_of(reading: Reading, gpu: int) -> dict[str, float]:
    return next((dict(values) for e, values in reading.rows if e.gpu == gpu and not e.mig), {})


def absent_of(reading: Reading, gpu: int) -> dict[str, Absent]:
    return {name: why for e, name, why in reading.absent if e.gpu == gpu and not e.mig}


def keys_of(reading: Reading) -> dict[int | None, str]:
    return {e.gpu: e.key for e, _ in reading.rows if not e.mig}


def codes(readings: list[Reading]) -> list[tuple[str, int | None]]:
    return [(event.code, event.gpu) for reading in readings for event in reading.events]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


def test_a_call_that_blocks_for_ever(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """The GPU's own values stop; the seven others and the wait for XIDs go on, and NVML is not closed under the call.
    (That the agent reports `driver_hung` within 5 s: test_report_delay.py.)"""
    fake_nvml.block(2, "nvmlDeviceGetFieldValues")
    held: list[Reading] = []
    stuck = threading.Thread(target=lambda: held.append(source.devices[2].read(START + 1000)), daemon=True)
    stuck.start()
    until(source.devices[2].calling.locked)
    for device in source.devices[:2] + source.devices[3:]:
        assert device.read(START + 1000).rows[0][1]["power_w"] > 0
    source.release(START + 60_000)
    closing = threading.Thread(target=source.tend, args=(START + 2000,), daemon=True)
    closing.start()
    others = [0, 1, 7]
    while closing.is_alive():  # one thread waits for GPU 2: the others are read meanwhile
        for slot in others[:]:
            if values_of(source.devices[slot].read(START + 2000), slot):
                others.remove(slot)
    assert others == []
    assert source.session.open
    assert "GPU 2 does not return" in source.stuck
    fake_nvml.unblock(2, "nvmlDeviceGetFieldValues")
    stuck.join(DEADLINE_S)
    assert values_of(held[0], 2)["power_w"] == pytest.approx(642.3)
    source.tend(START + 4000)
    assert not source.session.open


def test_a_device_lost_in_the_middle_of_a_tick(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """What was read before the loss counts, the rest is absent as `lost`, and there is one `gpu_lost` event."""
    fake_nvml.error(5, "nvmlDeviceGetTemperatureV", "GPU_IS_LOST")
    reading = source.read(START + 1000)
    assert values_of(reading, 5)["power_w"] == pytest.approx(642.3)
    assert absent_of(reading, 5) == dict.fromkeys(NAMES - set(values_of(reading, 5)), Absent.LOST)
    assert codes([reading, source.read(START + 2000)]) == [("gpu_lost", 5)]
    fake_nvml.no_error(5, "nvmlDeviceGetTemperatureV")
    back = source.read(START + 3000)
    assert codes([back]) == [("gpu_back", 5)]
    assert keys_of(back)[5] == "1654023000005"


def test_nvml_init_fails_and_later_works(fake_nvml: FakeNvml) -> None:
    """The node says why it has no GPUs, and has them within RETRY_MS of the driver's return."""
    fake_nvml.down("DRIVER_NOT_LOADED")
    source = NvmlSource("node-1")
    first = source.read(START)
    assert "modprobe nvidia" in first.inventory["no_gpu_reason"]
    fake_nvml.up()
    later = source.read(START + RETRY_MS)
    assert len(later.rows) == 8
    assert codes([first, later]) == [("driver_missing", None), ("driver_back", None)]
    source.close()


@pytest.mark.parametrize("code", ["UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"])
def test_the_driver_is_unloaded_and_comes_back(fake_nvml: FakeNvml, source: NvmlSource, code: str) -> None:
    """`driver_missing` within two ticks, everything absent meanwhile, then `driver_back` and the same GPUs, without a
    restart of the agent."""
    before = keys_of(source.read(START + 1000))
    fake_nvml.down(code)
    away = [source.read(START + 1000 * tick) for tick in (2, 3, 4)]
    assert codes(away) == [("driver_missing", None)]
    assert not source.session.open
    assert all(absent_of(reading, gpu) == dict.fromkeys(NAMES, Absent.ERROR) for reading in away for gpu in range(8))
    assert all(reading.rows == [] for reading in away)
    fake_nvml.up()
    back = [source.read(START + 4000 + RETRY_MS), source.read(START + 5000 + RETRY_MS)]
    assert codes(back) == [("driver_back", None)]
    assert keys_of(back[0]) == before
    assert "sm_active_ratio" in values_of(back[1], 3)  # GPM too, out of new samples


def test_a_driver_that_does_not_come_back_after_a_release_is_missing(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """The operator unloaded it and forgot it: when the time is over the node says so."""
    source.release(START + 60_000)
    released = source.read(START + 1000)
    assert codes([released]) == [("driver_released", None)]
    assert source.read(START + 30_000).events == []  # and no attempt to open it
    fake_nvml.down()
    late = [source.read(START + 60_000), source.read(START + 60_000 + RETRY_MS)]
    assert codes(late) == [("driver_missing", None)]
    fake_nvml.up()
    assert codes([source.read(START + 60_000 + 2 * RETRY_MS)]) == [("driver_back", None)]


def test_a_driver_that_fails_right_after_each_start_is_started_no_more_often(
    fake_nvml: FakeNvml, source: NvmlSource
) -> None:
    """It would report its end and its return each second: at most once each in RETRY_MS."""
    fake_nvml.error(0, "nvmlDeviceGetTemperatureV", "UNINITIALIZED")
    flapping = [source.read(START + 1000 * tick) for tick in range(1, 60)]
    assert codes(flapping).count(("driver_missing", None)) <= 60_000 // RETRY_MS
    assert codes(flapping).count(("driver_back", None)) <= 60_000 // RETRY_MS
    fake_nvml.no_error(0, "nvmlDeviceGetTemperatureV")
    for tick in range(60, 75):
        reading = source.read(START + 1000 * tick)
    assert len(reading.rows) == 8


def test_a_release_that_an_agent_finds_at_its_start_is_reported(fake_nvml: FakeNvml) -> None:
    """The collector forgets what an agent said when another one starts, and would take the silent GPUs for lost."""
    source = NvmlSource("node-1")
    source.release(START + 60_000)
    readings = [source.read(START + 1000 * tick) for tick in range(62)]
    assert codes(readings) == [("driver_released", None), ("driver_back", None)]
    assert "an operator asked" in readings[0].inventory["no_gpu_reason"]
    assert readings[60].inventory["no_gpu_reason"] == ""
    source.close()


def test_a_driver_that_hangs_when_it_is_let_go_leaves_its_gpus_absent(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.block(0, "nvmlShutdown")
    source.release(START + 60_000)
    closing = threading.Thread(target=source.tend, args=(START + 1000,), daemon=True)
    closing.start()
    until(lambda: absent_of(source.devices[3].read(START + 1000), 3))
    assert absent_of(source.devices[3].read(START + 1000), 3) == dict.fromkeys(NAMES, Absent.ERROR)
    fake_nvml.unblock(0, "nvmlShutdown")
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


def test_what_another_reader_profiles_is_not_reported_as_absent(
    fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus
) -> None:
    """DCGM gives it every 10 s: an absence in each second between would come and go."""
    gpus.profiled_elsewhere = True
    fake_nvml.lose(1)
    fake_nvml.mig(2, [0])
    source.read(START + 10_000)
    source.release(START + 60_000)
    closed = source.read(START + 11_000)
    named = {name for _, name, _ in closed.absent}
    assert named == {m.name for m in READ_BY_NVML if "gpm" not in m.sources} | {"gpu_util_ratio"}  # NVML's own
    assert set(absent_of(source.read(START + 12_000), 1)) == named


def test_pcie_traffic_that_nvml_refused_is_not_reported_as_absent_once_another_reader_has_it(
    fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus
) -> None:
    fake_nvml.set(0, "gpm", 0)
    source.read(START + REFUSED_MS)  # with neither GPM nor the slow call
    assert absent_of(source.read(START + REFUSED_MS + 10_000), 0)["pcie_tx_bytes_per_s"] is Absent.UNSUPPORTED
    gpus.profiled_elsewhere = True
    assert "pcie_tx_bytes_per_s" not in absent_of(source.read(START + REFUSED_MS + 20_000), 0)


def test_the_xid_watcher_outlives_the_driver(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """XIDs of after a driver reload arrive as those of before did."""
    seen: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.extend(event.code for event in source.xids.read(START).events)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    until(lambda: len(source.xids.watching) == 8)
    fake_nvml.xid(1, 48)
    until(lambda: seen == ["48"])
    fake_nvml.down()
    for tick in range(1, 5):
        source.read(START + 1000 * tick)
        time.sleep(0)
    until(lambda: source.tend(START + 5000) and not source.session.open)
    fake_nvml.up()
    source.read(START + 5000 + RETRY_MS)
    until(lambda: len(source.xids.watching) == 8)
    fake_nvml.xid(2, 79)
    until(lambda: seen == ["48", "79"])
    done.set()
    source.xids.close()
    thread.join(DEADLINE_S)


def test_uuids_are_swapped_after_a_reset(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    """Two GPUs came back from a reset in each other's slots: from the first row on each carries its own key, and the
    inventory names the new one."""
    with fake_nvml.batch():
        fake_nvml.lose(3)
        fake_nvml.lose(4)
    source.read(START + 1000)
    with fake_nvml.batch():
        for slot, other in ((3, 4), (4, 3)):
            fake_nvml.recover(slot)
            fake_nvml.set(slot, "serial", f"16540230{other:05d}")
            fake_nvml.set(slot, "uuid", f"GPU-{other:08x}-0000-4000-8000-000000000000")
    reading = source.read(START + 2000)
    assert keys_of(reading) == {gpu: f"16540230{ {3: 4, 4: 3}.get(gpu, gpu):05d}" for gpu in range(8)}
    assert reading.inventory["gpu3.serial"] == "1654023000004"
    found = gpus.find(uuid="GPU-00000003-0000-4000-8000-000000000000")
    assert found is not None
    assert found.gpu == 4


def test_a_gpu_that_became_another_unnoticed_is_found_out(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """No error reported it: a row may carry the old key for at most a minute."""
    with fake_nvml.batch():
        fake_nvml.set(6, "serial", "1654099999999")
        fake_nvml.set(6, "uuid", "GPU-ffffffff-0000-4000-8000-000000000000")
    reading = source.read(START + 60_000)
    assert keys_of(reading)[6] == "1654099999999"
    assert reading.inventory["gpu6.uuid"] == "GPU-ffffffff-0000-4000-8000-000000000000"


def test_a_serial_that_cannot_be_read_for_a_moment_changes_no_key(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """After a loss one part of the identity fails: the UUID says that it is the same GPU, so its history goes on."""
    fake_nvml.lose(3)
    source.read(START + 1000)
    with fake_nvml.batch():
        fake_nvml.recover(3)
        fake_nvml.error(3, "nvmlDeviceGetSerial", "UNKNOWN")
    assert keys_of(source.read(START + 2000))[3] == "1654023000003"


def test_all_gpus_lost_come_back_by_a_new_start_of_nvml(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Handles of before a reset of all GPUs stay lost: NVML is started again; only GPU events are reported."""
    with fake_nvml.batch():
        for gpu in range(8):
            fake_nvml.lose(gpu)
    lost = [source.read(START + 1000)]
    number = source.session.number
    lost += [source.read(START + ALL_LOST_MS), source.read(START + ALL_LOST_MS + 1000)]
    assert source.session.number == number + 1
    assert codes(lost) == [("gpu_lost", gpu) for gpu in range(8)]
    with fake_nvml.batch():
        for gpu in range(8):
            fake_nvml.recover(gpu)
    assert codes([source.read(START + ALL_LOST_MS + 2000)]) == [("gpu_back", gpu) for gpu in range(8)]


def test_a_gpu_that_is_gone_after_a_reload_is_lost_and_the_others_keep_their_keys(
    fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus
) -> None:
    """NVML lists seven: those behind the gap move up by one slot with their own keys, and the last slot is lost."""
    fake_nvml.down()
    source.read(START + 1000)
    source.read(START + 2000)
    with fake_nvml.batch():
        fake_nvml.up()
        fake_nvml.vanish(2)
    back = source.read(START + 2000 + RETRY_MS)
    assert keys_of(back) == {slot: f"16540230{slot + (slot >= 2):05d}" for slot in range(7)}
    assert codes([back]) == [("driver_back", None), ("gpu_lost", 7)]
    assert "NVML lists 7 GPUs" in back.events[-1].message
    assert back.inventory["gpu_count"] == "7"
    assert back.inventory["gpu6.serial"] == "1654023000007"
    assert back.inventory["gpu7.serial"] == back.inventory["gpu7.vbios"] == ""
    assert [entity.gpu for entity in gpus.all()] == list(range(7))
    found = gpus.find(pci="0000:8b:00.0")  # of the last one, for its lines in the kernel log
    assert found is not None
    assert found.gpu == 6
    assert source.read(START + 3000 + RETRY_MS).inventory == {}


def test_a_metric_that_is_not_supported_is_asked_rarely(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """It is absent as `unsupported`, costs no further calls, and is back within REFUSED_MS once the GPU has it."""
    fake_nvml.unset(0, "nvmlDeviceGetTemperatureV(GPU)")
    assert absent_of(source.read(START + 10_000), 0)["gpu_temp_c"] is Absent.UNSUPPORTED
    fake_nvml.count_calls(fake_nvml.script.with_name("calls"))
    for tick in range(11, 40):
        assert "gpu_temp_c" not in values_of(source.read(START + tick * 1000), 0)
    assert fake_nvml.calls()["nvmlDeviceGetTemperatureV"] == 29 * 7
    fake_nvml.set(0, "nvmlDeviceGetTemperatureV(GPU)", 26)
    assert values_of(source.read(START + REFUSED_MS), 0)["gpu_temp_c"] == 26


def test_insufficient_permission_is_reported_for_each_metric(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Absent as `no-permission`, which `drover-agent check` explains; the metrics next to it are there."""
    fake_nvml.error(0, "nvmlDeviceGetComputeRunningProcesses_v3", "NO_PERMISSION")
    fake_nvml.error(0, "FI_DEV_MEMORY_TEMP", "NO_PERMISSION")
    fake_nvml.error(0, "nvmlGpmSampleGet", "NO_PERMISSION")
    reading = source.read(START + 10_000)
    absent = absent_of(reading, 0)
    profiling = {m.name for m in READ_BY_NVML if "gpm" in m.sources}
    by_nvml = {"gpu_util_ratio", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"}
    refused = {"compute_processes", "memory_temp_c", *profiling} - by_nvml
    assert {name for name, why in absent.items() if why is Absent.NO_PERMISSION} == refused
    assert set(values_of(reading, 0)) == NAMES - set(absent)


def test_sixteen_gpus(fake_nvml: FakeNvml) -> None:
    """An HGX of 16 is 16 rows, each with its own key and all its metrics."""
    fake_nvml.healthy(16)
    source = NvmlSource("node-1")
    source.read(START)
    reading = source.read(START + RARE_MS)
    assert keys_of(reading) == {slot: f"16540230{slot:05d}" for slot in range(16)}
    assert all(set(values_of(reading, gpu)) == NAMES - {"nvlink_effective_ber"} for gpu in range(16))
    source.close()


def test_mig_on_two_of_eight(fake_nvml: FakeNvml, source: NvmlSource, gpus: Gpus) -> None:
    """Each instance is a row of its own next to its GPU's; the six others look as ever."""
    fake_nvml.mig(2, [0, 1, 6])
    fake_nvml.mig(5, [3])
    source.read(START + 10_000)
    reading = source.read(START + 10_000 + RARE_MS)
    instances = [values for e, values in reading.rows if e.mig]
    assert [e.gpu for e, _ in reading.rows] == [0, 1, 2, 2, 2, 2, 3, 4, 5, 5, 6, 7]
    assert [values["framebuffer_used_bytes"] for values in instances] == [1e9, 2e9, 7e9, 4e9]
    assert [values["sm_active_ratio"] for values in instances] == pytest.approx([0.1, 0.2, 0.7, 0.4])
    assert [values["compute_processes"] for values in instances] == [0, 1, 6, 3]
    assert values_of(reading, 2)["framebuffer_used_bytes"] == 71e9
    assert absent_of(reading, 2)["memory_util_ratio"] is Absent.UNSUPPORTED
    assert all(set(values_of(reading, gpu)) == NAMES - {"nvlink_effective_ber"} for gpu in (0, 1, 3, 4, 6, 7))
    whole = {e.gpu: e for e in gpus.all()}
    for entity in (e for e, _ in reading.rows if e.mig):
        assert gpus.find(uuid=entity.mig) == entity
        assert entity.key == entity.uuid == entity.mig
        assert entity.pci == whole[entity.gpu].pci
