"""What all parts of ingest share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.limits import Limits, RateLimitedLogger
from drover_collector.ingest.schema_registry import Refusal
from drover_collector.ingest.session import Session
from drover_collector.ingest.stats import IngestStats
from drover_collector.store import Store
from drover_core.model.events import Event, ProbeResult
from drover_proto import telemetry_pb2 as pb

EventListener = Callable[[list[Event]], None]
ProbeListener = Callable[[list[ProbeResult]], None]


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class IngestListeners:
    """Called from the event loop; each returns at once. An event reaches one of the first two, once.

    Attributes:
        on_stored: receives events after they are stored.
        on_unstored: receives events that the store cannot accept yet; None: `on_stored` does.
        on_probes: receives probe results after they are stored.
    """

    on_stored: EventListener
    on_unstored: EventListener | None = None
    on_probes: ProbeListener = lambda _: None


@dataclass(slots=True)
class IngestContext:
    """Used in the event loop.

    Attributes:
        index: the fleet file.
        now_ms: the collector's wall clock.
    """

    store: Store
    index: FleetIndex
    listeners: IngestListeners
    limits: Limits = field(default_factory=Limits)
    now_ms: Callable[[], int] = _wall_clock_ms
    stats: IngestStats = field(init=False)
    logger: RateLimitedLogger = field(init=False)

    def __post_init__(self) -> None:
        self.stats = IngestStats(limits=self.limits)
        self.logger = RateLimitedLogger()

    def count_refusal(self, node: str, refusal: Refusal) -> None:
        """Count what was refused of a node, and log it once."""
        self.stats.count_refusal(node, refusal.code, refusal.text)
        self.logger.warning((node, refusal.code), "%s: refused: %s", node, refusal.text[:500])

    def refuse(self, session: Session, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        """Count a refused message, and report it with the next Ack so that its agent drops it."""
        self.count_refusal(session.node or "an agent before its Hello", refusal)
        if lane != pb.LANE_UNSPECIFIED:  # else the agent cannot know which message to drop
            session.acks.refuse(lane, seq, refusal)
