"""The metrics page's families about fleet, ingest, detection, notifications and the process, all from memory."""

from __future__ import annotations

import importlib.metadata
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import psutil

from drover_collector.api.fleet import gpus_by_health
from drover_collector.api.snapshot import (
    AHEAD_MS,
    LONG_S,
    REPORTING_MS,
    ApiSnapshot,
)
from drover_collector.incidents.correlation import jobs_hurt
from drover_collector.ingest.stats import capped
from drover_collector.observability.page import Page
from drover_collector.store import StoreError
from drover_core.model.events import IncidentKind

T = TypeVar("T")


def fleet(page: Page, facts: ApiSnapshot) -> None:
    incidents = facts.open_incidents()
    page.gauge("drover_gpus", "GPUs of the fleet by health", gpus_by_health(facts), "health")
    page.gauge("drover_gpus_expected", "GPUs of the fleet file", facts.index.gpu_count)
    page.gauge("drover_nodes_expected", "nodes of the fleet file", facts.index.node_count)
    page.gauge(
        "drover_nodes_unknown", "nodes that report and are not in the fleet file", len(facts.stats.unknown_nodes)
    )
    severities = {
        "info": 0,
        "warning": 0,
        "critical": 0,
    }  # an alert needs the series also when none is open
    severities |= Counter(str(i.severity) for i in incidents)
    page.gauge("drover_open_incidents", "open incidents by severity", severities, "severity")
    kinds = Counter(str(i.kind) for i in incidents)
    page.gauge("drover_open_incidents_by_kind", "open incidents by kind", kinds, "kind")
    incidents = [i for i in incidents if i.kind is not IncidentKind.IDLE]  # idle GPUs cost nothing that a fault caused
    page.gauge("drover_jobs_hurt", "jobs that open incidents hurt", len(jobs_hurt(incidents)))
    lost = sum(i.gpu_hours_lost or 0 for i in incidents)
    waited = sum(i.gpu_hours_waited or 0 for i in incidents)
    page.gauge("drover_open_incidents_lost_gpu_seconds", "GPU time lost to the faults of open incidents", lost * 3600)
    page.gauge(
        "drover_open_incidents_waited_gpu_seconds", "GPU time that peers waited in open incidents", waited * 3600
    )
    _reporting(page, facts)


def _reporting(page: Page, facts: ApiSnapshot) -> None:
    now_ms = facts.now_ms()
    try:
        seen = facts.last_seen()
        stored = facts.once("stored last seen", LONG_S, lambda: facts.store.entities.last_seen(facts.index))
    except StoreError:
        return  # not known; `drover_store_answers` shows why
    page.gauge(
        "drover_nodes_reporting",
        "nodes of the fleet file whose data came within 30 s",
        int(np.count_nonzero(seen >= now_ms - REPORTING_MS)),
    )
    page.gauge(
        "drover_nodes_never_seen", "nodes of the fleet file that never reported", int(np.count_nonzero(seen == 0))
    )
    ages = (now_ms - stored[(seen >= now_ms - REPORTING_MS) & (stored > 0) & (stored <= now_ms + AHEAD_MS)]) / 1000
    if ages.size:
        page.gauge(
            "drover_newest_sample_age_median_seconds",
            "age of the newest stored sample of each reporting node, the median; it is read every 5 s",
            float(np.median(ages)),
        )
        page.gauge(
            "drover_newest_sample_age_max_seconds",
            "age of the newest stored sample of each reporting node, the oldest",
            float(ages.max()),
        )


