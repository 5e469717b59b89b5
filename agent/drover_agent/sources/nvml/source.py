"""GPUs through NVML (nvidia-ml-py): one source per GPU, so that a call that hangs in the driver costs one GPU.

For the sampler, which runs each call where it can be abandoned (all of them may block for ever in the driver):

    nvml = NvmlSource(node)
    nvml.due(now_ms)   Whether `tend` has something to do; never blocks. Ask it each second.
    nvml.tend(now_ms)  Starts NVML, touching no GPU yet; closes it when the driver went away, when all GPUs are lost or
                       when it is to be released; and starts it again, trying every 10 s. Its Reading has `inventory`:
                       the versions, or "no_gpu_reason"; and `events`.
    nvml.devices       list[NvmlDevice], which grows when NVML is opened: Sources named "nvml:0", "nvml:1", ...;
                       interval 1 s. They outlive NVML: read while it is closed, everything is absent.
    nvml.xids          NvmlXidWatcher: a Source named "nvml:xids" with interval 0, for its `read` itself waits for up
                       to 2 s. Run it in a loop in a thread of its own.
    nvml.release(until_ms)  An operator wants to unload the driver or to reset a GPU: NVML is closed until then.
    nvml.restart       Why only a new process can use the driver again; "" while this one can.
    nvml.close()

For `once`: `nvml.read(now_ms)` opens and reads all GPUs in sequence, without XIDs. Profiling metrics (GPM) need two
reads of a device, so the first one lacks them.

A Reading of a device: values that were read, and every metric that was tried and failed with its reason. Slow metrics
(those that cost much or change slowly: process list, ECC, row remaps, NVLink, PCIe link, memory in use, memory clock,
margin to slowdown, clock event reasons, fabric; NVML's memory utilisation, where GPM reports each second how busy the
memory is; and counters, which lose nothing by it: energy, time held down) are
tried once in each 10 s, errors of NVLinks in each 30 s, GPU 1 a second after GPU 0 and so on up to GPU 7, so that no
tick has the slow calls of all GPUs; in the ticks between they are in neither, which means "no news". For each detector
bucket that is one value, and calls are what a tick costs.
What a GPU refuses for good (unsupported, no-permission) is reported with the slow metrics and asked again every 5
minutes. When a GPU is lost all its metrics are absent (`lost`) in every tick; so are they (`error`) when NVML is
closed. Each MIG instance is a row of its own, with the GPU's slot.
The first read adds the GPU's inventory as "gpuN.model" and so on; later ones what changed of it.
`Entity.pci` is written as in sysfs and the kernel log: "0000:3b:00.0".
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import pynvml

from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml.device import NvmlDevice, Session
from drover_agent.sources.nvml.events import NvmlXidWatcher
from drover_agent.sources.nvml.fields import field_ids
from drover_agent.sources.nvml.library import NOT_FOUND, replaced_by, why_not_loaded
from drover_core.model.kinds import EventKind

RETRY_MS = 10_000  # between attempts to start NVML
ALL_LOST_MS = 30_000  # between attempts to get lost GPUs back by starting NVML again
CLOSE_LIMIT_S = 2.5  # that calls in flight get to return before NVML is closed; the XID watcher's take up to 2 s

_log = logging.getLogger(__name__)

_MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
_WHY_NOT = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NOT_FOUND,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it (modprobe nvidia) and look for NVRM "
    "lines in the kernel log",
    _MISMATCH: "the NVIDIA library and the loaded driver differ in version: reload the driver or reboot",
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
        """`gpus` receives their identities; left out where nobody asks."""
        self.devices: list[NvmlDevice] = []
        self.restart = ""
        self.stuck = ""  # why NVML could not be closed at the last attempt
        self.session = Session()
        self.xids = NvmlXidWatcher(self.devices, self.session)
        self._node = node
        self._gpus = gpus or Gpus()
        self._serials: dict[str, set[int]] = {}
        self._next_try_ms = 0
        self._opened_ms = 0
        self._released_until_ms = 0
        self.reason = ""  # why no GPU is read, "" before the first attempt and while they are
        self._away = ""  # the code of the event that is out: driver_missing or driver_released

    def due(self, now_ms: int) -> bool:
        if not self._may_try(now_ms):
            return False
        if self._released_until_ms > now_ms:
            return self.session.open or self._away != "driver_released"
        return not self.session.open or bool(self._why_close(now_ms))

    def tend(self, now_ms: int) -> Reading:
        """Close NVML or start it if need be. Never raises for what NVML does: failure is in the Reading."""
        if not self.due(now_ms):
            return Reading()
        found = self._why_close(now_ms)
        if found is None:
            return self.open(now_ms)
        code, why = found
        if self.session.open:
            if not self._shut():
                self._next_try_ms = now_ms + 1000
                return Reading()
            _log.warning("NVML was closed: %s", why)
        # A driver that answers at each start and then stops is not started more often than one that is away.
        self._next_try_ms = self._opened_ms + RETRY_MS if code == "driver_missing" else 0
        if not code:
            return Reading()  # the GPUs themselves were reported as lost
        self._away, self.reason = code, why
        return Reading(events=[_event(now_ms, code, why)], inventory={"no_gpu_reason": why})

    def release(self, until_ms: int) -> None:
        """Hold no file of the driver until then; a time that is past ends it. `session.open` says when it is done."""
        self._released_until_ms = until_ms
        self._next_try_ms = 0

    def open(self, now_ms: int) -> Reading:
        """Start NVML unless it runs or was tried less than RETRY_MS ago."""
        if self.session.open or not self._may_try(now_ms):
            return Reading()
        self._next_try_ms = now_ms + RETRY_MS
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            reason = _WHY_NOT.get(error.value, f"NVML does not start: {error}")
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                reason = why_not_loaded() or reason
            if error.value == _MISMATCH and (fresh := replaced_by()):
                self.restart = f"the NVIDIA library was replaced by {fresh} while the agent had the old one loaded"
            return self._unavailable(now_ms, reason)
        try:
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            return self._unavailable(now_ms, f"NVML does not answer: {error}")
        if count == 0:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            return self._unavailable(now_ms, _NO_DEVICES)
        session = self.session
        session.number, session.count, session.ids, session.trouble = session.number + 1, count, field_ids(driver), ""
        session.open = True
        self._opened_ms, self._next_try_ms = now_ms, 0
        for slot in range(len(self.devices), count):
            self.devices.append(NvmlDevice(slot, self._node, session, self._serials, self._gpus))
        reading = Reading(inventory=self._inventory(driver, count))
        if self._away:
            self._away = ""
            reading.events.append(_event(now_ms, "driver_back", f"the NVIDIA driver {driver} answers"))
        return reading

    def read(self, now_ms: int) -> Reading:
        """Open if need be, then all devices in sequence."""
        total = self.tend(now_ms)
        for device in self.devices:
            reading = device.read(now_ms)
            total.rows += reading.rows
            total.absent += reading.absent
            total.events += reading.events
            total.inventory |= reading.inventory
        return total

    def close(self) -> None:
        """Release NVML for good. Like every call into the driver it may block."""
        self.xids.close()
        if self.session.open:
            self._shut()

    def _may_try(self, now_ms: int) -> bool:
        return not 0 < self._next_try_ms - now_ms <= RETRY_MS  # more than that: the clock was set back

    def _why_close(self, now_ms: int) -> tuple[str, str] | None:
        """(code of the event or "", reason), or nothing."""
        if self._released_until_ms > now_ms:
            return "driver_released", "an operator asked the agent to let go of the driver for a while"
        if not self.session.open:
            return None
        if self.session.trouble:
            return "driver_missing", self.session.trouble
        if (
            self.devices
            and all(device.lost for device in self.devices)
            and not 0 <= now_ms - self._opened_ms < ALL_LOST_MS
        ):
            return "", "all GPUs are lost; NVML is started again, in case they were reset"
        return None

    def _shut(self) -> bool:
        """End NVML when no call is in flight: it must not go away under one. False: a call does not return."""
        of_gpus = [(f"a call for GPU {device.slot}", device.calling) for device in self.devices]
        calls = [("the wait for XIDs", self.xids.calling), *of_gpus]
        with contextlib.ExitStack() as held:
            self.xids.in_the_way = True
            held.callback(setattr, self.xids, "in_the_way", False)
            until = time.monotonic() + CLOSE_LIMIT_S
            # First each is only waited for: a GPU that hangs shall keep no other from being read meanwhile.
            for keep, waited_for in ((False, of_gpus), (True, calls)):
                for who, lock in waited_for:
                    if not lock.acquire(timeout=max(until - time.monotonic(), 0)):
                        self._stay_open(f"{who} does not return from the driver, which cannot be let go before it does")
                        return False
                    if keep:
                        held.callback(lock.release)
                    else:
                        lock.release()
            self.stuck = ""
            self.xids.let_go()
            for device in self.devices:
                device.close()
            self.session.open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                _log.warning("NVML did not shut down: %s", error)
        return True

    def _stay_open(self, why: str) -> None:
        if why != self.stuck:
            _log.warning("NVML is not closed: %s", why)
        self.stuck = why

    def _unavailable(self, now_ms: int, reason: str) -> Reading:
        """Report NVML as away, on all nodes without a driver: only the collector knows how many GPUs it should have."""
        if reason != self.reason:
            self.reason = reason
            _log.warning("no GPU telemetry: %s", reason)
        reading = Reading(inventory={"no_gpu_reason": reason, "gpu_count": "0"})
        if self._away != "driver_missing":
            self._away = "driver_missing"
            reading.events.append(_event(now_ms, "driver_missing", reason))
        return reading

    def _inventory(self, driver: str, count: int) -> dict[str, str]:
        """`no_gpu_reason` is empty here so that it replaces an earlier one."""
        self.reason = ""
        found = {"no_gpu_reason": "", "gpu_count": str(count), "driver_version": driver}
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
