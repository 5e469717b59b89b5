"""Replay: the engine over a recorded case, in the case's own time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from drover_collector.buckets import Bucket
from drover_collector.engine import LAG_MS, Engine, Outcome
from drover_collector.fleet_index import FleetIndex
from drover_collector.inventories import Told
from drover_collector.policy import Policy
from drover_proto.events import Event


class Replay:
    """Iterate over it for the outcomes; afterwards ask `could_not_judge`.

    Args:
        buckets: in order of time; each is judged LAG_MS after its end, as live.
        events: any order; each is judged at its own time (`received_ms` where it has one).
        inventories: any order; each is known to what is judged after it.
    """

    def __init__(
        self,
        index: FleetIndex,
        buckets: Iterable[Bucket],
        events: Iterable[Event],
        policy: Policy,
        inventories: Iterable[Told] = (),
    ) -> None:
        self._index, self._policy = index, policy
        self._buckets = iter(buckets)
        self._events = sorted(events, key=_when)
        self._inventories = sorted(inventories, key=lambda told: told[0])
        self._lacking: set[str] | None = None
        self.engine: Engine | None = None

    def __iter__(self) -> Iterator[Outcome]:
        bucket = next(self._buckets, None)
        starts = [
            t for t in (bucket.start_ms if bucket else None, _when(self._events[0]) if self._events else None) if t
        ]
        self.engine = engine = Engine(self._index, self._policy, min(starts, default=0))
        at = told = 0
        while bucket is not None:
            due_ms = bucket.end_ms + LAG_MS
            while told < len(self._inventories) and self._inventories[told][0] <= due_ms:
                ts_ms, node, facts = self._inventories[told]
                engine.on_inventory(node, facts, ts_ms)
                told += 1
            while at < len(self._events) and _when(self._events[at]) <= due_ms:
                together = self._together(at)
                yield engine.on_events(together, _when(together[0]))
                at += len(together)
            yield engine.on_bucket(bucket, due_ms)
            if bucket.gpu_rows.any() or bucket.node_rows.any():
                lacking = set(engine.could_not_judge())
                self._lacking = lacking if self._lacking is None else self._lacking & lacking
            bucket = next(self._buckets, None)
        while at < len(self._events):
            together = self._together(at)
            yield engine.on_events(together, _when(together[0]))
            at += len(together)

    def _together(self, at: int) -> list[Event]:
        """Events of one moment, from number `at` on: the live pipeline judges them in one call too."""
        return list(takewhile(lambda e: _when(e) == _when(self._events[at]), islice(self._events, at, None)))

    def could_not_judge(self) -> list[str]:
        """What no bucket of the case allowed to judge, each a sentence."""
        return sorted(self._lacking) if self._lacking is not None else ["anything: the case has no telemetry"]


def replay(
    index: FleetIndex,
    buckets: Iterable[Bucket],
    events: Iterable[Event],
    policy: Policy,
    inventories: Iterable[Told] = (),
) -> Replay:
    """Outcomes of the engine over a recorded case, in order; see `Replay`."""
    return Replay(index, buckets, events, policy, inventories)


def _when(event: Event) -> int:
    return event.received_ms or event.ts_ms
