"""One GPU as a source: what NVML and GPM say of it, and why the rest is absent."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pynvml

from drover_agent.sources.base import RATE_STEP, Entity, NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml_fields import (
    BER_KEY,
    DEVICE_KEYS,
    FAST_CALLS,
    GPM_METRICS,
    LINK_KEYS,
    NVML_METRICS,
    PCIE_CALLS,
    SLOW_CALLS,
    Call,
    Raw,
    bit_error_rate,
    field_value,
)
from drover_agent.sources.nvml_gpm import Gpm
from drover_proto.catalog import Absent, Metric, Scope
from drover_proto.events import EventKind

SLOW_MS = 10_000  # slow metrics are read once in each of these, in its first tick: one value per detector bucket

_log = logging.getLogger(__name__)

_ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: Absent.UNSUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Absent.UNSUPPORTED,  # a driver older than the call
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: Absent.UNSUPPORTED,  # or than this version of its struct
    pynvml.NVML_ERROR_DEPRECATED: Absent.UNSUPPORTED,
    pynvml.NVML_ERROR_GPU_IS_LOST: Absent.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Absent.LOST,
    pynvml.NVML_ERROR_NO_PERMISSION: Absent.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: Absent.TIMEOUT,
}
# Every metric that this source gives: what is absent while a GPU is lost.
_ALL = tuple({m.name: m for m in (*NVML_METRICS.values(), *GPM_METRICS.values())}.values())


class LostError(Exception):
    """The GPU has fallen off the bus: nothing more to ask it in this tick."""


class NvmlDevice:
    """One GPU. `read` never raises for what a device does; it blocks when the driver does."""

    interval_s = 1.0

    def __init__(self, slot: int, node: str, ids: Mapping[str, int], serials: dict[str, set[int]], gpus: Gpus) -> None:
        """`ids`: NVML's number of each field; `serials`: the slots that have each serial, one dict for all devices."""
        self.slot = slot
        self.name = f"nvml:{slot}"
        self.handle: Any = None
        self.address: int | None = None  # the last handle as a number: events name their device by it
        self.lost = False
        self.times_lost = 0
        self._node = node
        self._ids = ids
        self._serials = serials
        self._gpus = gpus
        self._known: dict[str, str] = {}  # what has been read of the identity; kept when the GPU is lost
        self._asked: set[str] = set()  # parts of the identity that were answered, or refused for good
        self._gpm: Gpm | None = None
        self._last_slow = -1  # number of the SLOW_MS in which slow metrics were last read
        self._links: dict[str, dict[int, float]] = {}  # link field -> link -> its last count
        self._logged: set[tuple[str, int]] = set()

    @property
    def entity(self) -> Entity:
        """Keyed by serial, else UUID, else NODE/PCI address, else NODE/gpuN."""
        known = self._known
        serial, uuid, pci = (known.get(part, "") for part in ("serial", "uuid", "pci"))
        # Two GPUs of one board may carry the board's serial: then it identifies neither.
        own = serial if len(self._serials.get(serial, ())) == 1 else ""
        key = own or uuid or (f"{self._node}/{pci}" if pci else f"{self._node}/gpu{self.slot}")
        return Entity(Scope.GPU, key, self.slot, uuid=uuid, serial=serial, pci=pci, model=known.get("model", ""))

    def read(self, now_ms: int) -> Reading:
        """Values, absences and whether the GPU was lost or came back since the last read."""
        slow = now_ms // SLOW_MS != self._last_slow or self.lost
        found, reading = _Found(), Reading()
        try:
            refused = self._identify(reading.inventory)
            if refused is None:
                self._read_all(found, slow=slow)
            else:
                found.rest(_ALL, refused)
        except LostError:
            if not self.lost:
                self.lost = True
                self.times_lost += 1
                reading.events.append(self._event(now_ms, "gpu_lost", "no longer answers: NVML says that it is lost"))
            self.handle, self._gpm = None, None  # the GPM samples went with the GPU
            found.rest(_ALL, Absent.LOST)
        else:
            if self.lost and refused is None:
                self.lost = False
                reading.events.append(self._event(now_ms, "gpu_back", "answers again"))
            if slow:
                self._last_slow = now_ms // SLOW_MS
        entity = self.entity
        self._gpus.tell(entity)
        if found.values:
            reading.rows.append((entity, found.values))
        reading.absent.extend((entity, name, why) for name, why in found.absent.items())
        return reading

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _read_all(self, found: _Found, *, slow: bool) -> None:
        self._read_fields(found, slow=slow)
        for call in FAST_CALLS:
            self._ask(found, call)
        if not self._read_gpm(found) and slow:
            for call in PCIE_CALLS:
                self._ask(found, call)
        if slow:
            for call in SLOW_CALLS:
                self._ask(found, call)

    def _ask(self, found: _Found, call: Call) -> None:
        try:
            values = call.read(self.handle)
        except pynvml.NVMLError as error:
            why = self._why(error, call.keys[0])
            for key in call.keys:
                found.miss(NVML_METRICS[key], why)
            return
        for key, value in zip(call.keys, values, strict=True):
            found.put(NVML_METRICS[key], value, NVML_METRICS[key].sources["nvml"].scale)

    def _read_fields(self, found: _Found, *, slow: bool) -> None:
        """All field values in one batch; those of each NVLink only with the slow metrics."""
        asked = [(key, 0) for key in DEVICE_KEYS if key in self._ids]
        if slow:
            asked += [(key, link) for key in LINK_KEYS for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
        for key in DEVICE_KEYS:
            if key not in self._ids:
                found.miss(NVML_METRICS[key], Absent.UNSUPPORTED)
        try:
            fields = pynvml.nvmlDeviceGetFieldValues(self.handle, [(self._ids[key], link) for key, link in asked])
        except pynvml.NVMLError as error:
            why = self._why(error, "nvmlDeviceGetFieldValues")
            for key in {key for key, _ in asked}:
                found.miss(NVML_METRICS[key], why)
            return
        links: dict[str, dict[int, float]] = {key: {} for key in LINK_KEYS}
        refused: dict[str, Absent] = {}
        for (key, link), field in zip(asked, fields, strict=True):
            try:
                value = field_value(field)
            except pynvml.NVMLError as error:
                if key not in links:
                    found.miss(NVML_METRICS[key], self._why(error, key))
                elif error.value != pynvml.NVML_ERROR_INVALID_ARGUMENT:  # NVML's word for a link past the last
                    refused[key] = self._why(error, key)
                continue
            if key not in links:
                found.put(NVML_METRICS[key], value, NVML_METRICS[key].sources["nvml"].scale)
            elif value is not None:
                links[key][link] = value
        if slow:
            self._sum_links(found, links, refused)

    def _sum_links(
        self, found: _Found, links: Mapping[str, Mapping[int, float]], refused: Mapping[str, Absent]
    ) -> None:
        """Counts are summed over links, the error rate is the worst of them.

        A link that stops answering keeps its last count in the sum: a dead link adds no errors, and a sum that fell
        would look like a reset of the counters.
        """
        for key, answered in links.items():
            metric = NVML_METRICS[key]
            if not answered:
                found.miss(metric, refused.get(key, Absent.UNSUPPORTED))
            elif key == BER_KEY:
                found.put(metric, max(bit_error_rate(word) for word in answered.values()))
            else:
                counts = self._links.setdefault(key, {})
                counts.update(answered)
                found.put(metric, sum(counts.values()), metric.sources["nvml"].scale)

    def _read_gpm(self, found: _Found) -> bool:
        """False when this GPU has no GPM, so that PCIe traffic must be had in another way."""
        try:
            if self._gpm is None:
                self._gpm = Gpm(self.handle)
            answers = self._gpm.read(self.handle) if self._gpm.supported else None
        except pynvml.NVMLError as error:
            why = self._why(error, "GPM")
            supported = why is not Absent.UNSUPPORTED
            self._miss_gpm(found, why, also_pcie=supported)
            return supported
        if answers is None:
            self._miss_gpm(found, Absent.UNSUPPORTED, also_pcie=False)
            return False
        for key, answer in answers.items():
            metric = GPM_METRICS[key]
            if isinstance(answer, pynvml.NVMLError):
                found.miss(metric, self._why(answer, key))
            else:
                found.put(metric, _meaningful(metric, answer * metric.sources["gpm"].scale))
        return True

    def _miss_gpm(self, found: _Found, why: Absent, *, also_pcie: bool) -> None:
        for metric in GPM_METRICS.values():
            if also_pcie or "nvml" not in metric.sources:
                found.miss(metric, why)

    def _identify(self, inventory: dict[str, str]) -> Absent | None:
        """Get a handle and what is not known yet of the identity; the reason when there is no handle to be had."""
        if self.handle is None:
            try:
                self.handle = pynvml.nvmlDeviceGetHandleByIndex(self.slot)
            except pynvml.NVMLError as error:
                return self._why(error, "nvmlDeviceGetHandleByIndex")
            self.address = ctypes.cast(self.handle, ctypes.c_void_p).value
        for key, call in _IDENTITY_CALLS.items():
            if key in self._asked:
                continue
            try:
                text = call(self.handle)
            except UnicodeDecodeError as error:
                _log.warning("GPU %d: its %s is not text (%s)", self.slot, key, error)
            except pynvml.NVMLError as error:
                if self._why(error, key) is not Absent.UNSUPPORTED:
                    continue  # it may be told another time
            else:
                if text.strip("0 "):  # boards without a serial number of their own report zeros
                    self._known[key] = inventory[f"gpu{self.slot}.{key}"] = text
                    if key == "serial":
                        self._serials.setdefault(text, set()).add(self.slot)
            self._asked.add(key)
        return None

    def _why(self, error: Any, what: str) -> Absent:
        """The reason for the records of one failure; unexpected ones are logged once.

        Raises:
            LostError: the GPU is gone, so that the rest need not be asked.
        """
        why = _ABSENT.get(error.value, Absent.ERROR)
        if why is Absent.LOST:
            raise LostError
        if why is not Absent.UNSUPPORTED and (what, error.value) not in self._logged:
            self._logged.add((what, error.value))
            _log.warning("GPU %d: %s could not be read: %s", self.slot, what, error)
        return why

    def _event(self, now_ms: int, code: str, text: str) -> NodeEvent:
        entity = self.entity
        label = " ".join(filter(None, (f"GPU {self.slot}", entity.model, entity.pci)))
        return NodeEvent(now_ms, self.slot, EventKind.LIFECYCLE, code, f"{label} {text}", "nvml")


class _Found:
    """What one read has found, by metric name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.absent: dict[str, Absent] = {}

    def put(self, metric: Metric, raw: Raw, scale: float = 1.0) -> None:
        if raw is None:
            self.absent[metric.name] = Absent.UNSUPPORTED
            return
        value = raw * scale
        if metric.low <= value <= metric.high:  # NaN fails both comparisons
            self.values[metric.name] = value
        else:
            self.absent[metric.name] = Absent.OUT_OF_RANGE

    def miss(self, metric: Metric, why: Absent) -> None:
        self.absent[metric.name] = why

    def rest(self, metrics: Iterable[Metric], why: Absent) -> None:
        """Whatever of `metrics` was not read is absent for this reason."""
        for metric in metrics:
            if metric.name not in self.values:
                self.absent[metric.name] = why


def _meaningful(metric: Metric, value: float) -> float:
    """A value of GPM in the resolution that is told. GPM divides two windows that do not end together, so that a busy
    unit comes out at a little over 100 %."""
    if metric.unit == "B/s" and math.isfinite(value):
        return round(value / RATE_STEP) * RATE_STEP
    return metric.high if metric.unit == "ratio" and metric.high < value <= metric.high * 1.05 else value


def _pci(handle: Any) -> str:
    info = pynvml.nvmlDeviceGetPciInfo(handle)
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


_IDENTITY_CALLS: Mapping[str, Callable[[Any], str]] = {
    "serial": lambda h: str(pynvml.nvmlDeviceGetSerial(h)),
    "uuid": lambda h: str(pynvml.nvmlDeviceGetUUID(h)),
    "pci": _pci,
    "model": lambda h: str(pynvml.nvmlDeviceGetName(h)),
    "vbios": lambda h: str(pynvml.nvmlDeviceGetVbiosVersion(h)),
}
