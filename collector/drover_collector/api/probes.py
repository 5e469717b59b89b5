"""Probes as people see them: results held against the fleet, one GPU's history, orders, and asking for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import grpc
import numpy as np

from drover_collector.api.snapshot import (
    DAY_MS,
    ApiSnapshot,
    RefusalError,
    bad_argument,
    not_found,
)
from drover_collector.probes.judging.drift import drift
from drover_collector.probes.judging.groups import part
from drover_collector.probes.judging.judgement import BUDGET, judge
from drover_collector.probes.judging.measurements import Group, Judgement, Measurement, Verdict
from drover_collector.probes.judging.rows import measurement
from drover_collector.probes.scheduling.planner import fabric_rounds
from drover_collector.probes.service import ProbeOrderService
from drover_collector.store import ProbeRow
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import (
    Audit,
    ProbeReason,
    ProbeVerdict,
    to_json,
)
from drover_core.model.probe_figures import FIGURES, LEVELS, VALIDATION_FIGURES, Better
from drover_proto import fleet_pb2 as pb

KEPT_S = 15.0  # a judgement of the fleet is shared by all who look
NODES = 512  # of the fleet's distribution, those probed last
PEER_NODES = 32  # the same next to all figures of one node, which are many
HISTORY = 64
MOST_HISTORY = 1000
ORDERS = 100
MOST_GROUPS = 500  # asked for at once
MOST_ORDERS = 1000
WHY_CHARS = 500
JUDGED = sum(f.better in (Better.HIGHER, Better.LOWER) and f.name not in VALIDATION_FIGURES for f in FIGURES.values())
ORDERS_MS = 90 * DAY_MS


def list_probes(facts: ApiSnapshot, request: pb.ProbesRequest) -> pb.ProbeList:
    if not request.figure and not request.node:
        raise bad_argument("give a figure, a node, or both")
    if request.figure and request.figure not in FIGURES:
        raise bad_argument(f"no figure is called {request.figure[:80]!r}; there are {', '.join(FIGURES)}")
    if request.node:
        facts.node_number(request.node)
    if request.figure:
        rows = facts.once(("probes", request.figure), KEPT_S, lambda: _newest(facts, [request.figure], "", NODES))
    else:
        rows = _with_peers(facts, request.node)
    return pb.ProbeList(figures=_figures(rows, request.node))


def _newest(
    facts: ApiSnapshot, figures: Sequence[str], node: str, nodes: int, sku: str | None = None
) -> list[ProbeRow]:
    return facts.store.probes.results.newest(figures, sku=sku, node=node, nodes=nodes, now_ms=facts.now_ms())


def _with_peers(facts: ApiSnapshot, node: str) -> list[ProbeRow]:
    """All of a node's figures, with those of other nodes of its boards."""
    own = _newest(facts, [], node, 0)
    others: list[ProbeRow] = []
    for sku in sorted({row.key.sku for row in own}):
        fleet = facts.once(("probes of", sku), KEPT_S, lambda sku=sku: _newest(facts, [], "", PEER_NODES, sku))  # type: ignore[misc]  # bound now
        others += [row for row in fleet if row.result.node != node]
    return [*own, *others]


