"""`drover job [ID]`: jobs, hurt ones first; or one of them: whether it is healthy, what it lost, and whose fault."""

from __future__ import annotations

import argparse
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.output import duration, incident_json, message_json, plain, print_json, print_table, say, when
from drover_core.metrics.catalog import BY_NAME, describe
from drover_core.model.collector_roles import why_unjudged
from drover_core.model.events import Incident, from_json
from drover_core.model.reports import gpu_hours, job_label
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "jobs, hurt ones first; of one: whether it is healthy, what it lost and by whose fault, its GPUs"
SHOWN = 12  # GPUs of a job: those in trouble first, then as the collector has them, the farthest from the median first
METRICS = ("sm_clock_mhz", "power_w", "gpu_temp_c", "gpu_util_ratio")
NONE, UNKNOWN = "-", "unknown"
UNNAMED = "whether an incident names it is not known"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("job", nargs="?", default="", metavar="ID", help="one job in full")
    parser.add_argument("--ended", action="store_true", help="those too that ended in the last 24 h")
    parser.add_argument("--limit", type=count, default=200, help="at most so many (default 200)")
    parser.add_argument("--json", action="store_true", help="one JSON object per job")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        if args.job:
            detail = fleet.call(methods.GET_JOB, pb.JobRequest(job=args.job, loss=True))
            status = fleet.call(methods.GET_STATUS, pb.StatusRequest())
            unjudged = f"{why_unjudged(status.role)}: {UNNAMED}"
            return _one(detail, args, "no open incident names it" if status.newest_tick_ms else unjudged)
        reply = fleet.call(methods.LIST_JOBS, pb.ListJobsRequest(ended=args.ended, limit=args.limit))
    if args.json:
        for row in reply.jobs:
            print_json(message_json(row))
        return 0
    if not reply.jobs:
        print("no job holds a GPU" if not args.ended else "no job holds a GPU, and none ended in the last 24 h")
        return 0
    owned = any(row.owner.text for row in reply.jobs)
    print_table(
        [
            "JOB", "GPUS", "NODES", "SINCE", "WAITS", "GPU-H WAITED", "STEP", "MFU",
            *(["TEAM", "USER"] if owned else []), "WHAT HURTS IT",
        ],
        [_line(row, owned) for row in reply.jobs],
        right=frozenset({1, 2, 4, 5, 6, 7}),
    )  # fmt: skip
    if reply.total > len(reply.jobs):
        print(f"{len(reply.jobs)} of {reply.total} shown; --limit shows more")
    return 0


def _line(row: pb.JobRow, owned: bool) -> list[object]:
    hurt = _died(row) or row.hurt or (f"ended {when(row.ended_ms)}" if row.HasField("ended_ms") else NONE)
    owner = [plain(row.owner.team) or UNKNOWN, plain(row.owner.user) or UNKNOWN] if owned else []
    return [
        row.job, row.gpus, row.nodes, when(row.since_ms), _optional(row, "waiting_share", "{:.0%}"),
        _optional(row, "gpu_hours_waited", "{:,.1f}"), _optional(row, "step_time_s", "{:.2f} s"),
        _optional(row, "mfu_ratio", "{:.0%}"), *owner, hurt,
    ]  # fmt: skip


def _owner(row: pb.JobRow) -> str:
    if not row.owner.text:
        return "owner unknown"
    said = " (said by its processes' environment)" if row.owner.said_by == "environment" else ""
    return plain(f"owner: {row.owner.text}{said}")


def _died(row: pb.JobRow) -> str:
    if not row.HasField("died"):
        return ""
    again = f", restarted as {row.died.restarted_as}" if row.died.restarted_as else ""
    return plain(f"died {when(row.ended_ms)} with {row.died.cause} on {row.died.node or 'its nodes'}{again}")


def _optional(row: Any, name: str, form: str) -> str:
    return form.format(getattr(row, name)) if row.HasField(name) else NONE


def _one(detail: pb.JobDetail, args: argparse.Namespace, unhurt: str) -> int:
    """`unhurt`: what it means that no incident names it."""
    row = detail.row
    incidents = [from_json(Incident, text) for text in detail.incidents_json]
    values = {each.metric: _floats(each.values) for each in detail.metrics}
    if args.json:
        print_json(_detail_json(detail, incidents, values))
        return 0
    if detail.sentence:
        say(detail.sentence, 2)
    until = f", ended {when(row.ended_ms)}" if row.HasField("ended_ms") else ""
    print(f"{plain(job_label(row.job))}: {row.gpus} GPUs on {row.nodes} nodes since {when(row.since_ms)}{until}")
    say(f"  {_owner(row)}", 2)
    if detail.parallel:
        say(f"  ranks: {plain(detail.parallel)}", 2)
    say(f"  {_died(row) or row.hurt or unhurt}", 2)
    say(
        f"  waits {_optional(row, 'waiting_share', '{:.0%}')} of the time for its slowest",
        2,
    )
    for work in detail.workloads:
        step, mfu = _optional(work, "step_time_s", "{:.2f} s"), _optional(work, "mfu_ratio", "{:.0%}")
        tokens = _optional(work, "tokens_per_s", "{:,.0f}")
        print(f"  {plain(work.name)} on {work.nodes} nodes: step {step}, MFU {mfu}, tokens/s {tokens}")
    _show_loss(detail.loss)
    now_ms = round(time.time() * 1000)
    for incident in incidents:
        state = "closed" if incident.closed_ms else "open"
        lasted = duration(((incident.closed_ms or now_ms) - incident.since_ms) / 1000)
        say(f"  {incident.id} {incident.severity}, {state}, {lasted}: {incident.summary}", 4)
    _show_gpus(detail, values)
    for text in detail.absent:
        say(f"not known: {text}", 2)
    return 0


