"""`drover probe NODE...`: ask for micro-benchmarks of nodes; `drover probe --list`: orders and what became of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.errors import CliError
from drover_cli.output import ago, cut, plain, print_json, print_table, when
from drover_core.model.events import (
    ProbeOrder,
    ProbeResult,
    ProbeVerdict,
    from_json,
    to_dict,
)
from drover_core.model.probe_figures import LEVELS
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "ask for probes (micro-benchmarks) of nodes, and show what they gave against the fleet"
_PROTECTED = {
    "drained": "drained", "hand": "in service: gives way to a job that starts there", "none": "no scheduler is known",
}  # fmt: skip
POLL_S = 2.0
OPEN = ("asked", "sent")
MARKS = {"pass": "", "fail": "FAIL", "doubtful": "doubtful", "unknown": "not judged"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("node", nargs="*", help="nodes to probe; with --list: only orders of these")
    parser.add_argument(
        "--gpu", type=_slot, action="append", default=[], metavar="N", help="this slot alone; repeatable"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--group", action="store_true", help="these nodes together: collectives over their network")
    how.add_argument(
        "--fabric", action="store_true",
        help="pairs of these nodes (none named: of all), under each leaf switch and across: names the odd one",
    )  # fmt: skip
    parser.add_argument("--level", choices=list(LEVELS), default="quick", help="how thorough (default quick)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these: docs/reference/probes.md")
    parser.add_argument("--why", default="", help="kept with the order, for the record")
    parser.add_argument("--wait", action="store_true", help="until all have ended, then show the figures")
    parser.add_argument("--list", action="store_true", help="orders of all nodes, those asked for last first")
    parser.add_argument("--limit", type=count, default=50, help="of --list (default 50)")
    parser.add_argument("--json", action="store_true", help="one JSON object per order")


def _slot(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{text!r} is no slot of a GPU, as in --gpu 3")
    return int(text)


def run(args: argparse.Namespace) -> int:
    if args.gpu and (args.group or args.fabric):
        raise CliError("--gpu has no say with --group and --fabric: all GPUs of their nodes take part")
    if not args.list and not args.node and not args.fabric:
        raise CliError("name the nodes to probe, or --list to see orders")
    with client.connect(args) as fleet:
        if args.list:
            return _list(fleet, args)
        asked = _ask(fleet, args)
        rows = _await(fleet, asked) if args.wait else [_row(fleet, id_) for id_ in asked]
        if args.json:
            for row in rows:
                print_json(_report(row))
        elif args.wait:
            for row in rows:
                _show(fleet, row)
        else:
            print_table(["ORDER", "NODE", "STATE"], [[o.id, o.node, o.state] for o in map(_order, rows)])
            print("`drover probe --list` shows what becomes of them; --wait waits for it")
    return int(args.wait and not all(map(_passed, rows)))


def _ask(fleet: client.FleetClient, args: argparse.Namespace) -> list[str]:
    """Ids of the orders."""
    names = [name for word in args.only for name in word.split(",") if name]
    ask = pb.ProbeAsk(gpus=args.gpu, level=args.level, probes=names, why=args.why)
    if args.group or args.fabric:
        ask.group.extend(dict.fromkeys(args.node))
        ask.fabric = args.fabric
        return list(fleet.call(methods.REQUEST_PROBE, ask).ids)
    asked = []
    for node in dict.fromkeys(args.node):
        ask.node = node
        asked.append(fleet.call(methods.REQUEST_PROBE, ask).id)
    return asked


def _await(fleet: client.FleetClient, asked: Sequence[str]) -> list[pb.ProbeOrderRow]:
    """All when they have ended; each change is printed on stderr."""
    printed: dict[str, str] = {}
    while True:
        rows = [_row(fleet, id_) for id_ in asked]
        for row in rows:
            order = _order(row)
            if printed.get(order.id) != (text := _state(order)):
                printed[order.id] = text
                _say(f"{order.node}: {text}")
        if all(_order(row).state not in OPEN for row in rows):
            return rows
        time.sleep(POLL_S)


def _list(fleet: client.FleetClient, args: argparse.Namespace) -> int:
    nodes = list(dict.fromkeys(args.node)) or [""]
    rows = [
        row
        for node in nodes
        for row in fleet.call(methods.LIST_PROBE_ORDERS, pb.ProbeOrdersRequest(node=node, limit=args.limit)).orders
    ]
    if args.json:
        for row in rows:
            print_json(_report(row))
        return 0
    if not rows:
        print("no orders" + (f" of {', '.join(nodes)}" if args.node else ""))
        return 0
    now_ms = round(time.time() * 1000)
    lines = []
    for row in rows:
        o = _order(row)
        what = ",".join(o.probes) or o.level
        lines.append([o.id, o.node, what, o.why.value, o.by, ago(o.ts_ms, now_ms), o.state, _outcome(row)])
    print_table(["ORDER", "NODE", "WHAT", "WHY", "BY", "CHANGED", "STATE", "OUTCOME"], lines)
    return 0


def _show(fleet: client.FleetClient, row: pb.ProbeOrderRow) -> None:
    """Of an order that has ended: its verdict, then its figures against the fleet's."""
    order = _order(row)
    if order.group:
        _show_group(row)
        return
    print(plain(f"{order.node}: {_outcome(row)}"))
    lines = [
        line
        for figure in fleet.call(methods.LIST_PROBES, pb.ProbesRequest(node=order.node)).figures
        for line in _figure(figure, order.id)
    ]
    if lines:
        heads = ["PROBE", "ON", "VALUE", "", "EXPECTED", "OFF BY", "JUDGED FROM", "VERDICT"]
        print_table(heads, lines, right=frozenset({2, 4, 5, 6}))
    unpassed = [v for v in _verdicts(row) if v.passed is not True]
    for verdict in unpassed:
        print(plain(verdict.text))


