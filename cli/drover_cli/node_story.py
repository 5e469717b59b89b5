"""What happened to a node, and why: its incidents, what was decided, answered, done and proven, in one timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from drover_cli import client
from drover_cli.days import named
from drover_cli.output import plain, print_json, say, when
from drover_core.model.events import Audit, Incident, from_json
from drover_core.model.reports import incident_report
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from drover_proto.incident_timeline import TimelineEntry, build_timeline

DAY_MS = 86_400_000
MOST_DETAILED = 12  # incidents whose whole life is asked for: those that were acted on, then the newest
LISTED = 1000
GPU_ACTS = {"isolate_gpu": "isolate", "return_gpu": "put back"}


@dataclass(frozen=True, slots=True)
class Story:
    row: pb.NodeRow
    duties: tuple[pb.DutyLine, ...]
    incidents: tuple[Incident, ...]
    moments: tuple[tuple[TimelineEntry, str], ...]  # oldest first, each with its incident's id or ""
    gpus: tuple[pb.DutyLine, ...] = ()  # GPUs that are out of service alone


def of_node(fleet: client.FleetClient, node: str, from_ms: int, to_ms: int) -> Story:
    """Of [from_ms, to_ms): what happened then, of incidents that were open then.

    Raises:
        grpc.RpcError: no such node, or no answer.
    """
    asked_of = pb.NodeRequest(node=node, health_from_ms=from_ms, health_to_ms=to_ms)
    detail_of_node = fleet.call(methods.GET_NODE, asked_of)
    row = detail_of_node.row
    reply = fleet.call(
        methods.LIST_INCIDENTS, pb.ListIncidentsRequest(state="all", node=node, since_ms=from_ms, limit=LISTED)
    )
    found = [i for i in (from_json(Incident, text) for text in reply.incidents_json) if i.since_ms < to_ms]
    done = fleet.call(methods.LIST_ACTIONS, pb.ActionsRequest(node=node, limit=LISTED))
    acted = {line.incident_id for line in done.actions}
    moments: list[tuple[TimelineEntry, str]] = []
    detailed = sorted(found, key=lambda i: (i.id not in acted, -i.opened_ms))[:MOST_DETAILED]
    for incident in detailed:
        detail = fleet.call(methods.GET_INCIDENT, pb.IncidentRequest(id=incident.id))
        moments.append(
            (TimelineEntry(incident.since_ms, "incident", f"{incident.summary} [{incident.id}]"), incident.id)
        )
        moments += [(moment, incident.id) for moment in build_timeline(detail)]
    moments += [(_action(line), "") for line in done.actions if line.incident_id not in {i.id for i in detailed}]
    moments += _health(node, _without_repeats(detail_of_node.health))
    asked = pb.AuditRequest(since_ms=from_ms, subject=node, limit=LISTED)
    lines = fleet.call(methods.LIST_AUDIT, asked).audit_json
    moments += [(_audit(from_json(Audit, text)), "") for text in lines]
    once = dict.fromkeys(m for m in moments if from_ms <= m[0].ts_ms < to_ms)  # an act is in the audit of both
    inside = sorted(once, key=lambda m: m[0].ts_ms)
    return Story(row, tuple(done.duties), tuple(found), tuple(inside), tuple(done.gpus))


def _action(line: pb.ActionLine) -> TimelineEntry:
    by = "" if line.by == "drover" else f" by {line.by}"
    why = line.why or line.detail
    act = line.act
    if line.HasField("gpu"):
        act = f"{GPU_ACTS.get(act, act)} GPU {line.gpu} of"
    return TimelineEntry(line.ts_ms, "action", f"{act} {line.node}: {line.state}{by}{f': {why}' if why else ''}")


def _without_repeats(changes: Sequence[pb.HealthMoment]) -> list[pb.HealthMoment]:
    """Without those of GPUs that are as their node is."""
    of_node = {(change.ts_ms, change.health) for change in changes if not change.HasField("gpu")}
    own = ("suspect", "confirmed")
    return [c for c in changes if not c.HasField("gpu") or c.health in own or (c.ts_ms, c.health) not in of_node]


def _health(node: str, changes: Iterable[pb.HealthMoment]) -> list[tuple[TimelineEntry, str]]:
    """A line for all that became the same at the same time: the node and its GPUs."""
    found: dict[tuple[int, str, str, str], list[pb.HealthMoment]] = {}
    for c in changes:
        found.setdefault((c.ts_ms, c.health, c.reason, c.incident_id), []).append(c)
    kept = []
    for (ts_ms, health, reason, incident), mine in found.items():
        gpus = sorted(c.gpu for c in mine if c.HasField("gpu"))
        of_gpus = f" GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}" if gpus else ""
        place = f"{node}{' and' if gpus and len(gpus) < len(mine) else ''}{of_gpus}"
        kept.append((TimelineEntry(ts_ms, "health", f"{place} {health}{f': {reason}' if reason else ''}"), incident))
    return kept


def _audit(line: Audit) -> TimelineEntry:
    return TimelineEntry(line.ts_ms, "person", f"{line.what} by {line.by}{f': {line.why}' if line.why else ''}")


def show(story: Story, from_ms: int, to_ms: int, as_json: bool) -> int:
    """Print it."""
    row = story.row
    if as_json:
        print_json(_json(story))
        return 0
    place = ", ".join(f"{name} {value}" for name, value in (("rack", row.rack), ("leaf", row.leaf)) if value)
    head = f"{plain(place)}; " if place else ""
    say(f"{row.name}: {row.health or 'unknown'}{f', {row.reason}' if row.reason else ''}", 2)
    say(f"  {head}jobs: {', '.join(row.jobs) or 'none'}; last report {when(row.last_seen_ms)}", 2)
    for duty in story.duties:
        stage = "in service" if duty.stage == "healthy" else f"out of service, {duty.stage}"
        say(f"  {stage} since {when(duty.ts_ms)}: {duty.reason}", 2)
    span = named(from_ms) if to_ms - from_ms == DAY_MS else f"{when(from_ms)} to {when(to_ms)}"
    for gpu in story.gpus:
        say(f"  GPU {gpu.gpu} ({gpu.uuid}) out alone, {gpu.stage} since {when(gpu.ts_ms)}: {gpu.reason}", 2)
    print(f"\n{span}")
    for moment, _ in story.moments:
        say(f"  {when(moment.ts_ms)}  {moment.source:<8}  {moment.text}", 6)
    if not story.moments:
        print("  nothing was noted of it then; --day or --since says which time is looked at")
    for line in _open_then(story.incidents):
        print(f"  {line}")
    return 0


def _open_then(incidents: Iterable[Incident]) -> list[str]:
    ids = [incident.id for incident in incidents]
    which = "its incident" if len(ids) == 1 else f"the newest of its {len(ids)} incidents"
    return [f"all about {which} then: drover explain {ids[0]}"] if ids else []


def _json(story: Story) -> dict[str, Any]:
    return {
        "node": story.row.name,
        "health": story.row.health,
        "reason": story.row.reason,
        "duties": [
            {
                "stage": d.stage,
                "since": when(d.ts_ms),
                "since_ms": d.ts_ms,
                "reason": d.reason,
                "by": d.by,
                "waits_for": d.waits_for or None,
            }
            for d in story.duties
        ],
        "gpus": [
            {
                "gpu": d.gpu,
                "uuid": d.uuid,
                "stage": d.stage,
                "since": when(d.ts_ms),
                "since_ms": d.ts_ms,
                "reason": d.reason,
                "by": d.by,
                "waits_for": d.waits_for or None,
            }
            for d in story.gpus
        ],
        "life": [
            {"ts": when(m.ts_ms), "ts_ms": m.ts_ms, "source": m.source, "text": m.text, "incident": incident or None}
            for m, incident in story.moments
        ],
        "incidents": [incident_report(incident) for incident in story.incidents],
    }


def is_unknown(error: grpc.RpcError) -> bool:
    """Return True if the collector says that there is no such thing; False if it does not answer."""
    return error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
