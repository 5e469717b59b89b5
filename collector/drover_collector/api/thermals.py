"""Heat: racks as they stand, and the GPUs that are held down by it or poorly cooled.

Open incidents say which nodes are poorly cooled; the resistance next to it is the thermal detector's figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from drover_collector.api.fleet import racks
from drover_collector.api.recent_buckets import (
    MINUTE_MS,
    NOW,
    is_warning,
    known,
    last_known,
    recent,
)
from drover_collector.api.snapshot import ApiSnapshot, not_found, worst_first
from drover_collector.detectors._lib.metrics import counter_share
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.thermal.cooling import HELD_BY_HEAT, SLOWED_SHARE, Cooling, cooling
from drover_collector.fleet.buckets import Bucket, Floats
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Incident, IncidentKind
from drover_core.model.fleet import RackSpec
from drover_proto import fleet_pb2 as pb

HOT_MAX = 100
INLET_MS = 600_000  # an inlet that is read less often than GPUs counts this long
INLET_S = 30.0
KEPT_S = 3.0  # every console that is open asks for it
NO_RACK = "no rack"
NO_BUDGET = (
    'No rack has a power budget. To see headroom, give fleet.toml [[racks]] with names = "r01" and'
    " power_budget_w = 40000."
)


class _Heat:
    """Values of now, arrays [G] or [N], NaN where not known."""

    def __init__(self, facts: ApiSnapshot, buckets: Sequence[Bucket]) -> None:
        index = facts.index
        gpus, nodes = index.gpu_count, index.node_count
        self.temp, self.margin, self.power, self.limit = (
            last_known(buckets[-NOW:], Scope.GPU, name, gpus)
            for name in ("gpu_temp_c", "thermal_margin_c", "power_w", "power_limit_w")
        )
        self.inlet = _inlets(facts, buckets)
        self.fan = last_known(buckets, Scope.NODE, "fan_min_rpm", nodes)
        nothing = np.full(gpus, np.nan)
        self.held, self.cooling = (
            nothing,
            Cooling(nothing, nothing, np.zeros(gpus), nothing > 0, nothing > 0, nothing > 0),
        )
        if buckets:
            window = Window(index, tuple(buckets), False, (), facts.pipeline.started_ms)
            self.held = np.fmax(*(counter_share(window, name) for name in HELD_BY_HEAT))
            self.cooling = cooling(window, self.inlet)
        self.throttled: Bools = np.nan_to_num(self.held) >= SLOWED_SHARE


def get_thermals(facts: ApiSnapshot, request: pb.ThermalsRequest) -> pb.Thermals:
    index, buckets = facts.index, recent(facts)
    heat = facts.once("heat", KEPT_S, lambda: _Heat(facts, buckets))
    incidents = [i for i in facts.open_incidents() if is_warning(i) and i.kind is IncidentKind.THERMAL]
    incidents.sort(key=worst_first)
    of_node: dict[str, list[Incident]] = {}
    for incident in incidents:
        for node, _ in incident.members:
            of_node.setdefault(node, []).append(incident)
    standing = racks(index)
    reply = pb.Thermals(ts_ms=buckets[-1].end_ms if buckets else 0, absent=_absent(facts, buckets, heat))
    reply.held_known = int(np.count_nonzero(~np.isnan(heat.held)))
    reply.racks.extend(facts.once("rack heat", KEPT_S, lambda: _racks(facts, standing, heat, of_node)))
    if request.rack:
        wanted = "" if request.rack == NO_RACK else request.rack
        if wanted not in standing:
            raise not_found(
                f"no rack {request.rack!r} in the fleet file; `drover thermals` and the Thermals page list them"
            )
        reply.nodes.extend(_node(facts, n, heat, of_node) for n in standing[wanted])
    hot = _hot(facts, heat, incidents)
    reply.hot_total = len(hot)
    reply.hot.extend(_gpu(facts, g, heat, incident) for g, incident in hot[:HOT_MAX])
    return reply


def _inlets(facts: ApiSnapshot, buckets: Sequence[Bucket]) -> Floats:
    """degC of each node, float64 [N]: the newest, else the median of the last ten minutes."""
    size = facts.index.node_count
    found = last_known(buckets, Scope.NODE, "inlet_temp_c", size)
    if not buckets or not np.isnan(found).any():
        return found
    start_ms = buckets[-1].end_ms // MINUTE_MS * MINUTE_MS - INLET_MS

    def read() -> Floats:
        minutes = range(start_ms, start_ms + INLET_MS, MINUTE_MS)
        held = np.full(size, np.nan)
        for minute_ms in minutes:
            column = facts.store.buckets.values_at(facts.index, Scope.NODE, minute_ms, MINUTE_MS, ["inlet_temp_c"])
            if (values := column.get("inlet_temp_c")) is not None:
                held = np.where(np.isnan(values), held, values)
        return held

    return np.where(np.isnan(found), facts.once("inlets", INLET_S, read), found)


def _gpus(facts: ApiSnapshot, numbers: Sequence[int]) -> list[int]:
    first = facts.index.first_gpu
    return [g for n in numbers for g in range(int(first[n]), int(first[n + 1]))]


def _racks(
    facts: ApiSnapshot, standing: Mapping[str, Sequence[int]], heat: _Heat, of_node: dict[str, list[Incident]]
) -> list[pb.RackHeat]:
    specs = {rack.name: rack for rack in facts.index.spec.racks}
    return [_rack(facts, specs.get(name, RackSpec(name)), standing[name], heat, of_node) for name in standing]


def _rack(
    facts: ApiSnapshot, rack: RackSpec, numbers: Sequence[int], heat: _Heat, of_node: dict[str, list[Incident]]
) -> pb.RackHeat:
    index, gpus = facts.index, _gpus(facts, numbers)
    inlets, temps, power = heat.inlet[numbers], heat.temp[gpus], heat.power[gpus]
    row = pb.RackHeat(
        name=rack.name or NO_RACK, row=rack.row, nodes=len(numbers), gpus=len(gpus), budget_w=rack.power_budget_w
    )
    if not np.isnan(inlets).all():
        row.inlet_c, row.inlet_max_c = float(np.nanmedian(inlets)), float(np.nanmax(inlets))
    if not np.isnan(temps).all():
        row.gpu_median_c, row.gpu_max_c = float(np.nanmedian(temps)), float(np.nanmax(temps))
        node, slot = index.member(gpus[int(np.nanargmax(temps))])
        row.gpu_max_at = f"{node} GPU {slot}"
    if not np.isnan(heat.margin[gpus]).all():
        row.margin_min_c = float(np.nanmin(heat.margin[gpus]))
    known_power = ~np.isnan(power)
    if known_power.any():
        row.power_w, row.power_known = float(power[known_power].sum()), int(known_power.sum())
        limits = heat.limit[gpus][known_power]
        if not np.isnan(limits).any():
            row.limit_w = float(limits.sum())
    row.throttled = int(heat.throttled[gpus].sum())
    mine = {i.id: i for n in numbers for i in of_node.get(index.nodes[n].name, ())}
    row.poor = sum(i.cause in ("cooling", "fan") for i in mine.values())
    if mine:
        worst = min(mine.values(), key=lambda i: (i.scope != "rack", worst_first(i)))
        row.incident, row.severity, row.cause, row.summary = worst.id, worst.severity, worst.cause, worst.summary
    return row


def _node(facts: ApiSnapshot, n: int, heat: _Heat, of_node: dict[str, list[Incident]]) -> pb.NodeHeat:
    gpus, name = _gpus(facts, [n]), facts.index.nodes[n].name
    temps, power = heat.temp[gpus], heat.power[gpus]
    row = pb.NodeHeat(
        node=name,
        inlet_c=known(heat.inlet[n]),
        fan_min_rpm=known(heat.fan[n]),
        throttled=int(heat.throttled[gpus].sum()),
    )
    if len(temps) and not np.isnan(temps).all():
        row.gpu_median_c, row.gpu_max_c = float(np.nanmedian(temps)), float(np.nanmax(temps))
    if len(power) and not np.isnan(power).any():
        row.power_w = float(power.sum())
    row.incident = next((i.id for i in of_node.get(name, ())), "")
    return row


def _hot(facts: ApiSnapshot, heat: _Heat, incidents: Sequence[Incident]) -> list[tuple[int, Incident | None]]:
    """GPUs that an incident names, or its worst where it names the node, then others that heat holds down."""
    index = facts.index
    found: dict[int, Incident | None] = {}
    for incident in incidents:
        for node, slot in incident.members:
            n = index.node_number.get(node)
            if n is None or incident.scope == "rack":
                continue
            mine = _gpus(facts, [n]) if slot is None else [int(index.first_gpu[n]) + slot]
            for g in mine:
                found.setdefault(g, incident)
    for g in np.flatnonzero(heat.throttled).tolist():
        found.setdefault(g, None)
    held = np.nan_to_num(heat.held)
    return sorted(
        found.items(),
        key=lambda item: (item[1] is None, worst_first(item[1]) if item[1] else (), -held[item[0]], item[0]),
    )


def _gpu(facts: ApiSnapshot, g: int, heat: _Heat, incident: Incident | None) -> pb.HotGpu:
    index = facts.index
    node, slot = index.member(g)
    codes, names = facts.jobs()
    return pb.HotGpu(
        node=node, gpu=slot, rack=index.nodes[int(index.gpu_node[g])].rack, temp_c=known(heat.temp[g]),
        power_w=known(heat.power[g]), margin_c=known(heat.margin[g]), held_share=known(heat.held[g]),
        resistance=known(heat.cooling.resistance[g]) if heat.cooling.steady[g] else None,
        expected=known(heat.cooling.expected[g]) if heat.cooling.steady[g] else None,
        incident=incident.id if incident else "", summary=incident.summary if incident else "",
        job=names[codes[g]] if codes[g] >= 0 else "",
    )  # fmt: skip


def _absent(facts: ApiSnapshot, buckets: Sequence[Bucket], heat: _Heat) -> list[str]:
    found = []
    if not buckets:
        return ["Nothing was stored in the last minute: are the agents running, and do they reach the collector?"]
    if not any(facts.index.racks):
        found.append("Racks: fleet.toml names none, so that all nodes stand as one; give rack = there.")
    if np.isnan(heat.inlet).all():
        found.append("Inlet temperatures: no node reports one; `drover-agent sources` on a node says why.")
    if np.isnan(heat.temp).all():
        found.append("Core temperatures: no GPU reports one.")
    if np.isnan(heat.held).all():
        found.append("GPUs held down by heat: no GPU reports how long heat held it down.")
    if any(facts.index.racks) and not any(rack.power_budget_w for rack in facts.index.spec.racks):
        found.append(NO_BUDGET)
    return found
