"""Run the stages of a validation: ask for their probes, wait for them within a limit, and fetch what they gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drover_cli import client
from drover_cli.errors import CliError, NotFoundError, RefusedError
from drover_cli.validation.judge import OPEN
from drover_cli.validation.model import Answer, Mark, Member, Row
from drover_core.model.events import Health, ProbeOrder, ProbeResult, ProbeVerdict, from_json
from drover_core.model.probe_figures import LEVELS, STORAGE_FIGURES
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

STAGES = ("node", "storage", "network", "training")
PROBES = {"storage": STORAGE_FIGURES, "network": ("pairs_group",), "training": ("fsdp_group", "tp_group")}
POLL_S = 2.0
SCRAPED = "(scraped)"  # in the version of what reports for a node without an agent (drover_core.model.scraped)
SEEN_MS = 120_000  # a node that has sent nothing for this long does not report
GRACE_S = 180.0  # for the last nodes of a group, once another one has ended
LIMIT_FACTOR, LIMIT_EXTRA_S = 2.0, 900.0  # of a stage: its level's own limit, the wait for its turn, and for a job
LEAST_NODES = 2  # of a group
OUT = frozenset({Health.DRAINED, Health.VALIDATING, Health.REPAIR})
FACTS = ("driver_version", "driver", "cuda_version", "kernel", "os", "host.product", "cpu")
GPU_FACTS = ("model", "vbios", "gsp_firmware", "power_limit_set_w")
MARKS = {"pass": Mark.PASSED, "fail": Mark.FAILED}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """`stages`: of STAGES, in that order. `limit_s`: of each stage; 0: what suits it."""

    members: Sequence[Member]
    stages: Sequence[str]
    level: str
    why: str
    limit_s: float = 0.0


def members(fleet: client.FleetClient, names: Sequence[str], *, burn_in: bool, now_ms: int) -> list[Member]:
    """Return the nodes of these names: nodes, or pools.

    Raises:
        NotFoundError: neither a node nor a pool is called so. RefusedError: a node holds a job, does not report, or,
            with `burn_in`, is in service.
    """
    rows = fleet.call(methods.LIST_NODES, pb.ListNodesRequest(limit=1_000_000)).nodes
    by_name = {row.name: row for row in rows}
    chosen: dict[str, pb.NodeRow] = {}
    for name in names:
        found = [by_name[name]] if name in by_name else [row for row in rows if row.pool == name]
        if not found:
            raise NotFoundError(f"no node and no pool is called {name!r}; `drover nodes` lists both")
        chosen |= {row.name: row for row in found}
    held = [row for row in chosen.values() if row.jobs]
    if held:
        jobs = ", ".join(f"{row.name} (job {row.jobs[0]})" for row in held[:5])
        raise RefusedError(f"a job runs on {jobs}: a validation loads its nodes fully; drain them, or name others")
    paged = [row.name for row in chosen.values() if SCRAPED in row.agent_version]
    if paged:
        raise RefusedError(f"{', '.join(paged[:5])}: no agent is there, so nothing can run: its values are exporters'")
    away = [row.name for row in chosen.values() if now_ms - row.last_seen_ms > SEEN_MS]
    if away:
        raise RefusedError(
            f"{', '.join(away[:5])}: no agent reports from there; `drover node {away[0]}` says since when"
        )
    serving = [row.name for row in chosen.values() if row.health not in OUT]
    if burn_in and serving:
        raise RefusedError(
            f"--burn-in is for nodes out of service, and {', '.join(serving[:5])} is in service: drain it"
        )
    return [_member(fleet, row) for row in sorted(chosen.values(), key=lambda row: (row.leaf, row.name))]


def _member(fleet: client.FleetClient, row: pb.NodeRow) -> Member:
    inventory = fleet.call(methods.GET_NODE, pb.NodeRequest(node=row.name)).inventory
    facts = {key: inventory[key] for key in FACTS if inventory.get(key)}
    for key in GPU_FACTS:
        values = {
            value for name, value in sorted(inventory.items()) if name.startswith("gpu") and name.endswith(f".{key}")
        }
        if values - {""}:
            facts[f"gpu.{key}"] = ", ".join(sorted(values - {""}))
    return Member(row.name, row.pool, row.leaf, row.health, row.agent_version, facts)


def run(fleet: client.FleetClient, plan: Plan, say: Say, poll_s: float = POLL_S) -> list[Answer]:
    """Run all stages. Those over several nodes are one order, so that their processes start once.

    Raises:
        CliError: a stage needs two nodes; nothing has run then.
    """
    answers: list[Answer] = []
    together = [stage for stage in ("network", "training") if stage in plan.stages]
    if together and len(plan.members) < LEAST_NODES:
        raise CliError(f"{' and '.join(together)} need two nodes or more; --stages node storage validates one alone")
    for stage in ("node", "storage"):
        if stage in plan.stages:
            say(f"stage {stage}: {len(plan.members)} nodes, level {plan.level}")
            asked = {_ask_one(fleet, member.name, stage, plan): stage for member in plan.members}
            answers += _awaited(fleet, asked, plan, say, poll_s)
    if together:
        say(f"stage {' and '.join(together)}: {len(plan.members)} nodes together, level {plan.level}")
        probes = [name for stage in together for name in PROBES[stage]]
        ask = pb.ProbeAsk(group=[m.name for m in plan.members], level=plan.level, probes=probes, why=plan.why)
        asked = dict.fromkeys(fleet.call(methods.REQUEST_PROBE, ask).ids, together[0])
        answers += _awaited(fleet, asked, plan, say, poll_s)
    return answers


def _ask_one(fleet: client.FleetClient, node: str, stage: str, plan: Plan) -> str:
    ask = pb.ProbeAsk(node=node, level=plan.level, probes=PROBES.get(stage, ()), why=plan.why)
    return fleet.call(methods.REQUEST_PROBE, ask).id


def _awaited(fleet: client.FleetClient, asked: dict[str, str], plan: Plan, say: Say, poll_s: float) -> list[Answer]:
    """Wait until all have ended, or their time is over. A node that does not answer holds up nobody."""
    limit_s = plan.limit_s or LIMIT_FACTOR * LEVELS[plan.level] * max(1, len(asked) // 8) + LIMIT_EXTRA_S
    began, first_end_s, printed = time.monotonic(), 0.0, dict[str, str]()
    while True:
        rows = [_row(fleet, id_) for id_ in asked]
        orders = [from_json(ProbeOrder, row.order_json) for row in rows]
        for order in orders:
            text = f"{order.node}: {order.state} {order.detail}".rstrip()
            if printed.get(order.id) != text:
                printed[order.id] = text
                say(f"  {text}")
        now_s = time.monotonic()
        open_ = [order for order in orders if order.state in OPEN]
        if not open_:
            break
        if orders[0].group and not first_end_s and any(row.results_json for row in rows):
            first_end_s = now_s
        if now_s - began > limit_s or (first_end_s and now_s - first_end_s > GRACE_S):
            say(f"  not waited for any more: {', '.join(order.node for order in open_)}")
            break
        time.sleep(poll_s)
    return [_answer(fleet, row, order, asked[order.id]) for row, order in zip(rows, orders, strict=True)]


def _row(fleet: client.FleetClient, order: str) -> pb.ProbeOrderRow:
    (found,) = fleet.call(methods.LIST_PROBE_ORDERS, pb.ProbeOrdersRequest(id=order)).orders
    return found


def _answer(fleet: client.FleetClient, row: pb.ProbeOrderRow, order: ProbeOrder, stage: str) -> Answer:
    results = [from_json(ProbeResult, text) for text in row.results_json]
    verdicts = [from_json(ProbeVerdict, text) for text in row.verdicts_json]
    ended = any(result.end for result in results)
    rows = [] if order.group else _judged(fleet, order, stage, results)
    return Answer(stage, order, results, verdicts, rows, late=order.state in OPEN and not ended)


def _judged(fleet: client.FleetClient, order: ProbeOrder, stage: str, results: Sequence[ProbeResult]) -> list[Row]:
    """Return each figure as the collector judged it; what it does not judge, as it was measured."""
    found: dict[tuple[str, int | None, int | None], Row] = {}
    devices = {(r.probe, r.gpu, r.peer): r.device for r in results}
    for figure in fleet.call(methods.LIST_PROBES, pb.ProbesRequest(node=order.node)).figures:
        for value in figure.values:
            if value.order != order.id:
                continue
            gpu = value.gpu if value.HasField("gpu") else None
            peer = value.peer if value.HasField("peer") else None
            of = f"{value.expected:.4g}, {figure.nodes} nodes" if value.HasField("expected") else ""
            found[figure.figure, gpu, peer] = Row(
                stage, order.node, _place(gpu, peer), figure.figure, value.value if value.HasField("value") else None,
                figure.unit, of, MARKS.get(value.verdict, Mark.UNKNOWN), value.text,
                devices.get((figure.figure, gpu, peer), ""),
            )  # fmt: skip
    for r in results:
        key = r.probe, r.gpu, r.peer
        if not r.end and key not in found:
            mark = Mark.FAILED if r.ok is False else Mark.UNKNOWN
            text = r.detail or "not judged"
            found[key] = Row(
                stage, order.node, _place(r.gpu, r.peer), r.probe, r.value, r.unit, "", mark, text, r.device
            )
    return list(found.values())


def _place(gpu: int | None, peer: int | None) -> str:
    return "" if gpu is None else f"GPU {gpu}" + ("" if peer is None else f" to {peer}")
