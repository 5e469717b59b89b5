"""Jobs on the screen: the list, and one job's GPUs against each other. All but `show_*` are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Metric
from drover_core.model.events import Incident, IncidentKind, from_json
from drover_core.model.reports import gpu_hours
from drover_dashboard.pages import fabric_parts
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.components import component
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

LEAST_SPAN = 0.06  # of the median: a row of dots is not stretched so far that noise looks like a spread
LEAST_SPAN_C = 8.0
MARKED_SHARE = 0.01  # of a job's time that waits, from which it is worth a look
BAD_SHARE = 0.1
LIST_PX = 720

COLUMNS = (
    Column("State"), Column("Job", wrap=True), Column("GPUs", "right"), Column("Since"),
    Column("Waits", "right", help="mean share of its GPUs' time that peers waited, since its open incidents began"),
    Column("GPU-hours waited", "right", help="by incidents of 7 days that name it; its page has the exact sum"),
)  # fmt: skip
REPORTED = (
    Column("Step", "right", help="step time that its loop reports"), Column("Tokens/s", "right"),
    Column("MFU", "right", help="model operations per second over the hardware's peak"),
)  # fmt: skip
TEAM = Column("Team", help="whose it is, by its account or namespace, and its user")
NO_STEPS = (
    "Step time, tokens per second and MFU: no job reports them. A training loop does with three lines of"
    " drover_agent.client.training_steps (docs/how-to/workloads.md)."
)
NONE = Cell("not reported", kind="absent", title="nothing on its nodes reports it")
ABSENT = "unknown"  # in large letters
NONE_KNOWN = "none known"  # of what only incidents report


def share(value: float) -> str:
    """`0.4 %`, `12 %`."""
    return f"{value * 100:.{1 if value < 0.095 else 0}f} %"


def seconds(value: float) -> str:
    """`2.10 s`, `340 ms`."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def rows(found: Sequence[pb.JobRow], who: view.Viewer, with_steps: bool = True, with_owners: bool = False) -> list[Row]:
    return [
        Row(
            (*_cells(job, who, with_steps), *((_team(job),) if with_owners else ())), id=job.job,
            href=view.href(view.JOB, job=job.job),
        )
        for job in found
    ]  # fmt: skip


def _cells(job: pb.JobRow, who: view.Viewer, with_steps: bool) -> tuple[Cell, ...]:
    waited = job.HasField("gpu_hours_waited")
    cells = (
        _state(job),
        Cell(job.job, sub=_about(job, who), kind="strong"),
        Cell(fmt.number(job.gpus), sub=fmt.several(job.nodes, "node")),
        Cell(who.clock(job.since_ms), sub=_span(job, who)),
        _waits(job),
        Cell(fmt.hours(job.gpu_hours_waited)) if waited else Cell(NONE_KNOWN, kind="faint"),
    )
    if not with_steps:
        return cells
    return (
        *cells,
        Cell(seconds(job.step_time_s)) if job.HasField("step_time_s") else NONE,
        Cell(fmt.number(job.tokens_per_s)) if job.HasField("tokens_per_s") else NONE,
        Cell(share(job.mfu_ratio)) if job.HasField("mfu_ratio") else NONE,
    )


def _team(job: pb.JobRow) -> Cell:
    owner = job.owner
    if not owner.text:
        return Cell("unknown", kind="absent", title="nothing on its nodes reports whose it is (docs/how-to/owners.md)")
    return Cell(owner.team or "unknown", sub=owner.user, title=owner.text)


def owner(job: pb.JobRow) -> str:
    """Whose a job is, a sentence."""
    if not job.owner.text:
        return "Owner: unknown."
    said = ", as its processes' environment says" if job.owner.said_by == "environment" else ""
    return f"Owner: {job.owner.text}{said}."


def reports(reply: pb.JobList) -> bool:
    """Return True if any of the jobs reports steps or tokens."""
    return any(job.HasField("step_time_s") or job.HasField("tokens_per_s") for job in reply.jobs)


