"""Status, layout and picture: the fleet at a glance."""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import importlib.resources
import json
import time
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from drover_collector.api import (
    capacity as api_capacity,
)
from drover_collector.api import (
    decisions as api_decisions,
)
from drover_collector.api import (
    store as api_store,
)
from drover_collector.api.snapshot import (
    DAY_MS,
    LONG_S,
    REPORTING_MS,
    SHORT_S,
    ApiSnapshot,
    bad_argument,
    worst_first,
)
from drover_collector.detectors.risk.model import HORIZON_DAYS, counts
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.correlation import jobs_hurt
from drover_collector.incidents.health import HEALTHS
from drover_collector.policy.policy import least_mode
from drover_collector.process import open_files
from drover_collector.store import StoreError
from drover_core.metrics.catalog import BY_NAME, Metric, Scope
from drover_core.model.events import IncidentKind
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

NEWEST_MS = 60_000  # a value older than this is not what a GPU does now
SHOWN_DAMAGES = 5
SHOWN_UNKNOWN = 100
STUCK_S = 30  # an insert takes milliseconds, on a busy disk seconds
UNJUDGED_MS = 90_000  # a bucket is judged every 10 s; after a pause of this process three are left out
EXACT_VALUES = 16_384  # GPUs up to which a packed picture has the exact values too (64 kB)
FRAME_LEVEL = 1  # of gzip: to it the cells of a metric are noise, and higher levels save less than 1 %
RISK_LIMIT = 50
RISK_MOST = 20_000
MEASURED = "measured.json"  # what benchmarks/bench_risk.py prints; a test holds it to that


def get_status(facts: ApiSnapshot) -> pb.Status:
    facts.store.last_query.note()  # the status shows how old the newest values are, and open pages ask for it
    pipeline, stats, now_ms = facts.pipeline, facts.stats, facts.now_ms()
    totals, seen = facts.totals(), facts.last_seen()
    incidents = facts.open_incidents()
    day = facts.incidents(now_ms - DAY_MS)
    status = pb.Status(
        fleet=facts.index.spec.name,
        version=importlib.metadata.version("drover"),
        ts_ms=now_ms,
        started_ms=pipeline.started_ms,
        mode=least_mode(pipeline.policy.most_mode, pipeline.ceiling),
        nodes_expected=facts.index.node_count,
        nodes_reporting=int(np.count_nonzero(seen >= now_ms - REPORTING_MS)),
        gpus_expected=facts.index.gpu_count,
        gpus_by_health=gpus_by_health(facts),
        open_incidents_by_severity=Counter(str(i.severity) for i in incidents),
        samples_stored=totals.samples,
        samples_per_s=pipeline.rate.per_s(stats.samples),
        batches_rejected=stats.rejected_total,
        newest_sample_ms=facts.newest_sample_ms(),
        newest_tick_ms=pipeline.ticks.newest_end_ms,
        detector_seconds=pipeline.ticks.seconds,
        store_bytes=totals.bytes_on_disk,
        unknown_nodes=sorted(stats.unknown_nodes)[:SHOWN_UNKNOWN],
        troubles=troubles(facts),
        blind=filter(None, [facts.pipeline.ticks.troubles.get("blind")]),
        gpu_hours_lost=sum(i.gpu_hours_lost or 0 for i in day if i.kind is not IncidentKind.IDLE),
        gpu_hours_waited=sum(i.gpu_hours_waited or 0 for i in day),
        jobs_hurt=len(jobs_hurt(incidents)),
        pending=len(api_decisions.pending(facts)),
        receivers=facts.pipeline.outbox.delivery.receivers,
        policy=pipeline.policy.name,
        role=pipeline.lease.role(pipeline.leading),
    )
    api_store.fill(status, facts)
    _fill_use(status, facts)
    return status


def _fill_use(status: pb.Status, facts: ApiSnapshot) -> None:
    """Fill in how the GPUs are used, where that is known."""
    used = api_capacity.use(facts)
    status.gpus_held = int(used.held.sum())
    if used.judged_ms:
        status.gpus_free = int(used.free.sum())
        if used.idle_ms is not None and (used.activity_known & used.held).any():
            status.gpus_idle = int(used.idle.sum())
    try:
        rows = api_capacity.workloads(facts)
    except StoreError:
        return  # `facts.away` says so
    gpus = {node.name: node.gpus for node in facts.index.nodes}
    reported = [(row.values["mfu_ratio"], gpus.get(row.node, 0)) for row in rows if "mfu_ratio" in row.values]
    status.mfu_gpus = sum(count for _, count in reported)
    if status.mfu_gpus:
        status.mfu_ratio = sum(ratio * count for ratio, count in reported) / status.mfu_gpus


