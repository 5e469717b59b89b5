"""Jobs: who is hurt, and of one job what it lost, whose fault that is, and which GPU slows it since when."""

from __future__ import annotations

from typing import NamedTuple

import streamlit as st

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Scope
from drover_dashboard import client
from drover_dashboard.pages import incident_rows, job_parts, ledger_parts
from drover_dashboard.widgets import address, charts, grafana, moment, strip, time_range, view
from drover_dashboard.widgets import format as fmt
from drover_proto import fleet_pb2 as pb

NOW_S, CHARTS_S, STORY_S = 5, 10, 30
STATES = ("running", "ended too")
POINTS, TIME = 300, "job_time"
OPEN = 50  # incidents, as the frame of every page asks for: one answer for both
NO_JOBS = (
    "No GPU is held by a job. Agents report holdings where they find Slurm or Kubernetes on the node:"
    " `drover-agent sources` there says why not."
)


class _Span(NamedTuple):
    """What a job's charts share: from when to when, moments."""

    from_ms: int
    to_ms: int
    marks: list[int]


def choose() -> tuple[str, bool]:
    """The job ("": the list) and whether ended ones are listed, kept in the URL."""
    if job := st.query_params.get("job", ""):
        with st.container(horizontal=True, vertical_alignment="center"):
            back = st.button("All jobs", icon=":material/arrow_back:")
            moment.pick(key="job_moment")
        if back:
            address.write(job=None, **charts.CLOSED)
            st.rerun()
        return job, False
    with st.container(horizontal=True, vertical_alignment="center"):
        state = address.segments("state", "State", STATES, STATES[0], key="job_state", label_visibility="collapsed")
        moment.pick(key="jobs_moment")
    return "", state == STATES[1]