def _state(job: pb.JobRow) -> Cell:
    if job.HasField("died"):
        return Cell("DIED", badge="critical")
    if job.HasField("ended_ms"):
        return Cell("ended", badge="plain")
    return Cell("HURT", badge=job.severity) if job.severity else Cell("runs", badge="healthy")


def death(job: pb.JobRow, who: view.Viewer) -> str:
    """`died 19:07:32 with XID 79 on r03n06 GPU 0, restarted as job-2001r1`."""
    of = job.died
    gpu = of.gpu if of.HasField("gpu") else None
    place = f" on {fmt.member(of.node, gpu)}" if of.node else ""
    again = f", restarted as {of.restarted_as}" if of.restarted_as else ""
    return f"died {who.clock(job.ended_ms)} with {fmt.kind_and_cause(of.kind, of.cause)}{place}{again}"


def _about(job: pb.JobRow, who: view.Viewer) -> str:
    if job.HasField("died"):
        return death(job, who)
    return who.localize(job.hurt) or " · ".join((*job.pools, *job.skus))


def _span(job: pb.JobRow, who: view.Viewer) -> str:
    if job.HasField("ended_ms"):
        return f"to {who.clock(job.ended_ms)}"
    return f"for {who.ago(job.since_ms)}"


def _waits(job: pb.JobRow) -> Cell:
    if not job.HasField("waiting_share"):
        return Cell(NONE_KNOWN, kind="faint")
    waits = job.waiting_share
    tone = "bad" if waits >= BAD_SHARE else "warn"
    text = share(waits)
    return Cell("", mark=Mark(text, tone)) if waits >= MARKED_SHARE else Cell(text)


# ---- one job


def tiles(detail: pb.JobDetail, who: view.Viewer) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the numbers on top. What it lost stands above them, once."""
    job = detail.row
    network = share(detail.saturation_median) if detail.HasField("saturation_median") else ABSENT
    loop = next((w for w in detail.workloads if w.HasField("step_time_s")), None)
    by = f"on {fmt.several(loop.nodes, 'node')}" if loop else "no loop reports"
    return [
        ("GPUs", fmt.number(job.gpus), fmt.several(job.nodes, "node")),
        (
            "Waits",
            share(job.waiting_share) if job.HasField("waiting_share") else NONE_KNOWN,
            _waits_since(detail, who),
        ),
        ("Step time", seconds(job.step_time_s) if job.HasField("step_time_s") else ABSENT, by),
        ("Tokens/s", fmt.number(job.tokens_per_s) if job.HasField("tokens_per_s") else ABSENT, "whole job"),
        ("MFU", share(job.mfu_ratio) if job.HasField("mfu_ratio") else ABSENT, "of the peak"),
        (
            "Network in use",
            network,
            f"busiest port {share(detail.saturation_max)}" if detail.HasField("saturation_max") else "no rate known",
        ),
    ]


def _waits_since(detail: pb.JobDetail, who: view.Viewer) -> str:
    """What the share is a mean of. An incident's own sentence has that of the newest step, which differs."""
    costs = [i for i in incidents(detail) if i.closed_ms is None and i.gpu_hours_waited and i.since_ms < detail.ts_ms]
    if not costs:
        return "of its GPUs' time"
    worst = max(costs, key=lambda i: (i.gpu_hours_waited or 0.0) / (detail.ts_ms - i.since_ms))
    return f"mean since {who.clock(worst.since_ms)}"


def incidents(detail: pb.JobDetail) -> list[Incident]:
    return [from_json(Incident, text) for text in detail.incidents_json]


def culprit(found: Sequence[Incident], who: view.Viewer) -> str:
    """Who slows the job most, and since when, as its open incidents say; empty where none names a node.

    Not at what cost: the ledger above it has that. An incident also counts what it takes after the job.
    """
    named = [i for i in found if i.closed_ms is None and i.job is not None and i.node is not None]
    if not named:
        return ""
    named.sort(key=lambda i: -(i.gpu_hours_waited or 0.0))  # stable: the worst one first where no cost is known
    worst = named[0]
    more = f" Other open incidents of the job: {len(named) - 1}." if len(named) > 1 else ""
    return f"{who.localize(worst.summary)}\n{fmt.capital(who.since(worst.since_ms))}.{more}"


