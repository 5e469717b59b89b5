"""A backup of the store, asked for by an operator."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import grpc

from drover_collector.api.snapshot import ApiSnapshot, RefusalError, bad_argument
from drover_collector.store import StoreError
from drover_collector.store.durability.backup import PARTIAL
from drover_proto import fleet_pb2 as pb

log = logging.getLogger(__name__)


def backup(facts: ApiSnapshot, request: pb.BackupRequest) -> pb.BackupReply:
    """Make it; returns when it is whole.

    Raises:
        RefusalError: a name that is none, or what the store says.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", request.name) or request.name.endswith(PARTIAL):
        raise bad_argument(f"{request.name!r} is no name for a backup; use letters, digits, '-', '_' and '.'")
    folder = Path(facts.config.store.backup_folder) / request.name
    started = time.monotonic()
    try:
        copied = facts.store.backups.make(folder, facts.now_ms(), facts.config.store.keep_free_bytes)
    except StoreError as error:
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, f"no backup was made: {error}") from None
    seconds = time.monotonic() - started
    log.info("backup %s: %d bytes in %.1f s", folder, copied.bytes, seconds)
    return pb.BackupReply(path=str(folder), bytes=copied.bytes, seconds=seconds)