def ingest(page: Page, facts: ApiSnapshot) -> None:
    stats = facts.stats
    page.gauge("drover_agents_connected", "agents with an open stream", stats.connected)
    page.gauge("drover_openings_waiting", "agents that have connected and wait for their turn", stats.openings_waiting)
    page.counter(
        "drover_openings_turned_away_total", "agents that were asked to connect again later", stats.turned_away
    )
    page.counter("drover_batches_total", "batches stored", stats.batches)
    page.counter("drover_rows_total", "rows stored: one entity at one moment", stats.rows)
    page.counter("drover_samples_total", "samples stored: values that were present", stats.samples)
    page.counter("drover_received_bytes_total", "bytes of the batches stored, without TLS and framing", stats.bytes)
    page.counter("drover_records_total", "events, absences and holdings stored", stats.records)
    page.counter("drover_events_total", "events handed to the detectors", stats.events)
    page.counter("drover_acks_total", "acknowledgements sent", stats.acks)
    page.counter("drover_rejected_total", "what was refused, by reason", capped(stats.rejected), "reason")
    page.counter(
        "drover_out_of_range_total",
        "values stored as absent: they cannot be true",
        capped(stats.out_of_range),
        "metric",
    )
    page.counter("drover_skipped_total", "messages of kinds not known here, by kind", capped(stats.skipped), "kind")
    page.gauge(
        "drover_unknown_metrics", "metrics that agents send and that are not known here", len(stats.unknown_metrics)
    )
    page.counter("drover_backoffs_total", "times an agent was asked to hold back", stats.backoffs)
    page.counter("drover_slowed_total", "times an agent was read later, for sending more than its share", stats.slowed)
    page.counter("drover_left_with_agents_total", "messages left in agents' spools as the store failed", stats.dropped)
    page.counter("drover_streams_replaced_total", "streams ended as a newer one came for their node", stats.replaced)
    page.gauge("drover_unstored_events", "events judged and notified, but not stored yet", stats.unstored_events)
    page.gauge("drover_waiting_bytes", "bytes taken in and not stored yet", stats.waiting_bytes)
    limits = stats.limits
    limit = limits.waiting_bytes + limits.record_bytes
    page.gauge("drover_waiting_limit_bytes", "at this much, agents are not read on", limit)
    page.histogram(stats.write_times)
    page.histogram(stats.insert_rows)
    now = time.monotonic()
    stuck = {what: now - since for what, since in stats.writing.copy().items()}
    page.gauge(
        "drover_write_under_way_seconds", "how long the write under way takes by now", max(stuck.values(), default=0)
    )
    page.counter(
        "drover_ingest_store_failures_total", "writes that the store refused, tried again", stats.store_failures
    )
    page.counter("drover_ingest_defects_total", "failures of our own while taking data in", stats.defects)
    page.counter(
        "drover_calls_refused_total", "connections and calls refused, by reason", capped(facts.gate.refused), "reason"
    )


def detection(page: Page, facts: ApiSnapshot) -> None:
    pipeline, ticks = facts.pipeline, facts.pipeline.ticks
    roles = {name: float(name == pipeline.lease.role(pipeline.leading)) for name in ("active", "standby", "ingest")}
    page.gauge("drover_role", "1 for the part that this collector has", roles, "role")
    page.counter("drover_ticks_total", "buckets of 10 s judged", ticks.done)
    page.counter("drover_ticks_skipped_total", "buckets left out: too far behind", ticks.skipped)
    page.gauge("drover_tick_seconds", "time that the newest bucket took, read and judge", ticks.seconds)
    page.counter("drover_tick_read_seconds_total", "time of reading buckets from the store", ticks.read_seconds)
    page.counter("drover_tick_judge_seconds_total", "time of judging them and storing the outcome", ticks.judge_seconds)
    page.counter("drover_rollup_seconds_total", "time of making rollups", ticks.roll_seconds)
    seconds = dict(pipeline.engine.seconds)
    page.counter("drover_detector_seconds_total", "time in each detector", seconds, "detector")
    failed = {name: float(trouble.count) for name, trouble in dict(pipeline.engine.errors).items()}
    page.counter("drover_detector_failures_total", "calls of a detector that raised", failed, "detector")
    page.counter("drover_engine_failures_total", "calls of the engine that raised", ticks.failures)
    page.counter("drover_store_failures_total", "store calls of detection that failed", ticks.store_failures)
    page.counter("drover_lost_outcomes_total", "results of detection that could not be stored", ticks.lost_outcomes)
    page.counter(
        "drover_lost_events_total", "events that were stored and never judged: too many at once", ticks.lost_events
    )
    page.gauge("drover_pipeline_events_waiting", "events that wait to be judged", pipeline.waiting_events)
    page.gauge(
        "drover_pipeline_outcomes_waiting",
        "results that wait for a store that does not take them",
        pipeline.waiting_outcomes,
    )
    # A standby judges nothing, so it cannot be late.
    if pipeline.leading:
        page.gauge(
            "drover_blind",
            "1 while telemetry of most nodes, judging, the store or every receiver is dead",
            float("blind" in ticks.troubles),
        )
        judged_ms = max(ticks.newest_end_ms, pipeline.began_ms)
        page.gauge(
            "drover_tick_age_seconds",
            "time since the end of the newest bucket judged",
            (facts.now_ms() - judged_ms) / 1000,
        )


