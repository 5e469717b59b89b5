"""NVML through the real nvidia-ml-py on the C stand-in: values, absence, loss, identity, pace."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.nvml.fields import RARE_MS
from drover_agent.sources.nvml.metrics import REFUSED_MS
from drover_agent.sources.nvml.source import RETRY_MS, NvmlSource
from drover_core.metrics.catalog import BY_NAME, Absent, describe
from testbed.nvml import SCRIPT_VARIABLE, FakeNvml
from testbed.nvml_values import BOOLS, GPUS, READ_BY_NVML, SINGLE, feed_distinct, key_of

START = 1_700_000_000_000  # a multiple of 10 s, so that slow metrics are due at START + n * 10 s


@pytest.fixture
def source(fake_nvml: FakeNvml) -> Iterator[NvmlSource]:
    source = NvmlSource("node-1")
    yield source
    source.close()


def values_of(reading: Reading, gpu: int) -> dict[str, float]:
    return next((dict(values) for entity, values in reading.rows if entity.gpu == gpu), {})


def absent_of(reading: Reading, gpu: int) -> dict[str, Absent]:
    return {name: why for entity, name, why in reading.absent if entity.gpu == gpu}


def entity_of(reading: Reading, gpu: int) -> Entity:
    return next(e for e in [*(e for e, _ in reading.rows), *(e for e, _, _ in reading.absent)] if e.gpu == gpu)


def twice(source: NvmlSource, start: int = START) -> Reading:
    """Two reads, for GPM; the second one so much later that it has every metric."""
    source.read(start)
    return source.read(start + RARE_MS)


def test_every_metric_of_every_gpu_arrives_in_its_own_column(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    expected = feed_distinct(fake_nvml)
    reading = twice(source)
    assert [entity.gpu for entity, _ in reading.rows] == list(range(GPUS))
    assert reading.absent == []
    for gpu, want in enumerate(expected):
        assert set(want) == {m.name for m in READ_BY_NVML}
        assert values_of(reading, gpu) == pytest.approx(want, rel=1e-12)


def test_units_are_those_of_the_catalog(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    """Figures an operator knows, without the catalog's factors."""
    values = values_of(twice(source), 0)
    assert values["power_w"] == pytest.approx(642.3)
    assert values["power_limit_w"] == pytest.approx(700)
    assert values["throttle_power_us"] == pytest.approx(5e6)
    assert values["energy_j"] == pytest.approx(987_654_321)
    assert values["gpu_util_ratio"] == pytest.approx(0.99)
    assert values["sm_active_ratio"] == pytest.approx(0.915)
    assert values["pcie_tx_bytes_per_s"] == 1_258_000_000  # 1,200 MiB/s in whole MB/s
    assert values["framebuffer_total_bytes"] == 85_520_809_984


def test_a_metric_that_is_not_supported_is_absent_and_alone(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    whole = {m.name for m in READ_BY_NVML} - {"nvlink_effective_ber"}  # the steady node is older than Blackwell
    assert set(values_of(twice(source), 0)) == whole
    tick = START + 10_000
    for metric in SINGLE + BOOLS:
        tick += REFUSED_MS  # by then what was refused is asked again
        fake_nvml.error(0, key_of(metric), "NOT_SUPPORTED")
        reading = source.read(tick)
        fake_nvml.no_error(0, key_of(metric))
        absent = absent_of(reading, 0)
        call = key_of(metric).partition(".")[0].partition("[")[0]  # one call may give several metrics
        assert absent.pop("nvlink_effective_ber") is Absent.UNSUPPORTED
        if metric.name == "gpu_util_ratio":  # which two readers have: GPM reports it where NVML does not
            assert set(absent) == {"memory_util_ratio"}, "the other answer of the same call"
            assert set(values_of(reading, 0)) == whole - set(absent)
            continue
        if metric.name == "memory_util_ratio":
            assert absent == {metric.name: Absent.UNSUPPORTED}
            continue
        assert absent[metric.name] is Absent.UNSUPPORTED
        assert all(key_of(BY_NAME[name]).startswith(call) for name in absent), metric.name
        assert set(values_of(reading, 0)) == whole - set(absent)
        assert set(values_of(reading, 1)) == whole


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("NO_PERMISSION", Absent.NO_PERMISSION),
        ("TIMEOUT", Absent.TIMEOUT),
        ("FUNCTION_NOT_FOUND", Absent.UNSUPPORTED),
        ("UNKNOWN", Absent.ERROR),
        ("RESET_REQUIRED", Absent.ERROR),
    ],
)
@pytest.mark.parametrize(
    ("what", "metric"),
    [
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"),
        ("FI_DEV_POWER_INSTANT", "power_w"),
        ("nvmlDeviceGetFieldValues", "memory_temp_c"),
        ("GPM_METRIC_SM_UTIL", "sm_active_ratio"),
        ("nvmlGpmSampleGet", "tensor_active_ratio"),
        ("FI_DEV_NVLINK_ERROR_DL_CRC", "nvlink_crc_errors"),
        ("nvmlDeviceGetHandleByIndex_v2", "gpu_temp_c"),
    ],
)
def test_an_error_is_absence_with_its_reason(
    fake_nvml: FakeNvml, source: NvmlSource, what: str, metric: str, code: str, reason: Absent
) -> None:
    fake_nvml.error(2, what, code)
    reading = twice(source)
    assert absent_of(reading, 2)[metric] is reason
    assert metric not in values_of(reading, 2)
    assert metric in values_of(reading, 3)
    assert reading.events == []


