"""XIDs as NVML's event set delivers them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pynvml

from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.nvml.device import NvmlDevice, Session
from drover_agent.sources.nvml.errors import DRIVER_GONE
from drover_core.model.kinds import EventKind
from drover_core.xid.codes import lookup

WAIT_MS = 2000  # in NVML; less than nvml.CLOSE_LIMIT_S
AGAIN_S = 1.0  # while there is nothing to wait for, or after a failure
YIELD_S = 0.05  # between two waits while somebody wants to close NVML
BURST = 256  # most events of one read; more wait for the next

_log = logging.getLogger(__name__)


class NvmlXidWatcher:
    """Waits for XIDs of all devices; `read` returns after at most WAIT_MS (longer only if the driver hangs).

    NVML gives no time with an event: it gets the time of its arrival.
    """

    name = "nvml:xids"
    interval_s = 0.0

    def __init__(self, devices: Sequence[NvmlDevice], session: Session) -> None:
        self.calling = threading.Lock()  # held while it may be in a call: NVML must not be closed meanwhile
        self.in_the_way = False  # somebody waits for `calling`; a lock that is taken again at once leaves him no chance
        self._devices, self._session = devices, session
        self._set: Any = None
        self._watched: frozenset[tuple[int, int]] = frozenset()  # (slot, times lost) that the set was made for
        self.watching: frozenset[int] = frozenset()  # slots whose XIDs are sent
        self._closed = threading.Event()
        self._trouble = ""

    def read(self, now_ms: int) -> Reading:
        """XIDs that came while it waited, at most BURST of them."""
        if self.in_the_way:
            self._closed.wait(YIELD_S)
        with self.calling:
            if self._session.open:
                return self._read(now_ms)
        self._closed.wait(AGAIN_S)
        return Reading()

    def _read(self, now_ms: int) -> Reading:
        reading = Reading()
        begun = time.monotonic()

        def collect(timeout_ms: int) -> None:
            while len(reading.events) < BURST:
                data = pynvml.nvmlEventSetWait_v2(self._set, timeout_ms)
                timeout_ms = 0
                if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    reading.events.append(self._event(data, now_ms + round((time.monotonic() - begun) * 1000)))

        try:
            here = frozenset((d.slot, d.times_lost) for d in list(self._devices) if d.handle is not None and not d.lost)
            if here != self._watched:
                # A set with a lost GPU in it gives only errors, once it is empty: take what is in it, then a new one.
                if self._set is not None:
                    with contextlib.suppress(pynvml.NVMLError):
                        collect(0)
                self._renew(here)
            if not self.watching:
                self._closed.wait(AGAIN_S)
            else:
                collect(0 if reading.events else WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value in DRIVER_GONE:
                self._session.trouble = self._session.trouble or f"the NVIDIA driver does not answer any more: {error}"
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                self._failed(error, at_once=bool(reading.events))
        return reading

    def close(self) -> None:
        """End waits between attempts; the set itself goes with NVML, for a wait may still be in it."""
        self._closed.set()

    def let_go(self) -> None:
        """NVML is about to be closed, and no read is under way."""
        with contextlib.suppress(pynvml.NVMLError):
            self._drop()

    def _renew(self, here: frozenset[tuple[int, int]]) -> None:
        self._drop()
        fresh = pynvml.nvmlEventSetCreate()
        slots = {slot for slot, _ in here}
        for device in self._devices:
            if device.slot in slots:
                try:
                    pynvml.nvmlDeviceRegisterEvents(device.handle, pynvml.nvmlEventTypeXidCriticalError, fresh)
                except pynvml.NVMLError as error:
                    slots.remove(device.slot)
                    self._log_trouble(f"GPU {device.slot} has no XID events in NVML ({error}); the kernel log has them")
        self._set, self._watched, self.watching = fresh, here, frozenset(slots)

    def _drop(self) -> None:
        if self._set is not None:
            stale, self._set = self._set, None
            self._watched, self.watching = frozenset(), frozenset()
            pynvml.nvmlEventSetFree(stale)

    def _failed(self, error: Exception, *, at_once: bool) -> None:
        """Start over with a new set next time, and not at once: a set in trouble does not block."""
        self._log_trouble(f"waiting for XIDs in NVML failed: {error}")
        try:
            self._drop()
        except pynvml.NVMLError as second:
            _log.warning("an event set could not be freed: %s", second)
        if not at_once:  # events in hand leave first
            self._closed.wait(AGAIN_S)

    def _log_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s", trouble)

    def _event(self, data: Any, ts_ms: int) -> NodeEvent:
        address = ctypes.cast(data.device, ctypes.c_void_p).value
        slot = next((d.slot for d in self._devices if d.address == address), None)
        code = int(data.eventData)
        row = lookup(code)
        return NodeEvent(
            ts_ms=ts_ms,
            gpu=slot,
            kind=EventKind.XID,
            code=str(code),
            message=f"XID {code}: {row.meaning}" if row else f"XID {code}",
            source="nvml",
        )
