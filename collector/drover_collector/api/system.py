"""Drover itself: agents, ingest, detection, store and notifiers. What is in memory, and of the store what a thread of
its own read (`StoreWatch`), so that one that hangs holds no answer up for more than two seconds."""

from __future__ import annotations

import importlib.metadata
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import psutil

from drover_collector.api.nodes import newest_bucket
from drover_collector.api.snapshot import AHEAD_MS, REPORTING_MS, ApiSnapshot
from drover_collector.api.store import DAY_S, StoreWatch
from drover_collector.detectors.liveness.detector import CLOCK_WRONG_S
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.ingest.stats import CONFLICTS_S, capped
from drover_collector.pipeline.stats import Rate
from drover_core.metrics.catalog import Scope, describe, of_scope
from drover_proto import fleet_pb2 as pb

LAG_MS = 60_000  # agents send every 30 s at the latest: what is stored of one that reports is older only if it waits
SPOOL_BYTES = 1_000_000  # waits unacknowledged: some twenty minutes of an 8-GPU node
SHOWN = 40  # of each kind of trouble with agents
OUTCOMES = [metric for metric in of_scope(Scope.NODE) if metric.name.startswith("source_") and metric.unit == "enum"]


class SystemWatch:
    """What the System page asks between two looks: rates, and the store's figures from a thread of their own."""

    def __init__(self, facts: ApiSnapshot) -> None:
        self.facts = facts
        self.store = StoreWatch(facts)
        self._rates = {name: Rate() for name in ("samples", "batches", "bytes", "records", "cpu")}
        self._process = psutil.Process()

    def per_s(self, name: str, count: int) -> float:
        return self._rates[name].per_s(count)

    def cpu_cores(self) -> float:
        used = self._process.cpu_times()
        return self.per_s("cpu", round((used.user + used.system) * 1000)) / 1000

    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)


def get_system(watch: SystemWatch) -> pb.System:
    facts = watch.facts
    return pb.System(
        version=importlib.metadata.version("drover"),
        ts_ms=facts.now_ms(),
        started_ms=facts.pipeline.started_ms,
        agents=_agents(facts),
        ingest=_ingest(watch),
        detection=_detection(facts),
        store=_store(watch),
        notifiers=_notifiers(facts),
        troubles=_troubles(facts),
        certificate_ends_ms=round(facts.tls.own.ends_s * 1000) if facts.tls is not None else 0,
        resident_bytes=watch.resident_bytes(),
        cpu_cores=watch.cpu_cores(),
        agents_address=facts.parts.agents_address,
        scraping=_scraping(facts),
        exporters=_exporters(facts),
    )


def _exporters(facts: ApiSnapshot) -> list[pb.ExporterState]:
    now_ms = facts.now_ms()
    return [
        pb.ExporterState(
            name=name, kind=status.kind, sent=status.sent, lost=status.dropped + status.refused,
            failures=status.failures, trouble=status.trouble, waiting=status.waiting,
            oldest_s=max(0, now_ms - status.oldest_ms) / 1000 if status.waiting and status.oldest_ms else None,
            latency_s=status.latency_s, taken_ms=status.taken_ms,
        )
        for name, status in dict(facts.parts.exports()).items()
    ]  # fmt: skip


def _scraping(facts: ApiSnapshot) -> pb.ScrapingState | None:
    state = facts.parts.scraping()
    if state is None:
        return None
    now = state.of_process
    return pb.ScrapingState(
        nodes=now.get("nodes", 0), pages=now.get("targets", 0), failing=now.get("failing", 0), with_agent=state.agents,
        failing_pages=[f"{node}, {title}: {why}" for node, title, why in now.get("named", ())],
        blind=now.get("blind", {}), unused=now.get("unused", {}),
    )  # fmt: skip


def _troubles(facts: ApiSnapshot) -> list[str]:
    """Those of Status that are known without asking the store."""
    found = facts.pipeline.troubles() + facts.stats.notices() + facts.gate.troubles()
    if facts.stats.trouble:
        found.append(f"Data of agents waits, in memory and in their spools: {facts.stats.trouble}.")
    if facts.tls is not None:
        found += [f"This collector's {line}." for line in facts.tls.troubles()]
    return found