def test_an_unexpected_error_is_logged_once(
    fake_nvml: FakeNvml, source: NvmlSource, caplog: pytest.LogCaptureFixture
) -> None:
    fake_nvml.error(2, "nvmlDeviceGetEnforcedPowerLimit", "UNKNOWN")
    with caplog.at_level(logging.WARNING):
        for tick in range(5):
            source.read(START + tick * 1000)
    assert [r.getMessage() for r in caplog.records] == [
        "GPU 2: nvmlDeviceGetEnforcedPowerLimit could not be read: Unknown Error"
    ]


@pytest.mark.parametrize(
    ("key", "raw", "metric"),
    [
        ("nvmlDeviceGetClockInfo(SM)", 2**32 - 1, "sm_clock_mhz"),
        ("nvmlDeviceGetUtilizationRates.gpu", 2**32 - 1, "gpu_util_ratio"),
        ("nvmlDeviceGetTotalEnergyConsumption", 2**64 - 1, "energy_j"),
        ("nvmlDeviceGetMemoryInfo_v2.used", 2**64 - 1, "framebuffer_used_bytes"),
        ("FI_DEV_MEMORY_TEMP", 2**32 - 1, "memory_temp_c"),
        ("nvmlDeviceGetRemappedRows[1]", 2**32 - 1, "remapped_rows_uncorrected"),
    ],
)
def test_nvmls_word_for_no_value_is_no_value(
    fake_nvml: FakeNvml, source: NvmlSource, key: str, raw: int, metric: str
) -> None:
    fake_nvml.set(0, key, raw)
    reading = source.read(START)
    assert absent_of(reading, 0)[metric] is Absent.UNSUPPORTED
    assert metric not in values_of(reading, 0)


