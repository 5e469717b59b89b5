"""Work that the disk thread does for `AsyncSpool`: write what is new, read ahead what is sent next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drover_agent.atomic_file import write_whole
from drover_agent.spool.messages import Outgoing
from drover_agent.spool.record_format import Stored
from drover_agent.spool.spool import Losses, Spool

log = logging.getLogger(__name__)

AHEAD_RECORDS, AHEAD_BYTES = 64, 2**19  # read from the disk at once


@dataclass(frozen=True, slots=True)
class StateFile:
    """A small file that is replaced as a whole, before or after the records of the same job."""

    data: bytes
    before_records: bool


Files = dict[str, StateFile]  # by name


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What the event loop wants on the disk.

    Attributes:
        held: lane -> the highest sequence that the collector holds.
        below: (telemetry, events): records with lower sequences are only on the disk, and are counted there.
        tidy_ms: the time by which old files are removed; None: remove none now.
    """

    events: Sequence[Stored]
    batches: Sequence[Stored]
    files: Files
    held: Mapping[int, int]
    below: tuple[int, int]
    tidy_ms: int | None


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """What the event loop knows of the files.

    Attributes:
        trouble: why the disk refuses data, None if it takes it.
        oldest_batch_ms: time of the oldest batch in the files; None: there is none; 0: some cannot be read now.
        has_all_events: the files go back to the first event of this spool.
    """

    trouble: str | None
    oldest_batch_ms: int | None
    has_all_events: bool

    @classmethod
    def of(cls, spool: Spool) -> DiskStatus:
        return cls(spool.trouble, spool.oldest_batch_ms(), spool.has_all_events)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write job found.

    Attributes:
        waiting: (records, bytes) below `WriteJob.below` that no collector holds.
        losses: what was lost since the last job.
        failed: state files that could not be written.
    """

    status: DiskStatus
    waiting: tuple[int, int]
    losses: Losses | None
    failed: Files = field(default_factory=dict)


def write(spool: Spool, job: WriteJob) -> WriteResult:
    """Write the records and state files of `job`, and tidy the spool if it asks for that."""
    spool.held = dict(job.held)
    # The next run could not read batches whose entity numbers no file explains.
    failed, spool.telemetry.barred = _write_files(spool.folder, job.files, before_records=True)
    for segments, records in ((spool.telemetry, job.batches), (spool.events, job.events)):
        for record in records:
            if record.seq >= segments.next_seq:  # lower ones are there already: a defect ended the job before
                segments.append(record.ts_ms, record.payload, record.seq)
    if job.events:
        spool.sync_events()
    failed |= _write_files(spool.folder, job.files, before_records=False)[0]
    if job.tidy_ms is not None:
        spool.tidy(job.tidy_ms)
    return WriteResult(DiskStatus.of(spool), spool.pending(*job.below), spool.take_losses(), failed)


def _write_files(folder: Path, files: Files, *, before_records: bool) -> tuple[Files, str | None]:
    """Return the files that could not be written, and why."""
    failed: Files = {}
    why = None
    for name, file in files.items():
        if file.before_records is not before_records:
            continue
        try:
            write_whole(folder / name, file.data)
        except OSError as error:
            log.error("%s: %s. Drover tries again with the next write.", folder / name, error.strerror)
            failed[name] = file
            why = f"{folder}: {error.strerror}"
    return failed, why


def read(spool: Spool, lane: int, after: int, held: Mapping[int, int]) -> list[Outgoing]:
    """Return the next records of a lane above sequence `after`, at most AHEAD_RECORDS and about AHEAD_BYTES."""
    spool.held = dict(held)  # an older job may have set higher offsets, from before the last Welcome
    found: list[Outgoing] = []
    size = 0
    while len(found) < AHEAD_RECORDS and size < AHEAD_BYTES and (following := spool.next(lane, after)):
        found.append(following)
        after = following.seq
        size += len(following.body)
    return found
