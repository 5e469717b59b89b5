"""The spool's folder: all data is on disk before it is sent, and stays until a collector acknowledges it.

There are two logs (`segment_log.py`): events and telemetry. An event's number in its log is its sequence on the EVENTS
lane. A batch's number is its sequence on LIVE, unless the backfill plan (`backfill.py`) moved it to BACKFILL.

Events are synced at once: they are few, and one may be the last of a dying node. Telemetry is synced when its file is
full and at the end. A power cut may lose the newest telemetry; it loses nothing acknowledged, and no sequence is used
twice (see `segment_log.py`). A killed agent loses nothing that was written.

Every call may wait for the disk, so the disk thread makes them; the agent uses `async_spool.py`.

Acknowledged data is kept for `keep_acked_s`: a collector whose machine lost power asks for it by a lower offset in its
Welcome.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drover_agent.atomic_file import write_whole
from drover_agent.config import SpoolConfig
from drover_agent.spool.backfill import BackfillPlan, Range
from drover_agent.spool.messages import Outgoing, outgoing
from drover_agent.spool.record_format import Segment, Stored
from drover_agent.spool.segment_log import SegmentLog
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

LANES: tuple[int, ...] = (pb.EVENTS, pb.LIVE, pb.BACKFILL)
OUTAGE_MS = 60_000  # a backlog younger than this stays on LIVE
ROTATE_MS = 600_000  # files are closed at this age, so that acknowledged ones can be removed
MEMORY_BYTES = 4 * 2**20  # for each log, while the disk refuses data


class SpoolError(Exception):
    """The spool cannot be used. The message says what to do."""


@dataclass(slots=True)
class Losses:
    """What was lost since the last report."""

    telemetry: int = 0  # batches
    events: int = 0
    reason: str = ""
    damage: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.telemetry or self.events or self.damage)

    def add(self, more: Losses) -> None:
        self.telemetry += more.telemetry
        self.events += more.events
        self.reason = more.reason or self.reason
        self.damage += more.damage


class Spool:
    """The folder `config.dir`. Not thread-safe."""

    def __init__(self, config: SpoolConfig, now_ms: int) -> None:
        """Raises SpoolError."""
        self._config = config
        self.folder = Path(config.dir)
        self._lock = _claim(self.folder)
        segment_bytes = min(max(config.max_bytes // 16, 2**16), 4 * 2**20)
        try:
            self.events, self.telemetry = (
                SegmentLog(self.folder, prefix, segment_bytes, MEMORY_BYTES, partial(self._is_held, prefix))
                for prefix in ("events", "telemetry")
            )
        except OSError as error:
            raise SpoolError(_unusable(self.folder, error)) from None
        self._losses = Losses()
        self._tidied_ms = now_ms
        self._id_due = False
        self._counted_losses = {id(self.events): 0, id(self.telemetry): 0}
        damaged = self._take_damage()
        self._open_identity(damaged)
        self._losses.damage = tuple(damaged)
        for line in damaged:
            log.warning("The spool is damaged: %s", line)
        # Lane -> the highest sequence that the collector holds; a Welcome says which.
        self.held: dict[int, int] = {pb.EVENTS: 0, pb.LIVE: 0, pb.BACKFILL: self.plan.base - 1}
        self._rotate_at = {id(log_): now_ms + ROTATE_MS for log_ in self._logs}

    @property
    def _logs(self) -> tuple[SegmentLog, SegmentLog]:
        return self.telemetry, self.events

    def _open_identity(self, damaged: list[str]) -> None:
        """Read the id and the plan.

        If one of them or the log files are gone or broken, the sequences cannot be trusted: the spool gets a new id,
        and what waits is sent under that. The same if no file could be begun, because then the next start would not
        know which sequences this run used.
        """
        self.plan = BackfillPlan()
        fresh = self.events.was_empty or self.telemetry.was_empty or self.trouble is not None
        try:
            self.id = (self.folder / "id").read_text("ascii").strip()
            self.plan = BackfillPlan.load(self.folder / "backfill.json")
            if self.id and not fresh:
                return
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            damaged.append(f"identity files: {error}; what waits is sent under a new spool id")
        self._new_identity()

    def new_identity(self) -> None:
        """Go on under another id: the collector holds sequences that this spool never used (a copied folder)."""
        log.warning("The collector holds more of spool %s than was sent. Drover uses a new spool id.", self.id)
        self._new_identity()
        self.held = dict.fromkeys(LANES, 0)

    def _new_identity(self) -> None:
        self.id = os.urandom(16).hex()
        self.plan = BackfillPlan()
        self._save_identity()

    def _save_identity(self) -> None:
        """Write id and plan if both logs have a file: without one, the next run would use the same sequences again."""
        self._id_due = not all(log_.is_open for log_ in self._logs)
        try:
            if self._id_due:
                (self.folder / "id").unlink(missing_ok=True)
            else:
                self.plan.save(self.folder / "backfill.json")
                write_whole(self.folder / "id", self.id.encode())
        except OSError as error:
            self._id_due = True
            log.error("The spool's id cannot be written: %s. Drover tries again.", error.strerror)

    # ---- in

    def add_record(self, ts_ms: int, record: pb.Record) -> None:
        """Store an event, absence or holding, without its sequence."""
        self.events.append(ts_ms, record.SerializeToString())

    def add_batch(self, ts_ms: int, blocks: Sequence[pb.Block]) -> None:
        """Store one batch; `ts_ms` is the time of its newest row."""
        self.telemetry.append(ts_ms, pb.Batch(blocks=blocks).SerializeToString())

    def sync_events(self) -> None:
        """Sync the events added so far to the disk."""
        try:
            self.events.sync()
        except OSError as error:
            log.error("Events could not be synced to the spool's disk: %s", error.strerror)

    # ---- out

    def next(self, lane: int, after: int) -> Outgoing | None:
        """Return the first record or batch of a lane above `after` that no collector holds."""
        found = self._next_stored(lane, max(after, self.held[lane]))
        return outgoing(lane, found[0], found[1].payload) if found else None

    def _next_stored(self, lane: int, after: int) -> tuple[int, Stored] | None:
        if lane == pb.EVENTS:
            event = self.events.after(after)
            return (event.seq, event) if event else None
        if lane == pb.LIVE:
            batch = self.telemetry.after(max(after, self.plan.through))
            return (batch.seq, batch) if batch else None
        for low, high in self.plan.after(after):
            batch = self.telemetry.at_or_before(high)
            if batch and batch.seq >= low:
                return self.plan.seq_of(batch.seq), batch
        return None

    def welcome(self, held: Mapping[int, int], now_ms: int) -> None:
        """Take over what a collector holds, and move an old backlog to the BACKFILL lane."""
        self.held = {lane: held.get(lane, 0) for lane in LANES}
        self._plan_backfill(now_ms)

    def _plan_backfill(self, now_ms: int) -> None:
        held = self.held[pb.LIVE]
        moved: list[Range] = []
        if held < self.plan.floor:
            moved.append((held + 1, self.plan.floor))
        first = self.telemetry.after(max(held, self.plan.through))
        if first and first.ts_ms <= now_ms - OUTAGE_MS:
            moved.append((first.seq, self._last_before(now_ms - OUTAGE_MS, first.seq)))
        if not moved:
            return
        plan = self.plan.replaced_by([*self.plan.after(self.held[pb.BACKFILL]), *moved], held)
        try:
            plan.save(self.folder / "backfill.json")
        except OSError as error:
            log.error("The backfill plan cannot be written: %s. The backlog is sent in order.", error.strerror)
            return
        self.plan = plan
        waiting = sum(self.telemetry.size_between(low - 1, high)[0] for low, high in plan.ranges)
        log.info("%d batches wait from an outage. They are sent newest first.", waiting)

    def _last_before(self, ts_ms: int, seq: int) -> int:
        """Return the last batch of those from `seq` on, in order, that are not younger than `ts_ms`."""
        for segment in self.telemetry.segments:  # whole files first, then record by record
            if segment.count and segment.last > seq:
                if segment.newest_ms > ts_ms:
                    break
                seq = segment.last
        while (record := self.telemetry.after(seq)) and record.ts_ms <= ts_ms:
            seq = record.seq
        return seq

    def ack(self, lane: int, seq: int) -> None:
        """Take over that the collector holds a lane up to `seq`."""
        self.held[lane] = max(self.held[lane], seq)

    # ---- bounds

    def tidy(self, now_ms: int) -> None:
        """Remove what is held, too old or above the size limit. Call it every few seconds."""
        for log_ in self._logs:
            log_.retry()
            for segment in log_.closed():  # of this run: the clock of its rows may have been set since
                segment.closed_ms = segment.closed_ms or self._tidied_ms
            if now_ms >= self._rotate_at[id(log_)]:
                self._rotate_at[id(log_)] = now_ms + ROTATE_MS
                log_.rotate()
            self._count_refused(log_)
            for segment in log_.closed():
                kept_until = (segment.closed_ms or now_ms) + self._config.keep_acked_s * 1000
                if now_ms >= kept_until and self._pending(log_, segment) == 0:
                    log_.drop(segment)
        for segment in self.telemetry.closed():
            if (segment.closed_ms or now_ms) < now_ms - self._config.max_age_s * 1000:
                self._lose(self.telemetry, segment, f"older than spool.max_age_s {self._config.max_age_s:g}")
        self._fit()
        self._tidied_ms = now_ms
        if self._id_due and all(log_.is_open for log_ in self._logs):
            self._save_identity()

    def _fit(self) -> None:
        """Remove files above max_bytes: held ones first, then the oldest telemetry, then the oldest events."""
        while self.telemetry.size + self.events.size > self._config.max_bytes:
            held = [(g, s) for g in self._logs for s in g.closed() if self._pending(g, s) == 0]
            if held:
                held[0][0].drop(held[0][1])
                continue
            for log_ in self._logs:
                if not log_.closed():
                    log_.rotate()
                if oldest := log_.closed():
                    self._lose(log_, oldest[0], f"spool.max_bytes {self._config.max_bytes} reached")
                    break
            else:
                return

    def _lose(self, log_: SegmentLog, segment: Segment, reason: str) -> None:
        lost = self._pending(log_, segment)
        log_.drop(segment)
        self._count(log_, lost, reason)

    def _count(self, log_: SegmentLog, lost: int, reason: str) -> None:
        if not lost:
            return
        if log_ is self.telemetry:
            self._losses.telemetry += lost
        else:
            self._losses.events += lost
        self._losses.reason = reason

    def _count_refused(self, log_: SegmentLog) -> None:
        lost = log_.refused.lost - self._counted_losses[id(log_)]
        self._counted_losses[id(log_)] = log_.refused.lost
        self._count(log_, lost, f"the disk refuses data ({log_.trouble}) and memory for it is full")

    def _pending(self, log_: SegmentLog, segment: Segment) -> int:
        """Return how many records of a file no collector holds."""
        if not segment.count:
            return 0
        return sum(
            log_.size_between(low, high)[0] for low, high in self._waiting(log_, segment.first - 1, segment.last)
        )

    def _is_held(self, prefix: str, seq: int) -> bool:
        return not self._waiting(self.events if prefix == "events" else self.telemetry, seq - 1, seq)

    def _waiting(self, log_: SegmentLog, low: int, high: int) -> list[Range]:
        """Return the parts of (low, high] that no collector holds, each as (above, up to)."""
        if log_ is self.events:
            low = max(low, self.held[pb.EVENTS])
            return [(low, high)] if low < high else []
        live = max(low, self.held[pb.LIVE], self.plan.through)
        parts = [(live, high)] if live < high else []
        for begin, end in self.plan.after(self.held[pb.BACKFILL]):
            if max(begin - 1, low) < min(end, high):
                parts.append((max(begin - 1, low), min(end, high)))
        return parts

    def pending(self, telemetry_below: int | None = None, events_below: int | None = None) -> tuple[int, int]:
        """Return (records, bytes) that no collector holds; with bounds, only those with lower numbers."""
        records = size = 0
        for log_, below in ((self.telemetry, telemetry_below), (self.events, events_below)):
            for low, high in self._waiting(log_, 0, (below or log_.next_seq) - 1):
                found = log_.size_between(low, high)
                records += found[0]
                size += found[1]
        return records, size

    def oldest_batch_ms(self) -> int | None:
        """Return the time of the oldest batch in the files; None: there is none; 0: some cannot be read now."""
        if self.telemetry.unreadable:
            return 0
        return min((s.oldest_ms for s in self.telemetry.segments if s.count), default=None)

    @property
    def has_all_events(self) -> bool:
        """Whether the files go back to the first event of this spool."""
        return bool(self.events.segments) and self.events.segments[0].first == 1

    @property
    def trouble(self) -> str | None:
        """Why the disk refuses data now, None if it takes it."""
        return self.telemetry.trouble or self.events.trouble

    def take_losses(self) -> Losses | None:
        """Return what was lost since the last call, None if nothing was."""
        losses, self._losses = self._losses, Losses()
        losses.damage += tuple(self._take_damage())
        return losses or None

    def _take_damage(self) -> list[str]:
        found = [line for log_ in self._logs for line in log_.damaged]
        for log_ in self._logs:
            log_.damaged.clear()
        return found

    def close(self) -> None:
        self.events.close()
        self.telemetry.close()
        os.close(self._lock)


def _claim(folder: Path) -> int:
    """Create the folder and lock it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SpoolError(_unusable(folder, error)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SpoolError(f"{folder}: another agent uses this spool; stop it or set another spool.dir") from None
    return descriptor


def _unusable(folder: Path, error: OSError) -> str:
    return f"{folder}: cannot be used as the spool: {error.strerror}; set spool.dir to a folder the agent can write"
