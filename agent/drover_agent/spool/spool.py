"""Everything the agent tells is here, on disk, before it is sent, and stays until a collector acknowledges it.

Two logs (`segments.py`): events and telemetry. An event's number in its log is its sequence on the EVENTS lane; a
batch's number is its sequence on LIVE, unless the backfill plan (`backfill.py`) moved it to BACKFILL.

fsync: events at once (they are few, and one may be the last thing a dying node says); telemetry when its file is full
and at the end. A power cut may cost the last telemetry that the kernel had not written yet; nothing acknowledged is
lost, and no sequence is used twice (see `segments.py`). A killed agent loses nothing that was written.

All of it waits for the disk, so it runs in a thread of its own; the agent talks to `outbox.py`.

What is acknowledged stays `keep_acked_s` longer: a collector whose machine lost power says so by a lower sequence in
its Welcome, and gets it again.
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
from drover_agent.spool.record_format import Segment, Stored
from drover_agent.spool.segment_log import SegmentLog
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

LANES: tuple[int, ...] = (pb.EVENTS, pb.LIVE, pb.BACKFILL)
OUTAGE_MS = 60_000  # a backlog younger than this goes on in LIVE
ROTATE_MS = 600_000  # files are closed at this age, so that what is acknowledged can go
MEMORY_BYTES = 4 * 2**20  # for each log, while the disk refuses


class SpoolError(Exception):
    """The spool cannot be used; one line that says what to do."""


@dataclass(slots=True)
class Losses:
    """What was lost since it was last asked for."""

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
        self._seen_overflow = {id(self.events): 0, id(self.telemetry): 0}
        damaged = self._take_damage()
        self._open_identity(damaged)
        self._losses.damage = tuple(damaged)
        for line in damaged:
            log.warning("spool: %s", line)
        # Nothing is known to be held until a Welcome says so.
        self.held: dict[int, int] = {pb.EVENTS: 0, pb.LIVE: 0, pb.BACKFILL: self.plan.base - 1}
        self._rotate_at = {id(log_): now_ms + ROTATE_MS for log_ in self._logs}

    @property
    def _logs(self) -> tuple[SegmentLog, SegmentLog]:
        return self.telemetry, self.events

    def _open_identity(self, damaged: list[str]) -> None:
        """Read the id and the plan. Where one of them or the log files are gone or broken, the sequences can't be
        trusted, so the spool gets a new id; what waits in it is sent under that. So too where no file could be begun:
        nothing would tell the next start which sequences this run gives out."""
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
            damaged.append(f"identity files: {error}; sent under a new spool id")
        self._new_identity()

    def new_identity(self) -> None:
        """Go on under another id: a collector holds what this spool never gave out (a copied or restored folder)."""
        log.warning("spool: the collector holds more of spool %s than was sent; using a new spool id", self.id)
        self._new_identity()
        self.held = dict.fromkeys(LANES, 0)

    def _new_identity(self) -> None:
        self.id = os.urandom(16).hex()
        self.plan = BackfillPlan()
        self._save_identity()

    def _save_identity(self) -> None:
        """Only where both logs have a file: without one, the next run would give this one's sequences out again."""
        self._id_due = not all(log_.is_open for log_ in self._logs)
        try:
            if self._id_due:
                (self.folder / "id").unlink(missing_ok=True)
            else:
                self.plan.save(self.folder / "backfill.json")
                write_whole(self.folder / "id", self.id.encode())
        except OSError as error:
            self._id_due = True
            log.error("spool: cannot write its id: %s; it is tried again", error.strerror)

    # ---- in

    def add_record(self, ts_ms: int, record: pb.Record) -> None:
        """Keep one event, absence or holding (without its sequence)."""
        self.events.append(ts_ms, record.SerializeToString())

    def add_batch(self, ts_ms: int, blocks: Sequence[pb.Block]) -> None:
        """Keep one batch; `ts_ms` is the time of its newest row."""
        self.telemetry.append(ts_ms, pb.Batch(blocks=blocks).SerializeToString())

    def sync_events(self) -> None:
        """Bring the events added so far to the disk."""
        try:
            self.events.sync()
        except OSError as error:
            log.error("spool: events could not be brought to the disk: %s", error.strerror)

    # ---- out

    def next(self, lane: int, after: int) -> tuple[int, pb.AgentMessage, int] | None:
        """(sequence, message, size of its payload) of the first one of a lane above `after` that is not held."""
        found = self._next_stored(lane, max(after, self.held[lane]))
        return (found[0], as_message(lane, found[0], found[1].payload), len(found[1].payload)) if found else None

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
        """Take over what a collector holds, and move an old backlog to the backfill lane."""
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
            log.error("spool: cannot write the backfill plan: %s; the backlog goes on in order", error.strerror)
            return
        self.plan = plan
        waiting = sum(self.telemetry.size_between(low - 1, high)[0] for low, high in plan.ranges)
        log.info("spool: %d batches wait from an outage and are sent newest first", waiting)

    def _last_before(self, ts_ms: int, seq: int) -> int:
        """The end of the run of batches from `seq` on that are not younger than `ts_ms`."""
        for segment in self.telemetry.segments:  # whole files while they are old, then record by record
            if segment.count and segment.last > seq:
                if segment.newest_ms > ts_ms:
                    break
                seq = segment.last
        while (record := self.telemetry.after(seq)) and record.ts_ms <= ts_ms:
            seq = record.seq
        return seq

    def ack(self, lane: int, seq: int) -> None:
        """Everything of a lane up to `seq` is held."""
        self.held[lane] = max(self.held[lane], seq)

    # ---- bounds

    def tidy(self, now_ms: int) -> None:
        """Remove what is held, what is too old and what is too much. Call it now and then."""
        for log_ in self._logs:
            log_.retry()
            for segment in log_.closed():  # of this run: its rows' clock may have been set since it was begun
                segment.closed_ms = segment.closed_ms or self._tidied_ms
            if now_ms >= self._rotate_at[id(log_)]:
                self._rotate_at[id(log_)] = now_ms + ROTATE_MS
                log_.rotate()
            self._count_overflow(log_)
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
        """Bring the files below max_bytes: what is held first, then the oldest telemetry, then the oldest events."""
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

    def _count_overflow(self, log_: SegmentLog) -> None:
        lost = log_.overflowed - self._seen_overflow[id(log_)]
        self._seen_overflow[id(log_)] = log_.overflowed
        self._count(log_, lost, f"the disk refuses ({log_.trouble}) and memory for it is full")

    def _pending(self, log_: SegmentLog, segment: Segment) -> int:
        """How many records of a file nobody holds yet."""
        if not segment.count:
            return 0
        return sum(
            log_.size_between(low, high)[0] for low, high in self._waiting(log_, segment.first - 1, segment.last)
        )

    def _is_held(self, prefix: str, seq: int) -> bool:
        return not self._waiting(self.events if prefix == "events" else self.telemetry, seq - 1, seq)

    def _waiting(self, log_: SegmentLog, low: int, high: int) -> list[Range]:
        """The parts of (low, high] that nobody holds, each as (above, up to)."""
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
        """(records, bytes) that nobody holds yet; of those with lower numbers only, where one is given."""
        records = size = 0
        for log_, below in ((self.telemetry, telemetry_below), (self.events, events_below)):
            for low, high in self._waiting(log_, 0, (below or log_.next_seq) - 1):
                found = log_.size_between(low, high)
                records += found[0]
                size += found[1]
        return records, size

    def oldest_batch_ms(self) -> int | None:
        """Time of the oldest batch in the files, None when there is none; 0 when some cannot be read now."""
        if self.telemetry.unreadable:
            return 0
        return min((s.oldest_ms for s in self.telemetry.segments if s.count), default=None)

    @property
    def has_all_events(self) -> bool:
        """Whether the files go back to the first event that was ever told."""
        return bool(self.events.segments) and self.events.segments[0].first == 1

    @property
    def trouble(self) -> str | None:
        """Why the disk refuses data now, None when it takes it."""
        return self.telemetry.trouble or self.events.trouble

    def take_losses(self) -> Losses | None:
        """What was lost since the last call; None for nothing."""
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


def as_message(lane: int, seq: int, payload: bytes) -> pb.AgentMessage:
    """What is sent of a stored record."""
    message = pb.AgentMessage()
    if lane == pb.EVENTS:
        message.record.MergeFromString(payload)
        message.record.seq = seq
    else:
        message.batch.MergeFromString(payload)
        message.batch.lane = pb.LIVE if lane == pb.LIVE else pb.BACKFILL
        message.batch.seq = seq
    return message


def _claim(folder: Path) -> int:
    """Make the folder and take its lock."""
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
