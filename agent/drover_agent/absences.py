"""Absence as intervals: which metric of which device could not be read, from when, until when, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from drover_agent.sources.base import Entity
from drover_proto import telemetry_pb2 as pb
from drover_proto.catalog import Absent, Scope

log = logging.getLogger(__name__)

MAX_OPEN = 10_000  # of one node; things that come and go for years must not fill its memory

Place = tuple[int | None, str]  # GPU slot, link


class Absences:
    """The open intervals, kept over a restart so that their end is told. Feed it in the order of time."""

    def __init__(self, path: Path) -> None:
        self._open: dict[Place, dict[str, tuple[str, int]]] = {}
        self._began: set[tuple[Place, str]] = set()
        self._ended: list[pb.Absence] = []
        self._count = 0
        try:
            for gpu, link, metric, reason, from_ms in json.loads(path.read_bytes()):
                self._open.setdefault((gpu, link), {})[metric] = reason, from_ms
                self._count += 1
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            log.error("%s: %s; absences of the last run are not ended", path, error)

    def missing(self, entity: Entity, metric: str, reason: Absent, ts_ms: int) -> None:
        place = _place(entity)
        opened = self._open.setdefault(place, {})
        known = opened.get(metric)
        if known and known[0] == reason:
            return
        if known:
            self._end(place, metric, ts_ms)
        opened[metric] = reason, ts_ms
        self._began.add((place, metric))
        self._count += 1
        if self._count > MAX_OPEN:
            self._forget_oldest()

    def present(self, entity: Entity, values: Mapping[str, float], ts_ms: int) -> None:
        """The entity has these values; a value that cannot be true is to be told as missing, not here."""
        if opened := self._open.get(_place(entity)):
            for metric in [metric for metric in opened if metric in values]:
                self._end(_place(entity), metric, ts_ms)

    def _end(self, place: Place, metric: str, ts_ms: int) -> None:
        reason, from_ms = self._open[place].pop(metric)
        self._count -= 1
        self._began.discard((place, metric))
        # A clock that was set back meanwhile makes no interval that ends before it begins.
        self._ended.append(_absence(place, metric, reason, from_ms, max(ts_ms, from_ms)))

    def _forget_oldest(self) -> None:
        place = next(iter(self._open))
        log.warning("more than %d values are absent; those of %s are not followed any more", MAX_OPEN, place)
        gone = self._open.pop(place)
        self._count -= len(gone)
        self._began -= {(place, metric) for metric in gone}

    def changes(self) -> list[pb.Absence]:
        """What began or ended since the last call. `dump` follows it into the spool: better told twice than never."""
        if not self._began and not self._ended:
            return []
        told = [
            *self._ended,
            *(_absence(place, metric, *self._open[place][metric]) for place, metric in self._began),
        ]
        self._ended.clear()
        self._began.clear()
        return told

    def again(self) -> None:
        """Have `changes` tell all that is absent now once more."""
        self._began.update((place, metric) for place, opened in self._open.items() for metric in opened)

    def dump(self) -> bytes:
        """The content of the file that the next run reads."""
        return json.dumps(
            [[*place, metric, *value] for place, opened in self._open.items() for metric, value in opened.items()]
        ).encode()


def _place(entity: Entity) -> Place:
    """What an interval is of. Parts of a GPU and workloads have no field of their own there: their name stands for the
    link's, or what one of them lacks would be told of the whole GPU or node."""
    if entity.scope is Scope.WORKLOAD:
        return entity.gpu, entity.key.rpartition("/")[2]
    return entity.gpu, entity.mig or entity.link


def _absence(place: Place, metric: str, reason: str, from_ms: int, to_ms: int | None = None) -> pb.Absence:
    gpu, link = place
    return pb.Absence(gpu=gpu, link=link, metric=metric, reason=reason, from_ms=from_ms, to_ms=to_ms)
