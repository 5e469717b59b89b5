"""Absence as intervals: which metric of which device could not be read, from when, until when, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Container
from pathlib import Path

from drover_agent.sources.base import Entity
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

MAX_OPEN = 10_000  # of one node; things that come and go for years must not fill its memory
GONE_S = 4 * 3600.0  # workloads and MIG instances that nothing is told of for so long: longer than a driver is let go
LOOK_S = 600.0  # how often they are looked for

Place = tuple[int | None, str]  # GPU slot, link


class Absences:
    """The open intervals, kept over a restart so that their end is told. Feed it in the order of time."""

    def __init__(self, path: Path, now_s: float = 0.0) -> None:
        """`now_s`: of the steady clock."""
        self._open: dict[Place, dict[str, tuple[str, int]]] = {}
        self._began: set[tuple[Place, str]] = set()
        self._ended: list[pb.Absence] = []
        self._count = 0
        self._now_s = self._looked_s = now_s
        self._newest_ms = 0
        self._told: dict[Place, tuple[float, int]] = {}  # when something was told of a part: steady, and by its rows
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
        self._newest_ms = ts_ms
        if place[1]:
            self._told[place] = self._now_s, ts_ms
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

    def present(self, entity: Entity, values: Container[str], ts_ms: int) -> None:
        """The entity has these values, or could have had; one that cannot be true is to be told as missing."""
        self._newest_ms = ts_ms
        place = _place(entity)
        if opened := self._open.get(place):
            self._told[place] = self._now_s, ts_ms
            for metric in [metric for metric in opened if metric in values]:
                self._end(place, metric, ts_ms)

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
        self._told.pop(place, None)
        self._count -= len(gone)
        self._began -= {(place, metric) for metric in gone}

    def _end_gone(self) -> None:
        """What is absent of things that came and went ends when they were last told of. GPUs and ports are expected
        to be there: what they lack, they lack until they are back."""
        self._looked_s = self._now_s
        for place, opened in list(self._open.items()):
            told_s, told_ms = self._told.setdefault(place, (self._now_s, self._newest_ms))
            if not opened:
                del self._open[place], self._told[place]
            elif self._now_s - told_s >= GONE_S and _comes_and_goes(place, next(iter(opened))):
                for metric in list(opened):
                    self._end(place, metric, told_ms)
                del self._open[place], self._told[place]

    def changes(self, now_s: float) -> list[pb.Absence]:
        """What began or ended since the last call. `dump` follows it into the spool: better told twice than never.

        `now_s`: of the steady clock.
        """
        self._now_s = now_s
        if now_s - self._looked_s >= LOOK_S:
            self._end_gone()
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
        return entity.gpu, entity.link or entity.key.partition("/")[2]  # a model's name may have slashes too
    return entity.gpu, entity.mig or entity.link


def _comes_and_goes(place: Place, metric: str) -> bool:
    known = BY_NAME.get(metric)
    return bool(place[1]) and known is not None and known.scope in (Scope.GPU, Scope.WORKLOAD)


def _absence(place: Place, metric: str, reason: str, from_ms: int, to_ms: int | None = None) -> pb.Absence:
    gpu, link = place
    return pb.Absence(gpu=gpu, link=link, metric=metric, reason=reason, from_ms=from_ms, to_ms=to_ms)
