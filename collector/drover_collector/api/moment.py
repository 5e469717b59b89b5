"""The fleet as of a moment of the past, from what is stored. Answers of now and of then are made alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from drover_collector.api.snapshot import DAY_MS, ApiSnapshot, bad_argument
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.incidents.health import HEALTHS
from drover_collector.incidents.health_history import Change, blank, standing
from drover_collector.pipeline.start_line import START
from drover_core.model.events import Health, Incident

T = TypeVar("T")

KEPT_S = 60.0  # only what comes late changes the past
VALUES_GPUS = 16_384  # up to so many GPUs all values of a moment are read: more would take seconds and gigabytes
BUCKETS = 6  # a minute
MOST_DAYS = 400
FIRST_MS = 2 * BUCKET_MS  # so long after its start a collector has judged nothing yet
TOO_LARGE = f"Values of then: they are read for fleets of up to {VALUES_GPUS:,} GPUs. Charts and incidents are of then."
NO_VALUES = "Values of then: none are stored of this minute."
UNJUDGED = "Health of then: no collector judged, or nothing was stored, so it is unknown."


class Moment(ApiSnapshot):
    """What `ApiSnapshot` says, as of `at_ms`."""

    is_past = True

    def __init__(self, base: ApiSnapshot, at_ms: int) -> None:
        super().__init__(base.pipeline, base.stats, base.config, base.gate, base.tls, base.parts)
        self.base, self.at_ms = base, at_ms

    def now_ms(self) -> int:
        return self.at_ms

    def once(self, key: object, seconds: float, make: Callable[[], T]) -> T:
        return self.base.once((key, self.at_ms), max(KEPT_S, seconds), make)

    def jobs(self) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        return self.once("jobs", KEPT_S, lambda: self.store.jobs.at(self.index, self.at_ms))

    def incidents(self, since_ms: int = 0) -> list[Incident]:
        """Return incidents as they were then: open, or closed after `since_ms`."""
        since_ms = max(since_ms, self.at_ms - MOST_DAYS * DAY_MS)
        return self.once(("incidents", since_ms), KEPT_S, lambda: self.store.incidents.as_of(self.at_ms, since_ms))

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.incidents(self.at_ms) if i.closed_ms is None]

    def health(self) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8], bool]:
        """Return codes of nodes and GPUs, int8 [N] and [G], and whether it is not known as nobody judged."""

        def read() -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8], bool]:
            codes = standing(self.index, changes_of(self.store.health.standing(self.at_ms)))
            found = tuple(each[None].copy() for each in codes)
            blind = blank([self.at_ms], gaps(self.base, self.at_ms, self.at_ms), *found)
            return found[0][0], found[1][0], blind

        return self.once("health", KEPT_S, read)

    def health_of(self, node: str, gpu: int | None = None) -> tuple[Health, str]:
        nodes, gpus, _ = self.health()
        n = self.index.node_number.get(node)
        g = None if gpu is None else self.index.gpu(node, gpu)
        if n is None or (gpu is not None and g is None):
            return Health.UNKNOWN, ""
        health = HEALTHS[int(nodes[n] if g is None else gpus[g])]
        if health in (Health.HEALTHY, Health.UNKNOWN):
            return health, ""
        reasons = self.once(("reasons", node), KEPT_S, lambda: self.store.health.reasons(self.at_ms, [node]))
        return health, reasons.get((node, gpu), "")

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the minute before, in buckets; none where the fleet is too large or nothing of it is stored."""
        if self.index.gpu_count > VALUES_GPUS:
            return ()
        end_ms = self.at_ms // BUCKET_MS * BUCKET_MS

        def read() -> tuple[Bucket, ...]:
            return tuple(self.store.buckets.read_past(self.index, end_ms - BUCKETS * BUCKET_MS, BUCKETS))

        found = self.once("buckets", KEPT_S, read)
        return found if any(b.gpu_rows.any() or b.node_rows.any() for b in found) else ()

    def last_seen(self) -> npt.NDArray[np.int64]:
        """Return int64 [N]: the end of the newest bucket of that minute with a row of the node; 0: not known."""
        seen = np.zeros(self.index.node_count, np.int64)
        for bucket in self.buckets():
            seen[bucket.node_rows > 0] = bucket.end_ms
        return seen

    def absent(self) -> list[str]:
        """Return what is not known of then, a sentence each."""
        found = [UNJUDGED] if self.health()[2] else []
        if self.index.gpu_count > VALUES_GPUS:
            return [*found, TOO_LARGE]
        return found if self.buckets() else [*found, NO_VALUES]


def moment_of(facts: ApiSnapshot, at_ms: int) -> Moment:
    """
    Raises:
        RefusalError: it lies ahead, or too far back.
    """
    now_ms = facts.now_ms()
    if not now_ms - MOST_DAYS * DAY_MS <= at_ms <= now_ms:
        raise bad_argument(f"at_ms {at_ms}: give a moment of the last {MOST_DAYS} days")
    return Moment(facts, at_ms)


def of_then(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function of a method whose request may name a moment (`at_ms`)."""

    def of(call: Any) -> Any:
        if not call.request.at_ms:
            return answer(call)
        then = moment_of(call.facts, call.request.at_ms)
        reply = answer(replace(call, facts=then))
        if "absent" in reply.DESCRIPTOR.fields_by_name:
            reply.absent.extend(then.absent())
        return reply

    return of


def changes_of(table: Any) -> list[Change]:
    """Return rows of `HealthTable.standing` or `moves`."""
    columns = [table[name].to_pylist() for name in table.column_names]
    names = dict(zip(table.column_names, columns, strict=True))
    plain_ms, plain = names.get("plain_ms"), names.get("plain")
    return [
        Change(node, gpu, ms, health, plain_ms[at] if plain_ms else 0, plain[at] if plain else "")
        for at, (node, gpu, ms, health) in enumerate(
            zip(names["node"], names["gpu"], names["ms"], names["health"], strict=True)
        )
    ]


def gaps(facts: ApiSnapshot, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
    """Return the spans in which no collector judged, or nothing was stored: health stood still and was not known."""
    starts = facts.store.audit.read(from_ms - FIRST_MS, what=START, limit=1000)  # the newest first
    found = [(int(line.state), line.ts_ms + FIRST_MS) for line in starts if line.state.isdigit()]
    return [*found, *facts.store.health.unreported(from_ms, to_ms)]