def no_culprit(found: Sequence[Incident]) -> str:
    """What stands in the place of `culprit`. Its other incidents are not passed over: a reader took them for none."""
    if any(incident.closed_ms is None for incident in found):
        return "Its open incidents stand below; none is of a GPU or node that slows it."
    return "No open incident names a GPU or node that slows this job."


def slowest(detail: pb.JobDetail) -> tuple[str, int] | None:
    """(node, GPU) that an open incident names first, a straggler before others."""
    found = [i for i in incidents(detail) if i.closed_ms is None and i.node is not None and i.gpu is not None]
    found.sort(key=lambda i: (-(i.gpu_hours_waited or 0.0), i.kind is not IncidentKind.STRAGGLER))
    named = [(gpu.node, gpu.gpu) for gpu in detail.gpus if gpu.incident]
    return next(((i.node, i.gpu) for i in found if i.node is not None and i.gpu is not None), next(iter(named), None))


def unsaid(detail: pb.JobDetail) -> list[str]:
    """Return what is not known, but for what stands in the place of the dots or of the ports."""
    said = {detail.ports_absent} if not detail.ports else set()
    if not any(each.metric in catalog.BY_NAME for each in detail.metrics):
        said |= set(detail.absent[:1])
    return [text for text in dict.fromkeys(detail.absent) if text not in said]


def dots(detail: pb.JobDetail, named: dict[str, str], who: view.Viewer) -> dict[str, Any]:
    """What assets/dots.js draws. `named`: incident id -> what it says."""
    gpus = [
        {
            "name": f"{gpu.node} GPU {gpu.gpu}", "id": f"{gpu.node}/{gpu.gpu}", "named": bool(gpu.incident),
            "why": who.localize(named.get(gpu.incident, "")), "place": gpu.place,
        }
        for gpu in detail.gpus
    ]  # fmt: skip
    lines = [
        _line(catalog.BY_NAME[each.metric], each, detail) for each in detail.metrics if each.metric in catalog.BY_NAME
    ]
    total = detail.row.gpus
    note = (
        f"{fmt.number(len(gpus))} of {fmt.number(total)} GPUs drawn: those in trouble, the farthest out, others evenly"
    )
    return {
        "title": "Its GPUs against each other",
        "note": note if len(gpus) < total else f"{fmt.number(total)} GPUs, at {who.clock(detail.ts_ms)}",
        "gpus": gpus, "rows": lines,
        "empty": "" if lines else next(iter(detail.absent), "No values are known of its GPUs."),
    }  # fmt: skip


def _line(metric: Metric, found: pb.JobMetric, detail: pb.JobDetail) -> dict[str, Any]:
    values = np.frombuffer(found.values, "<f4").astype(float)
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (found.p10, found.p90)
    low, high = min(low, found.p10), max(high, found.p90)
    least = LEAST_SPAN_C if metric.unit == "degC" else LEAST_SPAN * abs(found.median) or 1.0
    if (lacking := least - (high - low)) > 0:
        low, high = low - lacking / 2, high + lacking / 2
        if high > metric.high >= found.p90:
            low, high = low - (high - metric.high), metric.high
        if low < 0 <= found.p10:
            low, high = 0.0, high - low
    text = [fmt.value(metric, value) if math.isfinite(value) else "" for value in values]
    median = fmt.value(metric, found.median)
    outside = [
        f"{gpu.node} GPU {gpu.gpu} {text[at]}" for at, gpu in enumerate(detail.gpus) if gpu.incident and text[at]
    ]
    return {
        "label": fmt.capital(metric.label), "low": low, "high": high, "p10": found.p10, "median": found.median,
        "p90": found.p90, "values": [float(f"{v:.5g}") if math.isfinite(v) else None for v in values], "texts": text,
        "low_text": fmt.value(metric, low), "high_text": fmt.value(metric, high), "median_text": median,
        "absent": detail.row.gpus - found.known,
        "said": f"{metric.label}: median {median}; {'; '.join(outside[:4]) or 'none named'}",
    }  # fmt: skip


