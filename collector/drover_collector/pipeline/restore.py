"""What a collector reads when it begins to judge: the last minutes, and what the former collector left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from drover_collector.detectors._lib.inventory import InventoryReport
from drover_collector.detectors.risk.model import KEPT_MS
from drover_collector.engine.engine import Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.guard_clock import MAX_STEPS
from drover_collector.store import Store
from drover_core.model.events import (
    Approval,
    Decision,
    Event,
    Incident,
    NodeOutage,
)

MAX_EVENTS = 100_000  # that wait for the engine; they are stored already
BEFORE_MS = 72 * 3_600_000  # a start must know what changed within a rollout (detectors/drift)
OVERLAP_MS = 600_000  # an inventory may wait for a store that fails, and is stored with the time it came
SLICE_NODES = 1_000  # of some 10 kB each, read at once at a start
RESTORED_MS = 3_600_000  # how far back incidents and events are read at a start
DAY_MS = 86_400_000
CLOCK = "clock"  # of an audit line: this collector's clock was set
RESTORED_BUCKETS = 60  # ten minutes: what the detectors' windows and baselines need to go on where they were
REPORTING_BUCKETS = 6  # of them, those that show which nodes report
TOGETHER = 10  # buckets read at once: those of 100,000 GPUs take some 15 MB each


class Inventories:
    """What nodes reported of their hardware, from the store to the engine. One thread at a time; raises StoreError."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mark = -1
        self._upto_ms = 0

    def restore(self, now_ms: int, nodes: int) -> Sequence[Callable[[], Sequence[InventoryReport]]]:
        """Return the queries of a start: for each part of the nodes what each had before a rollout, then its newest."""
        slices = max(1, -(-nodes // SLICE_NODES))
        self._upto_ms = now_ms
        return [
            partial(self._store.inventories.newest_between, 0, to_ms, number, slices)
            for number in range(slices)
            for to_ms in (now_ms - BEFORE_MS, now_ms + OVERLAP_MS)
        ]

    def changed(self, now_ms: int) -> Sequence[InventoryReport]:
        """Return the newest inventory of each node that reported lately. The engine ignores what it knows."""
        mark = self._store.table_fingerprint("inventory")
        if mark == self._mark:
            return []
        found = self._store.inventories.newest_between(self._upto_ms - OVERLAP_MS, now_ms + OVERLAP_MS)
        self._mark, self._upto_ms = mark, now_ms
        return found


@dataclass(frozen=True, slots=True)
class History:
    """
    Attributes:
        incidents: open, or closed lately. judged: events, oldest first. unjudged: events that no collector has judged.
        decisions: of these incidents. approvals: of the last hour. duties: node -> its newest outage.
        steps: of the clock, oldest first: when, by how many ms. gpu_outages: UUID -> its newest outage.
    """

    incidents: list[Incident]
    judged: list[Event]
    unjudged: list[Event]
    decisions: list[Decision] = field(default_factory=list)
    approvals: list[Approval] = field(default_factory=list)
    duties: dict[str, NodeOutage] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    gpu_outages: dict[str, NodeOutage] = field(default_factory=dict)


def history(store: Store, now_ms: int) -> History:
    """Read the last hour. Raises StoreError."""
    incidents = store.incidents.newest("open") + [
        i for i in store.incidents.newest("closed", now_ms - RESTORED_MS) if i.closed_ms is not None
    ]
    stored = store.events.read(now_ms - RESTORED_MS, now_ms, limit=MAX_EVENTS)
    unjudged = store.events.unjudged(now_ms, MAX_EVENTS)  # read last: another collector may store events meanwhile
    left = {e.id for e in unjudged}
    events = [e for e in stored if e.id not in left]
    steps = [(line.ts_ms, _number(line.state)) for line in reversed(store.audit.read(what=CLOCK, limit=MAX_STEPS))]
    # If the clock was set forward within the last hour, that hour began earlier by its times.
    ahead_ms = sum(max(0, step_ms) for at_ms, step_ms in steps if now_ms - RESTORED_MS <= at_ms <= now_ms)
    since_ms = now_ms - RESTORED_MS - min(ahead_ms, DAY_MS)
    decisions = store.decisions.of_incidents([i.id for i in incidents if i.closed_ms is None], since_ms)
    approvals = store.decisions.approvals(now_ms - RESTORED_MS)
    judged = sorted(events, key=lambda e: e.ts_ms)
    outages, gpu_outages = store.outages.current(), store.outages.gpus.current()
    return History(incidents, judged, unjudged, decisions, approvals, outages, steps, gpu_outages)


def _number(text: str) -> int:
    return int(text) if text.removeprefix("-").isdigit() else 0


class Past:
    """What the detectors knew, in steps: events are judged while it is taken up.

    Attributes:
        steps: each reads, in any thread but one at a time, and returns what to do with the engine, in its thread. One
            that raises StoreError may be tried again.
        held: the buckets without values: what events are judged by until all is taken up.
        newest: the last bucket with any row, once it was read.
    """

    def __init__(self, store: Store, index: FleetIndex, inventories: Inventories, next_ms: int, now_ms: int) -> None:
        """Raises StoreError."""
        self._store, self._index, self._next_ms = store, index, next_ms
        first_ms, last_ms = (next_ms - count * BUCKET_MS for count in (RESTORED_BUCKETS, REPORTING_BUCKETS))
        self.held = [
            *store.buckets.past_jobs(index, first_ms, RESTORED_BUCKETS - REPORTING_BUCKETS),
            *store.buckets.read_past(index, last_ms, REPORTING_BUCKETS, values=False),
        ]
        self.newest: Bucket | None = None
        self.steps: deque[Callable[[], Callable[[Engine], None]]] = deque()
        for ask in inventories.restore(now_ms, index.node_count):
            self.steps.append(partial(_inventories, ask))
        self.steps.append(lambda: partial(_troubles, store.incidents.for_risk(now_ms - KEPT_MS), now_ms))
        for back in range(RESTORED_BUCKETS, 0, -TOGETHER):
            self.steps.append(partial(self._buckets, back, TOGETHER))
        self.steps.append(lambda: Engine.recalled)

    def _buckets(self, back: int, count: int) -> Callable[[Engine], None]:
        found = self._read(back, count)
        self.newest = next((bucket for bucket in reversed(found) if _has_rows(bucket)), self.newest)
        self.steps.extendleft([partial(_add_bucket, bucket) for bucket in reversed(found)])
        return lambda _: None

    def _read(self, back: int, count: int) -> list[Bucket]:
        """Return the buckets with any row, of `count` from the one `back` before the next on, in order of time."""
        # While no collector ran, nodes were not silent. The last bucket counts even if it is empty: it shows how old
        # the rest is, so that what was healthy then is unknown now.
        last_ms = self._next_ms - BUCKET_MS
        found = self._store.buckets.read_past(self._index, self._next_ms - back * BUCKET_MS, count)
        return [bucket for bucket in found if _has_rows(bucket) or bucket.start_ms == last_ms]


def _has_rows(bucket: Bucket) -> bool:
    return bool(bucket.node_rows.any() or bucket.gpu_rows.any())


def _add_bucket(bucket: Bucket) -> Callable[[Engine], None]:
    return lambda engine: engine.recall(bucket)


def _inventories(ask: Callable[[], Sequence[InventoryReport]]) -> Callable[[Engine], None]:
    found = ask()

    def take(engine: Engine) -> None:
        for ts_ms, node, facts in found:
            engine.on_inventory(node, facts, ts_ms)

    return take


def _troubles(incidents: Sequence[Incident], now_ms: int, engine: Engine) -> None:
    engine.remember(incidents, now_ms)
