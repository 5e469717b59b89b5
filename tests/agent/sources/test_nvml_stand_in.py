"""The C stand-in refuses what a real device refuses, so that a mistake in our calls cannot pass on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from testbed.nvml import FakeNvml
from testbed.waiting import wait_until


@pytest.fixture
def handle(fake_nvml: FakeNvml) -> Iterator[Any]:
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(1)
    pynvml.nvmlShutdown()


def function(name: str) -> Callable[..., int]:
    pointer: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
    return pointer


def refused(call: Callable[[], Any]) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        call()
    return int(caught.value.value)


def test_calls_before_init_and_after_shutdown_are_refused(fake_nvml: FakeNvml) -> None:
    assert refused(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8
    pynvml.nvmlShutdown()
    assert refused(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_handle_that_nvml_did_not_give_is_refused(handle: Any) -> None:
    forged = ctypes.cast(ctypes.c_void_p(0xDEADBEEF), pynvml.c_nvmlDevice_t)
    assert refused(lambda: pynvml.nvmlDeviceGetUUID(forged)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(lambda: pynvml.nvmlDeviceGetHandleByIndex(8)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_null_and_small_buffers_are_refused(handle: Any) -> None:
    assert function("nvmlDeviceGetEnforcedPowerLimit")(handle, None) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    small = ctypes.create_string_buffer(4)
    assert function("nvmlDeviceGetUUID")(handle, small, ctypes.c_uint(4)) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    count = ctypes.c_uint(0)
    processes = function("nvmlDeviceGetComputeRunningProcesses_v3")
    assert processes(handle, ctypes.byref(count), None) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert count.value == 1


@pytest.mark.parametrize(
    ("name", "struct"),
    [
        ("nvmlDeviceGetMemoryInfo_v2", pynvml.c_nvmlMemory_v2_t),
        ("nvmlDeviceGetTemperatureV", pynvml.c_nvmlTemperature_v1_t),
        ("nvmlDeviceGetMarginTemperature", pynvml.c_nvmlMarginTemperature_v1_t),
        ("nvmlDeviceGetSramEccErrorStatus", pynvml.c_nvmlEccSramErrorStatus_v1_t),
        ("nvmlDeviceGetGpuFabricInfoV", pynvml.c_nvmlGpuFabricInfo_v2_t),
        ("nvmlGpmQueryDeviceSupport", pynvml.c_nvmlGpmSupport_t),
    ],
)
def test_a_struct_of_another_version_is_refused(handle: Any, name: str, struct: type[Any]) -> None:
    argument = struct()
    argument.version = 0x7000001
    assert function(name)(handle, ctypes.byref(argument)) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_unknown_fields_and_links_are_refused_one_by_one(fake_nvml: FakeNvml, handle: Any) -> None:
    crc = pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC
    asked = [pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_ECC_CURRENT, 9999, (crc, 17), (crc, 18)]
    answers = pynvml.nvmlDeviceGetFieldValues(handle, asked)
    assert [a.nvmlReturn for a in answers] == [
        pynvml.NVML_SUCCESS,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_SUCCESS,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ]


def test_gpm_refuses_samples_of_two_gpus_and_in_the_wrong_order(handle: Any) -> None:
    first, second, other = (pynvml.nvmlGpmSampleAlloc() for _ in range(3))
    pynvml.nvmlGpmSampleGet(handle, first)
    pynvml.nvmlGpmSampleGet(handle, second)
    pynvml.nvmlGpmSampleGet(pynvml.nvmlDeviceGetHandleByIndex(0), other)

    def ask(before: Any, after: Any, version: int = pynvml.NVML_GPM_METRICS_GET_VERSION) -> Any:
        question = pynvml.c_nvmlGpmMetricsGet_t()
        question.version, question.numMetrics = version, 2
        question.sample1, question.sample2 = before, after
        question.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
        question.metrics[1].metricId = 29
        return pynvml.nvmlGpmMetricsGet(question)

    answered = ask(first, second)
    assert (answered.metrics[0].nvmlReturn, answered.metrics[0].value) == (pynvml.NVML_SUCCESS, 91.5)
    assert answered.metrics[1].nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(lambda: ask(second, first)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(lambda: ask(first, other)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(lambda: ask(first, second, version=9)) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    for sample in (first, second, other):
        pynvml.nvmlGpmSampleFree(sample)


def test_a_gpu_that_is_gone_is_lost_now_and_not_listed_next_time(fake_nvml: FakeNvml, handle: Any) -> None:
    fake_nvml.vanish(1)
    assert refused(lambda: pynvml.nvmlDeviceGetUUID(handle)) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert pynvml.nvmlDeviceGetCount() == 8
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 7
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)).startswith("GPU-00000002")


def test_calls_are_counted_and_a_batch_of_fields_costs_what_its_driver_calls_do(
    fake_nvml: FakeNvml, handle: Any, tmp_path: Path
) -> None:
    fake_nvml.count_calls(tmp_path / "calls")
    fields = [pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT]  # one driver call
    fake_nvml.costs(call_us=1)
    pynvml.nvmlDeviceGetFieldValues(handle, fields)
    assert fake_nvml.driver_calls() == 1
    pynvml.nvmlDeviceGetFieldValues(handle, [*fields, pynvml.NVML_FI_DEV_MEMORY_TEMP, (161, 0), (163, 0), (163, 1)])
    assert fake_nvml.driver_calls() == 1 + 4
    pynvml.nvmlDeviceGetName(handle)
    assert fake_nvml.driver_calls() == 1 + 4 + 1
    assert fake_nvml.calls() == {"nvmlDeviceGetFieldValues": 2, "nvmlDeviceGetName": 1}


def test_an_older_driver_does_not_know_later_fields(fake_nvml: FakeNvml, handle: Any) -> None:
    fake_nvml.system("fields", "190")
    asked = [pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT]
    answers = pynvml.nvmlDeviceGetFieldValues(handle, asked)
    assert [a.nvmlReturn for a in answers] == [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_INVALID_ARGUMENT]


def test_a_mig_instance_answers_for_itself_and_not_when_it_is_gone(fake_nvml: FakeNvml, handle: Any) -> None:
    assert refused(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)) == pynvml.NVML_ERROR_NOT_FOUND
    fake_nvml.mig(1, [0])
    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    assert pynvml.nvmlDeviceGetUUID(instance).startswith("MIG-")
    assert refused(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(instance)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle)) == pynvml.NVML_ERROR_NOT_SUPPORTED
    fake_nvml.no_mig(1)
    assert refused(lambda: pynvml.nvmlDeviceGetUUID(instance)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_driver_that_is_down_fails_every_call_but_the_shutdown(fake_nvml: FakeNvml) -> None:
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    fake_nvml.down("DRIVER_NOT_LOADED")
    assert refused(lambda: pynvml.nvmlDeviceGetUUID(device)) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert refused(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    pynvml.nvmlShutdown()
    assert refused(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    fake_nvml.up()
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()


def test_a_value_that_moves_stays_between_its_bounds_and_one_that_grows_never_falls(
    fake_nvml: FakeNvml, handle: Any
) -> None:
    fake_nvml.set(1, "nvmlDeviceGetClockInfo(SM)", "1605~1905/0.001/15")  # to another place each millisecond
    fake_nvml.set(1, "nvmlDeviceGetTotalEnergyConsumption", "5000000000000+1000000000")
    clocks: set[int] = set()
    energies: list[int] = []

    def look() -> bool:
        clocks.add(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        energies.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return len(clocks) >= 5 and energies[-1] > energies[0]

    wait_until(look, "both values move")
    assert all(1605 <= clock <= 1905 and (clock - 1605) % 15 == 0 for clock in clocks)
    assert energies == sorted(energies)
    assert energies[0] >= 5_000_000_000_000
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) == 2619
