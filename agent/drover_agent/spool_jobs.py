"""What the spool's thread does for the event loop's side of it (`outbox.py`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drover_agent.files import write_whole
from drover_agent.segments import Stored
from drover_agent.spool import Losses, Spool
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

AHEAD_RECORDS, AHEAD_BYTES = 64, 2**19  # read from the disk at once

Sendable = tuple[int, pb.AgentMessage, int]  # sequence, message, size of its payload
Files = dict[str, tuple[bytes, bool]]  # name -> content, whether it is written before the records


@dataclass(slots=True)
class Done:
    """What the thread says of one job that wrote."""

    trouble: str | None
    waiting: tuple[int, int]  # (records, bytes) below the tails that nobody holds
    oldest_batch_ms: int | None
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
    failed = _write_files(spool.folder, {name: file for name, file in files.items() if file[1]})
    for record in batches:
        spool.telemetry.append(record.ts_ms, record.payload, record.seq)
    for record in events:
        spool.events.append(record.ts_ms, record.payload, record.seq)
    if events:
        spool.sync_events()
    failed |= _write_files(spool.folder, {name: file for name, file in files.items() if not file[1]})
    if now_ms is not None:
        spool.tidy(now_ms)
    return Done(spool.trouble, spool.pending(*below), spool.oldest_batch_ms(), spool.take_losses(), failed)


def _write_files(folder: Path, files: Files) -> Files:
    failed: Files = {}
    for name, (data, first) in files.items():
        try:
            write_whole(folder / name, data)
        except OSError as error:
            log.error("%s: %s; it is tried again", folder / name, error.strerror)
            failed[name] = data, first
    return failed


def read(spool: Spool, lane: int, after: int) -> list[Sendable]:
    found: list[Sendable] = []
    size = 0
    while len(found) < AHEAD_RECORDS and size < AHEAD_BYTES and (one := spool.next(lane, after)):
        found.append(one)
        after = one[0]
        size += one[2]
    return found
