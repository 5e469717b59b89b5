"""What a collector finds when it begins to judge: the last minutes, and what the one before it left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from drover_collector.arrivals import MAX_EVENTS
from drover_collector.buckets import BUCKET_MS, Bucket
from drover_collector.fleet_index import FleetIndex
from drover_collector.store import Store
from drover_proto.events import Approval, Decision, Duty, Event, Incident

RESTORED_MS = 3_600_000  # how far back incidents and events are read at a start
RESTORED_BUCKETS = 60  # ten minutes: what the detectors' windows and baselines need to go on where they were


@dataclass(frozen=True, slots=True)
class History:
    """Incidents, open or closed lately; events that were judged, oldest first; events that nobody has judged; decisions
    of these incidents; answers of the last hour; the newest duty of each node."""

    incidents: list[Incident]
    judged: list[Event]
    unjudged: list[Event]
    decisions: list[Decision] = field(default_factory=list)
    approvals: list[Approval] = field(default_factory=list)
    duties: dict[str, Duty] = field(default_factory=dict)


def history(store: Store, now_ms: int) -> History:
    """
    Raises:
        StoreError: the store cannot be read.
    """
    incidents = store.incidents("open") + [
        i for i in store.incidents("closed", now_ms - RESTORED_MS) if i.closed_ms is not None
    ]
    unjudged = store.unjudged_events(now_ms, MAX_EVENTS)
    left = {e.id for e in unjudged}
    events = [e for e in store.events(now_ms - RESTORED_MS, now_ms, limit=MAX_EVENTS) if e.id not in left]
    decisions = store.decisions_of([i.id for i in incidents if i.closed_ms is None], now_ms - RESTORED_MS)
    approvals = store.approvals(now_ms - RESTORED_MS)
    judged = sorted(events, key=lambda e: e.ts_ms)
    return History(incidents, judged, unjudged, decisions, approvals, store.duties())


def recent(store: Store, index: FleetIndex, next_ms: int, newest: Callable[[Bucket], None]) -> Iterator[Bucket]:
    """Buckets of the last minutes; `newest` is told of each that heard anything, in order of time.

    Raises:
        StoreError: the store cannot be read.
    """
    for back in range(RESTORED_BUCKETS, 0, -1):
        bucket = store.bucket(index, next_ms - back * BUCKET_MS)
        heard = bool(bucket.node_rows.any() or bucket.gpu_rows.any())
        if heard:
            newest(bucket)
        # A time when no collector ran is no silence of the nodes. The last bucket goes in all the same: it tells
        # how old the rest is, so that what was healthy then is unknown now.
        if heard or back == 1:
            yield bucket