def _show_group(row: pb.ProbeOrderRow) -> None:
    """What one node of a group measured, and what it says of that node."""
    order = _order(row)
    results = [from_json(ProbeResult, text) for text in row.results_json]
    figures = [f"{r.probe} {_number(r.value)} {r.unit}" for r in results if not r.end and r.value is not None]
    print(plain(f"{order.node} with {', '.join(m for m in order.members if m != order.node)}: {_outcome(row)}"))
    if figures:
        print(plain(f"    {', '.join(figures)}"))


def _figure(figure: pb.ProbeFigure, order: str) -> list[list[str]]:
    """Of p2p only what is not as it should be, and how many are: 56 lines of a node say less."""
    values = [value for value in figure.values if value.order == order]
    if figure.figure == "p2p":
        good = [value for value in values if value.verdict == "pass"]
        lines = [_line(figure, value) for value in values if value.verdict != "pass"]
        if good:
            lowest = min(value.value for value in good)
            text = f"{len(good)} pairs"
            lines.append([figure.figure, text, f"from {_number(lowest)}", figure.unit, "", "", "", ""])
        return lines
    return [_line(figure, value) for value in values]


def _line(figure: pb.ProbeFigure, value: pb.ProbeValue) -> list[str]:
    where = f"GPU {value.gpu}" if value.HasField("gpu") else "node"
    where += f" to {value.peer}" if value.HasField("peer") else ""
    return [
        figure.figure,
        where,
        _number(value.value) if value.HasField("value") else "absent",
        figure.unit,
        _number(value.expected) if value.HasField("expected") else "",
        f"{-100 * value.worse:+.1f} %" if value.HasField("worse") else "",
        f"{100 * value.detectable:.1f} %" if value.HasField("detectable") else "",
        MARKS.get(value.verdict, value.verdict),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _row(fleet: client.FleetClient, order: str) -> pb.ProbeOrderRow:
    (found,) = fleet.call(methods.LIST_PROBE_ORDERS, pb.ProbeOrdersRequest(id=order)).orders
    return found


def _order(row: pb.ProbeOrderRow) -> ProbeOrder:
    return from_json(ProbeOrder, row.order_json)


def _verdicts(row: pb.ProbeOrderRow) -> Sequence[ProbeVerdict]:
    return [from_json(ProbeVerdict, text) for text in row.verdicts_json]


def _passed(row: pb.ProbeOrderRow) -> bool:
    """Return True if it is proved: an order that failed proves nothing."""
    verdicts = _verdicts(row)
    return _order(row).state == "done" and bool(verdicts) and all(v.passed is True for v in verdicts)


def _outcome(row: pb.ProbeOrderRow) -> str:
    order, verdicts = _order(row), _verdicts(row)
    bad = [v for v in verdicts if v.passed is False]
    unsure = [v for v in verdicts if v.passed is None]
    if bad:
        return f"FAILED: {bad[0].text}"
    if order.state == "failed":
        return f"failed: {order.detail}"
    if unsure:
        return f"not proved: {unsure[0].text}"
    return f"passed: {verdicts[0].text}" if verdicts else ""


def _state(order: ProbeOrder) -> str:
    how = {"asked": "waits for its turn, or for the node", "sent": "under way on the node", "done": "has ended"}
    if order.state == "asked" and order.detail:
        return f"waits: {cut(order.detail, 200)}"
    if order.state == "sent" and order.protection:
        return (
            f"{how['sent']} ({_PROTECTED.get(order.protection) or f'held by {order.protection} {order.job}'.strip()})"
        )
    return f"failed: {cut(order.detail, 200)}" if order.state == "failed" else how.get(order.state, order.state)


def _report(row: pb.ProbeOrderRow) -> dict[str, object]:
    order = _order(row)
    return {
        **to_dict(order),
        "asked": when(row.asked_ms) if row.asked_ms else None,
        "passed": _passed(row) if order.state not in OPEN else None,
        "verdicts": [to_dict(v) for v in _verdicts(row)],
    }


def _say(text: str) -> None:
    print(plain(text), file=sys.stderr, flush=True)
