"""How each catalog key of reader `nvml` and `gpm` is asked of NVML; scales and ranges stand in the catalog.

A key may be asked in several ways; the first that a GPU and its driver do not refuse is taken. Field values come first,
for a batch of them is one call, and NVML makes one driver call for all fields that the driver gives together (API
reference, nvmlDeviceGetFieldValues). A field stands for a function only where nvml.h says that both are the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pynvml

from drover_agent.sources.nvml.calls import (
    Raw,
    Read,
    number,
    structure,
    u32,
)
from drover_core.metrics.catalog import (
    FABRIC_STATES,
    Metric,
    Scope,
    of_scope,
)

SLOW_MS = 10_000  # one value per detector bucket
RARE_MS = 30_000  # error counters of NVLinks: perhaps a driver call for each of 18, and a link that breaks has its XID


@dataclass(frozen=True, eq=False, slots=True)
class Way:
    """One way to have the values of `keys`: a field value, or a function that gives one value per key.

    Attributes:
        every_ms: asked once in this time; 0: in every tick.
        per_link: the field is one of each NVLink, whose number is its scope.
    """

    keys: tuple[str, ...]
    name: str  # the function, or the field without its NVML_
    make: Callable[[], Read] | None = None  # None: a field value
    every_ms: int = 0
    per_link: bool = False


def metrics_by_key(reader: str) -> Mapping[str, Metric]:
    """GPU rows of the catalog by their key at `reader`."""
    return MappingProxyType({m.sources[reader].key: m for m in of_scope(Scope.GPU) if reader in m.sources})


NVML_METRICS = metrics_by_key("nvml")
GPM_METRICS = metrics_by_key("gpm")
# "Percentage of time any compute/graphics app was active" (nvml.h). On an H100 and an H200 with driver 580.159.04 this
# one costs 1.85 ms of CPU and all others of GPM together 0.05 ms, while nvmlDeviceGetUtilizationRates reports the same
# for 4 us (docs/evidence/gpu.md). So GPM is asked for it only where that call does not answer: in MIG mode.
GPM_UTILIZATION_KEY = "GPM_METRIC_GRAPHICS_UTIL"
BER_KEY = "FI_DEV_NVLINK_COUNT_EFFECTIVE_BER"
STATE_KEY = "nvmlDeviceGetNvLinkState"
FABRIC_FAILED = FABRIC_STATES.index("failed")


def _memory_2() -> Any:
    return pynvml.c_nvmlMemory_v2_t(version=pynvml.nvmlMemory_v2)


def _temperature_1() -> Any:
    return pynvml.c_nvmlTemperature_v1_t(version=pynvml.nvmlTemperature_v1, sensorType=pynvml.NVML_TEMPERATURE_GPU)


def _margin_1() -> Any:
    return pynvml.c_nvmlMarginTemperature_v1_t(version=pynvml.nvmlMarginTemperature_v1)


def _active_links() -> Read:
    """Links that are up. NVML says so link by link and refuses numbers past the last one."""

    def read(handle: Any) -> tuple[Raw, ...]:
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

    return read


def _fabric_state(name: str, fresh: Callable[[], Any], layout: str) -> Callable[[], Read]:
    """`layout`: of status and state. nvml.h has the state as one byte, nvidia-ml-py as four: the rest is padding.

    The status "must be checked only if state returns complete" (nvml.h); an error there is reported as by DCGM
    (DcgmFMStatusFailure): the GPU is in no fabric.
    """

    def state_of(answer: tuple[Raw, ...]) -> tuple[Raw, ...]:
        status, state = answer
        done = state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
        return (FABRIC_FAILED if done and status != pynvml.NVML_SUCCESS else state,)

    return structure(name, fresh, layout, state_of)


def _sram_errors(answer: tuple[Raw, ...]) -> tuple[Raw, ...]:
    """Corrected, uncorrected, the threshold: volatile errors that parity found and those that SEC-DED found are counted
    apart here (nvidia-smi -q shows both); NVML's counter of uncorrected ones has them all."""
    parity, secded, corrected, exceeded = answer
    return corrected, None if parity is None or secded is None else parity + secded, exceeded


def _remapped_rows() -> Read:
    return lambda handle: tuple(u32(value) for value in pynvml.nvmlDeviceGetRemappedRows(handle))


def _call(name: str, make: Callable[[], Read], *keys: str, slow: bool = False) -> Way:
    return Way(keys or (name,), name, make, SLOW_MS if slow else 0)


def _ecc(kind: int, location: int, text: str) -> Way:
    name = "nvmlDeviceGetMemoryErrorCounter"
    make = number(name, kind, pynvml.NVML_VOLATILE_ECC, location, wide=True)
    return _call(name, make, f"{name}(VOLATILE,{text})", slow=True)