def _agents(facts: ApiSnapshot) -> pb.AgentsState:
    now_ms, names = facts.now_ms(), [node.name for node in facts.index.nodes]
    seen = facts.last_seen()
    reporting = seen >= now_ms - REPORTING_MS
    stored = facts.store.entities.last_seen(facts.index)  # kept in memory
    known = reporting & (stored > 0) & (stored <= now_ms + AHEAD_MS)
    ages_s = (now_ms - stored[known]) / 1000
    versions = facts.stats.agent_versions.copy()
    counts = Counter(versions.get(name, "") for name, last in zip(names, seen.tolist(), strict=True) if last)
    state = pb.AgentsState(
        expected=len(names),
        reporting=int(np.count_nonzero(reporting)),
        connected=facts.stats.connected,
        versions=[pb.AgentVersion(version=version, nodes=n) for version, n in counts.most_common()],
        lag_median_s=float(np.median(ages_s)) if len(ages_s) else None,
        lag_max_s=float(ages_s.max()) if len(ages_s) else None,
    )
    bucket = newest_bucket(facts)
    offsets = bucket.node.get("clock_offset_s") if bucket is not None else None
    if offsets is not None and np.isfinite(offsets).any():
        state.clock_worst_s = float(offsets[np.nanargmax(np.abs(offsets))])
    for kind, found in _agent_troubles(facts, seen.tolist(), stored.tolist(), known.tolist()).items():
        state.trouble_counts[kind] = len(found)
        state.troubles.extend(found[:SHOWN])
    return state


def _agent_troubles(
    facts: ApiSnapshot, seen: list[int], stored: list[int], known: list[bool]
) -> dict[str, list[pb.AgentTrouble]]:
    """Kind -> troubles of that kind, the worst first; only kinds that there are."""
    now_ms, names = facts.now_ms(), [node.name for node in facts.index.nodes]
    silent = sorted((last, n) for n, last in enumerate(seen) if 0 < last < now_ms - REPORTING_MS)
    late = sorted((last, n) for n, last in enumerate(stored) if known[n] and last < now_ms - LAG_MS)
    found_kinds = {
        "refused": _recent(facts, facts.stats.refusals.items(), "refused"),
        "rival": _recent(facts, facts.stats.conflicts.items(), "rival"),
        "silent": [_trouble(names[n], "silent", "nothing has come from its agent", last) for last, n in silent],
        "never": [
            _trouble(name, "never", "its agent has never reported", 0)
            for name, last in zip(names, seen, strict=True)
            if not last
        ],
        "lag": [
            _trouble(names[n], "lag", "its agent reports, but nothing newer of it is stored", last) for last, n in late
        ],
        "clock": [
            _trouble(name, "clock", f"its clock differs by {value:+,.1f} s", 0)
            for name, value in _beyond(facts, "clock_offset_s", CLOCK_WRONG_S)
        ],
        "spool": [
            _trouble(name, "spool", f"{value / 1e6:,.1f} MB wait in its spool, not acknowledged", 0)
            for name, value in _beyond(facts, "spool_bytes", SPOOL_BYTES)
        ],
        "source": [_trouble(name, "source", text, 0) for name, text in _bad_sources(facts)],
        "unknown": [
            _trouble(name, "unknown", "it reports, but is not in the fleet file", 0)
            for name in sorted(facts.stats.unknown_nodes)
        ],
    }
    return {kind: found for kind, found in found_kinds.items() if found}


def _trouble(node: str, kind: str, text: str, since_ms: int) -> pb.AgentTrouble:
    return pb.AgentTrouble(node=node, kind=kind, text=text, since_ms=since_ms)


def _recent(facts: ApiSnapshot, noted: Iterable[tuple[str, tuple[float, str]]], kind: str) -> list[pb.AgentTrouble]:
    """What was noted of nodes within the last minutes, the newest first."""
    now, found = time.monotonic(), []
    for node, (at, text) in noted:
        if now - at < CONFLICTS_S:
            found.append(_trouble(node, kind, text, facts.now_ms() - round((now - at) * 1000)))
    return sorted(found, key=lambda t: -t.since_ms)


def _beyond(facts: ApiSnapshot, metric: str, least: float) -> Iterator[tuple[str, float]]:
    """(node, value) of those beyond `least` in the newest bucket, either way, the farthest first."""
    bucket = newest_bucket(facts)
    values = bucket.node.get(metric) if bucket is not None else None
    if values is None:
        return
    beyond = np.flatnonzero(np.nan_to_num(np.abs(values)) > least)
    for n in beyond[np.argsort(-np.abs(values[beyond]))].tolist():
        yield facts.index.nodes[n].name, float(values[n])


def _bad_sources(facts: ApiSnapshot) -> list[tuple[str, str]]:
    """(node, which of its sources failed or overran their limit in the newest bucket), those with most of them first;
    of agents that do not name them, how many."""
    found: dict[str, list[str]] = {}
    for metric in OUTCOMES:
        source = metric.name.removeprefix("source_").removesuffix("_outcome")
        for node, value in _beyond(facts, metric.name, 0):
            found.setdefault(node, []).append(f"source {source} {describe(metric, value)}")
    found_kinds = {node: "; ".join(texts) for node, texts in sorted(found.items(), key=lambda item: -len(item[1]))}
    for node, value in _beyond(facts, "agent_sources_failing", 0):
        found_kinds.setdefault(node, f"{value:.0f} of its sources give nothing")
    return list(found_kinds.items())


