"""What a tick costs in calls, what older drivers and plainer GPUs are asked instead, and the inventory's pace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml.device import STAGGERED
from drover_agent.sources.nvml.fields import (
    RARE_METRICS,
    RARE_MS,
    SLOW_METRICS,
    SLOW_MS,
)
from drover_agent.sources.nvml.inventory import EVERY_MS, SPREAD_MS
from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Absent
from testbed.nvml import PROCESS_LISTS, FakeNvml
from testbed.nvml_values import GPUS, READ_BY_NVML

START = 1_700_000_000_000
NAMES = {metric.name for metric in READ_BY_NVML} - {"nvlink_effective_ber"}  # the steady node is older than Blackwell


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def source(fake_nvml: FakeNvml, gpus: Gpus) -> Iterator[NvmlSource]:
    source = NvmlSource("node-1", gpus)
    yield source
    source.close()


def values_of(reading: Reading, gpu: int) -> dict[str, float]:
    return next((dict(values) for entity, values in reading.rows if entity.gpu == gpu), {})


def absent_of(reading: Reading, gpu: int) -> dict[str, Absent]:
    return {name: why for entity, name, why in reading.absent if entity.gpu == gpu}


def calls_of(fake_nvml: FakeNvml, source: NvmlSource, at_ms: int, folder: Path) -> dict[str, int]:
    """Calls of the read at this time, per function."""
    if not (folder / "calls").exists():
        fake_nvml.count_calls(folder / "calls")
    before = fake_nvml.calls()
    source.read(at_ms)
    return {name: n - before.get(name, 0) for name, n in fake_nvml.calls().items() if n > before.get(name, 0)}


def test_a_tick_asks_each_thing_once_and_nothing_slow(fake_nvml: FakeNvml, source: NvmlSource, tmp_path: Path) -> None:
    """One batch of fields and one call each for what no field gives; GPM is one sample and one difference."""
    for tick in range(STAGGERED):
        source.read(START + 1000 * tick)
    fast = calls_of(fake_nvml, source, START + 1000 * STAGGERED, tmp_path)
    assert set(fast.values()) == {GPUS}
    assert set(fast) == {
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetUtilizationRates",
        "nvmlGpmSampleGet",
        "nvmlGpmMetricsGet",
    }
    assert calls_of(fake_nvml, source, START + 1000 * (STAGGERED + 1), tmp_path) == fast


def test_nvml_itself_reports_utilisation_and_gpm_is_not_asked_for_it(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """GPM's utilisation costs 1.85 ms of CPU on an H100, NVML's 4 us. Also while GPM fails, as under a profiler."""
    fake_nvml.set(0, "nvmlDeviceGetUtilizationRates.gpu", 42)
    fake_nvml.error(0, "GPM_METRIC_GRAPHICS_UTIL", "UNKNOWN")  # would make it absent
    for tick in range(STAGGERED + 3):
        reading = source.read(START + 1000 * tick)
        assert values_of(reading, 0)["gpu_util_ratio"] == 0.42
        assert "gpu_util_ratio" not in absent_of(reading, 0)
        assert ("memory_util_ratio" in values_of(reading, 0)) is (tick in (0, 10)), "slow, as GPM has dram_active_ratio"
    device = source.devices[0]
    take = device.ask(START + 1000 * (STAGGERED + 4))
    assert take is not None
    fast = values_of(take(), 0)
    assert fast["gpu_util_ratio"] == 0.42
    assert "sm_active_ratio" in fast
    fake_nvml.error(0, "nvmlGpmSampleGet", "UNKNOWN")
    reading = device.read(START + 1000 * (STAGGERED + 5))
    assert values_of(reading, 0)["gpu_util_ratio"] == 0.42
    assert absent_of(reading, 0)["sm_active_ratio"] is Absent.ERROR


def test_a_value_that_gpm_refuses_or_cannot_be_is_absent_alone(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    source.read(START)
    fake_nvml.error(0, "GPM_METRIC_SM_UTIL", "NOT_SUPPORTED")
    fake_nvml.set(0, "GPM_METRIC_DRAM_BW_UTIL", 900)
    reading = source.read(START + 1000)
    assert absent_of(reading, 0)["sm_active_ratio"] is Absent.UNSUPPORTED
    assert absent_of(reading, 0)["dram_active_ratio"] is Absent.OUT_OF_RANGE
    assert not {"sm_active_ratio", "dram_active_ratio"} & values_of(reading, 0).keys()
    assert "tensor_active_ratio" in values_of(reading, 0)


def test_in_mig_mode_nvml_has_no_utilisation_and_gpm_has(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.mig(0, [2])
    source.read(START)
    reading = source.read(START + 10_000)
    assert values_of(reading, 0)["gpu_util_ratio"] == pytest.approx(0.99)
    assert "gpu_util_ratio" not in absent_of(reading, 0)
    assert absent_of(reading, 0)["memory_util_ratio"] is Absent.UNSUPPORTED
    [instance] = [dict(values) for entity, values in reading.rows if entity.mig]
    assert instance["gpu_util_ratio"] == pytest.approx(0.35)


def test_slow_calls_are_those_of_one_gpu_in_a_tick_and_of_each_once_in_10_s(
    fake_nvml: FakeNvml, source: NvmlSource, tmp_path: Path
) -> None:
    for tick in range(10):
        source.read(START + 1000 * tick)
    reported: list[list[int]] = []
    calls: list[dict[str, int]] = []
    fake_nvml.count_calls(tmp_path / "calls")
    for tick in range(10, 30):
        before = fake_nvml.calls()
        reading = source.read(START + 1000 * tick)
        calls.append({name: n - before.get(name, 0) for name, n in fake_nvml.calls().items()})
        reported.append([gpu for gpu in range(GPUS) if "framebuffer_used_bytes" in values_of(reading, gpu)])
    assert reported == 2 * [*([gpu] for gpu in range(GPUS)), [], []]
    assert [made.get(PROCESS_LISTS[0], 0) for made in calls] == 2 * [*([1] * GPUS), 0, 0]  # nvidia-ml-py makes two
    assert not {"nvmlDeviceGetNvLinkState", "nvmlDeviceGetRemappedRows"} & {name for made in calls for name in made}


def test_a_slow_read_that_was_missed_is_made_up_for_in_the_same_bucket(source: NvmlSource) -> None:
    for tick in range(10):
        source.read(START + 1000 * tick)
    ticks = [source.read(START + SLOW_MS + 1000 * tick) for tick in (0, 1, 2, 8)]  # paused from second 3 to 7
    last = {gpu for gpu in range(GPUS) if "framebuffer_used_bytes" in values_of(ticks[-1], gpu)}
    assert last == set(range(3, GPUS))


def test_what_the_docs_call_slow_is_what_a_tick_between_leaves_out(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    start = START + SLOW_MS
    assert start % RARE_MS == 0
    source.read(start)
    between = set(values_of(source.read(start + 1000), 0))
    of_ten_s = set(values_of(source.read(start + SLOW_MS), 0))
    whole = set(values_of(source.read(start + RARE_MS), 0))
    assert whole - of_ten_s == RARE_METRICS - {"nvlink_effective_ber"}
    assert of_ten_s - between == SLOW_METRICS - RARE_METRICS
    assert not between & SLOW_METRICS


def test_links_past_the_last_are_asked_once(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.set(0, "links", 4)
    source.read(START)
    fake_nvml.set(0, "links", 6)  # which no GPU does: but it would show whether they are asked
    assert values_of(source.read(START + SLOW_MS), 0)["nvlink_active_links"] == 4


def driver_of_2021(fake_nvml: FakeNvml) -> None:
    """R470: before fields of power and most struct versions. The functions it lacks are those that came after it."""
    with fake_nvml.batch():
        fake_nvml.system("driver", "470.256.02")
        fake_nvml.system("fields", "164")
        for function in (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetTemperatureV",
            "nvmlDeviceGetMarginTemperature",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetGpuFabricInfo",
            "nvmlDeviceGetSramEccErrorStatus",
            "nvmlGpmQueryDeviceSupport",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ):
            for gpu in range(GPUS):
                fake_nvml.error(gpu, function, "FUNCTION_NOT_FOUND")
        for gpu in range(GPUS):
            fake_nvml.set(gpu, "nvmlDeviceGetPowerUsage", 641_000)
            for which in ("TX", "RX"):
                fake_nvml.set(gpu, f"nvmlDeviceGetPcieThroughput({which})", 7)


def test_an_older_driver_is_asked_by_its_own_calls(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Everything it has in any form is read, from the first tick on; the rest says `unsupported`."""
    driver_of_2021(fake_nvml)
    reading = source.read(START)
    values, absent = values_of(reading, 0), absent_of(reading, 0)
    assert values["power_w"] == pytest.approx(641)
    assert values["power_limit_w"] == 700
    assert values["clock_event_reasons"] == 4
    assert values["gpu_temp_c"] == 61
    assert values["framebuffer_used_bytes"] == 71e9
    assert values["nvlink_active_links"] == 18
    assert values["pcie_rx_bytes_per_s"] == 7000
    assert absent["thermal_margin_c"] is Absent.UNSUPPORTED
    assert set(absent.values()) == {Absent.UNSUPPORTED}
    assert set(values) | set(absent) == NAMES | {"nvlink_effective_ber"}
    assert not set(values) & set(absent)