# Functions for which a field value gives the same. The comments are those of nvml.h (R575) at the field.
_FIELD_OF: Mapping[str, str] = {
    # "Limit currently enforced in milliwatts (This includes other limits set elsewhere. E.g. Out-of-band)"
    "nvmlDeviceGetEnforcedPowerLimit": "FI_DEV_POWER_CURRENT_LIMIT",
    # "Total energy consumption for the GPU in mJ since the driver was last reloaded"
    "nvmlDeviceGetTotalEnergyConsumption": "FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    "nvmlDeviceGetPcieReplayCounter": "FI_DEV_PCIE_REPLAY_COUNTER",
    # "Device memory single (double) bit volatile ECC errors"; NVML_MEMORY_LOCATION_DRAM is the device memory
    "nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,CORRECTED)": "FI_DEV_ECC_SBE_VOL_DEV",
    "nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,UNCORRECTED)": "FI_DEV_ECC_DBE_VOL_DEV",
    "nvmlDeviceGetRemappedRows[0]": "FI_DEV_REMAPPED_COR",
    "nvmlDeviceGetRemappedRows[1]": "FI_DEV_REMAPPED_UNC",
    "nvmlDeviceGetRemappedRows[2]": "FI_DEV_REMAPPED_PENDING",
    "nvmlDeviceGetRemappedRows[3]": "FI_DEV_REMAPPED_FAILURE",
    # "NVLink State - Active,Inactive"; NCCL takes it for nvmlDeviceGetNvLinkState on Hopper and newer (paths.cc)
    STATE_KEY: "FI_DEV_NVLINK_GET_STATE",
}
# Each tick: what moves from second to second and is gone when it was not read. A counter loses nothing by waiting.
_FAST_FIELDS = frozenset({"FI_DEV_POWER_INSTANT", "FI_DEV_MEMORY_TEMP", "nvmlDeviceGetEnforcedPowerLimit"})


def _is_of_link(key: str) -> bool:
    return key.startswith("FI_DEV_NVLINK_") or key == STATE_KEY


def _every_ms(key: str) -> int:
    if _is_of_link(key) and key != STATE_KEY:
        return RARE_MS
    return 0 if key in _FAST_FIELDS else SLOW_MS


FIELDS: tuple[Way, ...] = tuple(
    Way(
        (key,),
        _FIELD_OF.get(key, key),
        every_ms=_every_ms(key),
        per_link=_is_of_link(key),
    )
    for key in NVML_METRICS
    if key.startswith("FI_DEV_") or key in _FIELD_OF
)

_SRAM, _DRAM = pynvml.NVML_MEMORY_LOCATION_SRAM, pynvml.NVML_MEMORY_LOCATION_DRAM
_CORRECTED, _UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_TEMPERATURE = "nvmlDeviceGetTemperatureV(GPU)"
_MEMORY = ("nvmlDeviceGetMemoryInfo_v2.total", "nvmlDeviceGetMemoryInfo_v2.used")
_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
_FABRIC = "nvmlDeviceGetGpuFabricInfoV"
_UTILIZATION = "nvmlDeviceGetUtilizationRates"
UTILIZATION_KEY, _MEMORY_UTILIZATION_KEY = f"{_UTILIZATION}.gpu", f"{_UTILIZATION}.memory"

