"""`drover node NAME`: one node and its GPUs side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict

from drover_cli import client
from drover_cli.output import ago, message_json, plain, print_json, print_table, say
from drover_core.metrics.catalog import BY_NAME, describe
from drover_core.model import gpu_processes
from drover_core.model.conditions import Standing
from drover_core.model.events import Health
from drover_core.model.reports import job_label
from drover_core.model.scraped import blind_of, origin_of
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "one node and its GPUs: health, job, utilisation, memory, temperature, power, clock, and why a value is absent"
SHOWN = (
    "gpu_util_ratio", "framebuffer_used_bytes", "gpu_temp_c", "memory_temp_c", "power_w", "sm_clock_mhz",
    "clock_event_reasons",
)  # fmt: skip
HEADERS = ("GPU", "HEALTH", "JOB", "UTIL", "MEMORY", "TEMP", "HBM TEMP", "POWER", "SM CLOCK", "HELD BY", "WHY")
NONE = "-"
OLD_MS = 30_000  # a value older than three ticks of the detectors is not what a GPU does now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("node", metavar="NAME", help="name of the node; `drover nodes` lists them")
    parser.add_argument("--json", action="store_true", help="one JSON object per GPU, with every metric")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        detail = fleet.call(methods.GET_NODE, pb.NodeRequest(node=args.node))
    if args.json:
        for gpu in detail.gpus:
            print_json(_json(detail, gpu))
        return 0
    row, now_ms = detail.row, round(time.time() * 1000)
    place = ", ".join(f"{key} {value}" for key, value in (("rack", row.rack), ("leaf", row.leaf)) if value)
    seen = f"last report {ago(row.last_seen_ms, now_ms)}" if row.last_seen_ms else "never reported"
    say(
        plain(
            f"{row.name}: {row.health}, {seen}{', ' if place else ''}{place}{f': {row.reason}' if row.reason else ''}"
        )
    )
    if row.maintenance:
        say(plain(row.maintenance))
    if origin := origin_of(detail.inventory, row.agent_version):
        say(plain(origin))
        for detector, text in blind_of(detail.inventory).items():
            say(plain(f"  blind: {detector}: {text}"))
    for found in detail.conditions:
        why = ": ".join(part for part in (found.reason, found.message) if part)
        judged = "" if found.standing != Standing.SHOWN else " (not judged)"
        say(plain(f"Kubernetes condition {found.type}={found.status}{judged}{f': {why}' if why else ''}"))
    if not detail.gpus:
        why = detail.inventory.get("no_gpu_reason", "")
        print(plain(f"no GPU: {why}") if why else "no GPU is known on this node")
        return 0
    rows = [_row(gpu, now_ms) for gpu in detail.gpus]
    print_table(HEADERS, rows, right=frozenset({0, 3, 4, 5, 6, 7, 8}))
    held = [line for gpu in detail.gpus for line in _processes(gpu.gpu, detail.inventory, now_ms)]
    if held:
        print_table(("GPU", "PID", "USER", "PROCESS", "SINCE"), held, right=frozenset({0, 1}))
    return 0


def _processes(slot: int, inventory: Mapping[str, str], now_ms: int) -> list[list[object]]:
    """A row for each process that holds the GPU, as far as its agent lists them and the caller may see them."""
    found = gpu_processes.unpack(inventory.get(gpu_processes.key(slot), ""))
    if found is None:
        return []
    listed, total = found
    rows: list[list[object]] = [
        [
            slot, process.pid, plain(process.user) or f"uid {process.uid}", plain(process.name),
            ago(process.since_ms, now_ms) if process.since_ms else NONE,
        ]
        for process in listed
    ]  # fmt: skip
    return rows + ([[slot, NONE, NONE, f"and {total - len(listed)} more", NONE]] if total > len(listed) else [])


def _row(gpu: pb.GpuDetail, now_ms: int) -> list[object]:
    values = {value.metric: value for value in gpu.values}
    why = [gpu.reason] if gpu.health != Health.HEALTHY and gpu.reason else []
    absent: dict[str, list[str]] = {}  # metrics by reason
    for name in SHOWN:
        found = values.get(name)
        if found is None or not found.present:
            absent.setdefault((found.reason if found else "") or "not reported", []).append(BY_NAME[name].label)
        elif now_ms - found.ts_ms > OLD_MS:
            absent.setdefault(f"from {ago(found.ts_ms, now_ms)}", []).append(BY_NAME[name].label)
    why += [f"{'all' if len(names) == len(SHOWN) else ', '.join(names)}: {reason}" for reason, names in absent.items()]
    util, memory, temp, hbm, power, clock, held = (_text(values, name) for name in SHOWN)
    return [
        gpu.gpu, gpu.health, job_label(gpu.job) if gpu.job else NONE, util,
        _of(values, memory, "framebuffer_total_bytes"), temp, hbm, _of(values, power, "power_limit_w"), clock, held,
        "; ".join(why) or NONE,
    ]  # fmt: skip


def _text(values: Mapping[str, pb.Value], name: str) -> str:
    found = values.get(name)
    return describe(BY_NAME[name], found.value) if found is not None and found.present else NONE


def _of(values: Mapping[str, pb.Value], text: str, limit: str) -> str:
    """`62.1 GB of 85.9 GB`; only the value where its limit is not known."""
    most = _text(values, limit)
    return text if text == NONE or most == NONE else f"{text} of {most}"


def _json(detail: pb.NodeDetail, gpu: pb.GpuDetail) -> dict[str, object]:
    """`processes` is null where they are not known."""
    found = message_json(gpu)
    processes = gpu_processes.unpack(detail.inventory.get(gpu_processes.key(gpu.gpu), ""))
    del found["values"]
    return {
        "node": detail.row.name,
        **found,
        "processes": None if processes is None else [asdict(process) for process in processes[0]],
        "values": {value.metric: value.value for value in gpu.values if value.present},
        "times_ms": {value.metric: value.ts_ms for value in gpu.values if value.present},
        "absent": {value.metric: value.reason or "not reported" for value in gpu.values if not value.present},
    }
