"""Rank nodes by their risk to fail within a week, and report the few that stand out.

It recommends no action: a scheduler may prefer other nodes for the longest jobs, and idle probes start with these.
docs/evidence/sensitivity.md has its measured quality; most failures have no early sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.metrics import column, margin_c
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.risk.model import (
    DAY_MS,
    HORIZON_DAYS,
    Risk,
    Trouble,
    risk_ranking,
)
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "risk"
VERSION = 1
EVERY_MS = 600_000
QUIET_MS = 1_800_000
# Drover's own limits: ten times the base rate of the public trace (2.4 % of nodes fail within a week), and at most the
# first 5 % or 20 nodes of the ranking.
REPORT_CHANCE = 0.25
REPORT_SHARE = 0.05
REPORT_NODES = 20

ROWS_MANY = 10  # SuperBench
MARGIN_C = 3.0


@dataclass(slots=True)
class RiskState:
    ranked_ms: int = 0
    ranking: list[Risk] = field(default_factory=list)  # the newest, of all nodes
    corrected: Floats = field(default_factory=lambda: np.zeros(0))  # newest corrected HBM errors, [G]
    grown_ms: Floats = field(default_factory=lambda: np.zeros(0))  # when they last grew, [G], NaN never


def detect(window: Window, state: RiskState | None, now_ms: int) -> tuple[list[Finding], RiskState]:
    s = state if state is not None else RiskState()
    if not window.fresh:
        return [], s
    _watch_corrected(window, s)
    if 0 <= now_ms - s.ranked_ms < EVERY_MS:
        return [], s
    s.ranked_ms = now_ms
    history = {node: list(mine.values()) for node, mine in (window.troubles or {}).items()}
    s.ranking = risk_ranking(history, [node.name for node in window.index.nodes], now_ms, _signs(window, s, now_ms))
    few = max(1, min(REPORT_NODES, int(REPORT_SHARE * window.index.node_count)))
    worst = [risk for risk in s.ranking[:few] if risk.chance >= REPORT_CHANCE and not risk.in_trouble]
    return [_finding(risk, history.get(risk.node, ()), now_ms) for risk in worst], s


def restored(_incidents: Sequence[Incident], _index: FleetIndex, _started_ms: int) -> None:
    """Return no state: what still holds is reported again."""


def could_not_judge(window: Window) -> list[str]:
    lacking = [m for m in ("remapped_rows_uncorrected", "thermal_margin_c") if m not in window.newest.gpu]
    return [f"risk: the data lacks {' and '.join(lacking)}, so nodes are ranked without"] if lacking else []


def _watch_corrected(window: Window, s: RiskState) -> None:
    values = column(window, "ecc_dram_corrected")
    if len(s.corrected) != len(values):
        s.corrected, s.grown_ms = values.copy(), np.full(len(values), np.nan)
    s.grown_ms[values > s.corrected] = window.newest.end_ms
    s.corrected = np.where(np.isnan(values), s.corrected, values)


def _signs(window: Window, s: RiskState, now_ms: int) -> Mapping[str, Sequence[str]]:
    rows = np.nan_to_num(column(window, "remapped_rows_uncorrected"))
    found: dict[str, list[str]] = {}
    with np.errstate(invalid="ignore"):
        shown = {
            "rows_many": rows > ROWS_MANY,
            "rows_some": (rows > 0) & (rows <= ROWS_MANY),
            "corrected": now_ms - s.grown_ms <= DAY_MS,
            "margin": margin_c(window) <= MARGIN_C,
        }
    for sign, gpus in shown.items():
        for n in np.unique(window.index.gpu_node[gpus]).tolist():
            found.setdefault(window.index.nodes[n].name, []).append(sign)
    return found


def _finding(risk: Risk, mine: Sequence[Trouble], now_ms: int) -> Finding:
    since = max((trouble.start_ms for trouble in mine), default=now_ms)
    return Finding(
        NAME, IncidentKind.RISK, "likely_to_fail", "node", risk.node, None, ((risk.node, None),), now_ms,
        min(since, now_ms), Severity.INFO, min(0.9, risk.chance), RecommendedAction.WATCH,
        f"Node {risk.node} is among the likeliest to fail within {HORIZON_DAYS} days: about {risk.chance:.0%}.",
        "Prefer other nodes for long jobs, and probe it when it is free. Most nodes on this list do not fail.",
        tuple(Evidence(f"{reason[0].upper()}{reason[1:]}.") for reason in risk.reasons)
        or (Evidence("Its signs differ from those of other nodes."),),
    )  # fmt: skip


def _example(days_ago: Sequence[float]) -> Mapping[str, Mapping[str, Trouble]]:
    starts = [START_MS - int(days * DAY_MS) for days in days_ago]
    return {"n03": {str(at): Trouble(str(at), at, at + 3_600_000, "xid/xid_79") for at in starts}}


def _more_rows(_number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    gpu["remapped_rows_uncorrected"][3] = 1


def _plays(days_ago: Sequence[float]) -> Iterator[tuple[Window, int]]:
    return play(small_fleet(), 3, _more_rows, troubles=_example(days_ago))


EXAMPLES = (
    Example("a failure two months ago", lambda: _plays([60]), frozenset()),
    Example(
        "a node that failed four times within a week",
        lambda: _plays([0.5, 1, 2, 5]),
        frozenset({("risk", "likely_to_fail", "node", "info")}),
    ),
)
