"""How each catalog key of reader `nvml` and `gpm` is asked of NVML; scales and ranges stand in the catalog.

Field values are read in one batch, everything else by a call of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pynvml

from drover_proto.catalog import Metric, Scope, of_scope

Raw = float | None  # None: NVML answered that it has no value

_NONE_32 = 2**32 - 1  # NVML_VALUE_NOT_AVAILABLE in the width of the answer
_NONE_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Call:
    """One NVML function; `read(handle)` gives one raw value per catalog key."""

    keys: tuple[str, ...]
    read: Callable[[Any], tuple[Raw, ...]]


def _u32(value: int) -> Raw:
    return None if value == _NONE_32 else value


def _u64(value: int) -> Raw:
    return None if value == _NONE_64 else value


def _utilization(handle: Any) -> tuple[Raw, ...]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return _u32(rates.gpu), _u32(rates.memory)


def _memory(handle: Any) -> tuple[Raw, ...]:
    info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return _u64(info.used), _u64(info.total)


def _temperature(handle: Any) -> tuple[Raw, ...]:
    try:
        return (pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU),)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:  # older drivers have only the older call
            raise
    return (_u32(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),)


def _ecc(kind: int, location: int) -> Callable[[Any], tuple[Raw, ...]]:
    def read(handle: Any) -> tuple[Raw, ...]:
        return (_u64(pynvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, pynvml.NVML_VOLATILE_ECC, location)),)

    return read


def _sram_status(handle: Any) -> tuple[Raw, ...]:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return (_u32(status.bThresholdExceeded),)


def _remapped_rows(handle: Any) -> tuple[Raw, ...]:
    return tuple(_u32(value) for value in pynvml.nvmlDeviceGetRemappedRows(handle))


def _remap_histogram(handle: Any) -> tuple[Raw, ...]:
    banks = pynvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return _u32(banks.max), _u32(banks.none)


def _fabric_state(handle: Any) -> tuple[Raw, ...]:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return (info.state,)


def _active_links(handle: Any) -> tuple[Raw, ...]:
    """Links that are up. NVML says so link by link and refuses numbers past the last one."""
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT and states:
                break
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:  # a link that this board does not wire up
                raise
    if not states:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return (sum(state == pynvml.NVML_FEATURE_ENABLED for state in states),)


def _pcie_throughput(counter: int) -> Callable[[Any], tuple[Raw, ...]]:
    def read(handle: Any) -> tuple[Raw, ...]:
        return (_u32(pynvml.nvmlDeviceGetPcieThroughput(handle, counter)),)

    return read


FAST_CALLS: tuple[Call, ...] = (
    Call(
        ("nvmlDeviceGetClockInfo(SM)",),
        lambda h: (_u32(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)),),
    ),
    Call(
        ("nvmlDeviceGetClockInfo(MEM)",),
        lambda h: (_u32(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM)),),
    ),
    Call(
        ("nvmlDeviceGetCurrentClocksEventReasons",),
        lambda h: (_u64(pynvml.nvmlDeviceGetCurrentClocksEventReasons(h)),),
    ),
    Call(("nvmlDeviceGetEnforcedPowerLimit",), lambda h: (_u32(pynvml.nvmlDeviceGetEnforcedPowerLimit(h)),)),
    Call(("nvmlDeviceGetTotalEnergyConsumption",), lambda h: (_u64(pynvml.nvmlDeviceGetTotalEnergyConsumption(h)),)),
    Call(("nvmlDeviceGetTemperatureV(GPU)",), _temperature),
    Call(("nvmlDeviceGetMarginTemperature",), lambda h: (pynvml.nvmlDeviceGetMarginTemperature(h),)),
    Call(("nvmlDeviceGetUtilizationRates.gpu", "nvmlDeviceGetUtilizationRates.memory"), _utilization),
    Call(("nvmlDeviceGetMemoryInfo_v2.used", "nvmlDeviceGetMemoryInfo_v2.total"), _memory),
    Call(("nvmlDeviceGetCurrPcieLinkGeneration",), lambda h: (_u32(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h)),)),
    Call(("nvmlDeviceGetCurrPcieLinkWidth",), lambda h: (_u32(pynvml.nvmlDeviceGetCurrPcieLinkWidth(h)),)),
    Call(("nvmlDeviceGetPcieReplayCounter",), lambda h: (_u32(pynvml.nvmlDeviceGetPcieReplayCounter(h)),)),
)

_SRAM, _DRAM = pynvml.NVML_MEMORY_LOCATION_SRAM, pynvml.NVML_MEMORY_LOCATION_DRAM
_CORRECTED, _UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED

SLOW_CALLS: tuple[Call, ...] = (
    Call(("nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,CORRECTED)",), _ecc(_CORRECTED, _SRAM)),
    Call(("nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,UNCORRECTED)",), _ecc(_UNCORRECTED, _SRAM)),
    Call(("nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,CORRECTED)",), _ecc(_CORRECTED, _DRAM)),
    Call(("nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,UNCORRECTED)",), _ecc(_UNCORRECTED, _DRAM)),
    Call(("nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded",), _sram_status),
    Call(tuple(f"nvmlDeviceGetRemappedRows[{i}]" for i in range(4)), _remapped_rows),
    Call(("nvmlDeviceGetRowRemapperHistogram.max", "nvmlDeviceGetRowRemapperHistogram.none"), _remap_histogram),
    Call(("nvmlDeviceGetNvLinkState",), _active_links),
    Call(("nvmlDeviceGetGpuFabricInfoV",), _fabric_state),
    Call(
        ("nvmlDeviceGetComputeRunningProcesses",),
        lambda h: (len(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(h)),),
    ),
)

# Instead of GPM on GPUs that lack it (before Hopper). Each call measures for 20 ms, so they are slow ones.
PCIE_CALLS: tuple[Call, ...] = (
    Call(("nvmlDeviceGetPcieThroughput(TX)",), _pcie_throughput(pynvml.NVML_PCIE_UTIL_TX_BYTES)),
    Call(("nvmlDeviceGetPcieThroughput(RX)",), _pcie_throughput(pynvml.NVML_PCIE_UTIL_RX_BYTES)),
)


def metrics_by_key(reader: str) -> Mapping[str, Metric]:
    """GPU rows of the catalog by their key at `reader`."""
    return MappingProxyType({m.sources[reader].key: m for m in of_scope(Scope.GPU) if reader in m.sources})


NVML_METRICS = metrics_by_key("nvml")
GPM_METRICS = metrics_by_key("gpm")

GPM_IDS: Mapping[str, int] = MappingProxyType({key: getattr(pynvml, f"NVML_{key}") for key in GPM_METRICS})

# Fields that NVML keeps per NVLink: `scopeId` is the link's number. (It takes UINT_MAX for "all" in throughput only.)
LINK_KEYS: tuple[str, ...] = tuple(key for key in NVML_METRICS if key.startswith("FI_DEV_NVLINK_"))
BER_KEY = "FI_DEV_NVLINK_COUNT_EFFECTIVE_BER"
DEVICE_KEYS: tuple[str, ...] = tuple(key for key in NVML_METRICS if key.startswith("FI_DEV_") and key not in LINK_KEYS)

# NVIDIA has numbered these three in two ways (NVML API reference, "Known Issues": fields 251 to 273 changed between
# CUDA 13.0 and 13.0 Update 1; nvidia-ml-py 12.570, 12.575, 13.580.65 and 13.580.82 show the numbers). The other meaning
# of each number is a power-smoothing setting, so that asking by the wrong one would give a false value, not an error:
#   before R575                      they do not exist; 251 to 268 are power smoothing (R570) or nothing
#   R575 up to 580.65.06             251, 252, 253
#   between 580.65.06 and 580.82.07  not documented: not asked
#   580.82.07 (CUDA 13.0 U1) on      269, 270, 271, as in the header that pynvml was made from
_RENUMBERED: Mapping[str, int] = MappingProxyType(
    {
        "FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": 251,
        "FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": 252,
        "FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": 253,
    }
)


def field_ids(driver_version: str) -> Mapping[str, int]:
    """NVML's number of each field key for this driver; keys that it lacks are missing."""
    ids = {key: int(getattr(pynvml, f"NVML_{key}")) for key in (*DEVICE_KEYS, *LINK_KEYS)}
    version = _version(driver_version)
    for key, old in _RENUMBERED.items():
        if version >= (580, 82):
            continue
        if (575,) <= version <= (580, 65, 6):
            ids[key] = old
        else:
            del ids[key]
    return MappingProxyType(ids)


def _version(text: str) -> tuple[int, ...]:
    """(580, 65, 6) of "580.65.06"; () when it is no version, which sorts before all."""
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        return ()


_UNION_FIELD = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def field_value(field: Any) -> Raw:
    """The number in an answered nvmlFieldValue_t, by the type that it names.

    Raises:
        NVMLError: the field was not answered, or is of a type this version does not know.
    """
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    name = _UNION_FIELD.get(field.valueType)
    if name is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    value = getattr(field.value, name)
    if name == "uiVal":
        return _u32(value)
    return _u64(value) if name in ("ulVal", "ullVal") else float(value)


def bit_error_rate(word: float) -> float:
    """The rate in NVML's packed form (NVML_NVLINK_BER_*): mantissa in bits 8 to 11, -log10 of its unit in 0 to 7."""
    mantissa, exponent = int(word) >> 8 & 0xF, int(word) & 0xFF
    return float(mantissa) * 10.0**-exponent