LANES = (
    ("run", "Runs", "no run is stored"), ("steps", "Steps", "no loop reports its steps"),
    ("slow", "Slow", "no slow phase is known"), ("fault", "Faults", "no fault is known"),
    ("restart", "Restarts", "no restart is known"), ("checkpoint", "Checkpoints", "nothing reports them"),
)  # fmt: skip
UNREPORTED = frozenset({"steps", "checkpoint"})  # empty because nobody reports: not known, and no good news
TICKS = 4
BLAME = {
    "gpu": "one GPU", "network": "the network", "storage": "storage or the data loader", "host": "the host",
    "job": "a cause of the whole job", "program": "the program", "unknown": "unknown",
}  # fmt: skip


def blame(loss: pb.JobLoss) -> str:
    """Return whose fault the lost time is, a line for each part; empty where nothing is known to be lost."""
    lines = []
    for part in loss.parts:
        what = BLAME.get(part.blame, part.blame)
        where = f", {part.where}" if part.where else ""
        why = f" ({fmt.cause(part.cause)}, incident {part.incident})" if part.incident else f" ({part.summary})"
        lines.append(f"{gpu_hours(part.ms)} GPU-hours, {share(part.ms / loss.lost_ms)}: {what}{where}{why}")
    return "\n".join(lines)


def timeline(detail: pb.JobDetail, who: view.Viewer) -> dict[str, Any]:
    """What assets/timeline.js draws."""
    loss = detail.loss
    low, span = loss.from_ms, max(1, loss.to_ms - loss.from_ms)

    def part(phase: pb.JobPhase) -> dict[str, Any]:
        text = who.localize(phase.text)
        times = f"{who.clock(phase.from_ms)} to {who.clock(phase.to_ms)}"
        return {
            "low": (phase.from_ms - low) / span, "high": (phase.to_ms - low) / span,
            "look": f"{phase.lane} {phase.severity}".strip(), "text": f"{times}: {text}" if text else times,
        }  # fmt: skip

    lanes = [
        {
            "label": label, "parts": [part(phase) for phase in loss.phases if phase.lane == lane], "empty": empty,
            "unknown": lane in UNREPORTED and all(phase.lane != lane for phase in loss.phases),
        }
        for lane, label, empty in LANES
    ]  # fmt: skip
    ticks = [{"at": at / TICKS, "text": who.clock(low + span * at // TICKS)} for at in range(TICKS + 1)]
    days = "the last 7 days" if detail.row.since_ms < loss.from_ms else "since it began"
    return {
        "title": "Its time", "note": f"{days}, in {who.zone_name()}; point at a part for its words", "lanes": lanes,
        "ticks": ticks if loss.to_ms else [],
    }  # fmt: skip


def show_timeline(key: str, data: dict[str, Any]) -> None:
    component("timeline")(key=key, data=data, height="content")


def show_dots(key: str, data: dict[str, Any]) -> str | None:
    """`NODE/GPU` of the dot just clicked."""
    opened: str | None = component("dots")(key=key, data=data, on_open_change=lambda: None).open
    return opened


def show_list(key: str, reply: pb.JobList, who: view.Viewer, empty: str) -> str | None:
    reported = reports(reply)
    owned = any(job.owner.text for job in reply.jobs)
    lines = rows(reply.jobs, who, reported, owned)
    return table(
        key,
        (*COLUMNS, *(REPORTED if reported else ()), *((TEAM,) if owned else ())),
        lines,
        empty=empty,
        link_column=1,
        height=LIST_PX if len(lines) > 14 else None,
    )


def show_ports(key: str, detail: pb.JobDetail, who: view.Viewer) -> str | None:
    troubled = [port for port in detail.ports if port.trouble]
    lines = fabric_parts.port_rows(troubled, who)
    empty = detail.ports_absent or "No network port data for this job."
    if detail.ports and not troubled:
        empty = "No network port of this job has trouble."
    height = 320 if len(lines) > 6 else None
    return table(key, fabric_parts.PORT_COLUMNS, lines, empty=empty, link_column=0, height=height)