@st.fragment(run_every=NOW_S)
def listing(ended: bool) -> None:
    who = view.viewer()
    answer = client.fleet().jobs(ended)
    view.trouble("jobs", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    running = [job for job in answer.value.jobs if not job.HasField("ended_ms")]
    # Of all jobs, as the Fleet page counts them; a collector of before does not send it.
    hurt = answer.value.hurt if answer.value.HasField("hurt") else sum(bool(job.incidents) for job in running)
    died = sum(job.HasField("died") for job in answer.value.jobs)
    shown, total = len(answer.value.jobs), answer.value.total
    dead = f", {fmt.number(died)} of them died" if died else ""
    gpus = fmt.number(sum(job.gpus for job in running))
    known = bool(hurt or moment.at_ms() or view.judged())
    harmed = f"{fmt.number(hurt)} hurt{dead}" if known else f"how many are hurt is not known{dead}"
    line = f"{fmt.several(len(running), 'job')} hold {gpus} GPUs  ·  {harmed}"
    if shown < total:  # those that are not here hold GPUs too
        line = f"The first {fmt.number(shown)} of {fmt.number(total)} jobs  ·  {harmed}"
    view.notice("jobs", "remark", f"{line}  ·  times in {who.zone_name()}")
    with view.place():
        if running and not job_parts.reports(answer.value):
            view.notice("steps", "remark", job_parts.NO_STEPS)
    clicked = job_parts.show_list("jobs", answer.value, who, NO_JOBS)
    if clicked:
        address.write(job=clicked)
        st.rerun()


@st.fragment(run_every=NOW_S)
def now(name: str) -> None:
    who = view.viewer()
    answer = client.fleet().job(name)
    view.trouble("job", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    detail = answer.value
    found = job_parts.incidents(detail)
    known = bool(moment.at_ms() or view.judged())
    view.notice("what", "summary", _head(detail, who))
    with view.place():
        view.notice("owner", "remark", job_parts.owner(detail.row))
        if detail.parallel:
            view.notice("parallel", "remark", f"Ranks: {detail.parallel}.")
    view.numbers(job_parts.tiles(detail, who))
    with view.place():
        if slowest := job_parts.culprit(found, who):
            view.notice("slow", "todo", slowest)
        elif not detail.row.HasField("ended_ms"):
            view.notice("slow_none", "remark", job_parts.no_culprit(found) if known else view.unjudged())
    named = {incident.id: incident.summary for incident in found}
    view.go(job_parts.show_dots("dots", job_parts.dots(detail, named, who)))
    with view.place():
        for number, text in enumerate(job_parts.unsaid(detail)):
            view.notice(f"absent_{number}", "remark", text)
    left, right = st.columns([1, 1], gap="medium")
    with left:
        opened = client.fleet().incidents("open", limit=OPEN).value or pb.IncidentList()
        lines = incident_rows.rows(found, view.racks(), who, opened.silences, opened.handling)
        clicked = incident_rows.show(
            "job_incidents", lines, height=320 if len(found) > 4 else None,
            empty="No incident names this job or what it holds." if known else view.unjudged(),
        )  # fmt: skip
        if clicked:
            st.switch_page(view.INCIDENTS, query_params={"id": clicked})
    with right:
        view.go(job_parts.show_ports("job_ports", detail, who), view.FABRIC)


@st.fragment(run_every=STORY_S)
def story(name: str) -> None:
    """Whether it is healthy, what it lost and by whose fault, and its time line: read from the store, so less often."""
    who = view.viewer()
    answer = client.fleet().job(name, loss=True)
    if client.fleet().job(name).trouble is None:  # else the page says it already
        view.trouble("story", answer.trouble, answer.as_of_ms, who)
    if answer.value is None or not answer.value.sentence:  # a collector of before
        return
    detail = answer.value
    view.notice("sentence", "summary", who.localize(detail.sentence))
    with view.place():
        if parts := job_parts.blame(detail.loss):
            view.notice("blame", "remark", parts)
    ledger_parts.of_job(detail)
    job_parts.show_timeline("timeline", job_parts.timeline(detail, who))


def _head(detail: pb.JobDetail, who: view.Viewer) -> str:
    job = detail.row
    span = (
        f"{who.clock(job.since_ms)} to {who.clock(job.ended_ms)}, ended"
        if job.HasField("ended_ms")
        else who.since(job.since_ms)
    )
    if job.HasField("died"):
        span = f"{who.clock(job.since_ms)} to {who.clock(job.ended_ms)}, {job_parts.death(job, who)}"
    boards = f" of {', '.join(job.skus)}" if job.skus else ""
    name = job.job if fmt.job(job.job) == job.job else f"Job {job.job}"
    return f"{name}: {fmt.several(job.gpus, 'GPU')}{boards} on {fmt.several(job.nodes, 'node')}, {span}"


@st.fragment(run_every=CHARTS_S)
def past(name: str, span_ms: int) -> None:
    """Its steps over time, and its slowest GPU against the others."""
    detail = client.fleet().job(name).value
    if detail is None:
        return
    who = view.viewer()
    steps = next((loop for loop in detail.workloads if loop.HasField("step_time_s")), None)
    slow = job_parts.slowest(detail)
    time_range.follow(TIME)
    end_ms = detail.row.ended_ms if detail.row.HasField("ended_ms") else who.now_ms
    from_ms, to_ms = charts.window(max(end_ms - span_ms, detail.row.since_ms), end_ms)
    open_end = not detail.row.HasField("ended_ms")
    grafana.button("job_grafana", grafana.span(span_ms) if open_end else (str(from_ms), str(to_ms)), job=name)
    held = {gpu.node for gpu in detail.gpus}
    lanes = [
        strip.incidents(job_parts.incidents(detail), who),
        strip.ask_changes(f"job {name} {time_range.named()}", held, from_ms, to_ms, who),
    ]
    span = _Span(from_ms, to_ms, strip.moments(lanes, from_ms, to_ms))
    if steps is not None or slow is not None:
        clicked = strip.show("job_strip", lanes, from_ms, to_ms, who)
        if clicked:
            st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})
    left, right = st.columns(2, gap="medium")
    if steps is not None:
        target = pb.SeriesTarget(node=steps.node, link=steps.name)
        with left:
            _chart(f"steps of {steps.name} on {steps.node}", Scope.WORKLOAD, target, "step_time_s", span, who)
    if slow is not None:
        target = pb.SeriesTarget(node=slow[0], gpu=slow[1])
        place = fmt.member(*slow)
        with right if steps is not None else left:
            _chart(place, Scope.GPU, target, "sm_clock_mhz", span, who)
        if steps is None:
            with right:
                _chart(place, Scope.GPU, target, "power_w", span, who)


def _chart(what: str, scope: Scope, target: pb.SeriesTarget, name: str, span: _Span, who: view.Viewer) -> None:
    from_ms, to_ms = span.from_ms, span.to_ms
    request = pb.SeriesRequest(
        scope=scope, targets=[target], metrics=[name], from_ms=from_ms, to_ms=to_ms, max_points=POINTS,
        with_peers=scope is Scope.GPU,
    )  # fmt: skip
    answer = client.fleet().series(request, f"job {what} {name} {time_range.named()}")
    view.trouble(f"chart_{name}", answer.trouble, 0, who)
    if answer.value is None:
        return
    lines = charts.lines_of(answer.value, name, frozenset({target.gpu}))
    chart = charts.Chart(
        catalog.BY_NAME[name], charts.times_of(answer.value), lines, from_ms, to_ms, span.marks,
        note=f"{what}{'; band: peers p10 to p90' if scope is Scope.GPU else ''}",
        absent="no value in this time" if charts.nothing_there(lines) else "",
    )  # fmt: skip
    charts.show(f"job_{name}", chart, loads=True)


job, ended = choose()
address.title(fmt.job(job) if job else "Job")
if job:
    above = st.container()
    now(job)  # first: it is in memory
    with above:
        story(job)
    past(job, time_range.pick(key=TIME) or 0)
else:
    listing(ended)