def _show_gpus(detail: pb.JobDetail, values: Mapping[str, Sequence[float]]) -> None:
    """Print the GPUs in trouble, then others. `values`: metric -> value of each GPU of the detail."""
    places = [(gpu.node, gpu.gpu) for gpu in detail.gpus]
    shown = [name for name in METRICS if name in values]
    order = sorted(range(len(places)), key=lambda at: not detail.gpus[at].incident)[:SHOWN]
    if order:
        print_table(
            [
                "GPU", "HEALTH", *(["PLACE"] if detail.parallel else []), *(BY_NAME[name].label for name in shown),
                "INCIDENT",
            ],
            [
                [
                    f"{places[at][0]} GPU {places[at][1]}", detail.gpus[at].health,
                    *([plain(detail.gpus[at].place) or NONE] if detail.parallel else []),
                    *(_value(name, values[name][at]) for name in shown), detail.gpus[at].incident or NONE,
                ]
                for at in order
            ],
        )  # fmt: skip
        medians = {each.metric: each.median for each in detail.metrics if each.HasField("median")}
        usual = ", ".join(f"{BY_NAME[name].label} {_value(name, medians[name])}" for name in shown if name in medians)
        say(f"{len(order)} of {detail.row.gpus} GPUs shown; medians of all: {usual or 'none known'}")


def _detail_json(
    detail: pb.JobDetail, incidents: Sequence[Incident], values: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """`values`: metric -> value of each GPU of the detail."""
    gpus = [
        {
            "node": gpu.node, "gpu": gpu.gpu, "health": gpu.health, "incident": gpu.incident or None,
            "place": gpu.place or None,
            "values": {name: found[at] for name, found in values.items() if math.isfinite(found[at])},
        }
        for at, gpu in enumerate(detail.gpus)
    ]  # fmt: skip
    return {
        **message_json(detail.row), "sentence": detail.sentence or None, "parallel": detail.parallel or None,
        "loss": _loss_json(detail.loss) if detail.HasField("loss") else None, "gpus_shown": gpus,
        "medians": {each.metric: each.median for each in detail.metrics if each.HasField("median")},
        "incidents": [incident_json(incident) for incident in incidents], "absent": list(detail.absent),
    }  # fmt: skip


def _show_loss(loss: pb.JobLoss) -> None:
    """Print what it lost by whose fault it is; the rows add up to all of it."""
    if loss.lost_ms:
        print(f"  lost since {when(loss.from_ms)}:")
        rows = [
            [
                f"  {part.blame}", part.where or NONE, gpu_hours(part.ms), f"{part.ms / loss.lost_ms:.0%}",
                part.incident or NONE, part.cause.replace("_", " ") or part.summary,
            ]
            for part in loss.parts
        ]  # fmt: skip
        print_table(["  BLAME", "WHERE", "GPU-H", "SHARE", "INCIDENT", "CAUSE"], rows, right=frozenset({2, 3}))
    for move in loss.moves:
        kept = f"; {gpu_hours(move.kept_ms)} GPU-hours not repeated" if move.HasField("kept_ms") else ""
        say(f"  {when(move.asked_ms)}, before {move.node} went out: {move.text}{kept}", 4)
    for text in loss.doubts:
        say(f"  not known: {text}", 4)


def _loss_json(loss: pb.JobLoss) -> dict[str, Any]:
    return {
        **message_json(loss), "shares": message_json(loss.shares),
        "parts": [message_json(each) for each in loss.parts], "phases": [message_json(each) for each in loss.phases],
        "moves": [message_json(each) for each in loss.moves],
    }  # fmt: skip


def _floats(packed: bytes) -> list[float]:
    """float32, little-endian; the machines that this runs on are."""
    values = array("f")
    values.frombytes(packed)
    return values.tolist()


def _value(metric: str, value: float) -> str:
    return plain(describe(BY_NAME[metric], value)) if math.isfinite(value) else "absent"
