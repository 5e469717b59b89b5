"""Inference services: time to the first token and tokens per request, against their own past at like load.

A burst is no fault: what a server gives is compared with what it gave with as many requests, and a bucket in which
requests wait in the queue is not judged.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.robust import middle
from drover_collector.detectors.slowdown.change import Change, Limits, Observation
from drover_collector.fleet.buckets import Floats, Workloads

BIN_STEPS = 2.0  # loads of one bin differ by at most the square root of 2
BIN_PAST, BIN_LEARN = 60, 12  # observations of one load
WAITING_SHARE = 0.1  # of the running requests: more in the queue is a burst
MAX_SERVERS = 2_000  # that are judged, as each keeps a past for each load
FORGET_MS = 86_400_000

SPEED, TTFT = "tokens_slower", "ttft_slower"
# Prompts of other lengths change both a little, and the time to the first token more: ours.
LIMITS = {SPEED: Limits(0.12, 0.10, 300_000), TTFT: Limits(math.log(1.4), 0.25, 600_000)}
METRICS = {SPEED: "tokens_per_s", TTFT: "ttft_p50_s"}


@dataclass(slots=True)
class Server:
    """What one server gave at each load: (cause, bin of load) -> logs of its cost."""

    bins: dict[tuple[str, int], deque[float]] = field(default_factory=dict)
    seen_ms: int = 0


@dataclass(slots=True)
class Service:
    """Servers of one name.

    Attributes:
        changes: cause -> its test. nodes: that reported last.
        before, now: cause -> what a request got in the past at the present load, and gets.
    """

    changes: dict[str, Change] = field(default_factory=lambda: {cause: Change() for cause in LIMITS})
    nodes: tuple[int, ...] = ()
    seen_ms: int = 0
    before: dict[str, float] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Services:
    """All services, by name, and their servers, by (node, name)."""

    named: dict[str, Service] = field(default_factory=dict)
    servers: dict[tuple[int, str], Server] = field(default_factory=dict)

    def advance(self, work: Workloads, ts_ms: int) -> None:
        """Add one bucket."""
        rows = _rows(work)
        for name, mine in sorted(rows.items()):
            service = self.named.setdefault(name, Service())
            service.nodes = tuple(int(work.node[row]) for row in mine)
            service.seen_ms = ts_ms
            for cause in service.changes:
                self._add(work, mine, service, cause, ts_ms)
        if len(self.servers) > MAX_SERVERS or ts_ms % 600_000 == 0:
            self._forget(ts_ms)

    def _add(self, work: Workloads, rows: list[int], service: Service, cause: str, ts_ms: int) -> None:
        change = service.changes[cause]
        residuals, before, now = [], [], []
        for row in rows:
            load, cost = _cost(work, row, cause)
            if math.isnan(cost):
                continue
            server = self.servers.setdefault((int(work.node[row]), work.name[row]), Server())
            server.seen_ms = ts_ms
            past = server.bins.setdefault((cause, load), deque(maxlen=BIN_PAST))
            if len(past) >= BIN_LEARN:
                usual = middle(np.array(past))
                residuals.append(cost - usual)
                before.append(math.exp(usual))
                now.append(math.exp(cost))
            if not change.pending:
                past.append(cost)
        if residuals:
            change.add(Observation(ts_ms, middle(np.array(residuals)), NOTHING), LIMITS[cause])
            service.before[cause], service.now[cause] = middle(np.array(before)), middle(np.array(now))

    def _forget(self, ts_ms: int) -> None:
        self.named = {name: each for name, each in self.named.items() if ts_ms - each.seen_ms <= FORGET_MS}
        kept = sorted(self.servers.items(), key=lambda entry: (-entry[1].seen_ms, entry[0]))[:MAX_SERVERS]
        self.servers = {key: server for key, server in kept if ts_ms - server.seen_ms <= FORGET_MS}


NOTHING: Floats = np.zeros(0)


def _rows(work: Workloads) -> dict[str, list[int]]:
    """Return the rows of servers, by their name."""
    running = work.values.get("requests_running")
    ttft = work.values.get("ttft_p95_s")
    found: dict[str, list[int]] = {}
    for column in (running, ttft):
        if column is not None:
            for row in np.flatnonzero(~np.isnan(column)).tolist():
                mine = found.setdefault(work.name[row], [])
                if row not in mine:
                    mine.append(row)
    return found


def _cost(work: Workloads, row: int, cause: str) -> tuple[int, float]:
    """Return the bin of the load, and the log of the cost of a request; NaN: not to be judged."""

    def value(metric: str) -> float:
        column = work.values.get(metric)
        return math.nan if column is None else float(column[row])

    running, waiting, found = value("requests_running"), value("requests_waiting"), value(METRICS[cause])
    if not running >= 1 or waiting > max(1.0, WAITING_SHARE * running) or not found > 0:
        return 0, math.nan
    cost = running / found if cause == SPEED else found
    return round(BIN_STEPS * math.log2(running)), math.log(cost)
