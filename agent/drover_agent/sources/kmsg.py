"""The kernel log, read from where the last run stopped: XIDs, NVSwitch errors, PCIe, memory, OOM, hung tasks.

Not on the sampler's schedule: `KmsgReader.run` has a thread of its own that waits for lines, so that an event is told
as soon as the kernel has it. Only lines of the kernel's own facility count; user space can write all others.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drover_agent.files import write_whole
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg_lines import understand
from drover_proto.events import EventKind

log = logging.getLogger(__name__)

RECORD_BYTES = 16_384  # the kernel refuses smaller reads than a record, and caps records below this
WAIT_S = 0.5
SAVE_S = 5.0
LIVE_US = 5_000_000  # a line of the backlog younger than this happened now
BATCH = 500  # records read before their events are told

SlotOf = Callable[[str, str], int | None]  # (PCI address as `normal_pci` writes it, UUID or "") -> GPU slot
Deliver = Callable[[list[NodeEvent]], None]  # returns when the events are in the spool


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One record of /dev/kmsg: `priority,sequence,microseconds,flags;text`."""

    facility: int
    seq: int
    us: int  # since boot
    text: str


def parse_record(data: bytes) -> KernelRecord | None:
    """A record as read from the device (its ` KEY=value` lines are left out); None when it is none."""
    head, _, text = data.decode("utf-8", "replace").split("\n", 1)[0].partition(";")
    parts = head.split(",")
    try:
        return KernelRecord(int(parts[0]) >> 3, int(parts[1]), int(parts[2]), text)
    except (IndexError, ValueError):
        return None


class KmsgReader:
    """Reads `path` in the calling thread until `stop`; keeps its place in `state` (None: nowhere)."""

    def __init__(
        self,
        path: Path,
        boot_id: str,
        state: Path | None,
        slot_of: SlotOf,
        deliver: Deliver,
        *,
        accept_user_facility: bool = False,
    ) -> None:
        self._path, self._boot_id, self._state = path, boot_id, state
        self._slot_of, self._deliver, self._accept_user = slot_of, deliver, accept_user_facility
        self._stopped = threading.Event()
        self._last = self._load()  # sequence of the newest record seen in this boot, None for none
        self._saved = self._last
        self._save_at = 0.0
        self._backlog = True
        self._lost_before_next = False
        self._rest = b""

    def stop(self) -> None:
        """End `run` within WAIT_S; safe in any thread."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def run(self) -> None:
        """Read until `stop`; may be called again after an error.

        Raises:
            OSError: the log cannot be opened or read.
        """
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            waits = select.poll()
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if not regular:  # a regular file is always readable
                waits.register(descriptor, select.POLLIN)
            while not self._stopped.is_set():
                more = self._read_some(descriptor)
                if not more:
                    self._backlog = False
                    self._save(time.monotonic())
                    waits.poll((0.05 if regular else WAIT_S) * 1000)
            self._save(float("inf"))
        finally:
            os.close(descriptor)

    def _read_some(self, descriptor: int) -> bool:
        """Read up to BATCH records and tell their events; False when nothing is left to read."""
        events: list[NodeEvent] = []
        more = True
        for _ in range(BATCH):
            try:
                data = os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                more = False
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self._lost_before_next = True  # the kernel overwrote what was not read yet
                continue
            if not data:
                more = False
                break
            for record in self._records(data):
                events += self._take(record)
        if events:
            self._deliver(events)
            self._save_at = 0.0  # what was told must not be told again after a restart
        return more

    def _records(self, data: bytes) -> Iterator[KernelRecord]:
        """The device gives one record a read; files and pipes give many, and parts of them."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line and not line.startswith(b" ") and (record := parse_record(line)):
                yield record

    def _take(self, record: KernelRecord) -> Iterator[NodeEvent]:
        known = self._last
        if known is not None and record.seq <= known:
            return
        self._last = record.seq
        age_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000 - record.us
        # Lines are timed by a clock that nothing corrects: minutes off after weeks. Only old lines are reckoned by it.
        reckoned = self._backlog and age_us > LIVE_US
        ts_ms = time.time_ns() // 1_000_000 - (age_us // 1000 if reckoned else 0)
        gap = record.seq - known - 1 if known is not None else 0
        if self._lost_before_next or gap > 0:
            self._lost_before_next = False
            count = f"{gap} kernel log lines" if gap > 0 else "kernel log lines"
            yield self._event(ts_ms, None, EventKind.LIFECYCLE, "kmsg_overrun", f"{count} were lost before being read")
        line = understand(record.text)
        if line is None:
            return
        gpu = self._slot_of(line.pci, line.uuid) if line.pci or line.uuid else None
        forgeable = record.facility != 0 and not self._accept_user
        yield self._event(ts_ms, gpu, line.kind, line.code, line.message, forgeable=forgeable)

    def _event(
        self, ts_ms: int, gpu: int | None, kind: EventKind, code: str, message: str, *, forgeable: bool = False
    ) -> NodeEvent:
        return NodeEvent(ts_ms, gpu, kind, code, message, "kmsg", backlog=self._backlog, forgeable=forgeable)

    def _load(self) -> int | None:
        if self._state is None:
            return None
        try:
            data = json.loads(self._state.read_bytes())
            return int(data["seq"]) if data["boot_id"] == self._boot_id else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s: %s; the kernel log is read from its beginning", self._state, error)
            return None

    def _save(self, now: float) -> None:
        if self._state is None or self._last is None or self._last == self._saved or now < self._save_at:
            return
        self._save_at = now + SAVE_S
        try:
            write_whole(self._state, json.dumps({"boot_id": self._boot_id, "seq": self._last}).encode(), sync=False)
            self._saved = self._last
        except OSError as error:
            log.error("%s: %s; lines may be told again after a restart", self._state, error.strerror)