def notifications(page: Page, facts: ApiSnapshot) -> None:
    delivery = facts.pipeline.outbox.delivery
    page.gauge("drover_outbox_pending", "messages that wait, by receiver", delivery.pending, "receiver")
    page.gauge(
        "drover_outbox_oldest_seconds", "age of the oldest of them; 0: none waits", delivery.oldest_s, "receiver"
    )
    page.counter("drover_outbox_delivered_total", "messages delivered", delivery.delivered, "receiver")
    page.counter(
        "drover_outbox_tries_failed_total", "tries that failed; most are repeated", delivery.tries_failed, "receiver"
    )
    page.counter("drover_outbox_given_up_total", "messages given up", delivery.given_up, "receiver")
    beats = facts.parts.heartbeat
    if beats is not None:
        page.counter("drover_heartbeats_total", "signs of life that arrived, also those of blindness", beats.sent)
        page.counter("drover_heartbeats_failed_total", "signs of life that did not arrive", beats.failed)


def exports(page: Page, facts: ApiSnapshot) -> None:
    """Add what goes out to other systems; nothing where no exporter is set."""
    found = dict(facts.parts.exports())

    def by_name(field: str) -> dict[str, float]:
        return {name: float(getattr(status, field)) for name, status in found.items()}

    page.counter("drover_export_sent_total", "samples and lines taken by receivers", by_name("sent"), "exporter")
    page.counter(
        "drover_export_dropped_total", "samples and lines dropped for want of room", by_name("dropped"), "exporter"
    )
    page.counter(
        "drover_export_refused_total", "samples and lines refused by receivers for good", by_name("refused"), "exporter"
    )
    page.counter(
        "drover_export_failures_total", "requests that failed and are tried again", by_name("failures"), "exporter"
    )
    page.gauge("drover_export_waiting", "samples and lines not sent yet", by_name("waiting"), "exporter")
    page.gauge("drover_export_waiting_bytes", "memory of what waits", by_name("waiting_bytes"), "exporter")


def process(page: Page, facts: ApiSnapshot) -> None:
    """Add the process' families, named as in Prometheus' client libraries."""
    me = psutil.Process()
    with me.oneshot():
        cpu = me.cpu_times()
        page.counter("process_cpu_seconds_total", "user and system time", cpu.user + cpu.system)
        page.gauge("process_resident_memory_bytes", "memory resident", me.memory_info().rss)
        page.gauge("process_start_time_seconds", "start, since 1970", me.create_time())
        page.gauge("process_open_fds", "open files and connections", _known(me.num_fds))
        limit = _known(lambda: me.rlimit(psutil.RLIMIT_NOFILE)[0])
        page.gauge("process_max_fds", "how many may be open", None if limit is None or limit < 0 else limit)
    if facts.tls is not None:
        begun, followed = facts.tls.connections, facts.gate.calls
        page.counter("drover_tls_connections_total", "TLS handshakes begun, also those that failed", begun, "listener")
        page.counter("drover_calls_total", "calls and streams let in, by service", followed, "service")
        page.gauge(
            "drover_certificate_expiry_timestamp_seconds",
            "end of this collector's own certificate, since 1970",
            facts.tls.own.ends_s,
        )
    build = {importlib.metadata.version("drover"): 1}
    page.gauge("drover_build_info", "1, with the version as a label", build, "version")


def _known(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except psutil.Error:
        return None
