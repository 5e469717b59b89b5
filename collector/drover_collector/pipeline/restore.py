"""What a collector finds when it begins to judge: the last minutes, and what the one before it left over."""

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
from drover_collector.pipeline.arrivals import MAX_EVENTS
from drover_collector.pipeline.inventories import Inventories
from drover_collector.policy.guard_clock import MOST
from drover_collector.store import Store
from drover_core.model.events import (
    Approval,
    Decision,
    Event,
    Incident,
    NodeOutage,
)

RESTORED_MS = 3_600_000  # how far back incidents and events are read at a start
DAY_MS = 86_400_000
CLOCK = "clock"  # of an audit line: this collector's clock was set
RESTORED_BUCKETS = 60  # ten minutes: what the detectors' windows and baselines need to go on where they were
HEARD_BUCKETS = 6  # of them, those that tell who reports
TOGETHER = 10  # buckets read at once: those of 100,000 GPUs take some 15 MB each


@dataclass(frozen=True, slots=True)
class History:
    """Incidents, open or closed lately; events that were judged, oldest first; events that nobody has judged; decisions
    of these incidents; answers of the last hour; the newest duty of each node."""

    incidents: list[Incident]
    judged: list[Event]
    unjudged: list[Event]
    decisions: list[Decision] = field(default_factory=list)
    approvals: list[Approval] = field(default_factory=list)
    duties: dict[str, NodeOutage] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)  # of the clock, oldest first: when, by how many ms


def history(store: Store, now_ms: int) -> History:
    """
    Raises:
        StoreError: the store cannot be read.
    """
    incidents = store.incidents.newest("open") + [
        i for i in store.incidents.newest("closed", now_ms - RESTORED_MS) if i.closed_ms is not None
    ]
    stored = store.events.read(now_ms - RESTORED_MS, now_ms, limit=MAX_EVENTS)
    unjudged = store.events.unjudged(now_ms, MAX_EVENTS)  # after them: what another collector stores meanwhile was not
    left = {e.id for e in unjudged}
    events = [e for e in stored if e.id not in left]
    steps = [(line.ts_ms, _number(line.state)) for line in reversed(store.audit.read(what=CLOCK, limit=MOST))]
    # The last hour lies further back by what the clock was set forward in it.
    ahead_ms = sum(max(0, step_ms) for at_ms, step_ms in steps if now_ms - RESTORED_MS <= at_ms <= now_ms)
    since_ms = now_ms - RESTORED_MS - min(ahead_ms, DAY_MS)
    decisions = store.decisions.of_incidents([i.id for i in incidents if i.closed_ms is None], since_ms)
    approvals = store.decisions.approvals(now_ms - RESTORED_MS)
    judged = sorted(events, key=lambda e: e.ts_ms)
    return History(incidents, judged, unjudged, decisions, approvals, store.outages.current(), steps)


def _number(text: str) -> int:
    return int(text) if text.removeprefix("-").isdigit() else 0


class Past:
    """What the detectors knew, in the steps in which it is taken up beside the judging of events.

    `steps`: each reads, in any thread but one at a time, and gives what is to be done with the engine, in the thread
    that judges. One that raises StoreError may be tried again.
    """

    def __init__(self, store: Store, index: FleetIndex, inventories: Inventories, next_ms: int, now_ms: int) -> None:
        """
        Attributes:
            held: the buckets without values: what events are judged by until all is taken up.
            newest: the last one that heard anything, once it was read.
        Raises:
            StoreError: the store cannot be read.
        """
        self._store, self._index, self._next_ms = store, index, next_ms
        first_ms, last_ms = (next_ms - count * BUCKET_MS for count in (RESTORED_BUCKETS, HEARD_BUCKETS))
        self.held = [
            *store.buckets.past_jobs(index, first_ms, RESTORED_BUCKETS - HEARD_BUCKETS),
            *store.buckets.read_past(index, last_ms, HEARD_BUCKETS, values=False),
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
        self.newest = next((bucket for bucket in reversed(found) if _heard(bucket)), self.newest)
        self.steps.extendleft([partial(_recall, bucket) for bucket in reversed(found)])
        return lambda _: None

    def _read(self, back: int, count: int) -> list[Bucket]:
        """Those that heard anything, of `count` from the one `back` before the next on, in order of time."""
        # A time when no collector ran is no silence of the nodes. The last bucket goes in all the same: it tells
        # how old the rest is, so that what was healthy then is unknown now.
        last_ms = self._next_ms - BUCKET_MS
        found = self._store.buckets.read_past(self._index, self._next_ms - back * BUCKET_MS, count)
        return [bucket for bucket in found if _heard(bucket) or bucket.start_ms == last_ms]


def _heard(bucket: Bucket) -> bool:
    return bool(bucket.node_rows.any() or bucket.gpu_rows.any())


def _recall(bucket: Bucket) -> Callable[[Engine], None]:
    return lambda engine: engine.recall(bucket)


def _inventories(ask: Callable[[], Sequence[InventoryReport]]) -> Callable[[Engine], None]:
    told = ask()

    def take(engine: Engine) -> None:
        for ts_ms, node, facts in told:
            engine.on_inventory(node, facts, ts_ms)

    return take


def _troubles(incidents: Sequence[Incident], now_ms: int, engine: Engine) -> None:
    engine.remember(incidents, now_ms)
