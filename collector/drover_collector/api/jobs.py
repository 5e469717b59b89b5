"""Jobs: which run, which are hurt, and what that costs. A straggler's text is its incident's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.api.owners import add_owners
from drover_collector.api.recent_buckets import is_warning
from drover_collector.api.snapshot import (
    DAY_MS,
    LONG_S,
    RECENT_MS,
    ApiSnapshot,
    not_found,
    worst_first,
)
from drover_collector.incidents.correlation import jobs_hurt
from drover_collector.store import JobSpan, WorkloadRow
from drover_core.model.events import (
    SEVERITY_ORDER,
    Incident,
    IncidentKind,
    Severity,
)
from drover_proto import fleet_pb2 as pb

JOBS, JOBS_MAX = 200, 5000
ENDED_MS = DAY_MS  # jobs that ended longer ago are not listed
SINCE_S = 30.0
REPORTS_MS = 120_000  # a training loop reports each step, and a step takes a minute at most
HOUR_MS = 3_600_000
DEATH_MS = 600_000  # a scheduler gives a dead node's job up within minutes
DEATH_EARLY_MS = 30_000  # holdings are read more often than some sources of faults
RESTART = re.compile(
    r"(?:[-_.](?:r|retry|restart|attempt|try)?|r|retry|restart|attempt|try)[-_.]?[0-9]+", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Running:
    """A job that GPUs are held by now: their indices, int [K], in order."""

    job: str
    gpus: Sequence[int]
    since_ms: int


def running(facts: ApiSnapshot) -> dict[str, Running]:
    """By name."""
    return facts.once("running", LONG_S, lambda: _running(facts))


def _running(facts: ApiSnapshot) -> dict[str, Running]:
    codes, names = facts.jobs()

    def since() -> dict[str, int]:
        return facts.store.jobs.started(names, facts.now_ms())

    begun = facts.once("jobs since", LONG_S, since) if names else {}
    order = np.argsort(codes, kind="stable")
    order = order[codes[order] >= 0]
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    found = (
        Running(name, p.tolist(), begun.get(name, facts.now_ms())) for p in parts for name in (names[codes[p[0]]],)
    )
    return {job.job: job for job in found}


def ended(facts: ApiSnapshot) -> dict[str, JobSpan]:
    """Of the last day, by name."""
    now_ms = facts.now_ms()
    upto_ms = now_ms if facts.is_past else now_ms + DAY_MS
    spans = facts.once("ended jobs", SINCE_S, lambda: facts.store.jobs.ended(now_ms - ENDED_MS, upto_ms))
    return {span.job: span for span in spans}


def workloads(facts: ApiSnapshot) -> dict[str, list[WorkloadRow]]:
    """What reports of its work now, by node."""
    rows = facts.once("workloads", LONG_S, lambda: facts.store.samples.workloads(facts.now_ms(), REPORTS_MS))
    found: dict[str, list[WorkloadRow]] = {}
    for row in rows:
        found.setdefault(row.node, []).append(row)
    return found


def list_jobs(facts: ApiSnapshot, request: pb.ListJobsRequest) -> pb.JobList:
    now, over = running(facts), ended(facts)
    named, limit = incidents_by_job(facts), min(request.limit or JOBS, JOBS_MAX)
    asked = [job for job in now.values() if request.contains in job.job]
    hurt = [_row(facts, job, named[job.job]) for job in asked if any(map(is_warning, named.get(job.job, ())))]
    hurt.sort(key=lambda row: (-row.waiting_share, -row.gpus, row.job))
    shown = {row.job for row in hurt}
    well = sorted((job for job in asked if job.job not in shown), key=lambda job: (-len(job.gpus), job.job))
    past = [span for span in over.values() if span.job not in now and request.contains in span.job]
    past.sort(key=lambda span: (-span.ended_ms, span.job))
    dead = [row for row in (ended_row(s, named.get(s.job, ()), now.values()) for s in past if s.job in named)
            if row.HasField("died")]  # fmt: skip
    past = [s for s in past if s.job not in {row.job for row in dead}] if request.ended else []
    # Rows are made of those that are shown only: there may be as many jobs as GPUs.
    rows = dead[:limit]
    rows += hurt[: limit - len(rows)]
    rows += [_row(facts, job, named.get(job.job, ())) for job in well[: limit - len(rows)]]
    rows += [ended_row(span, named.get(span.job, ())) for span in past[: limit - len(rows)]]
    add_owners(facts, rows)
    total, harmed = len(asked) + len(dead) + len(past), jobs_hurt(facts.open_incidents())
    return pb.JobList(jobs=rows, total=total, hurt=sum(request.contains in job for job in harmed))


def incidents_by_job(facts: ApiSnapshot) -> dict[str, list[Incident]]:
    """Those of the last 7 days that name a job and are no idleness, the worst open ones first."""
    found: dict[str, list[Incident]] = {}
    for incident in sorted(facts.incidents(facts.now_ms() - RECENT_MS), key=worst_first):
        if incident.job and incident.kind is not IncidentKind.IDLE:
            found.setdefault(incident.job, []).append(incident)
    return found


def row_of(facts: ApiSnapshot, job: Running) -> pb.JobRow:
    return _row(facts, job, incidents_by_job(facts).get(job.job, ()))


def _row(facts: ApiSnapshot, job: Running, incidents: Sequence[Incident]) -> pb.JobRow:
    index, now_ms = facts.index, facts.now_ms()
    numbers = np.unique(index.gpu_node[job.gpus])
    row = pb.JobRow(
        job=job.job, gpus=len(job.gpus), nodes=len(numbers), since_ms=job.since_ms,
        pools=[index.pools[code] for code in np.unique(index.pool[numbers]) if index.pools[code]],
        skus=[index.skus[code] for code in np.unique(index.sku[numbers]) if index.skus[code]],
    )  # fmt: skip
    _hurt(row, incidents, now_ms)
    for name, value in figures(facts, [index.nodes[n].name for n in numbers.tolist()]).items():
        setattr(row, name, value)
    return row


def ended_row(span: JobSpan, incidents: Sequence[Incident], now: Iterable[Running] = ()) -> pb.JobRow:
    """`now`: jobs that run, among which it may have been started again."""
    row = pb.JobRow(job=span.job, gpus=span.gpus, nodes=span.nodes, since_ms=span.since_ms, ended_ms=span.ended_ms)
    _hurt(row, incidents, span.ended_ms)
    if (incident := _killer(span, incidents)) is not None:
        row.died.CopyFrom(
            pb.JobDeath(
                incident_id=incident.id, kind=incident.kind.value, cause=incident.cause, node=incident.node or "",
                gpu=incident.gpu, restarted_as=_restarted_as(span, now),
            )
        )  # fmt: skip
    return row


def _killer(span: JobSpan, incidents: Sequence[Incident]) -> Incident | None:
    """The open critical incident within minutes of whose begin the job ended; of several the one that began last."""
    found = [
        i
        for i in incidents
        if is_warning(i)
        and i.severity is Severity.CRITICAL
        and -DEATH_EARLY_MS <= span.ended_ms - i.since_ms <= DEATH_MS
    ]
    return max(found, key=lambda i: i.since_ms, default=None)


def _restarted_as(span: JobSpan, now: Iterable[Running]) -> str:
    """Schedulers and launchers append a number to the name: `job-2001r1`. `job-20011` is another job."""
    later = [
        job for job in now
        if job.since_ms >= span.ended_ms - DEATH_EARLY_MS and RESTART.fullmatch(job.job.removeprefix(span.job))
        and job.job.startswith(span.job)
    ]  # fmt: skip
    return min(later, key=lambda job: job.since_ms).job if later else ""


def _hurt(row: pb.JobRow, incidents: Sequence[Incident], now_ms: int) -> None:
    """Fill in what the incidents that name the job say."""
    hurting = [incident for incident in incidents if is_warning(incident)]
    hurting.sort(key=lambda i: -(i.gpu_hours_waited or 0.0))  # stable: the worst first where no cost is known
    row.incidents.extend(incident.id for incident in hurting)
    if hurting:
        row.hurt = hurting[0].summary
        row.severity = max((i.severity for i in hurting), key=SEVERITY_ORDER.index)
    for field, costs in (
        ("gpu_hours_waited", [i.gpu_hours_waited for i in incidents]),
        ("gpu_hours_lost", [i.gpu_hours_lost for i in incidents]),
    ):
        if any(cost is not None for cost in costs):
            setattr(row, field, sum(cost or 0.0 for cost in costs))
    shares = [
        incident.gpu_hours_waited / (row.gpus * (now_ms - incident.since_ms) / HOUR_MS)
        for incident in hurting
        if incident.gpu_hours_waited is not None and now_ms > incident.since_ms and row.gpus
    ]
    if shares:
        row.waiting_share = min(1.0, max(shares))  # all wait for the slowest


def figures(facts: ApiSnapshot, nodes: Iterable[str]) -> dict[str, float]:
    """step_time_s, tokens_per_s and mfu_ratio of the training loop that most of the nodes report, else tokens_per_s of
    their inference servers; no key for what is not reported."""
    reports = summed(facts, nodes)
    if not reports:
        return {}
    chief = max(reports, key=lambda report: (report.HasField("step_time_s"), report.nodes))
    found = {
        "step_time_s": chief.step_time_s if chief.HasField("step_time_s") else None,
        "tokens_per_s": chief.tokens_per_s if chief.HasField("tokens_per_s") else None,
        "mfu_ratio": chief.mfu_ratio if chief.HasField("mfu_ratio") else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def summed(facts: ApiSnapshot, nodes: Iterable[str]) -> list[pb.JobWorkload]:
    """Sum each workload over the nodes that report it. All nodes of a training job report the same tokens and
    operations of a step; servers of one name each make tokens of their own."""
    by_node = workloads(facts)
    found: dict[str, list[WorkloadRow]] = {}
    for node in nodes:
        for row in by_node.get(node, ()):
            found.setdefault(row.name, []).append(row)
    return [_summed(name, rows) for name, rows in sorted(found.items())]


def _summed(name: str, rows: Sequence[WorkloadRow]) -> pb.JobWorkload:
    def all_of(metric: str) -> list[float]:
        return sorted(row.values[metric] for row in rows if metric in row.values)

    def middle(metric: str) -> float | None:
        held = all_of(metric)
        return held[(len(held) - 1) // 2] if held else None

    step, tokens, made = middle("step_time_s"), middle("tokens_per_step"), all_of("tokens_per_s")
    rate = tokens / step if step and tokens is not None else sum(made) if made else None
    return pb.JobWorkload(
        name=name, nodes=len(rows), ts_ms=max(row.ts_ms for row in rows), step_time_s=step, tokens_per_s=rate,
        mfu_ratio=middle("mfu_ratio"), ttft_p95_s=max(all_of("ttft_p95_s"), default=None), node=rows[0].node,
    )  # fmt: skip


def find_job(facts: ApiSnapshot, name: str) -> Running | JobSpan:
    """
    Raises:
        RefusalError: no GPU holds or lately held it.
    """
    job = running(facts).get(name) or ended(facts).get(name)
    if job is None:
        raise not_found(f"no job {name!r} runs or ended in the last day; the Job page and `drover job` list them")
    return job
