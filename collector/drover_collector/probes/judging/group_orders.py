"""Judge orders of groups: each finished group with those that ran at about the same time, figure by figure.

What is bad of a group is bad of its worst node, or of the way between them. So no order of a group is judged by itself:
`groups_of_nodes.blame` names a node when it was bad with two partners that were good with others, and nobody else. A
group that gave no figure, because one never came, gave way or was refused, is no word against any of its nodes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.judging.measurements import End
from drover_collector.probes.judging.multi_node import Blame, Run, blame
from drover_collector.probes.judging.rows import CPU
from drover_collector.store import ProbeRow, Store
from drover_collector.store.repositories.probes import NEWEST_DAYS
from drover_core.model.events import ProbeOrder, ProbeResult, ProbeVerdict
from drover_core.model.probe_figures import GROUP_FIGURES, VALIDATION_FIGURES

FRESH_MS = 3_600_000  # groups that ran within this time show the same state of their nodes
MOST_ORDERS = 2000  # that are looked at: the newest
LEAST_BAD = 2  # groups, with different partners
_TOGETHER = frozenset({"done", "hung", "crashed", "timeout"})  # ends of nodes that had all come


@dataclass(slots=True)
class Ran:
    """A group that has ended: its orders by number, with what each of them gave."""

    orders: list[ProbeOrder] = field(default_factory=list)
    rows: dict[str, list[ProbeRow]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ts_ms(self) -> int:
        return max(order.ts_ms for order in self.orders)

    @property
    def members(self) -> tuple[str, ...]:
        return self.orders[0].members

    @property
    def on_cpu(self) -> bool:
        return any(row.result.device == CPU for rows in self.rows.values() for row in rows)


@dataclass(frozen=True, slots=True)
class Judged:
    """`verdicts`: by order, of a group and of others on which it sheds light. `blames`: figure -> who made groups of
    the last hour slow. `orders`: of these groups, and of those under way."""

    verdicts: Mapping[str, ProbeVerdict]
    blames: Mapping[str, Blame]
    orders: Sequence[ProbeOrder]


def judge_groups(store: Store, index: FleetIndex, group: str, now_ms: int) -> Judged:
    """Judge a group that has ended, with the others of the last hour.

    Raises:
        StoreError.
    """
    orders = store.probes.orders.of_groups(now_ms - NEWEST_DAYS * 86_400_000, MOST_ORDERS)
    ran: dict[str, Ran] = defaultdict(Ran)
    for order in sorted(orders, key=lambda o: o.members.index(o.node) if o.node in o.members else 0):
        ran[order.group].orders.append(order)
    of_order = {order.id: order.group for order in orders}
    for row in store.probes.results.of_orders(list(of_order)):
        ran[of_order[row.result.request]].rows[row.result.request].append(row)
    whole = {id_: one for id_, one in ran.items() if id_ == group or all(one.rows[o.id] for o in one.orders)}
    fresh = {id_: one for id_, one in whole.items() if one.ts_ms >= now_ms - FRESH_MS}
    leaf = {node.name: node.leaf for node in index.nodes}
    known = [one for id_, one in whole.items() if id_ not in fresh]
    blames = blames_of(list(fresh.values()), known, leaf)
    judged = verdicts(list(fresh.values()), known, leaf, now_ms)
    before = {v.request: v for v in store.probes.verdicts.read(from_ms=now_ms - FRESH_MS)}
    mine = {order.id for order in ran[group].orders}
    kept = {
        id_: v for id_, v in judged.items()
        if id_ in mine or (id_ in before and v.passed is not None and before[id_].passed != v.passed)
    }  # fmt: skip
    return Judged(kept, blames, [order for order in orders if order.ts_ms >= now_ms - FRESH_MS])


def blames_of(fresh: Sequence[Ran], known: Sequence[Ran], leaf: Mapping[str, str]) -> dict[str, Blame]:
    """Figure -> who made groups of `fresh` slow, held against each other and against those known. Pure."""
    newest = {tuple(sorted(one.members)): one for one in sorted(fresh, key=lambda one: one.ts_ms)}
    runs = {id(one): runs_of(one) for one in [*fresh, *known]}
    return {
        probe: blame(
            [r for one in newest.values() if (r := runs[id(one)].get(probe)) is not None], leaf,
            [r for one in known if (r := runs[id(one)].get(probe)) is not None], least=LEAST_BAD,
        )
        for probe in GROUP_FIGURES
    }  # fmt: skip


def verdicts(
    fresh: Sequence[Ran], known: Sequence[Ran], leaf: Mapping[str, str], now_ms: int
) -> dict[str, ProbeVerdict]:
    """Order -> verdict of each group of `fresh`; see `blames_of`. Pure."""
    blames = blames_of(fresh, known, leaf)
    return {order.id: _verdict(order, one, runs_of(one), blames, now_ms) for one in fresh for order in one.orders}


def runs_of(one: Ran) -> dict[str, Run]:
    """Figure -> how the group did in it."""
    if one.on_cpu:
        return {}
    ends = [next((row.result for row in one.rows[o.id] if row.result.end), None) for o in one.orders]
    whole = len(one.orders) == len(one.members)
    apart = [e for e in ends if e is None or not _came(e)]
    board = next((f"{row.key.sku} {row.result.level}" for rows in one.rows.values() for row in rows), "")
    found = {}
    for probe in GROUP_FIGURES:
        results = [row.result for rows in one.rows.values() for row in rows if row.result.probe == probe]
        figures = [r for r in results if not r.end]
        bad = next((r for r in results if r.end in ("hung", "crashed", "timeout")), None)
        values = [r.value for r in figures if r.value is not None]
        if not results:
            continue
        if whole and not apart and len(values) == len(one.members):
            found[probe] = Run(one.members, probe, statistics.median_low(values), board=board)
        elif whole and not apart and bad is not None:
            found[probe] = Run(one.members, probe, None, End(bad.end), bad.detail, board)
        else:
            why = next((f"{e.node}: {e.end}: {e.detail}" for e in apart if e is not None), "")
            why = why or next((r.detail for r in figures if r.value is None), "")
            found[probe] = Run(one.members, probe, None, End.UNSERVED if apart else End.DONE, why, board)
    return found


def _came(end: ProbeResult) -> bool:
    """One that ended in no probe did not: its service was killed, or its process had not begun yet."""
    return end.end in _TOGETHER and (end.end == "done" or bool(end.probe))


def _verdict(
    order: ProbeOrder, one: Ran, runs: Mapping[str, Run], blames: Mapping[str, Blame], now_ms: int
) -> ProbeVerdict:
    node = order.node
    of = {p: next((v for v in blames[p].nodes if v.node == node), None) for p in runs}
    ways = {p: next((text for names, text in blames[p].ways if names == tuple(sorted(one.members))), "") for p in runs}
    good = tuple(p for p, v in of.items() if v is not None and v.ok and not ways[p] and runs[p].value is not None)
    bad = next((p for p, v in of.items() if v is not None and v.ok is False), "")
    passed: bool | None = None
    probe = bad
    if one.on_cpu:
        text = f"{node}: not judged, CPUs were measured: no NVIDIA driver there; that says nothing of the fabric"
    elif not runs and any(row.result.probe in VALIDATION_FIGURES for rows in one.rows.values() for row in rows):
        text = f"{node}: measured for a validation, whose report judges its nodes against each other"
    elif not runs:
        why = next((f"{o.node}: {o.detail}" for o in one.orders if o.detail), "no figure came")
        text = f"{node}: not judged, {why}"
    elif bad:
        verdict = of[bad]
        passed, text = False, verdict.text if verdict is not None else ""
    elif probe := next((p for p in runs if ways[p]), ""):
        text = f"{node}: {ways[probe]}"
    elif len(good) == len(runs):
        passed, text = True, f"{node}: {', '.join(good)} over {', '.join(one.members)} as groups of its kind give"
    else:
        probe = next(p for p in runs if p not in good)
        verdict = of[probe]
        pairs = [f"{a} with {b}" for a, b in blames[probe].next_pairs if node in (a, b)]
        run_next = f"; run next: {', '.join(pairs)}" if pairs else ""
        why = _no_figure(runs[probe]) or (verdict.why if verdict is not None else "")
        text = f"{node}: not judged, {why}{run_next}"
    run = runs.get(probe)
    return ProbeVerdict(
        order.id, node, None, passed, probe, text, now_ms, order.why, order.incident_id,
        run.value if run is not None else None, None, None, good,
    )  # fmt: skip


def _no_figure(run: Run) -> str:
    if run.value is not None or run.end not in (End.DONE, End.UNSERVED):
        return ""
    return f"{run.probe} over {', '.join(run.nodes)} gave no figure" + (f": {run.detail}" if run.detail else "")
