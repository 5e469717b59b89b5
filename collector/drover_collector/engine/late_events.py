"""Which errors are history: recorded and shown, and never acted on, since somebody may have dealt with them. Pure.

An error that is judged more than an hour after it happened is history. So is one of an earlier boot of its node (by
`records.take_record`, or by `Boots` for what a crash left unjudged), and one that is judged late when something proves
that it is over: its node came back to service since, or the GPU that was gone gives values since. A fault that lasts
is found in what telemetry gives now, so nothing is missed (docs/decisions/0030-late-errors.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event, EventKind, NodeOutage

HISTORY_MS = 3_600_000  # the agents' own limit: LATE_S of drover_agent/sources/kmsg/reader.py
LATE_MS = 60_000  # from which age on an error was not reported as it happened
GONE_CODES = frozenset({"79"})  # XIDs after which a GPU gives no value until it was reset or its node booted
LASTING = frozenset(liveness.LOST)  # lifecycle codes that report a fault


@dataclass(frozen=True, slots=True)
class _Boot:
    id: str
    first_ms: int  # receipt of the first event of it
    last_ms: int
    after_another: bool


class Boots:
    """The newest boot of each node, by the order in which its events were received."""

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self._newest: dict[str, _Boot] = {}

    def note(self, event: Event) -> None:
        if not event.boot or event.backlog or event.node not in self._index.node_number:
            return
        at_ms, known = event.received_ms or event.ts_ms, self._newest.get(event.node)
        if known is None or (known.id != event.boot and at_ms >= known.last_ms):
            self._newest[event.node] = _Boot(event.boot, at_ms, at_ms, known is not None)
        elif known.id == event.boot:
            self._newest[event.node] = replace(known, last_ms=max(known.last_ms, at_ms))

    def over(self, event: Event) -> bool:
        """Whether its node has booted since: what a crash left over is judged after later events of the node."""
        known = self._newest.get(event.node)
        if known is None or not event.boot or known.id == event.boot:
            return False
        return (event.received_ms or event.ts_ms) <= known.first_ms

    def since(self, node: str, at_ms: int) -> bool:
        """Whether a node is known to have booted after this."""
        known = self._newest.get(node)
        return known is not None and known.after_another and known.first_ms > at_ms


def is_error(kind: str, code: str) -> bool:
    """Whether an event reports a fault, which may be over when it is judged."""
    return kind != EventKind.LIFECYCLE or code in LASTING


def dealt_with(
    event: Event,
    judged_ms: int,
    returned: Mapping[str, NodeOutage],
    window: Window | None = None,
    boots: Boots | None = None,
) -> Event:
    """Return the event, as backlog where it is history.

    Args:
        judged_ms: when it is judged: its receipt, or for what a crash left over the start of judging.
        returned: node -> the outage that ended with its newest return to service.
        window: what telemetry gives now. boots: as of all events that were received by then.
    """
    if event.backlog or not is_error(event.kind, event.code):
        return event
    if boots is not None and boots.over(event):
        return replace(event, backlog=True)
    age_ms = judged_ms - _happened_ms(event, judged_ms)
    if age_ms > HISTORY_MS or (age_ms > LATE_MS and (_returned(event, returned) or _answered(event, window))):
        return replace(event, backlog=True)
    return event


def _happened_ms(event: Event, judged_ms: int) -> int:
    """By the node's clock, but never after its receipt; where that clock is in doubt, the receipt itself."""
    received_ms = judged_ms if event.received_ms is None else event.received_ms
    return received_ms if event.clock_suspect else min(event.ts_ms, received_ms)


def _returned(event: Event, returned: Mapping[str, NodeOutage]) -> bool:
    """Whether its node came back to service since. Of one that passed probes only what was before these were asked for
    is dealt with. Nothing can be said where the node's clock is in doubt."""
    duty = None if event.clock_suspect else returned.get(event.node)
    return duty is not None and event.ts_ms < (duty.asked_ms or duty.ts_ms)


def _answered(event: Event, window: Window | None) -> bool:
    """Whether a GPU that was gone by this error has given a value since: a minute later at least, so that clocks which
    differ a little prove nothing."""
    gone = event.code in GONE_CODES if event.kind is EventKind.XID else event.code in LASTING
    if not gone or window is None or not window.buckets or event.clock_suspect:
        return False
    bucket, index = window.newest, window.index
    n = index.node_number.get(event.node)
    if n is None or bucket.start_ms < event.ts_ms + LATE_MS:
        return False
    first, end = int(index.first_gpu[n]), int(index.first_gpu[n + 1])
    if event.gpu is not None:
        g = index.gpu(event.node, event.gpu)
        first, end = (0, 0) if g is None else (g, g + 1)
    elif event.kind is EventKind.XID:  # which GPU is not known
        return False
    values = [bucket.gpu[metric][first:end] for metric in liveness.CORE if metric in bucket.gpu]
    return any(not bool(np.isnan(column).all()) for column in values if len(column))
