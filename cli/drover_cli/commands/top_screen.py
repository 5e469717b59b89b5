"""One frame of `drover top`, drawn to the size of the terminal. Pure: facts in, something that rich prints out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from drover_cli.output import cut, duration, plain, where
from drover_core.model.events import Health, Incident, Severity
from drover_dashboard.widgets.theme import HEALTH
from drover_proto import fleet_pb2 as pb

SEVERITY = {Severity.CRITICAL: "bold white on red", Severity.WARNING: "bold yellow", Severity.INFO: "cyan"}
WELL, UNKNOWN = "·", "~"  # signs of the picture; the others are those of the console
LEAST_ROWS = 3  # of a list that is shown
NODE_WIDTH = 12


@dataclass(slots=True)
class ScreenFacts:
    """What one look at the collector gave. `trouble`: why it is old."""

    status: pb.Status
    layout: pb.Layout
    picture: pb.Picture
    incidents: Sequence[Incident]
    jobs: Sequence[pb.JobRow]
    nodes: Sequence[pb.NodeRow]
    now_ms: int
    trouble: str = field(default="")


def frame(facts: ScreenFacts, width: int, height: int) -> Group:
    """At most `height` lines of `width` columns: head, every GPU where there is room, incidents, jobs, nodes."""
    head = _head(facts, width)
    left = height - len(head)
    picture = _picture(facts, width, max(0, left - 3 * (LEAST_ROWS + 2)))
    left -= len(picture)
    hurt = [job for job in facts.jobs if job.severity] + [job for job in facts.jobs if not job.severity]
    bad = [node for node in facts.nodes if node.health != Health.HEALTHY]
    room = _shared(left, [len(facts.incidents), len(hurt), len(bad)])
    lists = [
        _incidents(facts, facts.incidents[: room[0]], width),
        _jobs(hurt[: room[1]], facts, width),
        _nodes(bad[: room[2]], width),
    ]
    shown = [each for each, rows in zip(lists, room, strict=True) if rows]
    return Group(*head, *picture, *shown)


def _shared(lines: int, wanted: Sequence[int]) -> list[int]:
    """Rows of each list: what is wanted, else a fair part; a title and a line of heads go off each that has rows."""
    rows = [0] * len(wanted)
    left = lines
    for place, want in enumerate(wanted):
        waiting = sum(1 for later in wanted[place:] if later)
        if not want or not waiting:
            continue
        rows[place] = max(0, min(want, left // waiting - 2))
        left -= rows[place] + 2 if rows[place] else 0
    return rows


def _head(facts: ScreenFacts, width: int) -> list[Text]:
    status = facts.status
    age = duration((facts.now_ms - status.newest_sample_ms) / 1000) if status.newest_sample_ms else "never"
    line = (
        f"{plain(status.fleet or 'fleet')}  {status.mode}"
        f"  {status.nodes_reporting}/{status.nodes_expected} nodes report"
        f"  {status.samples_per_s:,.0f} samples/s  newest {age}"
    )
    health = Text()
    for state in Health:
        count = status.gpus_by_health.get(state, 0)
        if count:
            health.append(f" {health_sign(state)} ", style=health_style(state))
            health.append(f" {state} {count:,}   ")
    parts = [
        f"jobs hurt {status.jobs_hurt if status.jobs_hurt or status.newest_tick_ms else 'not known'}",
        f"lost {status.gpu_hours_lost:,.1f}, waited {status.gpu_hours_waited:,.1f} GPU-h in 24 h",
    ]
    parts.append(f"MFU {status.mfu_ratio:.0%}" if status.HasField("mfu_ratio") else "MFU not reported")
    if status.HasField("gpus_idle"):
        parts.append(f"held {status.gpus_held:,}, idle {status.gpus_idle:,}")
    if status.HasField("gpus_free"):
        parts.append(f"free {status.gpus_free:,}")
    lines = [Text(cut(line, width), style="bold"), health, Text(cut("   ".join(parts), width))]
    if facts.trouble:
        lines.insert(0, Text(cut(f"OLD {plain(facts.trouble)}", width), style="bold white on red"))
    lines += [Text(cut(f"! {plain(trouble)}", width), style="yellow") for trouble in status.troubles[:2]]
    for each in lines:
        each.no_wrap, each.overflow = True, "ellipsis"
    return lines


def health_sign(health: Health) -> str:
    return {Health.HEALTHY: WELL, Health.UNKNOWN: UNKNOWN}.get(health, HEALTH[health].sign)


def health_style(health: Health) -> str:
    if health is Health.HEALTHY:
        return "green"
    return "dim" if health is Health.UNKNOWN else f"black on {HEALTH[health].dark}"


def _picture(facts: ScreenFacts, width: int, lines: int) -> list[Text]:
    """Every GPU as a sign, node by node; racks line by line. None where it does not fit: the lists say what is bad."""
    if facts.picture.layout_version != facts.layout.version:
        return []  # the fleet file has just changed
    if len(facts.picture.cells) > width * max(0, lines):
        return []  # a hundred thousand signs would be made for nothing
    legend = [Health(word) if word in tuple(Health) else Health.UNKNOWN for word in facts.picture.legend]
    drawn: list[Text] = []
    at = 0
    for rack in facts.layout.racks:
        line = Text(f"{cut(plain(rack.name or '-'), NODE_WIDTH):<{NODE_WIDTH}}", no_wrap=True, end="")
        for node in rack.nodes:
            if len(line) + node.gpus + 1 > width:
                drawn.append(line)
                line = Text(" " * NODE_WIDTH, no_wrap=True, end="")
            line.append(" ")
            for cell in facts.picture.cells[at : at + node.gpus]:
                state = legend[cell] if cell < len(legend) else Health.UNKNOWN
                line.append(health_sign(state), style=health_style(state))
            at += node.gpus
        drawn.append(line)
    if len(drawn) > lines:
        return []
    for line in drawn:
        line.end = "\n"
    return drawn


def _table(title: str, heads: Iterable[str], rows: Iterable[Sequence[str | Text]], width: int) -> Table:
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        width=width,
    )
    for head in heads:
        made.add_column(
            head, no_wrap=True, overflow="ellipsis", ratio=None if head != "WHAT" else 1, header_style="dim"
        )
    for row in rows:
        made.add_row(*row)
    return made


def _incidents(facts: ScreenFacts, found: Sequence[Incident], width: int) -> Table:
    rows = [
        (
            Text(i.severity.upper(), style=SEVERITY[i.severity]),
            Text(plain(where(i))),
            Text(duration((facts.now_ms - i.since_ms) / 1000)),
            Text(i.action.value),
            Text(plain(i.summary)),
        )
        for i in found
    ]
    title = f"Open incidents: {len(facts.incidents)}"
    return _table(title, ("SEVERITY", "WHERE", "FOR", "WANTS", "WHAT"), rows, width)


def _jobs(found: Sequence[pb.JobRow], facts: ScreenFacts, width: int) -> Table:
    rows = [
        (
            Text(plain(job.job), style="bold" if job.severity else ""),
            Text(f"{job.gpus:,} on {job.nodes:,}"),
            Text(f"{job.waiting_share:.0%}" if job.HasField("waiting_share") else "-"),
            Text(f"{job.step_time_s:.2f} s" if job.HasField("step_time_s") else "-"),
            Text(f"{job.mfu_ratio:.0%}" if job.HasField("mfu_ratio") else "-"),
            Text(hurt_words(job, facts.status), style="" if job.severity else "dim"),
        )
        for job in found
    ]
    return _table(f"Jobs: {len(facts.jobs)}", ("JOB", "GPUS", "WAITS", "STEP", "MFU", "WHAT"), rows, width)


def hurt_words(job: pb.JobRow, status: pb.Status) -> str:
    """Return what hurts a job. Before anything is judged nothing found does not mean that nothing does."""
    return plain(job.hurt) or ("not hurt" if status.newest_tick_ms else "not known")


def _nodes(found: Sequence[pb.NodeRow], width: int) -> Table:
    rows = []
    for node in found:
        gpus = Text()
        for word in node.gpu_health:
            state = Health(word) if word in tuple(Health) else Health.UNKNOWN
            gpus.append(health_sign(state), style=health_style(state))
        rows.append((Text(node.name), Text(node.rack), gpus, Text(node.health), Text(plain(node.reason) or "-")))
    return _table("Nodes that are not healthy", ("NODE", "RACK", "GPUS", "HEALTH", "WHAT"), rows, width)
