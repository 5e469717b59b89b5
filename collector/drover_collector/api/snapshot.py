"""The data of the Fleet API's answers. Each is computed once for all consoles that ask within its time.

Everything here may block on the store and is called from the API's worker threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import numpy as np
import numpy.typing as npt

from drover_collector.api.trend_days import TrendCache
from drover_collector.auth.authorization import Gate
from drover_collector.auth.tls import ServerTls
from drover_collector.config import CollectorConfig
from drover_collector.exporters.sending import SendStatus
from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.stats import IngestStats
from drover_collector.pipeline.expiry import ClockGuardedExpiry
from drover_collector.pipeline.node_conditions import Reading
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.probes.service import ProbeOrderService
from drover_collector.scrape.feed import ScrapeState
from drover_collector.scrape.otlp_in import Answer, Form
from drover_collector.store import Store, StoreError, Totals
from drover_core.model.events import (
    SEVERITY_ORDER,
    WANTED_ORDER,
    Health,
    Incident,
)

T = TypeVar("T")

# While the store does not answer, the last known of these is returned, and the status shows a trouble.
STATUS = frozenset({"totals", "stored last seen", "incidents", "jobs", "parts", "drops"})
SHORT_S = 1.0  # pictures
LONG_S = 5.0  # counts, times and jobs, which change slowly
COUNTED_SHARE = 30  # counting what is stored takes at most a thirtieth of the time,
MOST_S = 60.0  # unless the count would be older than this
MOST_KEPT = 128  # answers without STATUS: a picture for each metric of GPUs, some for each board and span
DAY_MS = 86_400_000
RECENT_MS = 7 * DAY_MS
AHEAD_MS = 30_000  # how far a node's clock may be ahead of the collector's
REPORTING_MS = 30_000  # a node without newer data is not reporting: six batches of an agent

# The worst first. An unknown one may be faulty, so it comes before those being repaired.
HEALTH_ORDER = (
    Health.CONFIRMED, Health.SUSPECT, Health.UNKNOWN, Health.REPAIR, Health.DRAINING, Health.DRAINED,
    Health.VALIDATING, Health.HEALTHY,
)  # fmt: skip


class RefusalError(Exception):
    """A request that cannot be answered: a gRPC status, and one line that says what to do."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def bad_argument(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_found(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.NOT_FOUND, message)


@dataclass(frozen=True, slots=True)
class _Kept:
    made_s: float
    seconds: float  # how long it may be used
    value: Any


class _Lock:
    def __init__(self) -> None:
        self.held, self.users = threading.Lock(), 0


@dataclass(slots=True)
class HeartbeatStatus:
    """Since the start, for metrics and `drover doctor`."""

    sent: int = 0
    failed: int = 0
    trouble: str = ""  # why the newest did not arrive


@dataclass(frozen=True, slots=True)
class OptionalParts:
    """Parts of a whole collector that a test or a benchmark may lack.

    Attributes:
        probes: orders probes. heartbeat: of the dead man's switch. expiry: of what is too old.
        agents_address: HOST:PORT on which agents are served.
        scraping: returns what is read of nodes without an agent; None: nothing is.
        exports: returns the status of each exporter that sends, by its name.
        take_write: takes a request of remote_write from another thread and returns the status of HTTP and a sentence;
            None: no such requests are taken.
        take_otlp: the same for a request of OTLP; None: none are taken.
        conditions: returns what was read last of the conditions of Kubernetes' nodes.
    """

    probes: ProbeOrderService | None = None
    heartbeat: HeartbeatStatus | None = None
    expiry: ClockGuardedExpiry | None = None
    agents_address: str = ""
    exports: Callable[[], Mapping[str, SendStatus]] = dict
    scraping: Callable[[], ScrapeState | None] = lambda: None
    take_write: Callable[[bytes], tuple[int, str]] | None = None
    take_otlp: Callable[[Form, bytes], Answer] | None = None
    conditions: Callable[[], Reading] = Reading