def _ingest(watch: SystemWatch) -> pb.IngestState:
    stats, gate = watch.facts.stats, watch.facts.gate
    limits = stats.limits
    return pb.IngestState(
        samples_per_s=watch.per_s("samples", stats.samples),
        batches_per_s=watch.per_s("batches", stats.batches),
        bytes_per_s=watch.per_s("bytes", stats.bytes),
        records_per_s=watch.per_s("records", stats.records),
        samples=stats.samples,
        rejected=_whole(stats.rejected),
        out_of_range=_whole(stats.out_of_range),
        left_with_agents=stats.dropped,
        backoffs=stats.backoffs,
        slowed=stats.slowed,
        store_failures=stats.store_failures,
        waiting_bytes=stats.waiting_bytes,
        waiting_limit_bytes=limits.waiting_bytes + limits.record_bytes,
        unstored_events=stats.unstored_events,
        calls_refused=_whole(gate.refused),
    )


def _whole(counts: Counter[str]) -> dict[str, int]:
    return {name: int(count) for name, count in capped(counts).items()}


def _detection(facts: ApiSnapshot) -> pb.DetectionState:
    pipeline, ticks = facts.pipeline, facts.pipeline.ticks
    done = max(1, ticks.done)
    failures = dict(pipeline.engine.errors)
    lease = pipeline.lease.state()
    slowest = sorted(dict(pipeline.engine.seconds).items(), key=lambda item: -item[1])
    return pb.DetectionState(
        role=pipeline.lease.role(pipeline.leading),
        holder=lease.holder,
        lease_left_s=lease.left_s,
        lease_s=lease.ttl_s,
        newest_tick_ms=ticks.newest_end_ms,
        tick_s=ticks.seconds,
        interval_s=BUCKET_MS / 1000,
        read_s=ticks.read_seconds / done,
        judge_s=ticks.judge_seconds / done,
        rollup_s=ticks.roll_seconds / done,
        ticks=ticks.done,
        skipped=ticks.skipped,
        failures=ticks.failures + ticks.store_failures,
        detectors=[
            pb.DetectorState(
                name=name,
                seconds=seconds / done,
                failures=failures[name].count if name in failures else 0,
                newest_failure=str(failures[name].latest) if name in failures else "",
            )
            for name, seconds in slowest
        ],
        events_waiting=pipeline.waiting_events,
        outcomes_waiting=pipeline.waiting_outcomes,
    )


def _store(watch: SystemWatch) -> pb.StoreState:
    facts = watch.facts
    store, figures = facts.store, watch.store.look()
    marks, oldest_ms = store.dirty_ranges.lag(facts.now_ms())
    url = facts.config.store.url
    state = pb.StoreState(
        answers=figures is not None,
        retention_days=store.retention_days,
        rollup_marks=marks,
        rollup_oldest_s=oldest_ms / 1000,
        write_s=facts.stats.write_seconds,
        damaged_parts=len(store.integrity.damages) if store.integrity is not None else 0,
        kind="embedded" if url.startswith("chdb:") else "cluster" if facts.config.store.cluster else "server",
    )
    if figures is None:
        return state
    for size in figures.sizes:
        state.tables.add(
            name=size.name, rows=size.rows, bytes=size.bytes, oldest_ms=size.oldest_ms, newest_ms=size.newest_ms
        )
    state.bytes = sum(size.bytes for size in figures.sizes)
    if figures.free_bytes is not None and figures.disk_bytes is not None:
        state.free_bytes, state.disk_bytes = figures.free_bytes, figures.disk_bytes
    if figures.left_s is not None:
        state.days_left = figures.left_s / DAY_S
    if figures.held_s is not None:
        state.held_s = figures.held_s
    if figures.dropped_bytes is not None:
        state.dropped_bytes = figures.dropped_bytes
    return state


def _notifiers(facts: ApiSnapshot) -> list[pb.NotifierState]:
    delivery = facts.pipeline.outbox.delivery
    oldest, delivered, failed, given_up = (
        delivery.oldest_s,
        delivery.delivered,
        delivery.tries_failed,
        delivery.given_up,
    )
    kinds, trouble = delivery.kinds, delivery.troubles
    return [
        pb.NotifierState(
            name=name,
            kind=kinds.get(name, ""),
            pending=waiting,
            oldest_s=oldest.get(name, 0),
            delivered=int(delivered.get(name, 0)),
            tries_failed=int(failed.get(name, 0)),
            given_up=int(given_up.get(name, 0)),
            trouble=trouble.get(name, ""),
        )
        for name, waiting in delivery.pending.items()
    ]
