"""What a GPU is made of and how it is set up: read at first, then rarely, and sent when it changes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pynvml

from drover_agent.sources.nvml.errors import absence
from drover_agent.sources.nvml.identity import pci_address

EVERY_MS = 300_000
SPREAD_MS = 7_000  # between the GPUs of a node, so that not all ask in the same tick

_ON = {pynvml.NVML_FEATURE_DISABLED: "off", pynvml.NVML_FEATURE_ENABLED: "on"}
_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
}
_LINK_ENDS = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
}


def _watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:g}"


def _limits(handle: Any) -> tuple[str, str]:
    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return _watts(low), _watts(high)


def _modes(pair: list[int]) -> tuple[str, str]:
    now, pending = (_ON.get(mode, str(mode)) for mode in pair)
    return now, pending


def _fabric(handle: Any) -> tuple[str, str]:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    state = info.state & 0xFF  # one byte in nvml.h, then padding
    if state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != pynvml.NVML_SUCCESS:
        return "", ""
    digits = bytes(info.clusterUuid).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])), str(info.cliqueId)


def _memory_limit(handle: Any) -> tuple[str, ...]:
    return (str(pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX)),)


def _inforom(thing: int) -> Callable[[Any], tuple[str, ...]]:
    return lambda h: (str(pynvml.nvmlDeviceGetInforomVersion(h, thing)),)


_CALLS: Mapping[tuple[str, ...], Callable[[Any], tuple[str, ...]]] = {
    ("vbios",): lambda h: (str(pynvml.nvmlDeviceGetVbiosVersion(h)),),
    ("inforom_image",): lambda h: (str(pynvml.nvmlDeviceGetInforomImageVersion(h)),),
    ("inforom_oem",): _inforom(pynvml.NVML_INFOROM_OEM),
    ("inforom_ecc",): _inforom(pynvml.NVML_INFOROM_ECC),
    ("inforom_power",): _inforom(pynvml.NVML_INFOROM_POWER),
    ("part_number",): lambda h: (str(pynvml.nvmlDeviceGetBoardPartNumber(h)),),
    # The limit that was set: the enforced one may move with the node's power and heat, and is sent each second.
    ("power_limit_set_w",): lambda h: (_watts(pynvml.nvmlDeviceGetPowerManagementLimit(h)),),
    ("power_limit_default_w",): lambda h: (_watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit(h)),),
    ("power_limit_min_w", "power_limit_max_w"): _limits,
    ("ecc_mode", "ecc_mode_pending"): lambda h: _modes(pynvml.nvmlDeviceGetEccMode(h)),
    ("mig_mode", "mig_mode_pending"): lambda h: _modes(pynvml.nvmlDeviceGetMigMode(h)),
    ("persistence_mode",): lambda h: (_ON.get(pynvml.nvmlDeviceGetPersistenceMode(h), ""),),
    ("compute_mode",): lambda h: (_COMPUTE_MODES.get(pynvml.nvmlDeviceGetComputeMode(h), ""),),
    ("sm_clock_max_mhz",): lambda h: (str(pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_SM)),),
    ("memory_clock_max_mhz",): lambda h: (str(pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_MEM)),),
    ("memory_temp_max_c",): _memory_limit,
    ("pcie_generation_max",): lambda h: (str(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(h)),),
    ("pcie_width_max",): lambda h: (str(pynvml.nvmlDeviceGetMaxPcieLinkWidth(h)),),
    ("gsp_firmware",): lambda h: (_text(pynvml.nvmlDeviceGetGspFirmwareVersion(h)),),
    ("fabric_cluster", "fabric_clique"): _fabric,
}


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _links(handle: Any) -> Iterator[tuple[str, str]]:
    """ "switch 0000:06:00.0" for each NVLink that is up."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            end = _LINK_ENDS.get(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link), "unknown")
            yield f"nvlink.{link}", f"{end} {pci_address(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))}"
        except pynvml.NVMLError as error:
            absence(error.value)
            if link == 0 or error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # no NVLink, or past the last
                return


class Inventory:
    """Of one slot. A key whose value can no longer be had is sent as empty."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._due_ms: int | None = None
        self._last: dict[str, str] = {}

    def again(self) -> None:
        """At the next read: it may be another GPU, or another mode."""
        self._due_ms = None

    def clear(self) -> dict[str, str]:
        """Forget the GPU, as the slot has none. Return what was sent of it, as empty."""
        cleared, self._last, self._due_ms = dict.fromkeys(self._last, ""), {}, None
        return cleared

    def due(self, now_ms: int) -> bool:
        return self._due_ms is None or not 0 < self._due_ms - now_ms <= EVERY_MS + self._slot * SPREAD_MS

    @property
    def next_ms(self) -> int:
        """When `read` next asks something, unless the clock is set back."""
        return self._due_ms or 0

    def read(self, handle: Any, now_ms: int) -> dict[str, str]:
        """What changed since the last read; nothing when it is not due.

        Raises:
            LostError, DriverGoneError.
        """
        if not self.due(now_ms):
            return {}
        first = self._due_ms is None
        found = {f"gpu{self._slot}.{key}": value for key, value in self._ask(handle)}
        changed = {key: found.get(key, "") for key in found | self._last if found.get(key, "") != self._last.get(key)}
        self._last = {**dict.fromkeys(self._last, ""), **found}
        self._due_ms = now_ms + EVERY_MS + (self._slot * SPREAD_MS if first else 0)
        return changed

    def _ask(self, handle: Any) -> Iterator[tuple[str, str]]:
        for keys, call in _CALLS.items():
            try:
                yield from zip(keys, call(handle), strict=True)
            except pynvml.NVMLError as error:
                absence(error.value)  # a part that this board or driver does not have, or not for this user
            except UnicodeDecodeError:
                continue  # damaged InfoROM text; the kernel log and `check` report the InfoROM
        yield from _links(handle)