UTILIZATION = _call(_UTILIZATION, structure(_UTILIZATION, pynvml.c_nvmlUtilization_t, "=I4x"), UTILIZATION_KEY)
# GPM reports how busy the memory was over the whole second; NVML's own answer is of the last part of one.
_MEMORY_UTILIZATION = _call(
    _UTILIZATION,
    structure(_UTILIZATION, pynvml.c_nvmlUtilization_t, "=4xI"),
    _MEMORY_UTILIZATION_KEY,
    slow=True,
)
MEMORY = _call(
    "nvmlDeviceGetMemoryInfo_v2",
    structure("nvmlDeviceGetMemoryInfo_v2", _memory_2, "=8xQ16xQ"),
    *_MEMORY,
    slow=True,
)
CALLS: tuple[Way, ...] = (
    _call(
        "nvmlDeviceGetClockInfo", number("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM), "nvmlDeviceGetClockInfo(SM)"
    ),
    _call(
        "nvmlDeviceGetClockInfo",
        number("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        "nvmlDeviceGetClockInfo(MEM)",
        slow=True,
    ),
    _call(_REASONS, number(_REASONS, wide=True), slow=True),
    # Its name until R535.
    _call(
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        number("nvmlDeviceGetCurrentClocksThrottleReasons", wide=True),
        _REASONS,
        slow=True,
    ),
    # Where the field is not known: of the board, averaged over a second on Ampere and newer but GA100.
    _call("nvmlDeviceGetPowerUsage", number("nvmlDeviceGetPowerUsage"), "FI_DEV_POWER_INSTANT"),
    _call("nvmlDeviceGetEnforcedPowerLimit", number("nvmlDeviceGetEnforcedPowerLimit")),
    _call("nvmlDeviceGetTotalEnergyConsumption", number("nvmlDeviceGetTotalEnergyConsumption", wide=True), slow=True),
    _call(
        "nvmlDeviceGetTemperatureV",
        structure("nvmlDeviceGetTemperatureV", _temperature_1, "=8xi"),
        _TEMPERATURE,
    ),
    _call(
        "nvmlDeviceGetTemperature", number("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU), _TEMPERATURE
    ),  # until R575
    _call(
        "nvmlDeviceGetMarginTemperature",
        structure("nvmlDeviceGetMarginTemperature", _margin_1, "=4xi"),
        slow=True,
    ),
    UTILIZATION,
    _MEMORY_UTILIZATION,
    MEMORY,
    # Until R510; what it calls used has the driver's reserved memory in it.
    _call(
        "nvmlDeviceGetMemoryInfo",
        structure("nvmlDeviceGetMemoryInfo", pynvml.c_nvmlMemory_t, "=Q8xQ"),
        *_MEMORY,
        slow=True,
    ),
    _call("nvmlDeviceGetCurrPcieLinkGeneration", number("nvmlDeviceGetCurrPcieLinkGeneration"), slow=True),
    _call("nvmlDeviceGetCurrPcieLinkWidth", number("nvmlDeviceGetCurrPcieLinkWidth"), slow=True),
    _call("nvmlDeviceGetPcieReplayCounter", number("nvmlDeviceGetPcieReplayCounter"), slow=True),
    _call(
        "nvmlDeviceGetSramEccErrorStatus",
        structure("nvmlDeviceGetSramEccErrorStatus", pynvml.c_nvmlEccSramErrorStatus_v1_t, "=32xQQQ40xI", _sram_errors),
        "nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,CORRECTED)",
        "nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,UNCORRECTED)",
        "nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded",
        slow=True,
    ),
    # until R550
    _ecc(_CORRECTED, _SRAM, "SRAM,CORRECTED"),
    _ecc(_UNCORRECTED, _SRAM, "SRAM,UNCORRECTED"),
    _ecc(_CORRECTED, _DRAM, "DRAM,CORRECTED"),
    _ecc(_UNCORRECTED, _DRAM, "DRAM,UNCORRECTED"),
    _call(
        "nvmlDeviceGetRemappedRows", _remapped_rows, *(f"nvmlDeviceGetRemappedRows[{i}]" for i in range(4)), slow=True
    ),
    _call(
        "nvmlDeviceGetRowRemapperHistogram",
        structure(
            "nvmlDeviceGetRowRemapperHistogram",
            pynvml.c_nvmlRowRemapperHistogramValues,
            "=I12xI",
        ),
        "nvmlDeviceGetRowRemapperHistogram.max",
        "nvmlDeviceGetRowRemapperHistogram.none",
        slow=True,
    ),
    _call(STATE_KEY, _active_links, slow=True),
    _call(_FABRIC, _fabric_state(_FABRIC, pynvml.c_nvmlGpuFabricInfo_v2_t, "=20xi4xB"), slow=True),
    _call(
        "nvmlDeviceGetGpuFabricInfo",  # until R545
        _fabric_state("nvmlDeviceGetGpuFabricInfo", pynvml.c_nvmlGpuFabricInfo_t, "=16xi4xB"),
        _FABRIC,
        slow=True,
    ),
)

# Instead of GPM on GPUs that lack it (before Hopper). Each call measures for 20 ms, so they are slow ones.
PCIE_CALLS: tuple[Way, ...] = (
    _call(
        "nvmlDeviceGetPcieThroughput",
        number("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES),
        "nvmlDeviceGetPcieThroughput(TX)",
        slow=True,
    ),
    _call(
        "nvmlDeviceGetPcieThroughput",
        number("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES),
        "nvmlDeviceGetPcieThroughput(RX)",
        slow=True,
    ),
)
PROCESSES_KEY = "nvmlDeviceGetComputeRunningProcesses"

# Metrics that are not asked in every tick, in whatever way, and those of them that are asked in RARE_MS once.
SLOW_METRICS = frozenset(
    NVML_METRICS[key].name
    for key in (PROCESSES_KEY, *(key for way in (*FIELDS, *CALLS) if way.every_ms for key in way.keys))
)
RARE_METRICS = frozenset(NVML_METRICS[key].name for way in FIELDS if way.every_ms == RARE_MS for key in way.keys)

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
    ids = {key: int(getattr(pynvml, f"NVML_{key}")) for key in (way.name for way in FIELDS)}
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


def bit_error_rate(word: float) -> float:
    """The rate in NVML's packed form (NVML_NVLINK_BER_*): mantissa in bits 8 to 11, -log10 of its unit in 0 to 7."""
    mantissa, exponent = int(word) >> 8 & 0xF, int(word) & 0xFF
    return float(mantissa) * 10.0**-exponent