class ApiSnapshot:
    is_past = False  # it is of now; `moment.Moment` is of then

    def __init__(
        self,
        pipeline: Pipeline,
        stats: IngestStats,
        config: CollectorConfig,
        gate: Gate | None = None,
        tls: ServerTls | None = None,
        parts: OptionalParts | None = None,
    ) -> None:
        self.gate = gate or Gate(secure=False)
        self.tls = tls
        self.pipeline = pipeline
        self.stats = stats
        self.config = config
        self.parts = parts or OptionalParts()
        self.away = ""  # why the store does not answer the status's questions
        self.trend = TrendCache()
        self._kept: dict[object, _Kept] = {}  # the one made last comes last
        self._locks: dict[object, _Lock] = {}  # of those that are being made
        self._guard = threading.Lock()  # of these two

    @property
    def index(self) -> FleetIndex:
        return self.pipeline.index

    @property
    def store(self) -> Store:
        return self.pipeline.store

    def now_ms(self) -> int:
        return self.pipeline.now_ms()

    def once(self, key: object, seconds: float, make: Callable[[], T]) -> T:
        """Return `make()`, or its result of less than `seconds` ago. Concurrent callers share one call.

        Older results are dropped when another is made; the last one of each key of STATUS stays.
        """
        with self._alone(key):
            found = self._kept.get(key)
            if found is None or time.monotonic() - found.made_s >= seconds:
                try:
                    found = _Kept(time.monotonic(), seconds, make())
                    if key in STATUS:
                        self.away = ""
                except StoreError as error:
                    if found is None or key not in STATUS:
                        raise
                    self.away = str(error)
                    found = _Kept(time.monotonic(), seconds, found.value)
                self._keep(key, found)
            return cast(T, found.value)

    @contextlib.contextmanager
    def _alone(self, key: object) -> Iterator[None]:
        with self._guard:
            lock = self._locks.setdefault(key, _Lock())
            lock.users += 1
        try:
            with lock.held:
                yield
        finally:
            with self._guard:
                lock.users -= 1
                if not lock.users:
                    del self._locks[key]

    def _keep(self, key: object, kept: _Kept) -> None:
        now_s = time.monotonic()
        with self._guard:
            self._kept.pop(key, None)
            self._kept[key] = kept
            passing = [each for each in self._kept if each not in STATUS and each != key]
            too_many = len(passing) + 1 - MOST_KEPT
            for number, each in enumerate(passing):
                if number < too_many or now_s - self._kept[each].made_s >= self._kept[each].seconds:
                    del self._kept[each]

    def totals(self) -> Totals:
        """Count what is stored, the more rarely the longer it takes: with 100,000 GPUs it is a second's work."""

        def make() -> tuple[Totals, float]:
            began_s = time.monotonic()
            return self.store.rollups.totals(), time.monotonic() - began_s

        known = self._kept.get("totals")
        took_s = known.value[1] if known else 0.0
        return self.once("totals", min(max(LONG_S, took_s * COUNTED_SHARE), MOST_S), make)[0]

    def newest_sample_ms(self) -> int:
        """Return the time of the newest stored sample of the fleet; 0: none. A sample of the future does not count."""
        return max(int(self._stored_seen().max(initial=0)), 0)

    def _stored_seen(self) -> npt.NDArray[np.int64]:
        stored = self.once("stored last seen", LONG_S, lambda: self.store.entities.last_seen(self.index))
        # A sample of the future has a wrong clock: counted, a node that fell silent would seem to report.
        return np.where(stored > self.now_ms() + AHEAD_MS, 0, stored)

    def jobs(self) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        """Return int32 [G], the index into the job names of each GPU's job, -1 for none, and the names."""

        def make() -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
            codes, names = self.store.jobs.at(self.index, self.now_ms())
            return codes, tuple(names)

        return self.once("jobs", LONG_S, make)

    def last_seen(self) -> npt.NDArray[np.int64]:
        """Return int64 [N], the time of each node's newest sample or message, ms; 0: never."""

        def make() -> npt.NDArray[np.int64]:
            messages = self.stats.last_seen
            newest = np.array([messages.get(n.name, 0) for n in self.index.nodes], np.int64)
            return np.maximum(self._stored_seen(), newest)

        return self.once("last seen", SHORT_S, make)

    def incidents(self, since_ms: int = 0) -> list[Incident]:
        """Return incidents open, or closed after `since_ms`, in their newest version: the engine's over the store's."""

        recent_ms = self.now_ms() - RECENT_MS
        if since_ms >= recent_ms:
            stored = self.once("incidents", LONG_S, lambda: self.store.incidents.newest("all", recent_ms))
        else:
            stored = self.store.incidents.newest("all", since_ms)
        found = {i.id: i for i in stored}
        found.update({i.id: i for i in self.pipeline.incidents.values()})
        return [i for i in found.values() if i.closed_ms is None or i.closed_ms >= since_ms]

    def open_by_node(self) -> dict[str, list[Incident]]:
        """Return the open incidents of each node, the worst first."""
        found: dict[str, list[Incident]] = defaultdict(list)
        for incident in sorted(self.open_incidents(), key=worst_first):
            for node in dict.fromkeys(node for node, _ in incident.members):
                found[node].append(incident)
        return found

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.pipeline.incidents.values() if i.closed_ms is None]

    def health_of(self, node: str, gpu: int | None = None) -> tuple[Health, str]:
        """Return health and its reason ("" when healthy); unknown for what the fleet does not have."""
        return self.pipeline.engine.health_of(node, gpu)

    def node_number(self, name: str) -> int:
        """Return the index of a node.

        Raises:
            RefusalError: the fleet has no such node.
        """
        if not name:
            raise bad_argument("node is empty; give the name of a node")
        found = self.index.node_number.get(name)
        if found is None:
            raise not_found(f"no node {name!r} in the fleet file; `drover nodes` lists them")
        return found


def worst_first(incident: Incident) -> tuple[bool, int, int, int, str]:
    """A sort key: open before closed, then severity, wanted action, newest."""
    return (
        incident.closed_ms is not None,
        -SEVERITY_ORDER.index(incident.severity),
        -WANTED_ORDER.index(incident.action),
        -incident.opened_ms,
        incident.id,
    )
