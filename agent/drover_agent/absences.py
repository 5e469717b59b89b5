"""Absence as intervals: which metric of which device could not be read, from when, until when, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from drover_agent.files import write_whole
from drover_agent.sources.base import Entity
from drover_proto import telemetry_pb2 as pb
from drover_proto.catalog import Absent

log = logging.getLogger(__name__)

AbsenceKey = tuple[int | None, str, str]  # (GPU slot, link, metric)


class Absences:
    """The open intervals, kept over a restart so that their end is told. Feed it in the order of time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[AbsenceKey, tuple[str, int]] = {}
        self._began: set[AbsenceKey] = set()
        self._ended: list[pb.Absence] = []
        try:
            for gpu, link, metric, reason, from_ms in json.loads(path.read_bytes()):
                self._open[gpu, link, metric] = reason, from_ms
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            log.error("%s: %s; absences of the last run are not ended", path, error)

    def missing(self, entity: Entity, metric: str, reason: Absent, ts_ms: int) -> None:
        key = (entity.gpu, entity.link, metric)
        known = self._open.get(key)
        if known and known[0] == reason:
            return
        if known:
            self._end(key, ts_ms)
        self._open[key] = reason, ts_ms
        self._began.add(key)

    def present(self, entity: Entity, metrics: Iterable[str], ts_ms: int) -> None:
        if self._open:
            for metric in metrics:
                key = (entity.gpu, entity.link, metric)
                if key in self._open:
                    self._end(key, ts_ms)

    def _end(self, key: AbsenceKey, ts_ms: int) -> None:
        reason, from_ms = self._open.pop(key)
        self._began.discard(key)
        self._ended.append(_absence(key, reason, from_ms, ts_ms))

    def changes(self) -> list[pb.Absence]:
        """What began or ended since the last call. `save` when it is in the spool: better told twice than never."""
        if not self._began and not self._ended:
            return []
        told = [*self._ended, *(_absence(key, *self._open[key]) for key in self._began)]
        self._ended.clear()
        self._began.clear()
        return told

    def save(self) -> None:
        try:
            write_whole(self._path, json.dumps([[*key, *value] for key, value in self._open.items()]).encode())
        except OSError as error:
            log.error("%s: %s", self._path, error.strerror)


def _absence(key: AbsenceKey, reason: str, from_ms: int, to_ms: int | None = None) -> pb.Absence:
    gpu, link, metric = key
    return pb.Absence(gpu=gpu, link=link, metric=metric, reason=reason, from_ms=from_ms, to_ms=to_ms)
