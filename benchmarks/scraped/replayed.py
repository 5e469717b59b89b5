"""The same fleet through the engine four times: as agents report it, and as its pages say, without a clock.

Each page is rendered as text, parsed and mapped by the collector's own code, and put into a bucket. Time is the
simulated fleet's, so a loaded machine changes no figure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Floats
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_collector.scrape.mapping import Found, PageMapper
from drover_collector.scrape.tables import table
from drover_core.model.events import Event, EventKind, Incident
from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from scraped.pages import EXPORTERS, FleetPages

START_MS = 1_800_000_000_000
Columns = dict[str, Floats]


class Judge:
    """An engine, and the incidents that it reports."""

    def __init__(self, index: FleetIndex) -> None:
        self.engine = Engine(index, Policy.named("nvidia"), START_MS)
        self.incidents: dict[str, Incident] = {}

    def take(self, bucket: Bucket, events: list[Event]) -> None:
        for event in sorted(events, key=lambda e: e.ts_ms):
            self._add(self.engine.on_events([event], event.ts_ms).incidents)
        self._add(self.engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents)

    def _add(self, incidents: Any) -> None:
        self.incidents.update((incident.id, incident) for incident in incidents)


class Scraped:
    """The pages of all nodes as buckets."""

    def __init__(self, index: FleetIndex, which: str) -> None:
        self._index, self._which = index, which
        names = [node.name for node in index.nodes]
        self._mappers = {name: (PageMapper(table(EXPORTERS[which])), PageMapper(table("node"))) for name in names}
        self._events = 0

    def bucket(self, pages: FleetPages, start_ms: int) -> tuple[Bucket, list[Event]]:
        index, fleet = self._index, pages.fleet
        gpu: Columns = {}
        node: Columns = {}
        link: Columns = {}
        gpu_rows, node_rows = np.zeros(index.gpu_count, np.int32), np.zeros(index.node_count, np.int32)
        events: list[Event] = []
        now_ms = start_ms + BUCKET_MS
        silent = fleet.silent_nodes()
        for n, spec in enumerate(index.nodes):
            if spec.name in silent:
                continue
            found, answered = self._found(pages, n, spec.name, now_ms)
            node_rows[n] = answered > 0
            for name, value in (found.node | {"exporters_up": answered, "exporters_down": 2 - answered}).items():
                _put(node, name, n, value, index.node_count)
            for of, values in found.gpus.items():
                g = index.gpu(spec.name, of.slot)
                if g is not None:
                    gpu_rows[g] = 1
                    for name, value in values.items():
                        _put(gpu, name, g, value, index.gpu_count)
            for port, values in found.links.items():
                number = index.ports.number(spec.name, port)
                for name, value in values.items() if number is not None else ():
                    _put(link, name, number or 0, value, len(index.ports))
            for slot, code in found.xids:
                self._events += 1
                text = f"XID {code} (by dcgm-exporter)"
                events.append(Event(f"s{self._events}", now_ms - 1, spec.name, slot, EventKind.XID, str(code), text))
        jobs = np.full(index.gpu_count, -1, np.int32)
        return Bucket(start_ms, BUCKET_MS, gpu, node, gpu_rows, node_rows, jobs, (), link), events

    def _found(self, pages: FleetPages, n: int, name: str, now_ms: int) -> tuple[Found, int]:
        gpus, host = self._mappers[name]
        found, answered = host.read(pages.node(n), now_ms), 1
        has_gpus = not pages.fleet.unreachable()[self._index.gpu_node == n].all()  # else the page is refused
        if has_gpus and not pages.fleet.modifiers.hung[n]:
            found.add(gpus.read(pages.gpus(n, self._which), now_ms))
            answered = 2
        return found, answered


def _put(columns: Columns, name: str, at: int, value: float, size: int) -> None:
    if name not in columns:
        columns[name] = np.full(size, math.nan)
    columns[name][at] = value


def by_agents(index: FleetIndex, fleet: SimulatedFleet, start_ms: int) -> Bucket:
    """Return the bucket that agents' readings make."""
    silent = np.array([node.name in fleet.silent_nodes() for node in index.nodes])
    gone = fleet.unreachable()
    gpu = {name: np.where(gone, np.nan, of) for name, of in fleet.gpu_columns().items()}
    node = {name: np.where(silent, np.nan, of) for name, of in fleet.node_columns().items()}
    ports, columns = fleet.link_columns()
    numbers = [index.ports.number(*port) for port in ports]
    link = {name: np.full(len(index.ports), np.nan) for name in columns}
    for name, of in columns.items():
        for (owner, _), number, value in zip(ports, numbers, of, strict=True):
            if number is not None and not silent[index.node_number[owner]]:
                link[name][number] = value
    now_ms = start_ms + BUCKET_MS
    running = [job for job in fleet.jobs if job.start_ms <= now_ms and (job.end_ms is None or now_ms < job.end_ms)]
    jobs = np.full(index.gpu_count, -1, np.int32)
    for code, job in enumerate(running):
        for owner, slot in job.members:
            jobs[index.gpu(owner, slot)] = code
    return Bucket(
        start_ms, BUCKET_MS, gpu, node, (~gone).astype(np.int32), (~silent).astype(np.int32), jobs,
        tuple(job.id for job in running), link,
    )  # fmt: skip


def play(
    nodes: int, seed: int, faults: list[Fault], buckets: int
) -> tuple[dict[str, list[Incident]], Any, dict[str, set[str]]]:
    """Return the incidents of each way of seeing the fleet, its labels, and the metrics that each kind of page gave."""
    spec = build_fleet(nodes, seed)
    index = FleetIndex(spec)
    fleet = SimulatedFleet(spec, seed, faults, START_MS)
    pages = FleetPages(fleet)
    judges = {which: Judge(FleetIndex(spec)) for which in ("agents", *EXPORTERS)}
    seers = {which: Scraped(index, which) for which in EXPORTERS}
    seen: dict[str, set[str]] = {which: set() for which in EXPORTERS}
    for number in range(buckets):
        start_ms = START_MS + number * BUCKET_MS
        events = pages.step(BUCKET_MS / 1000)
        judges["agents"].take(by_agents(index, fleet, start_ms), events)
        for which, seer in seers.items():
            bucket, found = seer.bucket(pages, start_ms)
            judges[which].take(bucket, found)
            seen[which] |= bucket.gpu.keys() | bucket.node.keys() | bucket.link.keys()
    for which, judge in judges.items():
        if judge.engine.errors:
            raise RuntimeError(f"detectors failed, {which}: {judge.engine.errors}")
    return {which: list(judge.incidents.values()) for which, judge in judges.items()}, fleet.labels, seen