def troubles(facts: ApiSnapshot) -> list[str]:
    """Troubles of Drover itself, each a sentence."""
    stats, pipeline = facts.stats, facts.pipeline
    found = pipeline.troubles() + api_store.troubles(facts)
    if facts.away:
        found.append(f"The store does not answer; counts are older: {facts.away}.")
    if stats.trouble:
        found.append(f"Data of agents waits, in memory and in their spools: {stats.trouble}.")
    found += stats.notices()
    for what, since in stats.writing.copy().items():
        seconds = int(time.monotonic() - since)
        if seconds >= STUCK_S:
            found.append(f"Writing {what} to the store has been blocked for {seconds} s. Check the store's disk.")
    if stats.defects:
        found.append(
            f"Taking data in failed {stats.defects} times, last with {stats.defect}; see the log, and report it."
        )
    found += facts.gate.troubles() + open_files.troubles(facts.index.node_count)
    if facts.tls is not None:
        found += [f"This collector's {line}." for line in facts.tls.troubles()]
    if facts.store.integrity is not None:
        damages = facts.store.integrity.damages
        found += [damage.sentence for damage in damages[-SHOWN_DAMAGES:]]
        if len(damages) > SHOWN_DAMAGES:
            found.append(f"{len(damages) - SHOWN_DAMAGES} more damaged parts were set aside; the log names each.")
    judged_ms = max(pipeline.ticks.newest_end_ms, pipeline.began_ms)
    if pipeline.leading and facts.now_ms() - judged_ms > UNJUDGED_MS:
        found.append(f"Nothing has been judged since {iso(judged_ms)}: health is as it was then.")
    if stats.unknown_metrics:
        found.append(f"Agents send metrics not known here: {', '.join(sorted(stats.unknown_metrics)[:5])}.")
    return found


def gpus_by_health(facts: ApiSnapshot) -> Counter[str]:
    _, codes = facts.pipeline.engine.health_codes
    return Counter(
        {str(HEALTHS[code]): int(count) for code, count in zip(*np.unique(codes, return_counts=True), strict=True)}
    )


def racks(index: FleetIndex) -> dict[str, list[int]]:
    """Numbers of the nodes of each rack, racks and nodes in the order of the fleet file."""
    found: dict[str, list[int]] = {}
    for n, node in enumerate(index.nodes):
        found.setdefault(node.rack, []).append(n)
    return found


def layout_order(index: FleetIndex) -> npt.NDArray[np.intp]:
    """intp [G]: the GPU of each cell, rack by rack."""
    cells = [np.arange(index.first_gpu[n], index.first_gpu[n + 1]) for nodes in racks(index).values() for n in nodes]
    return np.concatenate(cells).astype(np.intp) if cells else np.zeros(0, np.intp)


def get_layout(facts: ApiSnapshot, jobs: bool = False) -> pb.Layout:
    def make() -> pb.Layout:
        index = facts.index
        layout = pb.Layout(version=index.version)
        for name, numbers in racks(index).items():
            rack = layout.racks.add(name=name)
            for n in numbers:
                node = index.nodes[n]
                rack.nodes.add(name=node.name, gpus=node.gpus, leaf=node.leaf, pool=node.pool, sku=node.sku)
        return layout

    layout = facts.once("layout", LONG_S, make)
    if not jobs:
        return layout
    codes, names = facts.jobs()
    held = pb.Layout(job_names=names, jobs=codes[_order(facts)].astype("<i4").tobytes())
    held.MergeFrom(layout)
    return held


def get_picture(facts: ApiSnapshot, color_by: str, packed: bool = False) -> pb.Picture:
    """`packed`: made and compressed once for all consoles and browsers, which pass it on unchanged."""
    color_by = color_by or "health"
    if packed:
        return facts.once(("packed picture", color_by), SHORT_S, lambda: _packed_picture(facts, color_by))
    if color_by == "health":
        return facts.once(("picture", color_by), SHORT_S, lambda: _health_picture(facts))
    metric = BY_NAME.get(color_by)
    if metric is None or metric.scope is not Scope.GPU:
        raise bad_argument(f"color_by {color_by!r}: give health or a GPU metric, such as gpu_temp_c or power_w")
    return facts.once(("picture", color_by), SHORT_S, lambda: _metric_picture(facts, metric))


