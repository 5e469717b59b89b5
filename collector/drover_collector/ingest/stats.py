"""What ingest counts, for Status and metrics."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import Histogram

from drover_collector.ingest.limits import Limits, RecentlyUsed

# Bounds of histograms' buckets.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (10, 100, 1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)

CONFLICTS_S = 300.0  # a conflict about a node, and a refusal, is shown so long
SHOWN = 5
MANY = 50  # waiting handshakes; fewer take a second or less
REFUSAL_CHARS = 200
OTHER = "other"
MAX_LABELS = 50  # values of one label; the rest is summed as `other`


def _rows_histogram() -> Histogram:
    return Histogram("drover_insert_rows", "rows of inserts of telemetry", registry=None, buckets=ROWS)


def _write_histogram() -> Histogram:
    help_ = "time of writes to the store"
    return Histogram("drover_write_seconds", help_, ["what"], registry=None, buckets=SECONDS)


@dataclass(slots=True)
class IngestStats:
    """Counts since the start of this process. Written by the event loop; other threads may read."""

    limits: Limits = field(default_factory=Limits)  # in force
    connected: int = 0  # open streams
    openings_waiting: int = 0  # streams whose handshake waits for its turn
    openings_per_s: float = 0.0  # measured while some waited
    turned_away: int = 0  # streams that were asked to connect again later
    batches: int = 0  # stored
    rows: int = 0
    samples: int = 0  # values present
    bytes: int = 0  # of stored batches
    insert_rows: Histogram = field(default_factory=_rows_histogram)
    records: int = 0  # events, absences, holdings and probe results stored
    events: int = 0  # stored
    probes: int = 0  # probe results stored
    acks: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # reason -> messages and streams refused
    out_of_range: Counter[str] = field(default_factory=Counter)  # metric -> values stored as absent
    skipped: Counter[str] = field(default_factory=Counter)  # unknown kind of message -> how many
    unknown_nodes: frozenset[str] = frozenset()  # that report but are not in the fleet file
    unknown_metrics: frozenset[str] = frozenset()  # not stored
    last_seen: dict[str, int] = field(default_factory=dict)  # node -> when its newest message arrived, ms
    agent_versions: dict[str, str] = field(default_factory=dict)
    replaced: int = 0  # streams closed by a newer one of their node
    conflicts: RecentlyUsed[str, tuple[float, str]] = field(
        default_factory=lambda: RecentlyUsed(100)
    )  # node -> (when, sentence)
    refusals: RecentlyUsed[str, tuple[float, str]] = field(
        default_factory=lambda: RecentlyUsed(100)
    )  # node -> (when, why)
    backoffs: int = 0  # requests to an agent to wait
    slowed: int = 0  # times an agent was read later because it sent too much
    dropped: int = 0  # messages left in their agents' spools because the store fails
    unstored_events: int = 0  # judged, but not stored
    waiting_bytes: int = 0  # received and not stored
    write_seconds: float = 0.0  # of the newest write
    write_times: Histogram = field(default_factory=_write_histogram)
    store_failures: int = 0
    troubles: dict[str, str] = field(default_factory=dict)  # what cannot be stored now -> why
    writing: dict[str, float] = field(default_factory=dict)  # what is being stored -> since when, monotonic seconds
    clock_doubt: str = ""  # why this collector's clock may be wrong; telemetry is not accepted meanwhile
    clock_votes: tuple[int, int] = (0, 0)  # agents that reported their time, and those whose clock agrees with ours
    defects: int = 0  # failures of the collector itself
    defect: str = ""  # the newest of them

    @property
    def rejected_total(self) -> int:
        return sum(self.rejected.values())

    @property
    def trouble(self) -> str:
        """Why the store accepts no data now; empty if it does."""
        return next(iter(self.troubles.copy().values()), "")

    def count_refusal(self, node: str, reason: str, text: str) -> None:
        self.rejected[reason] += 1
        self.refusals[node] = (time.monotonic(), text[:REFUSAL_CHARS])

    def count_defect(self, text: str) -> None:
        self.defects += 1
        self.defect = text

    def count_write(self, what: str, seconds: float) -> None:
        self.write_seconds = seconds
        self.write_times.labels(what).observe(seconds)

    def notices(self) -> list[str]:
        """Return what an operator should know about the agents, as sentences for Status."""
        found = [f"{self.clock_doubt}."] if self.clock_doubt else []
        if self.openings_waiting >= MANY:
            found.append(
                f"{self.openings_waiting:,} agents have connected and wait for their handshake;"
                f" {self.openings_per_s:.0f} a second are processed. Their data waits in their spools."
            )
        if self.unstored_events:
            found.append(f"{self.unstored_events} events are judged, but not stored yet; their agents keep them.")
        since = time.monotonic() - CONFLICTS_S
        found += [text for _, (at, text) in self.conflicts.items() if at >= since][-SHOWN:]
        refused = [f"{node}: {text}" for node, (at, text) in self.refusals.items() if at >= since]
        found += [f"Data was refused within {CONFLICTS_S / 60:.0f} min, of {each}." for each in refused[-SHOWN:]]
        if len(refused) > SHOWN:
            found.append(f"Data of at least {len(refused) - SHOWN} more nodes was refused; see the log.")
        return found


def capped(counts: Counter[str]) -> dict[str, float]:
    """Return the largest counts, and the sum of the others: names from agents must not make series without limit."""
    held = counts.copy()
    found: dict[str, float] = dict(held.most_common(MAX_LABELS))
    rest = held.total() - sum(found.values())
    if rest:
        found[OTHER] = found.get(OTHER, 0) + rest
    return found
