"""Replay: the engine over a recorded case, in the case's own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

from drover_collector.detectors._lib.inventory import InventoryReport
from drover_collector.engine.engine import LAG_MS, Engine, Outcome
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.model.events import Event, ProbeVerdict


class Replay:
    """Iterate over it for the outcomes; afterwards ask `could_not_judge`.

    Args:
        buckets: in order of time; each is judged LAG_MS after its end, as live.
        events: any order; each is judged at its own time (`received_ms` where it has one).
        inventories: any order; each is known to what is judged after it.
        verdicts: of probes, any order; those of one order together, at their own time.
    """

    def __init__(
        self,
        index: FleetIndex,
        buckets: Iterable[Bucket],
        events: Iterable[Event],
        policy: Policy,
        inventories: Iterable[InventoryReport] = (),
        verdicts: Iterable[ProbeVerdict] = (),
    ) -> None:
        self._index, self._policy = index, policy
        self._buckets = iter(buckets)
        self._calls = _calls_of(events, verdicts)
        self._inventories = sorted(inventories, key=lambda found: found[0])
        self._lacking: set[str] | None = None
        self.engine: Engine | None = None

    def __iter__(self) -> Iterator[Outcome]:
        bucket = next(self._buckets, None)
        starts = [t for t in (bucket.start_ms if bucket else None, *(ms for ms, _ in self._calls[:1])) if t]
        self.engine = engine = Engine(self._index, self._policy, min(starts, default=0))
        at = known = 0
        while bucket is not None:
            due_ms = bucket.end_ms + LAG_MS
            while known < len(self._inventories) and self._inventories[known][0] <= due_ms:
                ts_ms, node, facts = self._inventories[known]
                engine.on_inventory(node, facts, ts_ms)
                known += 1
            while at < len(self._calls) and self._calls[at][0] <= due_ms:
                yield self._calls[at][1](engine)
                at += 1
            yield engine.on_bucket(bucket, due_ms)
            # What one bucket had is no longer lacking; when nothing is, no further bucket is asked.
            if self._lacking != set() and (bucket.gpu_rows.any() or bucket.node_rows.any()):
                lacking = set(engine.could_not_judge())
                self._lacking = lacking if self._lacking is None else self._lacking & lacking
            bucket = next(self._buckets, None)
        for _, judge in self._calls[at:]:
            yield judge(engine)

    def could_not_judge(self) -> list[str]:
        """Return what no bucket of the case allowed to judge, each a sentence."""
        return sorted(self._lacking) if self._lacking is not None else ["anything: the case has no telemetry"]


def replay(
    index: FleetIndex,
    buckets: Iterable[Bucket],
    events: Iterable[Event],
    policy: Policy,
    inventories: Iterable[InventoryReport] = (),
    verdicts: Iterable[ProbeVerdict] = (),
) -> Replay:
    """Return the engine's outcomes over a recorded case, in order; see `Replay`."""
    return Replay(index, buckets, events, policy, inventories, verdicts)


def _calls_of(
    events: Iterable[Event], verdicts: Iterable[ProbeVerdict]
) -> list[tuple[int, Callable[[Engine], Outcome]]]:
    """Return the calls by time: events of one time in one call, as live, and the verdicts of one order in one."""
    found: list[tuple[int, Callable[[Engine], Outcome]]] = []
    for at_ms, group in groupby(sorted(events, key=_when), key=_when):
        found.append((at_ms, partial(Engine.on_events, events=list(group), now_ms=at_ms)))
    ordered = sorted(verdicts, key=lambda v: (v.ts_ms, v.request))
    for (at_ms, _), judged in groupby(ordered, key=lambda v: (v.ts_ms, v.request)):
        found.append((at_ms, partial(Engine.on_verdicts, verdicts=list(judged), now_ms=at_ms)))
    return sorted(found, key=lambda call: call[0])


def _when(event: Event) -> int:
    return event.received_ms or event.ts_ms
