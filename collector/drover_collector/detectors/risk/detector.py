"""Nodes that are likelier than others to fail within a week: a ranking, and a note on the few that stand out.

It asks for nothing: a scheduler may prefer other nodes for the longest jobs, and idle probes begin with these. What the
ranking finds, measured, stands in docs/evidence/sensitivity.md; most failures come without a forerunner.
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
from drover_collector.detectors._lib.steady import column, margin_c
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.risk.model import (
    DAY_MS,
    HORIZON_DAYS,
    Risk,
    Trouble,
    risk_ranking,
)
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "risk"
VERSION = 1
EVERY_MS = 600_000
QUIET_MS = 1_800_000
# Ours: ten times the base rate of the public trace (2.4 % of nodes fail within a week), and no more than the ranking's
# top 5 %, at most 20: a note that half of the fleet carries helps nobody.
TELL_CHANCE = 0.25
TELL_SHARE = 0.05
TELL_NODES = 20

ROWS_MANY = 10  # SuperBench
MARGIN_C = 3.0


@dataclass(slots=True)
class RiskState:
    looked_ms: int = 0
    ranking: list[Risk] = field(default_factory=list)  # the newest, of all nodes
    corrected: Floats = field(default_factory=lambda: np.zeros(0))  # newest count of each GPU
    grown_ms: Floats = field(default_factory=lambda: np.zeros(0))  # when it last grew, NaN never


def detect(window: Window, state: RiskState | None, now_ms: int) -> tuple[list[Finding], RiskState]:
    s = state if state is not None else RiskState()
    if not window.fresh:
        return [], s
    _watch_corrected(window, s)
    if 0 <= now_ms - s.looked_ms < EVERY_MS:
        return [], s
    s.looked_ms = now_ms
    history = {node: list(mine.values()) for node, mine in (window.troubles or {}).items()}
    s.ranking = risk_ranking(history, [node.name for node in window.index.nodes], now_ms, _signs(window, s, now_ms))
    few = max(1, min(TELL_NODES, int(TELL_SHARE * window.index.node_count)))
    told = [risk for risk in s.ranking[:few] if risk.chance >= TELL_CHANCE and not risk.in_trouble]
    return [_finding(risk, history.get(risk.node, ()), now_ms) for risk in told], s


def could_not_judge(window: Window) -> list[str]:
    lacking = [m for m in ("remapped_rows_uncorrected", "thermal_margin_c") if m not in window.newest.gpu]
    return [f"risk: nodes are ranked without {' and '.join(lacking)}"] if lacking else []


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
        "Give long jobs other nodes first, and probe it when it is free; most nodes of this list do not fail.",
        tuple(Evidence(f"{reason[0].upper()}{reason[1:]}.") for reason in risk.reasons)
        or (Evidence("Its signs stand out."),),
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
