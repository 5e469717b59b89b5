"""What the spool's thread does for the event loop's side of it (`outbox.py`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drover_agent.atomic_file import write_whole
from drover_agent.spool.record_format import Stored
from drover_agent.spool.spool import Losses, Spool
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

AHEAD_RECORDS, AHEAD_BYTES = 64, 2**19  # read from the disk at once

Sendable = tuple[int, pb.AgentMessage, int]  # sequence, message, size of its payload
Files = dict[str, tuple[bytes, bool]]  # name -> content, whether it is written before the records


@dataclass(slots=True, eq=False, repr=False)
class Done:
    """What the thread says of one job that wrote."""

    trouble: str | None
    waiting: tuple[int, int]  # (records, bytes) below the tails that nobody holds
    oldest_batch_ms: int | None
    has_all_events: bool
    losses: Losses | None
    failed: Files  # state files that could not be written


def write(
    spool: Spool,
    events: Sequence[Stored],
    batches: Sequence[Stored],
    files: Files,
    held: Mapping[int, int],
    below: tuple[int, int],
    now_ms: int | None,
) -> Done:
    spool.held = dict(held)
    # Batches whose numbers no file explains would be read by the next run as those of something else.
    failed, spool.telemetry.barred = _write_files(spool.folder, files, first=True)
    for log_, records in ((spool.telemetry, batches), (spool.events, events)):
        for record in records:
            if record.seq >= log_.next_seq:  # else it is there: a fault ended the job before
                log_.append(record.ts_ms, record.payload, record.seq)
    if events:
        spool.sync_events()
    failed |= _write_files(spool.folder, files, first=False)[0]
    if now_ms is not None:
        spool.tidy(now_ms)
    waiting, losses = spool.pending(*below), spool.take_losses()
    return Done(spool.trouble, waiting, spool.oldest_batch_ms(), spool.has_all_events, losses, failed)


def _write_files(folder: Path, files: Files, *, first: bool) -> tuple[Files, str | None]:
    """(those that could not be written, why)."""
    failed: Files = {}
    why = None
    for name, (data, before) in files.items():
        if before is not first:
            continue
        try:
            write_whole(folder / name, data)
        except OSError as error:
            log.error("%s: %s; it is tried again", folder / name, error.strerror)
            failed[name] = data, before
            why = f"{folder}: {error.strerror}"
    return failed, why


def read(spool: Spool, lane: int, after: int, held: Mapping[int, int]) -> list[Sendable]:
    spool.held = dict(held)  # the job before may be of before the Welcome, and know of more
    found: list[Sendable] = []
    size = 0
    while len(found) < AHEAD_RECORDS and size < AHEAD_BYTES and (one := spool.next(lane, after)):
        found.append(one)
        after = one[0]
        size += one[2]
    return found
