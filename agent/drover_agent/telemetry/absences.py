"""Intervals of absence: a metric of an entity that could not be read, from when, until when, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Container
from pathlib import Path

from drover_agent.sources.base import Entity
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

MAX_OPEN = 10_000  # of one node; entities that appear and go for years must not fill its memory
GONE_S = 4 * 3600.0  # workloads and MIG instances without a reading for so long: longer than a driver is released
CHECK_S = 600.0  # how often they are searched

Place = tuple[int | None, str]  # GPU slot, link


class Absences:
    """The open intervals, kept over a restart so that their end is reported. Feed it in the order of time."""

    def __init__(self, path: Path, now_s: float = 0.0) -> None:
        """`path`: the file that the last run left. `now_s`: steady time."""
        self._open: dict[Place, dict[str, tuple[str, int]]] = {}
        self._begun: set[tuple[Place, str]] = set()
        self._ended: list[pb.Absence] = []
        self._count = 0
        self._now_s = self._checked_s = now_s
        self._newest_ms = 0
        self._read: dict[Place, tuple[float, int]] = {}  # the newest reading: steady time, and time of its row
        try:
            for gpu, link, metric, reason, from_ms in json.loads(path.read_bytes()):
                self._open.setdefault((gpu, link), {})[metric] = reason, from_ms
                self._count += 1
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            log.error("%s: %s. Absences of the last run stay open in the store.", path, error)

    def add_missing(self, entity: Entity, metric: str, reason: Absent, ts_ms: int) -> None:
        """Begin an interval, unless one with this reason is open."""
        place = _place(entity)
        self._newest_ms = ts_ms
        if place[1]:
            self._read[place] = self._now_s, ts_ms
        opened = self._open.setdefault(place, {})
        known = opened.get(metric)
        if known and known[0] == reason:
            return
        if known:
            self._end(place, metric, ts_ms)
        opened[metric] = reason, ts_ms
        self._begun.add((place, metric))
        self._count += 1
        if self._count > MAX_OPEN:
            self._forget_oldest()

    def add_present(self, entity: Entity, values: Container[str], ts_ms: int) -> None:
        """End the intervals of these metrics: the entity has them, or could have."""
        self._newest_ms = ts_ms
        place = _place(entity)
        if opened := self._open.get(place):
            self._read[place] = self._now_s, ts_ms
            for metric in [metric for metric in opened if metric in values]:
                self._end(place, metric, ts_ms)

    def _end(self, place: Place, metric: str, ts_ms: int) -> None:
        reason, from_ms = self._open[place].pop(metric)
        self._count -= 1
        self._begun.discard((place, metric))
        # The clock may have been set back: no interval ends before it begins.
        self._ended.append(_absence(place, metric, reason, from_ms, max(ts_ms, from_ms)))

    def _forget_oldest(self) -> None:
        place = next(iter(self._open))
        log.warning("More than %d values are absent. Those of %s are no longer followed.", MAX_OPEN, place)
        gone = self._open.pop(place)
        self._read.pop(place, None)
        self._count -= len(gone)
        self._begun -= {(place, metric) for metric in gone}

    def _end_gone(self) -> None:
        """End the intervals of workloads and MIG instances that are gone, at their last reading.

        GPUs and ports are expected to return, so their intervals stay open.
        """
        self._checked_s = self._now_s
        for place, opened in list(self._open.items()):
            read_s, read_ms = self._read.setdefault(place, (self._now_s, self._newest_ms))
            if not opened:
                del self._open[place], self._read[place]
            elif self._now_s - read_s >= GONE_S and _is_temporary(place, next(iter(opened))):
                for metric in list(opened):
                    self._end(place, metric, read_ms)
                del self._open[place], self._read[place]

    def take_changes(self, now_s: float) -> list[pb.Absence]:
        """Return the intervals that began or ended since the last call. `now_s`: steady time.

        Store them before `dump`: after a crash an interval is reported twice rather than never.
        """
        self._now_s = now_s
        if now_s - self._checked_s >= CHECK_S:
            self._end_gone()
        if not self._begun and not self._ended:
            return []
        changes = [
            *self._ended,
            *(_absence(place, metric, *self._open[place][metric]) for place, metric in self._begun),
        ]
        self._ended.clear()
        self._begun.clear()
        return changes

    def report_all_again(self) -> None:
        """Have `take_changes` return all open intervals once more."""
        self._begun.update((place, metric) for place, opened in self._open.items() for metric in opened)

    def dump(self) -> bytes:
        """Return the content of the file that the next run reads."""
        return json.dumps(
            [[*place, metric, *value] for place, opened in self._open.items() for metric, value in opened.items()]
        ).encode()


def _place(entity: Entity) -> Place:
    """Return what an interval belongs to.

    An `Absence` has no field for MIG instances and workloads, so their name takes the place of the link's.
    """
    if entity.scope is Scope.WORKLOAD:
        return entity.gpu, entity.link or entity.key.partition("/")[2]  # a model's name may have slashes too
    return entity.gpu, entity.mig or entity.link


def _is_temporary(place: Place, metric: str) -> bool:
    known = BY_NAME.get(metric)
    return bool(place[1]) and known is not None and known.scope in (Scope.GPU, Scope.WORKLOAD)


def _absence(place: Place, metric: str, reason: str, from_ms: int, to_ms: int | None = None) -> pb.Absence:
    gpu, link = place
    return pb.Absence(gpu=gpu, link=link, metric=metric, reason=reason, from_ms=from_ms, to_ms=to_ms)
