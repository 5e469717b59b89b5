"""`drover status`: the numbers that matter, now."""

from __future__ import annotations

import argparse
import time
from typing import Any

from google.protobuf.json_format import MessageToDict

from drover_cli import client
from drover_cli.output import ago, duration, plain, print_json, say, size_text
from drover_core.model.collector_roles import why_unjudged
from drover_core.model.events import SEVERITY_ORDER
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

ENOUGH_DAYS = 36_500  # what the collector reports when the disk holds all that is kept
INDENT = 16
SHOWN_TABLES = 5  # the largest; all of them would scroll what matters off the screen
ROLES = {
    "active": "active: detects and notifies",
    "standby": "standby: takes in and answers; another collector detects",
    "ingest": "ingest: takes in and answers, never detects",
}
HELP = "health of the fleet and of Drover itself in one screen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        status = fleet.call(methods.GET_STATUS, pb.StatusRequest())
    if args.json:
        print_json(as_json(status))
        return 0
    now = round(time.time() * 1000)
    health = ", ".join(f"{n} {name}" for name, n in sorted(status.gpus_by_health.items()) if n) or "none known"
    by_severity = status.open_incidents_by_severity
    none = "none" if status.newest_tick_ms else f"not known: {why_unjudged(status.role)}"
    incidents = ", ".join(f"{by_severity[s]} {s}" for s in reversed(SEVERITY_ORDER) if by_severity[s]) or none
    mode = "observe (decides and notifies, touches nothing)" if status.mode == "observe" else status.mode
    waiting = f"{status.pending} decision{'s' * (status.pending != 1)}"
    lines = {
        "fleet": plain(status.fleet or "unnamed"),
        "nodes": f"{status.nodes_reporting} of {status.nodes_expected} reporting",
        "GPUs": f"{status.gpus_expected}: {health}",
        "open incidents": incidents,
        **({"wait for you": f"{waiting}: drover decisions"} if status.pending else {}),
        "lost": f"{status.gpu_hours_lost:.1f} GPU-hours to faults, {status.gpu_hours_waited:.1f} waited (24 h)",
        "newest sample": ago(status.newest_sample_ms, now),
        "last detection": _detection(status, now),
        "jobs hurt": f"{status.jobs_hurt} by open incidents" if status.jobs_hurt or status.newest_tick_ms else none,
        "samples": f"{status.samples_stored:,} stored, {status.samples_per_s:,.0f}/s, "
        f"{status.batches_rejected} batches rejected",
        "store": _store(status),
        "policy": f"{status.policy}, {mode}",
        "role": ROLES.get(status.role, plain(status.role) or "not reported"),
    }
    for name, text in lines.items():
        say(f"{name:<15} {text}", INDENT)
    for table in status.tables[:SHOWN_TABLES]:
        over = f" over {duration((table.newest_ms - table.oldest_ms) / 1000)}" if table.oldest_ms else ""
        print(f"  {table.name:<20} {size_text(table.bytes):>10}, {table.rows:,} rows{over}")
    rest = status.tables[SHOWN_TABLES:]
    if rest:
        print(f"  {len(rest)} smaller tables {size_text(sum(table.bytes for table in rest)):>13}; --json has each")
    for node in status.unknown_nodes:
        say(f"unknown node    {node} reports but is not in fleet.toml: add it there or stop its agent", INDENT)
    for trouble in status.troubles:
        say(f"trouble         {trouble}", INDENT)
    return 0


def as_json(status: pb.Status) -> dict[str, Any]:
    """As JSON, with numbers as numbers: protobuf writes those of 64 bits as strings."""
    found: dict[str, Any] = MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for name, value in found.items():
        if isinstance(value, str) and name.endswith(("_ms", "_stored", "_rejected", "_bytes")):
            found[name] = int(value)
    for table in found["tables"]:
        table.update({name: int(value) for name, value in table.items() if name != "name"})
    return found


def _detection(status: pb.Status, now_ms: int) -> str:
    if status.newest_tick_ms:
        return f"{ago(status.newest_tick_ms, now_ms)}, took {status.detector_seconds:.2f} s"
    return "not by this collector" if status.role in ("standby", "ingest") else "never"


def _store(status: pb.Status) -> str:
    """Bytes and days: what is held, what is kept, what is free and for how long that will do."""
    spans = [(t.oldest_ms, t.newest_ms) for t in status.tables if t.name.endswith("_samples") and t.oldest_ms]
    held = ""
    if spans:
        held = f" of {duration((max(newest for _, newest in spans) - min(oldest for oldest, _ in spans)) / 1000)},"
    text = f"{size_text(status.store_bytes)} on disk; samples{held} kept {status.retention_days} days"
    if not status.HasField("store_free_bytes"):
        return text  # a server's disk: not known here
    text += f"; {size_text(status.store_free_bytes)} free, "
    if not status.HasField("store_days_left"):
        return text + "too little data yet to say for how long"
    if status.store_days_left >= ENOUGH_DAYS:
        return text + "enough for all that is kept"
    return text + f"at this rate the oldest samples go for room in {duration(status.store_days_left * 86_400)}"