def _figures(rows: Iterable[ProbeRow], node: str) -> list[pb.ProbeFigure]:
    """A figure and board each. `node`: values of it alone, and only where it has some."""
    of: dict[tuple[str, str], list[tuple[Measurement, ProbeRow]]] = defaultdict(list)
    for row in rows:
        if (m := measurement(row)) is not None:
            of[m.probe, m.key.sku].append((m, row))
    order = list(FIGURES)
    found = []
    for (figure, sku), pairs in sorted(of.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        if node and not any(m.node == node for m, _ in pairs):
            continue
        # As strict as an order for all figures, so that none is called bad here that it would have passed.
        judged = _newest_of_each(judge((m for m, _ in pairs), BUDGET / JUDGED))
        found.append(_figure(figure, sku, judged, {_place(m): row for m, row in pairs}, node))
    return found


def _newest_of_each(judged: Judgement) -> Judgement:
    """Of what was measured briefly and at length the later one: both count in the judgement, and one is shown."""

    def place(v: Verdict) -> object:
        return v.measurement.node, v.measurement.gpu, v.measurement.peer

    last: dict[object, int] = {}
    for v in judged.verdicts:
        last[place(v)] = max(v.measurement.ts_ms, last.get(place(v), 0))
    kept = [v for v in judged.verdicts if v.measurement.ts_ms == last[place(v)]]
    return replace(judged, verdicts=tuple(kept))


def _figure(figure: str, sku: str, judged: Judgement, rows: dict[object, ProbeRow], node: str) -> pb.ProbeFigure:
    described = FIGURES[figure]
    centres = {group.key: group for group in judged.groups}
    values = [
        _value(v, centres.get(_part(v.measurement.key, figure)), rows[_place(v.measurement)])
        for v in judged.verdicts
        if not node or v.measurement.node == node
    ]
    known = [v.measurement.value for v in judged.verdicts if v.measurement.value is not None]
    return pb.ProbeFigure(
        figure=figure, unit=described.unit, better=described.better.value, sku=sku, values=values,
        groups=[_group(group) for group in judged.groups], notes=[note.text for note in judged.notes],
        fleet=np.sort(np.array(known, "<f4")).tobytes(), nodes=len({v.measurement.node for v in judged.verdicts}),
    )  # fmt: skip


def _value(verdict: Verdict, group: Group | None, row: ProbeRow) -> pb.ProbeValue:
    m = verdict.measurement
    word = "pass" if verdict.ok else "fail" if verdict.ok is False else "doubtful" if verdict.suspicious else "unknown"
    return pb.ProbeValue(
        node=m.node, gpu=m.gpu, peer=m.peer, value=m.value, verdict=word, text=verdict.text, ts_ms=m.ts_ms,
        expected=group.centre if group is not None else None, worse=verdict.worse, detectable=verdict.detectable,
        spread=m.spread, order=row.result.request, level=row.result.level,
    )  # fmt: skip


def _group(group: Group) -> pb.ProbeGroup:
    return pb.ProbeGroup(
        configuration=configuration(group.key), size=group.size, centre=group.centre, spread=group.spread,
        detectable=group.detectable,
    )  # fmt: skip


def configuration(key: Key) -> str:
    """ "driver 570.1, 700 W, ECC on": what is known of it, and matters to the figure."""
    parts = [
        key.sku,
        f"driver {key.driver}" if key.driver else "",
        f"{key.power_limit_w:g} W" if key.power_limit_w is not None else "",
        "" if key.ecc is None else f"ECC {'on' if key.ecc else 'off'}",
        f"PCIe {key.pcie_gen} x{key.pcie_width}" if key.pcie_gen is not None and key.pcie_width is not None else "",
        f"{key.nvlinks} NVLinks" if key.nvlinks is not None else "",
        "MIG" if key.mig else "",
        key.host,
        {"long": "measured at length"}.get(key.form, key.form),
    ]
    return ", ".join(text for text in parts if text) or "nothing is known of it"


def _part(key: Key, figure: str) -> Key:
    """What of it matters to the figure; all of it where one answer is right whatever the configuration."""
    return part(key, figure) if FIGURES[figure].better in (Better.HIGHER, Better.LOWER) else key


def _place(m: Measurement) -> object:
    return m.node, m.gpu, m.peer, m.probe, m.key.form


def probe_history(facts: ApiSnapshot, request: pb.ProbeHistoryRequest) -> pb.ProbeHistoryReply:
    facts.node_number(request.node)
    if request.figure not in FIGURES:
        raise bad_argument(f"no figure is called {request.figure[:80]!r}; there are {', '.join(FIGURES)}")
    gpu = request.gpu if request.HasField("gpu") else None
    peer = request.peer if request.HasField("peer") else None
    rows = facts.store.probes.results.history(
        request.node, gpu, request.figure, peer, min(request.limit or HISTORY, MOST_HISTORY)
    )
    measured = [m for row in rows if (m := measurement(row)) is not None]
    points = [
        pb.ProbePoint(
            ts_ms=m.ts_ms, value=m.value, spread=m.spread, order=row.result.request, level=row.result.level,
            configuration=configuration(_part(m.key, m.probe)),
        )
        for m, row in ((measurement(row), row) for row in reversed(rows))
        if m is not None
    ]  # fmt: skip
    reply = pb.ProbeHistoryReply(figure=request.figure, unit=FIGURES[request.figure].unit, points=points)
    if FIGURES[request.figure].better in (Better.HIGHER, Better.LOWER):
        seen = drift(measured)
        reply.drift = seen.text
        if seen.ok is not None:
            reply.steady = seen.ok
        if seen.since_ms is not None:
            reply.since_ms = seen.since_ms
    return reply


def list_orders(facts: ApiSnapshot, request: pb.ProbeOrdersRequest) -> pb.ProbeOrderList:
    if request.node:
        facts.node_number(request.node)
    if request.id:
        return pb.ProbeOrderList(orders=[_one_order(facts, request.id)])
    limit = min(request.limit or ORDERS, MOST_ORDERS)
    since_ms = request.since_ms or facts.now_ms() - ORDERS_MS
    orders = facts.store.probes.orders.newest(request.node or None, since_ms, limit)
    verdicts: dict[str, list[ProbeVerdict]] = defaultdict(list)
    if orders:
        for verdict in facts.store.probes.verdicts.read(request.node or None, from_ms=since_ms):
            verdicts[verdict.request].append(verdict)
    return pb.ProbeOrderList(
        orders=[
            pb.ProbeOrderRow(order_json=to_json(order), verdicts_json=_sorted(verdicts[order.id])) for order in orders
        ]
    )


def _one_order(facts: ApiSnapshot, id_: str) -> pb.ProbeOrderRow:
    versions = facts.store.probes.orders.versions(id_)
    if not versions:
        raise not_found(f"no order {id_[:100]!r}; `drover probe --list` lists them")
    return pb.ProbeOrderRow(
        order_json=to_json(versions[-1]), asked_ms=versions[0].ts_ms,
        verdicts_json=_sorted(facts.store.probes.verdicts.read(request=id_)),
        results_json=[to_json(row.result) for row in facts.store.probes.results.of_order(id_)],
    )  # fmt: skip


def _sorted(verdicts: Iterable[ProbeVerdict]) -> list[str]:
    """The node's first, then its GPUs'."""
    return [to_json(v) for v in sorted(verdicts, key=lambda v: -1 if v.gpu is None else v.gpu)]


def request_probe(facts: ApiSnapshot, request: pb.ProbeAsk, by: str) -> pb.ProbeAsked:
    """`by`: who asks, as the certificate names them."""
    if facts.parts.probes is None:
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION, "this collector asks for no probes: ask the active one (drover status)"
        )
    level = request.level or "quick"
    if level not in LEVELS:
        raise bad_argument(f"no level is called {level[:80]!r}; there are {', '.join(LEVELS)}")
    try:
        if request.group or request.fabric:
            asked = _ask_groups(facts, facts.parts.probes, request, level, by)
        else:
            facts.node_number(request.node)
            asked = [facts.parts.probes.orders.ask(
                request.node, ProbeReason.PERSON, gpus=request.gpus, level=level, probes=request.probes, by=by
            )]  # fmt: skip
    except ValueError as error:
        raise bad_argument(str(error)) from None
    now_ms, why = facts.now_ms(), " ".join(request.why.split())[:WHY_CHARS]
    whom = request.node or ", ".join(request.group) or "all nodes"
    orders = f"order {asked[0]}" + (f" and {len(asked) - 1} more" if len(asked) > 1 else "")
    facts.store.audit.write([Audit(f"probe {asked[0]} {now_ms}", now_ms, by, "probe", whom[:WHY_CHARS], why, orders)])
    return pb.ProbeAsked(id=asked[0], ids=asked)


def _ask_groups(facts: ApiSnapshot, desk: ProbeOrderService, request: pb.ProbeAsk, level: str, by: str) -> list[str]:
    """
    Raises:
        ValueError: as `ProbeDesk.ask_group`; no pairs can be made.
    """
    groups = [tuple(request.group)]
    for name in request.group:
        facts.node_number(name)
    if request.fabric:
        groups = [pair for round_ in fabric_rounds(facts.index.spec, request.group or None) for pair in round_]
        if not groups:
            raise ValueError("no pairs: name two nodes or more, of GPUs and leaf switches that fleet.toml has")
        if len(groups) > MOST_GROUPS:
            raise ValueError(f"{len(groups)} pairs are more than {MOST_GROUPS}; name fewer nodes")
    return [
        order
        for group in groups
        for order in desk.orders.ask_group(group, ProbeReason.PERSON, probes=request.probes, level=level, by=by)
    ]
