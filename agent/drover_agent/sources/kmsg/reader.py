"""The kernel log, read from where the last run stopped: XIDs, NVSwitch errors, PCIe, memory, OOM, hung tasks.

Not on the sampler's schedule: `KmsgReader.run` has a thread of its own that waits for lines, so that an event is sent
as soon as the kernel has it. Only lines of the kernel's own facility count; user space can write all others.

What is sent as backlog is noted and never acted on: lines of before the first start, and of before the last reboot, are
of a machine that nobody watched, or that was mended since. An agent that was restarted or updated goes on at its place:
what the same boot wrote since is news, sent late with its own time, unless it is older than LATE_S.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from drover_agent.atomic_file import write_whole
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg.clock import (
    Clocks,
    LogClock,
    may_be_suspend,
    system_clocks,
)
from drover_agent.sources.kmsg.lines import SETTLED_US, of_start, understand
from drover_core.model.kinds import EventKind

log = logging.getLogger(__name__)

RECORD_BYTES = 16_384  # the kernel refuses smaller reads than a record, and caps records below this
WAIT_S = 5.0  # between looks at a log in which nothing is written
FILE_WAIT_S = 0.05  # the same for a regular file, for which nobody can wait
STALL_S = 1.0  # a wait longer than it should be by this was none: the machine or the process stood still
SAVE_S = 5.0
BATCH = 500  # records read before their events are sent
MAX_REST = 65_536  # bytes kept of a record that has not ended; the device gives whole ones
LOST_EVERY_S = 10.0  # lines that go on being lost are reported in sums
LATE_S = 3600.0  # a line that was missed for longer is history: somebody may have dealt with it since

SlotOf = Callable[[str, str], int | None]  # (PCI address as `normal_pci` writes it, UUID or "") -> GPU slot
Deliver = Callable[[list[NodeEvent]], None]  # returns when the events are in the spool


class KernelRecord(NamedTuple):
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
        clocks: Callable[[], Clocks] = system_clocks,
        caught_up: Callable[[], object] = lambda: None,
    ) -> None:
        """`caught_up` is called in the reader's thread when the log could be read to its end, once for each `run`."""
        self._path, self._boot_id, self._state = path, boot_id, state
        self._slot_of, self._deliver, self._accept_user, self._caught_up = (
            slot_of,
            deliver,
            accept_user_facility,
            caught_up,
        )
        self._stopped = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)
        self._last: int | None = None  # sequence of the newest record seen in this boot, None for none
        self._newest: int | None = None  # the same in this run
        self._clock = self._load(clocks)
        self._saved: int | None = self._last
        self._resumed = self._last is not None  # an earlier run of this boot had read all up to this place
        self._save_at = 0.0
        self._backlog = True
        self._first_new: int | None = None  # sequence of the first record written since `run` began, once there is one
        self._overran = False
        self._lost: int | None = None  # lines that were lost and are not reported yet; 0 when their number is not known
        self._deliver_lost_at = 0.0
        self._rest = b""

    def stop(self) -> None:
        """End `run` soon; safe in any thread."""
        self._stopped.set()
        os.eventfd_write(self._wake, 1)

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def run(self) -> None:
        """Read until `stop`; may be called again after an error.

        Raises:
            OSError: the log cannot be opened or read.
        """
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        end: int | None = None
        try:
            end = self._open_end() if self._backlog else None
            if self._clock.unexplained:
                self._explain(descriptor)
            waits = select.poll()
            waits.register(self._wake, select.POLLIN)
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if not regular:  # a regular file is always readable
                waits.register(descriptor, select.POLLIN)
            prompt, at_end = False, False
            while not self._stopped.is_set():
                empty_us = self._clock.boot_us()  # if nothing is read, nothing was there then
                if self._read_some(descriptor, prompt, end):
                    prompt = False
                    continue
                if not at_end and self._was_reset(descriptor):
                    continue
                self._backlog = False
                if not at_end:
                    at_end = True
                    self._caught_up()
                self._deliver_lost()
                self._save(time.monotonic())
                wait_s = FILE_WAIT_S if regular else WAIT_S
                waits.poll(wait_s * 1000)
                # Not when the machine, its disk or this process stood still meanwhile: then the lines may be old.
                prompt = self._clock.boot_us() - empty_us < (wait_s + STALL_S) * 1e6
            self._save(float("inf"))
        finally:
            os.close(descriptor)
            if end is not None:
                os.close(end)

    def _open_end(self) -> int | None:
        """The log, to be read from its present end on; None of a pipe, whose old lines cannot be known."""
        end = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.lseek(end, 0, os.SEEK_END)
        except OSError as error:
            os.close(end)
            if error.errno != errno.ESPIPE:
                raise
            return None
        return end

    def _look_for_new(self, end: int) -> None:
        """Find the first record that is no backlog. Sending old ones takes as long as the disk does: what comes
        meanwhile is a fault of now, and must not pass for an old one."""
        with contextlib.suppress(BlockingIOError):
            try:
                data = os.read(end, RECORD_BYTES)
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                data = os.read(end, RECORD_BYTES)  # overwritten already; this is the oldest that is left
            found = (parse_record(line) for line in data.split(b"\n") if not line.startswith(b" "))
            self._first_new = next((record.seq for record in found if record), None)

    def _was_reset(self, descriptor: int) -> bool:
        """Whether the whole log is older than the place that was kept: a virtual machine that was set back to an
        earlier state has the boot id of then. Its log is read from the beginning, lest all of it seem known."""
        if self._last is None or self._newest is None or self._newest >= self._last:
            return False
        log.warning("%s: ends before the place kept of it; it is read from its beginning", self._path)
        self._last, self._resumed = None, False
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            return False
        self._overran, self._rest = False, b""
        return True

    def _explain(self, descriptor: int) -> None:
        """Look through the whole log for suspends, then begin at its beginning again; a pipe has none."""
        found: list[tuple[int, str]] = []
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            while data := self._read(descriptor):
                found += [(r.us, r.text) for r in self._records(data) if r.facility == 0 and may_be_suspend(r.text)]
            os.lseek(descriptor, 0, os.SEEK_SET)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
        self._overran, self._rest = False, b""
        self._clock.explain(found)

    def _read(self, descriptor: int) -> bytes:
        """What one read gives; nothing when there is nothing now."""
        while True:
            try:
                return os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                return b""
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self._overran = True  # the kernel overwrote what was not read yet; the next read goes on

    def _read_some(self, descriptor: int, prompt: bool, end: int | None) -> bool:
        """Read up to BATCH records and send their events; False when nothing is left to read. `prompt`: the first of
        them came while this waited."""
        records: list[KernelRecord] = []
        more = True
        while len(records) < BATCH and more:
            data = self._read(descriptor)
            records += self._records(data)
            more = bool(data)
        if self._backlog and self._first_new is None and end is not None:
            self._look_for_new(end)  # after the records: what of them is new is to be found there as well
        self._clock.look((record.us, record.text) for record in records if record.facility == 0)
        if prompt and records:
            self._clock.came_now(records[0].us)
        events = [event for record in records for event in self._take(record)]
        if events:
            self._deliver(events)
            self._save_at = 0.0  # what was sent must not be sent again after a restart
            if self._resumed or not self._backlog:  # a place is kept of a log that was read to its end only
                self._save(time.monotonic())
        return more or bool(events)  # lines may have come while these were delivered: they are not prompt

    def _records(self, data: bytes) -> Iterator[KernelRecord]:
        """The device gives one record a read; files and pipes give many, and parts of them."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= MAX_REST else b""
        for line in lines:
            if line and not line.startswith(b" ") and (record := parse_record(line)):
                yield record

    def _take(self, record: KernelRecord) -> Iterator[NodeEvent]:
        self._newest = max(record.seq, self._newest or 0)
        known = self._last
        if known is not None and record.seq <= known:
            return
        self._last = record.seq
        gap = record.seq - known - 1 if known is not None else 0
        if self._overran or gap > 0:
            self._overran = False
            self._lost = (self._lost or 0) + gap
            yield from self._lost_lines()
        line = understand(record.text)
        if line is None or (record.us < SETTLED_US and of_start(line)):
            return
        gpu = self._slot_of(line.pci, line.uuid) if line.pci or line.uuid else None
        forgeable = record.facility != 0 and not self._accept_user
        ts_ms, age_us = self._clock.when(record.us)
        backlog = self._is_backlog(record, age_us)
        up_ms = (self._clock.boot_us() - age_us) // 1000
        yield NodeEvent(
            ts_ms, gpu, line.kind, line.code, line.message, "kmsg", backlog, 1, forgeable, up_ms, where=line.where
        )

    def _is_backlog(self, record: KernelRecord, age_us: int) -> bool:
        """Whether the line is from before somebody watched, or too old to be news: an agent that was stopped, or whose
        disk hung, for so long does not know what was done meanwhile, just as one that did not run."""
        if age_us > LATE_S * 1e6:
            return True
        watched = not self._backlog or (self._first_new is not None and record.seq >= self._first_new)
        return not watched and not self._resumed

    def _lost_lines(self) -> Iterator[NodeEvent]:
        """Word of lost lines: the first at once, then every LOST_EVERY_S."""
        if self._lost is None or time.monotonic() < self._deliver_lost_at:
            return
        self._deliver_lost_at = time.monotonic() + LOST_EVERY_S
        text = f"{self._lost or 'some'} kernel log lines were lost before being read"
        count, self._lost = max(self._lost, 1), None
        now_ms = time.time_ns() // 1_000_000
        yield NodeEvent(now_ms, None, EventKind.LIFECYCLE, "kmsg_overrun", text, "kmsg", self._backlog, count)

    def _deliver_lost(self) -> None:
        if events := list(self._lost_lines()):
            self._deliver(events)

    def _load(self, clocks: Callable[[], Clocks]) -> LogClock:
        """Go on where the last run of this boot stopped."""
        if self._state is None:
            return LogClock(clocks)
        try:
            data = json.loads(self._state.read_bytes())
            if data["boot_id"] != self._boot_id:
                return LogClock(clocks)
            self._last = int(data["seq"])
        except FileNotFoundError:
            return LogClock(clocks)
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            log.warning("%s: %r; the kernel log is read from its beginning", self._state, error)
            return LogClock(clocks)
        try:
            return LogClock(clocks, data.get("clock"))
        except (ValueError, TypeError, KeyError, OverflowError) as error:  # another version's: the place still counts
            log.warning("%s: %r; times of older kernel lines may be off", self._state, error)
            return LogClock(clocks)

    def _save(self, now: float) -> None:
        if self._state is None or self._last is None or self._last == self._saved or now < self._save_at:
            return
        self._save_at = now + SAVE_S
        data = {"boot_id": self._boot_id, "seq": self._last, "clock": self._clock.state}
        try:
            write_whole(self._state, json.dumps(data).encode(), sync=False)
            self._saved = self._last
        except OSError as error:
            log.error("%s: %s; lines may be sent again after a restart", self._state, error.strerror)