def test_a_counter_may_pass_the_32_bit_word_for_no_value(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.set(0, "nvmlDeviceGetTotalEnergyConsumption", 2**32 - 1)
    assert values_of(source.read(START), 0)["energy_j"] == pytest.approx((2**32 - 1) / 1000)


def test_a_value_that_cannot_be_true_is_out_of_range(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.set(0, "nvmlDeviceGetTemperatureV(GPU)", 4000)
    fake_nvml.set(0, "GPM_METRIC_SM_UTIL", 100.4)  # rounding: all of it
    fake_nvml.set(0, "GPM_METRIC_FP64_UTIL", 180)
    fake_nvml.set(0, "GPM_METRIC_FP32_UTIL", "nan")
    reading = twice(source)
    assert absent_of(reading, 0) == {
        "gpu_temp_c": Absent.OUT_OF_RANGE,
        "fp64_active_ratio": Absent.OUT_OF_RANGE,
        "fp32_active_ratio": Absent.OUT_OF_RANGE,
        "nvlink_effective_ber": Absent.UNSUPPORTED,
    }
    assert values_of(reading, 0)["sm_active_ratio"] == 1


def test_temperatures_may_be_negative_and_older_drivers_answer_by_the_older_call(
    fake_nvml: FakeNvml, source: NvmlSource
) -> None:
    fake_nvml.set(0, "nvmlDeviceGetMarginTemperature", -3)
    fake_nvml.error(0, "nvmlDeviceGetTemperatureV", "FUNCTION_NOT_FOUND")
    values = values_of(source.read(START), 0)
    assert values["thermal_margin_c"] == -3
    assert values["gpu_temp_c"] == 61


def test_slow_metrics_come_once_in_ten_seconds_and_are_no_news_between(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    ticks = [source.read(START + 4000 + 1000 * tick) for tick in range(13)]
    having = [tick for tick, reading in enumerate(ticks) if "nvlink_active_links" in values_of(reading, 0)]
    assert having == [0, 6]  # at once, then in the first tick of the next ten seconds
    assert all("nvlink_active_links" not in absent_of(reading, 0) for reading in ticks)
    assert all("power_w" in values_of(reading, 0) for reading in ticks)


def test_gpm_needs_two_samples(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    first, second = source.read(START), source.read(START + 1000)
    assert "sm_active_ratio" not in values_of(first, 0) | absent_of(first, 0)
    assert values_of(second, 0)["sm_active_ratio"] == pytest.approx(0.915)


def test_without_gpm_pcie_traffic_is_measured_by_the_slow_call(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.set(0, "gpm", 0)
    fake_nvml.set(0, "nvmlDeviceGetPcieThroughput(TX)", 31)
    fake_nvml.set(0, "nvmlDeviceGetPcieThroughput(RX)", 32)
    first, second = source.read(START), source.read(START + 1000)
    assert values_of(first, 0)["pcie_tx_bytes_per_s"] == 31_000
    assert values_of(first, 0)["pcie_rx_bytes_per_s"] == 32_000
    assert "pcie_tx_bytes_per_s" not in values_of(second, 0) | absent_of(second, 0)
    assert absent_of(first, 0)["sm_active_ratio"] is Absent.UNSUPPORTED
    assert absent_of(first, 0)["nvlink_tx_bytes_per_s"] is Absent.UNSUPPORTED


def test_a_dead_link_keeps_its_errors_in_the_sum(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.set(0, "FI_DEV_NVLINK_ERROR_DL_CRC.4", 70)
    fake_nvml.set(0, "FI_DEV_NVLINK_ERROR_DL_CRC.5", 5)
    assert values_of(source.read(START), 0)["nvlink_crc_errors"] == 75
    fake_nvml.error(0, "FI_DEV_NVLINK_ERROR_DL_CRC.4", "NOT_SUPPORTED")
    fake_nvml.set(0, "nvmlDeviceGetNvLinkState.4", 0)
    fake_nvml.set(0, "FI_DEV_NVLINK_ERROR_DL_CRC.5", 6)
    values = values_of(source.read(START + 10_000), 0)
    assert (values["nvlink_crc_errors"], values["nvlink_active_links"]) == (76, 17)


def test_a_link_that_answers_later_adds_no_errors_of_long_ago(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.set(0, "FI_DEV_NVLINK_ERROR_DL_CRC.4", 70)
    fake_nvml.set(0, "FI_DEV_NVLINK_ERROR_DL_CRC.5", 5)
    fake_nvml.error(0, "FI_DEV_NVLINK_ERROR_DL_CRC.4", "TIMEOUT")
    assert values_of(source.read(START), 0)["nvlink_crc_errors"] == 5
    fake_nvml.no_error(0, "FI_DEV_NVLINK_ERROR_DL_CRC.4")
    assert values_of(source.read(START + RARE_MS), 0)["nvlink_crc_errors"] == 5
    fake_nvml.set(0, "FI_DEV_NVLINK_ERROR_DL_CRC.4", 72)
    assert values_of(source.read(START + 2 * RARE_MS), 0)["nvlink_crc_errors"] == 7


def test_a_link_that_could_not_be_asked_is_not_down(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.error(0, "nvmlDeviceGetNvLinkState.4", "TIMEOUT")
    reading = source.read(START)
    assert "nvlink_active_links" not in values_of(reading, 0)
    assert absent_of(reading, 0)["nvlink_active_links"] is Absent.TIMEOUT
    assert values_of(reading, 1)["nvlink_active_links"] == 18


@pytest.mark.parametrize("older", [False, True])
def test_a_fabric_that_a_gpu_failed_to_join_is_not_completed(
    fake_nvml: FakeNvml, source: NvmlSource, older: bool
) -> None:
    fake_nvml.set(0, "fabric_status", "TIMEOUT")
    if older:
        fake_nvml.error(0, "nvmlDeviceGetGpuFabricInfoV", "FUNCTION_NOT_FOUND")
    reading = source.read(START)
    states = [describe(BY_NAME["fabric_state"], values_of(reading, gpu)["fabric_state"]) for gpu in (0, 1)]
    assert states == ["failed", "completed"]
    assert reading.inventory.get("gpu0.fabric_clique", "") == ""


def test_a_gpu_without_nvlink_says_so(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.unset(0, "links")
    absent = absent_of(source.read(START), 0)
    assert {name for name in absent if name.startswith("nvlink")} == {
        "nvlink_active_links",
        "nvlink_crc_errors",
        "nvlink_replays",
        "nvlink_recoveries",
        "nvlink_effective_ber",
    }
    assert set(absent.values()) == {Absent.UNSUPPORTED}


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("535.183.01", False),
        ("570.124.06", False),  # 251 to 253 are power smoothing here
        ("575.57.08", True),
        ("580.65.06", True),
        ("580.76.05", False),  # neither numbering is documented for it
        ("580.82.07", True),
        ("590.44.01", True),
        ("unreadable", False),
    ],
)
def test_the_slowdown_counters_are_asked_by_the_drivers_own_numbers(
    fake_nvml: FakeNvml, source: NvmlSource, driver: str, known: bool
) -> None:
    slowdowns = ("SW_THERM_SLOWDOWN", "HW_THERM_SLOWDOWN", "HW_POWER_BRAKE_SLOWDOWN")
    names = ("throttle_thermal_sw_us", "throttle_thermal_hw_us", "throttle_brake_us")
    smoothing = ("ENABLED", "PRIV_LVL", "IMM_RAMP_DOWN_ENABLED")
    with fake_nvml.batch():
        fake_nvml.system("driver", driver)
        for place in range(3):
            fake_nvml.set(0, f"FI_DEV_CLOCKS_EVENT_REASON_{slowdowns[place]}", 1_000_000 * (place + 1))
            fake_nvml.set(0, f"FI_PWR_SMOOTHING_{smoothing[place]}", 1)
    reading = source.read(START)
    if known:
        assert [values_of(reading, 0)[name] for name in names] == pytest.approx([1000, 2000, 3000])
    else:
        assert [absent_of(reading, 0)[name] for name in names] == [Absent.UNSUPPORTED] * 3
    assert values_of(reading, 0)["throttle_power_us"] == pytest.approx(5e6)


def test_a_lost_gpu_is_data_and_the_others_go_on(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    before = source.read(START)
    fake_nvml.lose(3)
    readings = [source.read(START + 1000 * tick) for tick in (1, 2, 3)]
    fake_nvml.recover(3)
    readings += [source.read(START + 1000 * tick) for tick in (4, 5)]

    events = [(e.gpu, e.kind, e.code, e.ts_ms - START) for reading in readings for e in reading.events]
    assert events == [(3, "lifecycle", "gpu_lost", 1000), (3, "lifecycle", "gpu_back", 4000)]
    assert "GPU 3 NVIDIA H100 80GB HBM3 0000:4b:00.0" in readings[0].events[0].message
    for reading in readings[:3]:
        assert values_of(reading, 3) == {}
        assert absent_of(reading, 3) == {m.name: Absent.LOST for m in READ_BY_NVML}
        assert entity_of(reading, 3) == entity_of(before, 3)
        assert all("power_w" in values_of(reading, gpu) for gpu in range(GPUS) if gpu != 3)
    assert "nvlink_active_links" in values_of(readings[3], 3)  # slow ones too, so that their absence ends
    assert "sm_active_ratio" in values_of(readings[4], 3)


def test_a_gpu_lost_in_the_middle_of_a_read_keeps_what_was_read(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    source.read(START)
    fake_nvml.error(5, "nvmlDeviceGetTemperatureV", "GPU_IS_LOST")
    reading = source.read(START + 1000)
    assert values_of(reading, 5)["power_w"] == pytest.approx(642.3)
    assert absent_of(reading, 5)["pcie_width"] is Absent.LOST
    assert [event.code for event in reading.events] == ["gpu_lost"]


def test_identity_falls_back_from_serial_to_slot(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    with fake_nvml.batch():
        fake_nvml.unset(1, "serial")
        fake_nvml.set(2, "serial", "0")
        for key in ("serial", "uuid"):
            fake_nvml.unset(3, key)
        for key in ("serial", "uuid", "pci"):
            fake_nvml.unset(4, key)
        fake_nvml.set(6, "serial", "shared")  # two GPUs on one board
        fake_nvml.set(7, "serial", "shared")
    reading = twice(source)
    assert [entity_of(reading, gpu).key for gpu in range(GPUS)] == [
        "1654023000000",
        "GPU-00000001-0000-4000-8000-000000000000",
        "GPU-00000002-0000-4000-8000-000000000000",
        "node-1/0000:4b:00.0",
        "node-1/gpu4",
        "1654023000005",
        "GPU-00000006-0000-4000-8000-000000000000",
        "GPU-00000007-0000-4000-8000-000000000000",
    ]
    assert entity_of(reading, 6).serial == "shared"


def test_a_gpu_that_is_lost_from_the_start_is_an_entity_and_gets_its_name_later(
    fake_nvml: FakeNvml, source: NvmlSource
) -> None:
    fake_nvml.lose(3)
    reading = source.read(START)
    assert entity_of(reading, 3).key == "node-1/gpu3"
    assert [(e.gpu, e.code) for e in reading.events] == [(3, "gpu_lost")]
    assert "gpu3.serial" not in reading.inventory
    fake_nvml.recover(3)
    reading = source.read(START + 1000)
    assert entity_of(reading, 3).key == "1654023000003"
    assert reading.inventory["gpu3.serial"] == "1654023000003"


def test_the_inventory_names_versions_and_gpus_once(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    inventory = source.read(START).inventory
    assert inventory["driver_version"] == "580.95.05"
    assert inventory["cuda_version"] == "13.0"
    assert inventory["gpu_count"] == "8"
    assert inventory["no_gpu_reason"] == ""
    assert inventory["gpu7.model"] == "NVIDIA H100 80GB HBM3"
    assert inventory["gpu7.vbios"] == "96.00.89.00.01"
    assert inventory["gpu7.pci"] == "0000:8b:00.0"
    assert source.read(START + 1000).inventory == {}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("DRIVER_NOT_LOADED", "driver is not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "differ in version"),
        ("NO_PERMISSION", "/dev/nvidia*"),
        ("UNKNOWN", "NVML does not start: Unknown Error"),
        ("LIBRARY_NOT_FOUND", "libnvidia-ml.so.1 was not found"),  # installed later, by NVIDIA's operator say
    ],
)
def test_no_nvml_is_a_reason_and_is_tried_again(fake_nvml: FakeNvml, source: NvmlSource, code: str, words: str) -> None:
    fake_nvml.error(0, "nvmlInitWithFlags", code)
    first = source.read(START)
    assert (first.rows, first.absent) == ([], [])
    assert words in first.inventory["no_gpu_reason"]
    assert [event.code for event in first.events] == ["driver_missing"]
    fake_nvml.no_error(0, "nvmlInitWithFlags")
    assert source.read(START + RETRY_MS - 1).rows == []
    later = source.read(START + RETRY_MS)
    assert len(later.rows) == GPUS
    assert later.inventory["no_gpu_reason"] == ""
    assert [event.code for event in later.events] == ["driver_back"]


def test_a_clock_that_is_set_back_does_not_put_off_the_next_attempt(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.error(0, "nvmlInitWithFlags", "DRIVER_NOT_LOADED")
    source.read(START)
    fake_nvml.no_error(0, "nvmlInitWithFlags")
    assert len(source.read(START - 3_600_000).rows) == GPUS


def test_a_driver_that_stays_away_is_reported_once(fake_nvml: FakeNvml, source: NvmlSource) -> None:
    fake_nvml.error(0, "nvmlInitWithFlags", "DRIVER_NOT_LOADED")
    codes = [event.code for n in range(4) for event in source.read(START + n * RETRY_MS).events]
    assert codes == ["driver_missing"]


def test_a_driver_without_gpus_and_a_machine_without_a_driver_say_so(
    fake_nvml: FakeNvml, source: NvmlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.system("devices", "0")
    without = source.read(START)
    assert "sees no GPU" in without.inventory["no_gpu_reason"]
    assert [event.code for event in without.events] == ["driver_missing"]
    monkeypatch.delenv(SCRIPT_VARIABLE)
    assert "libnvidia-ml.so.1 was not found" in source.read(START + RETRY_MS).inventory["no_gpu_reason"]
    monkeypatch.setenv(SCRIPT_VARIABLE, str(fake_nvml.script))
    fake_nvml.system("devices", "8")
    assert [event.code for event in source.read(START + 2 * RETRY_MS).events] == ["driver_back"]
