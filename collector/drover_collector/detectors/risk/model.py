"""Estimate a node's chance to fail within a week from its former troubles, with a readable logistic model.

    log-odds = BASE + SHORT * (troubles, weighted e^(-age / 3 days)) + LONG * (troubles, e^(-age / 30 days)) + signs

`benchmarks/bench_risk.py --fit` fits BASE, SHORT and LONG on the first 60 % of a public trace (InfiniteHBD: 400 servers
with 8 GPUs, 348 days); without --fit it measures them on the rest. No public history exists for the signs: their
weights follow published odds, and are small compared with a recent failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drover_collector.detectors._lib.texts import duration
from drover_core.model.conditions import is_foreign
from drover_core.model.events import Incident, IncidentKind, Severity

DAY_MS = 86_400_000
KEPT_MS = 90 * DAY_MS  # after it e^-3 of a trouble's weight is left
PER_NODE = 64
HORIZON_DAYS = 7

BASE = -3.76
SHORT, SHORT_DAYS = 0.96, 3.0
LONG, LONG_DAYS = 0.49, 30.0

# Not fitted. After 1 to 10 remapped rows 5.6 % of nodes regressed, after more 83 % (SuperBench, ATC'24). Corrected
# errors alone predict poorly (Titan, Delta); a GPU at its thermal limit throttles long before it fails.
SIGNS: Mapping[str, tuple[float, str]] = {
    "rows_many": (2.0, "more than 10 HBM rows were remapped on one of its GPUs"),
    "rows_some": (0.4, "HBM rows were remapped on one of its GPUs"),
    "corrected": (0.3, "HBM errors were corrected on one of its GPUs within the last day"),
    "margin": (0.3, "one of its GPUs runs within 3 degC of its thermal slowdown"),
}

# Kinds of incidents that concern the node's own hardware.
OWN = frozenset(
    {
        IncidentKind.XID, IncidentKind.MEMORY, IncidentKind.LINK, IncidentKind.LIVENESS, IncidentKind.THERMAL,
        IncidentKind.SDC, IncidentKind.STRAGGLER, IncidentKind.RISK,
    }
)  # fmt: skip
NO_FAULT = frozenset({"agent_stopped", "maintenance", "late", "no_telemetry", "clock"})


@dataclass(frozen=True, slots=True)
class Trouble:
    """A former or open incident of a node. `end_ms` None: open. `what`: its kind and cause."""

    id: str
    start_ms: int
    end_ms: int | None
    what: str


@dataclass(frozen=True, slots=True)
class Risk:
    """A node's `chance` of a new failure within HORIZON_DAYS. `in_trouble`: it has an open incident."""

    node: str
    chance: float
    reasons: tuple[str, ...]
    in_trouble: bool = False


class Troubles(dict[str, dict[str, Trouble]]):
    """Node -> incident id -> trouble: the newest PER_NODE of each node within KEPT_MS."""

    def take(self, incidents: Iterable[Incident], now_ms: int) -> None:
        """Add incidents that are new or have changed."""
        for incident in incidents:
            if not counts(incident) or (incident.closed_ms or now_ms) < now_ms - KEPT_MS:
                continue
            trouble = Trouble(
                incident.id, incident.since_ms, incident.closed_ms, f"{incident.kind.value}/{incident.cause}"
            )
            for node in dict.fromkeys(node for node, _ in incident.members):
                mine = self.setdefault(node, {})
                mine[incident.id] = trouble
                while len(mine) > PER_NODE:
                    del mine[min(mine, key=lambda id_: mine[id_].start_ms)]


def counts(incident: Incident) -> bool:
    """Return True if an incident concerns the node's own hardware."""
    return (
        incident.severity is not Severity.INFO
        and incident.kind in OWN
        and incident.scope in ("gpu", "node")
        and incident.cause not in NO_FAULT
        and not is_foreign(incident.cause)
    )


def memory(ages_days: Iterable[float], days: float) -> float:
    """Return the sum of troubles, weighted by age."""
    return sum(math.exp(-max(0.0, age) / days) for age in ages_days)


def chance_of(ages_days: Sequence[float], signs: Iterable[str] = ()) -> float:
    """Return the chance of a failure within HORIZON_DAYS, 0..1.

    Args:
        ages_days: age of each trouble of the node.
    """
    odds = BASE + SHORT * memory(ages_days, SHORT_DAYS) + LONG * memory(ages_days, LONG_DAYS)
    odds += sum(SIGNS[sign][0] for sign in signs)
    return 1 / (1 + math.exp(-odds))


def risk_ranking(
    history: Mapping[str, Iterable[Trouble]],
    nodes: Iterable[str],
    now_ms: int,
    signs: Mapping[str, Sequence[str]] | None = None,
) -> list[Risk]:
    """Return all `nodes`, the riskiest first; ties by name.

    Args:
        history: node -> its troubles; those older than KEPT_MS are ignored.
        signs: node -> names of SIGNS that it shows now.
    """
    found = []
    for node in nodes:
        mine = sorted(
            (t for t in history.get(node, ()) if 0 <= now_ms - t.start_ms <= KEPT_MS), key=lambda t: -t.start_ms
        )
        shown = () if signs is None else signs.get(node, ())
        chance = chance_of([(now_ms - t.start_ms) / DAY_MS for t in mine], shown)
        in_trouble = any(t.end_ms is None for t in mine)
        found.append(Risk(node, chance, tuple(_reasons(mine, shown, now_ms)), in_trouble))
    return sorted(found, key=lambda risk: (-risk.chance, risk.node))


def _reasons(mine: Sequence[Trouble], signs: Iterable[str], now_ms: int) -> Iterable[str]:
    if mine:
        times = "a trouble" if len(mine) == 1 else f"{len(mine)} troubles"
        days = -(-(now_ms - mine[-1].start_ms) // DAY_MS)
        within = "a day" if days <= 1 else f"{days} days"
        yield f"{times} within {within}, the newest {mine[0].what} {_ago(now_ms - mine[0].start_ms)} ago"
        kinds: dict[str, int] = {}
        for trouble in mine:
            kinds[trouble.what] = kinds.get(trouble.what, 0) + 1
        what, count = max(kinds.items(), key=lambda item: item[1])
        if count > 1:
            yield f"{what} {count} times"
    yield from (SIGNS[sign][1] for sign in signs)


def _ago(ms: int) -> str:
    return f"{ms / DAY_MS:.0f} days" if ms >= 2 * DAY_MS else duration(ms)
