"""GPUs through NVML (nvidia-ml-py): one source per GPU, so that a call that hangs in the driver costs one GPU.

For the sampler, which runs each call where it can be abandoned (all of them may block for ever in the driver):

    nvml = NvmlSource(node)
    nvml.open(now_ms)  Starts NVML, touching no GPU yet. Call it each tick while `nvml.devices` is empty; it tries
                       every 30 s. Its Reading has `inventory`: the versions, or "no_gpu_reason"; and `events`.
    nvml.devices       list[NvmlDevice], fixed once opened: Sources named "nvml:0", "nvml:1", ...; interval 1 s.
    nvml.xids          NvmlXidWatcher, None until opened: a Source named "nvml:xids" with interval 0, for its `read`
                       itself waits for up to 1 s. Run it in a loop in a thread of its own.
    nvml.close()

For `once`: `nvml.read(now_ms)` opens and reads all GPUs in sequence, without XIDs. Profiling metrics (GPM) need two
reads of a device, so the first one lacks them.

A Reading of a device: values that were read, and every metric that was tried and failed with its reason. Slow metrics
(process list, ECC, row remaps, NVLink, fabric) are tried in the first tick of each 10 s; in the ticks between they
are in neither, which means "no news". When a GPU is lost all its metrics are absent (`lost`) in every tick. The first
read adds the GPU's model, serial, UUID, PCI address and VBIOS to the inventory as "gpuN.model" and so on.
`Entity.pci` is written as in sysfs and the kernel log: "0000:3b:00.0".
"""

from __future__ import annotations

import logging
from typing import Any

import pynvml

from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml_device import NvmlDevice
from drover_agent.sources.nvml_events import NvmlXidWatcher
from drover_agent.sources.nvml_fields import field_ids
from drover_proto.events import EventKind

RETRY_MS = 30_000  # between attempts to start NVML

_log = logging.getLogger(__name__)

_NO_LIBRARY = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
_WHY_NOT = {
    _NO_LIBRARY: "libnvidia-ml.so.1 was not found: install the NVIDIA driver if this node has GPUs",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it (modprobe nvidia) and look for NVRM "
    "lines in the kernel log",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and the loaded driver differ in version: reload the "
    "driver or reboot, then restart the agent",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission for the NVIDIA devices: give the agent's user access to "
    "/dev/nvidia*",
    pynvml.NVML_ERROR_GPU_IS_LOST: "a GPU has fallen off the bus and NVML does not start: reset or reboot the node",
}
_NO_DEVICES = "the NVIDIA driver is loaded and sees no GPU: look for NVRM lines in the kernel log, and at lspci"


class NvmlSource:
    """All GPUs of this node. See the module's docstring for how the parts are run."""

    name = "nvml"
    interval_s = 1.0

    def __init__(self, node: str, gpus: Gpus | None = None) -> None:
        """`gpus` is told who they are; left out where nobody asks."""
        self.devices: list[NvmlDevice] = []
        self.xids: NvmlXidWatcher | None = None
        self._node = node
        self._gpus = gpus or Gpus()
        self._next_try_ms = 0
        self._reason = ""  # why there is no GPU, "" before the first attempt and when there is one
        self._missing = False  # a driver_missing event is out

    def open(self, now_ms: int) -> Reading:
        """Start NVML unless it runs or was tried less than RETRY_MS ago. Never raises: failure is in the inventory."""
        if self.devices or 0 < self._next_try_ms - now_ms <= RETRY_MS:  # more than that: the clock was set back
            return Reading()
        self._next_try_ms = now_ms + RETRY_MS
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            reason = _WHY_NOT.get(error.value, f"NVML does not start: {error}")
            return self._unavailable(now_ms, reason, driver_missing=error.value != _NO_LIBRARY)
        try:
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            return self._unavailable(now_ms, f"NVML does not answer: {error}", driver_missing=True)
        if count == 0:
            pynvml.nvmlShutdown()
            return self._unavailable(now_ms, _NO_DEVICES, driver_missing=False)
        serials: dict[str, set[int]] = {}
        ids = field_ids(driver)
        self.devices = [NvmlDevice(slot, self._node, ids, serials, self._gpus) for slot in range(count)]
        self.xids = NvmlXidWatcher(self.devices)
        reading = Reading(inventory=self._inventory(driver))
        if self._missing:
            self._missing = False
            reading.events.append(_event(now_ms, "driver_back", f"the NVIDIA driver {driver} answers"))
        return reading

    def read(self, now_ms: int) -> Reading:
        """Open if need be, then all devices in sequence."""
        total = self.open(now_ms)
        for device in self.devices:
            reading = device.read(now_ms)
            total.rows += reading.rows
            total.absent += reading.absent
            total.events += reading.events
            total.inventory |= reading.inventory
        return total

    def close(self) -> None:
        """Release NVML. Like every call into the driver it may block."""
        if not self.devices:
            return
        if self.xids is not None:
            self.xids.close()
        for device in self.devices:
            device.close()
        self.devices, self.xids, self._next_try_ms = [], None, 0
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            _log.warning("NVML did not shut down: %s", error)

    def _unavailable(self, now_ms: int, reason: str, *, driver_missing: bool) -> Reading:
        if reason != self._reason:
            self._reason = reason
            _log.warning("no GPU telemetry: %s", reason)
        reading = Reading(inventory={"no_gpu_reason": reason, "gpu_count": "0"})
        if driver_missing and not self._missing:
            self._missing = True
            reading.events.append(_event(now_ms, "driver_missing", reason))
        return reading

    def _inventory(self, driver: str) -> dict[str, str]:
        """`no_gpu_reason` is empty here so that it replaces an earlier one."""
        self._reason = ""
        found = {"no_gpu_reason": "", "gpu_count": str(len(self.devices)), "driver_version": driver}
        for key, call in (
            ("nvml_version", pynvml.nvmlSystemGetNVMLVersion),
            ("cuda_version", _cuda_version),
        ):
            try:
                found[key] = str(call())
            except pynvml.NVMLError as error:
                _log.warning("%s could not be read: %s", key, error)
        return found


def _cuda_version() -> str:
    version: Any = pynvml.nvmlSystemGetCudaDriverVersion()  # 12080 means 12.8
    return f"{version // 1000}.{version % 1000 // 10}"


def _event(now_ms: int, code: str, message: str) -> NodeEvent:
    return NodeEvent(ts_ms=now_ms, gpu=None, kind=EventKind.LIFECYCLE, code=code, message=message, source="nvml")