def _packed_picture(facts: ApiSnapshot, color_by: str) -> pb.Picture:
    colored, health = get_picture(facts, color_by), get_picture(facts, "health")
    gpus, parts = len(health.cells), [health.cells]
    packed = pb.Picture(
        layout_version=health.layout_version,
        ts_ms=min(health.ts_ms, colored.ts_ms),
        legend=health.legend,
        gpus=gpus,
    )
    if color_by != "health":
        packed.low, packed.high, packed.unit = colored.low, colored.high, colored.unit
        packed.known = gpus - colored.cells.count(0)
        packed.exact = gpus <= EXACT_VALUES
        parts += [colored.cells, colored.values] if packed.exact else [colored.cells]
    body = b"".join(part + bytes(-len(part) % 4) for part in parts)
    packed.frame = gzip.compress(body, FRAME_LEVEL, mtime=0)
    return packed


def _health_picture(facts: ApiSnapshot) -> pb.Picture:
    _, codes = facts.pipeline.engine.health_codes
    return pb.Picture(
        layout_version=facts.index.version,
        ts_ms=facts.now_ms(),
        cells=codes[_order(facts)].astype(np.uint8).tobytes(),
        legend=[str(health) for health in HEALTHS],
    )


def _metric_picture(facts: ApiSnapshot, metric: Metric) -> pb.Picture:
    now_ms = facts.now_ms()
    values = facts.store.samples.latest_gpu(facts.index, metric.name, now_ms, NEWEST_MS)[_order(facts)]
    cells, low, high = scale(values, metric)
    return pb.Picture(
        layout_version=facts.index.version,
        ts_ms=now_ms,
        cells=cells.tobytes(),
        low=low,
        high=high,
        unit=metric.unit,
        values=values.astype("<f4").tobytes(),
    )


def scale(values: npt.NDArray[np.float64], metric: Metric) -> tuple[npt.NDArray[np.uint8], float, float]:
    """Cells (0 unknown, 1..255 low..high) with the values that low and high stand for.

    Shares and flags span 0 to 1 whatever they are now, so that a quiet fleet does not look busy; the rest spans what
    the fleet has now.
    """
    known = ~np.isnan(values)
    cells = np.zeros(len(values), np.uint8)
    if metric.high == 1:
        low, high = 0.0, 1.0
    elif known.any():
        low, high = float(values[known].min()), float(values[known].max())
    else:
        return cells, 0.0, 0.0
    span = high - low
    cells[known] = 1 + np.rint(254 * (values[known] - low) / span) if span > 0 else 128
    return cells, low, high


def _order(facts: ApiSnapshot) -> npt.NDArray[np.intp]:
    return facts.once("order", LONG_S, lambda: layout_order(facts.index))


def list_risk(facts: ApiSnapshot, request: pb.RiskRequest) -> pb.RiskList:
    found, most = facts.pipeline.engine.risks, min(request.limit or RISK_LIMIT, RISK_MOST)
    troubled = _troubled_nodes(facts)
    ranked = (risk for risk in found if risk.node not in troubled)
    rows = [pb.RiskRow(node=risk.node, chance=risk.chance, reasons=risk.reasons) for risk in islice(ranked, most)]
    return pb.RiskList(
        nodes=rows, total=len(found), days=HORIZON_DAYS, measured=measured(),
        in_trouble=islice(troubled.values(), most), in_trouble_total=len(troubled),
    )  # fmt: skip


def _troubled_nodes(facts: ApiSnapshot) -> dict[str, pb.TroubledNode]:
    """Nodes with an open incident of their own hardware, the worst first: as of now, not of the last ranking."""
    found: dict[str, pb.TroubledNode] = {}
    for i in sorted(facts.open_incidents(), key=worst_first):
        for node in dict.fromkeys(node for node, _ in i.members) if counts(i) else ():
            if node in facts.index.node_number and node not in found:
                found[node] = pb.TroubledNode(
                    node=node, incident_id=i.id, kind=i.kind.value, cause=i.cause, severity=i.severity.value,
                    since_ms=i.since_ms, summary=i.summary,
                )  # fmt: skip
    return found


@functools.cache
def measured() -> pb.RiskMeasured:
    text = (importlib.resources.files("drover_collector.detectors.risk") / MEASURED).read_text("utf-8")
    line: dict[str, Any] = json.loads(text)
    first, last = line["days"]
    return pb.RiskMeasured(
        trace=line["trace"],
        servers=line["servers"],
        days=last - first + 1,
        faults=line["faults"],
        top_share=line["top_share"],
        captured=line["model"]["captured"],
        recency=line["recency"]["captured"],
        chance=line["random"]["captured"],
        auc=line["model"]["auc"],
        failed_before=line["on_nodes_that_had_failed_before"],
    )
