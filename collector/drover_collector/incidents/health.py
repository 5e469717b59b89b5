"""Health of every GPU and node: a fold over their reports and the open incidents. Pure.

    unknown    no report lately: never shown as healthy; an incident may show worse
    healthy    it reports, and has no open warning
    suspect    an open warning, or a critical incident that is not certain yet
    confirmed  an open critical incident with CONFIRMED_CONFIDENCE or more

    draining, drained, validating, repair: out of service; the node's `NodeOutage` says how far

A node is as bad as the worst of itself and its GPUs. Of a node out of service its duty says the health, whatever is
open on it; its GPUs keep a fault of their own, and are else as the node is. A duty that says healthy ends that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    OUT_STAGES,
    Health,
    Incident,
    NodeOutage,
    Severity,
)

CONFIRMED_CONFIDENCE = 0.9  # as sure as a fatal XID or a failed remap is
# They know no more than the silence.
UNHEARD_CAUSES = frozenset(
    {
        "silent",
        "never_came",
        "no_telemetry",
        "agent_stopped",
        "late",
        "maintenance",
        "pages_silent",
        "pages_silent_common",
        "pages_without_gpus",
        "gpu_page_silent",
        "gpu_page_silent_common",
    }
)

Codes = npt.NDArray[np.int8]
HEALTHS = tuple(Health)
_CODE = {health: code for code, health in enumerate(HEALTHS)}
# How bad, for the node's fold: an unknown GPU makes its node worse than healthy, but a proven fault says more.
_BADNESS = np.array([{Health.HEALTHY: 0, Health.UNKNOWN: 1, Health.SUSPECT: 2}.get(h, 3) for h in HEALTHS], np.int8)


@dataclass(frozen=True, slots=True)
class HealthChange:
    """One transition. `gpu` None: the node."""

    ts_ms: int
    node: str
    gpu: int | None
    health: Health
    reason: str
    incident_id: str | None


@dataclass(frozen=True, slots=True)
class HealthFold:
    """Health codes (index into HEALTHS), int8 [N] and [G]; reasons of what is neither healthy nor just unknown_."""

    node: Codes
    gpu: Codes
    node_reasons: dict[int, tuple[str, str]]  # node -> (reason, incident id)
    gpu_reasons: dict[int, tuple[str, str]]


def unknown(index: FleetIndex) -> HealthFold:
    """Return the health before the first report."""
    code = _CODE[Health.UNKNOWN]
    return HealthFold(np.full(index.node_count, code, np.int8), np.full(index.gpu_count, code, np.int8), {}, {})


def fold(
    index: FleetIndex,
    incidents: Iterable[Incident],
    node_reports: Bools,
    gpu_reports: Bools,
    duties: Mapping[str, NodeOutage] | None = None,
    isolated: Iterable[NodeOutage] = (),
) -> HealthFold:
    """Return the health of all, from open `incidents`, which nodes and GPUs report (bool [N], [G]), and who is out.

    `isolated`: outages of single GPUs.
    """
    healthy, unknown_ = _CODE[Health.HEALTHY], _CODE[Health.UNKNOWN]
    node = np.where(node_reports, healthy, unknown_).astype(np.int8)
    gpu = np.where(gpu_reports, healthy, unknown_).astype(np.int8)
    node_reasons: dict[int, tuple[str, str]] = {}
    gpu_reasons: dict[int, tuple[str, str]] = {}
    alone = _alone(index, isolated)
    for incident in sorted(incidents, key=lambda i: (i.opened_ms, i.id)):  # of two alike the first is the reason
        if incident.closed_ms is not None or incident.scope == "job":
            continue
        why = (incident.summary, incident.id)
        if incident.cause in UNHEARD_CAUSES:
            for name, _ in incident.members:
                n = index.node_number.get(name)
                if n is not None and not node_reports[n]:
                    node_reasons.setdefault(n, why)
                    for g in range(int(index.first_gpu[n]), int(index.first_gpu[n + 1])):
                        gpu_reasons.setdefault(g, why)
            continue
        if incident.severity is Severity.INFO:
            continue
        sure = incident.severity is Severity.CRITICAL and incident.confidence >= CONFIRMED_CONFIDENCE
        code = _CODE[Health.CONFIRMED if sure else Health.SUSPECT]
        for name, slot in incident.members:
            n = index.node_number.get(name)
            if n is None:
                continue
            if slot is None:
                _worsen(node, node_reasons, n, code, why)
                if incident.scope == "node" and incident.cause in ("driver_hung", "driver_lost", "driver_missing"):
                    for g in range(int(index.first_gpu[n]), int(index.first_gpu[n + 1])):
                        _worsen(gpu, gpu_reasons, g, code, why)
            elif (g_of := index.gpu(name, slot)) is not None:
                _worsen(gpu, gpu_reasons, g_of, code, why)
                if g_of not in alone:  # it is out of service, and no longer takes its node along
                    _worsen(node, node_reasons, n, code, why)
    _isolate(index, alone, (node, node_reasons), (gpu, gpu_reasons))
    if index.gpu_count:
        dumb = (gpu == unknown_) & (node[index.gpu_node] == healthy)  # the node talks, this GPU does not
        for g in np.flatnonzero(dumb).tolist():
            gpu_reasons.setdefault(g, ("no telemetry of this GPU", ""))
            n = int(index.gpu_node[g])
            node[n] = unknown_
            node_reasons.setdefault(n, (f"no telemetry of GPU {int(index.gpu_slot[g])}", ""))
    found = HealthFold(node, gpu, node_reasons, gpu_reasons)
    _take_out(index, found, duties or {})
    return found


def _take_out(index: FleetIndex, found: HealthFold, duties: Mapping[str, NodeOutage]) -> None:
    """Show nodes that are out of service at their stages, with those of their GPUs that have no fault of their own."""
    plain = (_CODE[Health.HEALTHY], _CODE[Health.UNKNOWN])
    for name, duty in duties.items():
        n = index.node_number.get(name)
        if n is None or duty.stage not in OUT_STAGES:
            continue
        code, why = _CODE[duty.stage], (duty.reason, duty.incident_id)
        found.node[n], found.node_reasons[n] = code, why
        for g in range(int(index.first_gpu[n]), int(index.first_gpu[n + 1])):
            if found.gpu[g] in plain:
                found.gpu[g], found.gpu_reasons[g] = code, why


def _alone(index: FleetIndex, isolated: Iterable[NodeOutage]) -> dict[int, NodeOutage]:
    """Return the GPUs that are out of service alone: number -> outage."""
    found = {}
    for outage in isolated:
        g = None if outage.gpu is None else index.gpu(outage.node, outage.gpu.slot)
        if g is not None and outage.stage in OUT_STAGES:
            found[g] = outage
    return found


def _isolate(
    index: FleetIndex,
    alone: Mapping[int, NodeOutage],
    nodes: tuple[Codes, dict[int, tuple[str, str]]],
    gpus: tuple[Codes, dict[int, tuple[str, str]]],
) -> None:
    """Show GPUs that are out alone at their stage, and their nodes as suspect at least: a part of them is missing."""
    slots: dict[int, list[int]] = {}
    for g, outage in alone.items():
        gpus[0][g], gpus[1][g] = _CODE[outage.stage], (outage.reason, outage.incident_id)
        slots.setdefault(int(index.gpu_node[g]), []).append(g)
    for n, numbers in slots.items():
        named = ", ".join(str(int(index.gpu_slot[g])) for g in sorted(numbers))
        there = int(index.first_gpu[n + 1] - index.first_gpu[n])
        first = alone[min(numbers)]
        word = "GPU" if len(numbers) == 1 else "GPUs"
        text = f"{word} {named} isolated ({first.stage}), {there - len(numbers)} in service: {first.reason}"
        _worsen(*nodes, n, _CODE[Health.SUSPECT], (text, first.incident_id))


def _worsen(codes: Codes, reasons: dict[int, tuple[str, str]], at: int, code: int, why: tuple[str, str]) -> None:
    if _BADNESS[code] > _BADNESS[codes[at]]:
        codes[at] = code
        reasons[at] = why


def reason_of(fold_: HealthFold, n: int, g: int | None) -> tuple[Health, str, str]:
    """(health, reason, incident id or "") of node number `n`, or of GPU index `g`."""
    codes, reasons, at = (fold_.node, fold_.node_reasons, n) if g is None else (fold_.gpu, fold_.gpu_reasons, g)
    health = HEALTHS[int(codes[at])]
    reason, incident = reasons.get(at, ("", ""))
    if health is Health.HEALTHY:
        return health, "", ""
    return health, reason or ("no report" if health is Health.UNKNOWN else ""), incident


def changes(index: FleetIndex, old: HealthFold, new: HealthFold, ts_ms: int) -> list[HealthChange]:
    """Return the changes, nodes first, without GPUs that only follow their node to or from unknown."""
    result = []
    for n in np.flatnonzero(old.node != new.node).tolist():
        health, reason, incident = reason_of(new, n, None)
        result.append(HealthChange(ts_ms, index.nodes[n].name, None, health, reason, incident or None))
    plain = (_CODE[Health.HEALTHY], _CODE[Health.UNKNOWN])
    moved = old.gpu != new.gpu
    if not moved.any():
        return result
    with_node = np.isin(old.gpu, plain) & np.isin(new.gpu, plain) & (new.gpu == new.node[index.gpu_node])
    with_node &= (old.node != new.node)[index.gpu_node]
    for g in np.flatnonzero(moved & ~with_node).tolist():
        name, slot = index.member(g)
        health, reason, incident = reason_of(new, int(index.gpu_node[g]), g)
        result.append(HealthChange(ts_ms, name, slot, health, reason, incident or None))
    return result