def test_an_older_driver_costs_no_refused_calls_in_later_ticks(
    fake_nvml: FakeNvml, source: NvmlSource, tmp_path: Path
) -> None:
    driver_of_2021(fake_nvml)
    for tick in range(STAGGERED):
        source.read(START + 1000 * tick)
    assert set(calls_of(fake_nvml, source, START + 1000 * STAGGERED, tmp_path)) == {
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetUtilizationRates",
    }


def test_a_plain_gpu_says_what_it_has_not(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """No ECC, no NVLink, no HBM sensor, no profiling: each `unsupported`, and everything else is there."""
    with fake_nvml.batch():
        for key in ("links", "gpm", "FI_DEV_MEMORY_TEMP", "nvmlDeviceGetGpuFabricInfoV", "mig_mode"):
            fake_nvml.unset(0, key)
        for metric in READ_BY_NVML:
            key = metric.sources["nvml"].key if "nvml" in metric.sources else ""
            if key.startswith(("nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetRemapped", "nvmlDeviceGetRow")):
                fake_nvml.unset(0, key)
        fake_nvml.unset(0, "nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded")
        for which in ("TX", "RX"):
            fake_nvml.set(0, f"nvmlDeviceGetPcieThroughput({which})", 7)
    reading = source.read(START)
    absent = absent_of(reading, 0)
    profiling = {m.name for m in READ_BY_NVML if "gpm" in m.sources and "nvml" not in m.sources}
    parts = ("ecc_", "sram_", "remap", "row_remap", "nvlink_")
    missing = {name for name in NAMES | {"nvlink_effective_ber"} if name.startswith(parts)}
    assert set(absent) == missing | profiling | {"memory_temp_c", "fabric_state"}
    assert set(absent.values()) == {Absent.UNSUPPORTED}
    assert set(values_of(reading, 0)) == NAMES - set(absent)


def test_the_inventory_shows_what_each_gpu_is_and_how_it_is_set_up(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    found = source.read(START).inventory
    of_one = {key.removeprefix("gpu5."): value for key, value in found.items() if key.startswith("gpu5.")}
    links = {key: of_one.pop(key) for key in list(of_one) if key.startswith("nvlink.")}
    assert of_one == {
        "model": "NVIDIA H100 80GB HBM3",
        "serial": "1654023000005",
        "uuid": "GPU-00000005-0000-4000-8000-000000000000",
        "pci": "0000:6b:00.0",
        "vbios": "96.00.89.00.01",
        "inforom_image": "G520.0200.00.05",
        "inforom_oem": "2.1",
        "inforom_ecc": "7.16",
        "part_number": "692-2G520-0200-000",
        "power_limit_set_w": "700",
        "power_limit_default_w": "700",
        "power_limit_min_w": "200",
        "power_limit_max_w": "700",
        "ecc_mode": "on",
        "ecc_mode_pending": "on",
        "mig_mode": "off",
        "mig_mode_pending": "off",
        "persistence_mode": "on",
        "compute_mode": "default",
        "sm_clock_max_mhz": "1980",
        "memory_clock_max_mhz": "2619",
        "memory_temp_max_c": "95",
        "pcie_generation_max": "5",
        "pcie_width_max": "16",
        "gsp_firmware": "580.95.05",
        "fabric_cluster": "c1c1c1c1-c1c1-c1c1-c1c1-c1c1c1c1c1c1",
        "fabric_clique": "0",
    }
    assert links == {f"nvlink.{link}": f"switch 0000:d{link % 4}:00.0" for link in range(18)}
    assert (found["driver_version"], found["cuda_version"], found["nvml_version"]) == (
        "580.95.05",
        "13.0",
        "13.580.95.05",
    )


def test_a_changed_setting_is_reported_alone_and_not_by_all_gpus_in_one_tick(
    fake_nvml: FakeNvml, source: NvmlSource
) -> None:
    source.read(START)
    with fake_nvml.batch():
        for gpu in range(GPUS):
            fake_nvml.set(gpu, "nvmlDeviceGetPowerManagementLimit", 500_000)
            fake_nvml.set(gpu, "nvmlDeviceGetEnforcedPowerLimit", 450_000)  # which moves, and is a value of each tick
        fake_nvml.unset(0, "gsp_firmware")
    assert source.read(START + EVERY_MS - 1000).inventory == {}
    assert source.read(START + EVERY_MS).inventory == {"gpu0.power_limit_set_w": "500", "gpu0.gsp_firmware": ""}
    assert source.read(START + EVERY_MS + SPREAD_MS).inventory == {"gpu1.power_limit_set_w": "500"}
