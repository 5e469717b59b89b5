"""What ingest counts, for Status and metrics."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import Histogram

from drover_collector.ingest.limits import Limits, Recent

# Bounds of histograms' buckets.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (10, 100, 1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)

RIVALS_S = 300.0  # how long a quarrel about a node, or a refusal, is shown
SHOWN = 5
MANY = 50  # agents that wait for their turn; fewer are through in a moment
TOLD_CHARS = 200  # of a refusal
OTHER = "other"
MOST_LABELS = 50  # values of one label; the rest is added up as `other`


def _rows_histogram() -> Histogram:
    return Histogram("drover_insert_rows", "rows of inserts of telemetry", registry=None, buckets=ROWS)


def _write_histogram() -> Histogram:
    help_ = "time of writes to the store"
    return Histogram("drover_write_seconds", help_, ["what"], registry=None, buckets=SECONDS)


@dataclass(slots=True)
class IngestStats:
    """Since the start of this process. Written by the event loop; other threads may read."""

    limits: Limits = field(default_factory=Limits)  # those in force
    connected: int = 0  # open streams
    openings_waiting: int = 0  # of them, those that wait for their turn to be welcomed
    openings_per_s: float = 0.0  # as measured while some waited, the newest
    turned_away: int = 0  # streams that were told to come again later
    batches: int = 0  # stored
    rows: int = 0
    samples: int = 0  # values that were present
    bytes: int = 0  # of the batches stored
    insert_rows: Histogram = field(default_factory=_rows_histogram)
    records: int = 0  # events, absences, holdings and results of probes stored
    events: int = 0  # handed on
    probes: int = 0  # results of probes stored
    acks: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # messages and streams refused, by reason
    out_of_range: Counter[str] = field(default_factory=Counter)  # values stored as absent, by metric
    skipped: Counter[str] = field(default_factory=Counter)  # kinds of messages that this collector does not know
    unknown_nodes: frozenset[str] = frozenset()  # report but are not in the fleet file
    unknown_metrics: frozenset[str] = frozenset()  # left out
    last_seen: dict[str, int] = field(default_factory=dict)  # node -> when its newest message came, ms
    agent_versions: dict[str, str] = field(default_factory=dict)
    replaced: int = 0  # streams ended because a newer one came for their node
    rivals: Recent[str, tuple[float, str]] = field(default_factory=lambda: Recent(100))  # node -> (when, sentence)
    refusals: Recent[str, tuple[float, str]] = field(default_factory=lambda: Recent(100))  # node -> (when, why)
    backoffs: int = 0  # times an agent was asked to hold back
    slowed: int = 0  # times an agent was read later because it sent more than its share
    dropped: int = 0  # messages left with their agents because the store fails
    unstored_events: int = 0  # judged and told, and not stored yet
    waiting_bytes: int = 0  # taken in and not yet stored
    write_seconds: float = 0.0  # of the newest write
    write_times: Histogram = field(default_factory=_write_histogram)
    store_failures: int = 0
    troubles: dict[str, str] = field(default_factory=dict)  # what is not stored now -> why
    writing: dict[str, float] = field(default_factory=dict)  # what is being stored -> since when, monotonic seconds
    clock_doubt: str = ""  # why this collector's own clock may be wrong, so that no telemetry is taken in
    clock_votes: tuple[int, int] = (0, 0)  # connected agents that told their time; of them, those that have ours
    defects: int = 0  # failures of our own while taking data in
    defect: str = ""  # the newest of them

    @property
    def rejected_total(self) -> int:
        return sum(self.rejected.values())

    @property
    def trouble(self) -> str:
        """Why the store does not take data now; empty when it does."""
        return next(iter(self.troubles.copy().values()), "")

    def refused(self, node: str, reason: str, text: str) -> None:
        self.rejected[reason] += 1
        self.refusals[node] = (time.monotonic(), text[:TOLD_CHARS])

    def wrote(self, what: str, seconds: float) -> None:
        self.write_seconds = seconds
        self.write_times.labels(what).observe(seconds)

    def sentences(self) -> list[str]:
        """What an operator should know of the agents, for Status."""
        found = [f"{self.clock_doubt}."] if self.clock_doubt else []
        if self.openings_waiting >= MANY:
            found.append(
                f"{self.openings_waiting:,} agents have connected and wait for their turn; {self.openings_per_s:.0f} a"
                " second are taken in. Their data waits in their spools."
            )
        if self.unstored_events:
            found.append(
                f"{self.unstored_events} events are judged and told, but not stored yet; their agents keep them."
            )
        since = time.monotonic() - RIVALS_S
        found += [text for _, (at, text) in self.rivals.items() if at >= since][-SHOWN:]
        refused = [f"{node}: {text}" for node, (at, text) in self.refusals.items() if at >= since]
        found += [f"Data was refused within {RIVALS_S / 60:.0f} min, of {each}." for each in refused[-SHOWN:]]
        if len(refused) > SHOWN:
            found.append(f"Data of at least {len(refused) - SHOWN} more nodes was refused; the log names them.")
        return found


def capped(counts: Counter[str]) -> dict[str, float]:
    """The largest counts; what agents may name without end must not become series without end."""
    held = counts.copy()
    found: dict[str, float] = dict(held.most_common(MOST_LABELS))
    rest = held.total() - sum(found.values())
    if rest:
        found[OTHER] = found.get(OTHER, 0) + rest
    return found
