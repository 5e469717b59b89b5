"""The lists of `drover top` and the screen of a node, drawn to the size of the terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drover_cli.commands.top_keys import HELP, Look
from drover_cli.commands.top_screen import SEVERITY, health_sign, health_style, hurt_words
from drover_cli.output import ago, cut, duration, plain, where
from drover_core.metrics.catalog import BY_NAME, describe
from drover_core.model.events import SEVERITY_ORDER, Health, Incident
from drover_proto import fleet_pb2 as pb

BAR = 12  # columns of a bar
FULL, EMPTY = "█", "░"
ListRow = pb.NodeRow | Incident | pb.JobRow
OLD_MS = 30_000  # as of `drover node`: older than three ticks of the detectors is not what a GPU does now


@dataclass(slots=True)
class ListFacts:
    """What one look at the collector gave for a list or a node. `of`: which view, and whose; None: any."""

    status: pb.Status
    now_ms: int
    nodes: Sequence[pb.NodeRow] = ()
    incidents: Sequence[Incident] = ()
    jobs: Sequence[pb.JobRow] = ()
    node: pb.NodeDetail | None = None
    total: int = 0
    trouble: str = field(default="")
    of: tuple[str, str] | None = None


def rows(facts: ListFacts, look: Look) -> Sequence[ListRow]:
    """Return the rows of the list, filtered and sorted."""
    wanted = look.contains.casefold()
    if look.view == "nodes":
        return list(facts.nodes)  # the collector has filtered and sorted them: there may be 12,500
    if look.view == "incidents":
        fits = [i for i in facts.incidents if wanted in f"{where(i)} {i.cause} {i.job or ''} {i.summary}".casefold()]
        if look.sorted_by() == "newest":
            return sorted(fits, key=lambda i: -i.since_ms)
        return sorted(fits, key=lambda i: -SEVERITY_ORDER.index(i.severity))
    if look.view == "jobs":
        jobs = [job for job in facts.jobs if wanted in f"{job.job} {job.hurt}".casefold()]
        if look.sorted_by() == "gpus":
            jobs.sort(key=lambda job: -job.gpus)
        return jobs
    return []


def nodes_of(facts: ListFacts, look: Look) -> list[str]:
    """Return the node that Enter opens for each row; "" for none."""
    if look.view == "incidents":
        found = [row for row in rows(facts, look) if isinstance(row, Incident)]
        return [i.node or next((node for node, _ in i.members), "") for i in found]
    if look.view == "nodes":
        return [row.name for row in facts.nodes]
    return [""] * len(rows(facts, look))


def screen(facts: ListFacts, look: Look, width: int, height: int) -> Group:
    """At most `height` lines of `width` columns."""
    status = facts.status
    head = f"{plain(status.fleet or 'fleet')}  {plain(status.mode)}  {look.view} {plain(look.node)}"
    lines: list[RenderableType] = [_line(head, width, "bold")]
    if facts.trouble:
        lines.insert(0, _line(f"OLD {plain(facts.trouble)}", width, "bold white on red"))
    if facts.of not in (None, (look.view, look.node)):  # of the screen before this one: no list of nothing
        lines.append(_line("not known: the collector has not answered this", width))
    elif look.view == "node":
        lines += _node(facts, width)
    else:
        lines += _list(facts, look, width, height - len(lines) - 3)
    foot = f"filter: {plain(look.contains)}{'_' if look.typing else ''}" if look.typing or look.contains else ""
    kept = lines[: max(1, height - 2)]
    whole = [*kept, _line(foot, width, "bold cyan"), _line(HELP, width, "dim")]
    return Group(*whole[: max(1, height)])


def _line(text: str, width: int, style: str = "") -> Text:
    return Text(cut(text, width), style=style, no_wrap=True, overflow="ellipsis")


def _list(facts: ListFacts, look: Look, width: int, room: int) -> list[RenderableType]:
    """A title and the rows around the chosen one."""
    found = rows(facts, look)
    total = facts.total if look.view == "nodes" else len(found)
    title = f"{total:,} {look.view}, by {look.sorted_by()}" + ("" if total == len(found) else f", first {len(found):,}")
    room = max(1, room - 1)
    first = max(0, min(look.at - room // 2, len(found) - room))
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    for head in {
        "nodes": ("NODE", "RACK", "HEALTH", "GPUS", "WHAT"),
        "incidents": ("SEVERITY", "WHERE", "FOR", "WANTS", "WHAT"),
        "jobs": ("JOB", "GPUS", "WAITS", "STEP", "MFU", "WHAT"),
    }.get(look.view, ("WHAT",)):
        made.add_column(
            head, no_wrap=True, overflow="ellipsis", ratio=1 if head == "WHAT" else None, header_style="dim"
        )
    for number, row in enumerate(found[first : first + room], first):
        made.add_row(*_cells(row, facts), style="reverse" if number == look.at else "")
    return [_line(title, width, "bold"), made]


def _cells(row: ListRow, facts: ListFacts) -> list[Text]:
    if isinstance(row, Incident):
        age = duration((facts.now_ms - row.since_ms) / 1000)
        severity = Text(row.severity.upper(), style=SEVERITY[row.severity])
        return [severity, Text(plain(where(row))), Text(age), Text(row.action.value), Text(plain(row.summary))]
    if isinstance(row, pb.JobRow):
        waits = f"{row.waiting_share:.0%}" if row.HasField("waiting_share") else "-"
        step = f"{row.step_time_s:.2f} s" if row.HasField("step_time_s") else "-"
        mfu = f"{row.mfu_ratio:.0%}" if row.HasField("mfu_ratio") else "-"
        gpus = f"{row.gpus:,} on {row.nodes:,}"
        return [Text(plain(row.job)), *map(Text, (gpus, waits, step, mfu)), Text(hurt_words(row, facts.status))]
    health = _health(row.health)
    signs = Text()
    for word in row.gpu_health:
        signs.append(health_sign(_health(word)), style=health_style(_health(word)))
    return [
        Text(plain(row.name)), Text(plain(row.rack)), Text(plain(row.health), style=health_style(health)), signs,
        Text(plain(row.reason) or "-"),
    ]  # fmt: skip


def _health(word: str) -> Health:
    return Health(word) if word in tuple(Health) else Health.UNKNOWN


# ---- a node


def _node(facts: ListFacts, width: int) -> list[RenderableType]:
    """Its GPUs side by side, with bars, as nvitop has them."""
    detail = facts.node
    if detail is None:
        return [_line("nothing is known of this node", width)]
    row = detail.row
    seen = f"last report {ago(row.last_seen_ms, facts.now_ms)}" if row.last_seen_ms else "never reported"
    about = f"{row.health}, {seen}, rack {row.rack or '-'}{f': {row.reason}' if row.reason else ''}"
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    for head in ("GPU", "HEALTH", "UTIL", "MEMORY", "POWER", "TEMP", "CLOCK", "JOB", "WHY"):
        made.add_column(head, no_wrap=True, overflow="ellipsis", ratio=1 if head == "WHY" else None, header_style="dim")
    for gpu in detail.gpus:
        made.add_row(*_gpu(gpu, facts.now_ms))
    return [_line(plain(about), width), made]


def _gpu(gpu: pb.GpuDetail, now_ms: int) -> list[Text]:
    """A value that is absent or old is `-`, with its reason at the end: never a bar of zero."""
    values = {v.metric: v for v in gpu.values if v.present and now_ms - v.ts_ms <= OLD_MS}
    why = [plain(gpu.reason)] if gpu.reason and gpu.health != Health.HEALTHY else []
    lacking = sorted({plain(v.reason) or "not reported" for v in gpu.values if not v.present and v.metric in _BARS})
    if any(v.present and now_ms - v.ts_ms > OLD_MS for v in gpu.values):
        lacking.append("old values")
    health = _health(gpu.health)
    return [
        Text(str(gpu.gpu)), Text(plain(gpu.health), style=health_style(health)),
        _bar(values, "gpu_util_ratio", ""), _bar(values, "framebuffer_used_bytes", "framebuffer_total_bytes"),
        _bar(values, "power_w", "power_limit_w"), *(Text(_text(values, m)) for m in ("gpu_temp_c", "sm_clock_mhz")),
        Text(plain(gpu.job) or "-"), Text("; ".join([*why, *lacking]) or "-"),
    ]  # fmt: skip


_BARS = ("gpu_util_ratio", "framebuffer_used_bytes", "power_w")


def _text(values: dict[str, pb.Value], name: str) -> str:
    found = values.get(name)
    return plain(describe(BY_NAME[name], found.value)) if found is not None else "-"


def _bar(values: dict[str, pb.Value], name: str, limit: str) -> Text:
    """A bar of a share, and the value; without a known limit the value alone."""
    found, most = values.get(name), values.get(limit)
    if found is None:
        return Text("-")
    share = found.value if not limit else found.value / most.value if most is not None and most.value > 0 else math.nan
    text = _text(values, name)
    if not math.isfinite(share):
        return Text(text)
    filled = round(max(0.0, min(1.0, share)) * BAR)
    style = "red" if share >= 0.95 and limit else "green"
    made = Text(FULL * filled, style=style)
    made.append(EMPTY * (BAR - filled), style="dim")
    made.append(f" {text}", style="")
    return made
