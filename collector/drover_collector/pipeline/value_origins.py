"""Which nodes' values others than root could have written, by what is judged and not by who is connected here.

Another collector of the same store may take a node's values from pages or from a writer, while this one detects. The
rows and events themselves say where they are from: pages give `exporters_up`, and the ids of their events have the
spool of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event
from drover_core.model.scraped import SPOOL

KEPT_MS = 600_000  # what pages said so long ago may still be why an incident opens


class ValueOrigins:
    """In the thread that judges.

    Args:
        is_forgeable: returns whether this collector's settings say that a node's pages or senders prove nothing.
        has_agent: returns whether a node's newest stream here was an agent's; any thread.
        others_take: returns whether another collector takes a node's values, and no setting here proves them.
    """

    def __init__(
        self,
        index: FleetIndex,
        is_forgeable: Callable[[str], bool] = lambda _: False,
        has_agent: Callable[[str], bool] = lambda _: False,
        others_take: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._index, self._others_take = index, others_take
        self._is_forgeable, self._has_agent = is_forgeable, has_agent
        self._pages_ms = np.zeros(index.node_count, np.int64)  # when something of its pages came last; 0: never
        self._agent_ms = np.zeros(index.node_count, np.int64)  # when only an agent's values came last
        self._newest_ms = 0

    def take_bucket(self, bucket: Bucket) -> None:
        """Note whose values a bucket has. Call it before the bucket is judged."""
        up = bucket.node.get("exporters_up")
        reports = bucket.node_rows > 0
        pages = np.zeros(self._index.node_count, np.bool_) if up is None else ~np.isnan(up)
        for known_ms in (self._pages_ms, self._agent_ms):  # the clock may have gone back
            np.minimum(known_ms, bucket.end_ms, out=known_ms)
        self._pages_ms[pages] = bucket.end_ms
        self._agent_ms[reports & ~pages] = bucket.end_ms
        self._newest_ms = bucket.end_ms

    def take_events(self, events: Sequence[Event], at_ms: int) -> None:
        """Note which events are of pages. Call it before they are judged."""
        self._newest_ms = max(self._newest_ms, at_ms)
        for event in events:
            number = self._index.node_number.get(event.node)
            if number is not None and event.id.split("/")[-2:-1] == [SPOOL]:
                self._pages_ms[number] = max(self._pages_ms[number], at_ms)

    def is_unproven(self, node: str) -> bool:
        """Return whether others than root could have written what is known of a node."""
        number = self._index.node_number.get(node)
        pages_ms, agent_ms = (0, 0) if number is None else (int(self._pages_ms[number]), int(self._agent_ms[number]))
        if pages_ms and (pages_ms >= agent_ms or self._newest_ms - pages_ms < KEPT_MS):
            return self._is_forgeable(node) or self._others_take(node)
        return self._is_forgeable(node) and not (agent_ms or self._has_agent(node))
