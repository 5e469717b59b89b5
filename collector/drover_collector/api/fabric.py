"""The fabric: leaf switches with what is wrong at them, their ports, and the NVLinks of a node.

Open incidents and ports that are down say what is wrong; the figures next to them are of the newest buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.api.recent_buckets import (
    NOW,
    counted,
    is_warning,
    known,
    last_known,
    per_second,
    recent,
    total,
)
from drover_collector.api.snapshot import ApiSnapshot, not_found, worst_first
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.robust import group_medians
from drover_collector.detectors._lib.texts import listing
from drover_collector.detectors.links.detector import NAME as LINKS
from drover_collector.detectors.links.ports import ports_of, ports_version
from drover_collector.fleet.buckets import Bucket, Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import Scope
from drover_core.model.events import SEVERITY_ORDER, Incident, IncidentKind
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

LEAFS, LEAFS_MAX = 200, 5000
KEPT_S = 3.0
PORTS_MAX = 1000
SHOWN_NODES = 3  # named in a verdict
BITS = 8
ERRORS = (
    "symbol_errors", "rx_errors", "local_integrity_errors", "buffer_overruns", "link_error_recoveries",
)  # fmt: skip
COUNTED = (*ERRORS, "link_downed", "tx_discards")
# Causes of incidents about ports.
OF_PORTS = frozenset({"port_down", "port_flaps", "port_errors", "nic", "switch", "congested_port", "hot_switch"})
NO_LEAF = "no leaf"
NO_LINKS = (
    "No port is known: no agent has reported one, and fleet.toml lists none. `drover-agent sources` on a node says what"
    " it reads of its ports, and why not."
)


class Layout:
    """The ports of a fleet, laid out once: arrays [L], and [P] over the pairs of a leaf and a node.

    Attributes:
        leafs: names; leaf: number of each port's. node: of each port. gpu: the slot that it serves, -1 for none.
        pair: number of each port's pair; pair_leaf, pair_node: of each pair. number: (node, port name) -> port.
    """

    def __init__(self, index: FleetIndex, inventory: Inventory) -> None:
        self.ports = ports_of(index, inventory)
        names = [port.leaf or NO_LEAF for port in self.ports]
        codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
        self.leafs = list(codes)
        self.leaf = np.array([codes[name] for name in names], np.int64)
        self.node = np.array([port.node for port in self.ports], np.int64)
        self.gpu = np.array([-1 if port.gpu is None else port.gpu for port in self.ports], np.int64)
        whole, self.pair = np.unique(self.leaf * index.node_count + self.node, return_inverse=True)
        self.pair_leaf, self.pair_node = whole // max(1, index.node_count), whole % max(1, index.node_count)
        self.of_node: dict[int, list[int]] = {}
        for k, n in enumerate(self.node.tolist()):
            self.of_node.setdefault(n, []).append(k)


@functools.lru_cache(2)
def _layout(index: FleetIndex, inventory: Inventory, _version: tuple[int, int]) -> Layout:
    return Layout(index, inventory)


def layout_of(facts: ApiSnapshot) -> Layout:
    """Made again when a port came, or a node said which GPU its ports serve."""
    index, inventory = facts.index, facts.pipeline.engine.inventory
    return _layout(index, inventory, ports_version(index, inventory))


@dataclass(frozen=True, slots=True)
class Ports:
    """All ports of the fleet, arrays [L]; NaN where not known.

    Attributes:
        state: up, down, unused or unknown. rx, tx: B/s. saturation: 0..1 of the rate, the busier direction. All three
            are absent of a port that is down: the last minute's are of before.
        errors, downs, discards: counted since `since_ms` (0: nothing is).
        incident: port -> the worst open one about it. trouble: port -> what is wrong with it, a sentence.
    """

    layout: Layout
    state: npt.NDArray[np.str_]
    rate_gbps: Floats
    rx: Floats
    tx: Floats
    saturation: Floats
    errors: Floats
    downs: Floats
    discards: Floats
    since_ms: int
    incident: Mapping[int, Incident]
    trouble: Mapping[int, str]
    end_ms: int

    def row(self, index: FleetIndex, k: int) -> pb.PortRow:
        port, found, slot = self.layout.ports[k], self.incident.get(k), int(self.layout.gpu[k])
        return pb.PortRow(
            node=index.nodes[port.node].name, link=port.name, leaf=port.leaf, gpu=None if slot < 0 else slot,
            state=str(self.state[k]), rate_gbps=known(self.rate_gbps[k]), rx_bytes_per_s=known(self.rx[k]),
            tx_bytes_per_s=known(self.tx[k]), saturation=known(self.saturation[k]), errors=known(self.errors[k]),
            downs=known(self.downs[k]), discards=known(self.discards[k]), trouble=self.trouble.get(k, ""),
            incident=found.id if found else "",
        )  # fmt: skip

    def worst(self, which: Sequence[int]) -> list[int]:
        """In trouble, then with errors, then the busiest."""
        at = np.array(which, np.int64)
        calm = np.array([k not in self.trouble for k in at.tolist()], bool)
        order = np.lexsort((at, -np.nan_to_num(self.saturation[at]), -np.nan_to_num(self.errors[at]), calm))
        found: list[int] = at[order].tolist()
        return found


def _incident_says(found: Incident, port: str, state: str) -> str:
    """Return its sentence, with its time if the port is up again: it would contradict the port's present state."""
    own = [e for e in found.evidence if e.port == port]
    if state != "up" or not any(e.metric == "link_up" and e.value == 0 for e in own):
        return found.summary
    seen_ms = max((e.to_ms for e in found.evidence if e.to_ms), default=found.updated_ms)
    return f"Up again; at {iso(seen_ms)}: {found.summary}"


def all_ports(facts: ApiSnapshot) -> Ports:
    """Kept for a few seconds: every console that is open asks for it."""
    return facts.once("ports", KEPT_S, lambda: _all_ports(facts, recent(facts)))


def _all_ports(facts: ApiSnapshot, buckets: Sequence[Bucket]) -> Ports:
    layout = layout_of(facts)
    size = len(layout.ports)
    up, rate = (last_known(buckets[-NOW:], Scope.LINK, name, size) for name in ("link_up", "rate_gbps"))
    rx, tx = (per_second(buckets, Scope.LINK, name, size) for name in ("rx_bytes", "tx_bytes"))
    carried = total(
        {name: last_known(buckets, Scope.LINK, name, size) for name in ("rx_bytes", "tx_bytes")},
        ("rx_bytes", "tx_bytes"), size,
    )  # fmt: skip
    since_ms, grown = counted(facts, buckets, Scope.LINK, COUNTED, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        saturation = np.where(rate > 0, np.fmax(rx, tx) * BITS / (rate * 1e9), np.nan)
    rx, tx, saturation = (np.where(up == 0, np.nan, values) for values in (rx, tx, saturation))
    state = np.where(
        np.isnan(up), "unknown", np.where(up > 0, "up", np.where(np.nan_to_num(carried) > 0, "down", "unused"))
    )
    nothing = np.full(size, np.nan)
    downs, incident = grown.get("link_downed", nothing), _incidents(facts, layout)
    trouble = {
        k: f"Port {layout.ports[k].name} went down {downs[k]:.0f} times."
        for k in np.flatnonzero(np.nan_to_num(downs) > 0).tolist()
    }
    trouble |= {k: f"Port {layout.ports[k].name} is down." for k in np.flatnonzero(state == "down").tolist()}
    trouble |= {k: _incident_says(found, layout.ports[k].name, str(state[k])) for k, found in incident.items()}
    return Ports(
        layout, state, rate, rx, tx, saturation, total(grown, ERRORS, size), downs, grown.get("tx_discards", nothing),
        since_ms, incident, trouble, buckets[-1].end_ms if buckets else 0,
    )  # fmt: skip


def get_fabric(facts: ApiSnapshot, request: pb.FabricRequest) -> pb.Fabric:
    index, buckets, ports = facts.index, recent(facts), all_ports(facts)
    layout = ports.layout
    leafs = facts.once("leafs", KEPT_S, lambda: _Leafs(index, ports))
    limit = min(request.limit or LEAFS, LEAFS_MAX)
    reply = pb.Fabric(
        ts_ms=ports.end_ms, counted_from_ms=ports.since_ms, leafs=[leafs.row(code) for code in leafs.order()[:limit]],
        leafs_total=len(layout.leafs), absent=_absent(buckets, ports),
    )  # fmt: skip
    shown: list[int] = []
    if request.node:
        n = facts.node_number(request.node)
        shown = layout.of_node.get(n, [])
        reply.nvlinks.extend(_nvlinks(facts, buckets, n))
    elif request.leaf:
        if request.leaf not in layout.leafs:
            raise not_found(f"no leaf {request.leaf!r} in the fleet file; the Fabric page lists them")
        shown = np.flatnonzero(layout.leaf == layout.leafs.index(request.leaf)).tolist()
    reply.ports.extend(ports.row(index, k) for k in ports.worst(shown)[:PORTS_MAX])
    reply.ports_total = len(shown)
    return reply


def _incidents(facts: ApiSnapshot, layout: Layout) -> dict[int, Incident]:
    """The worst open incident about each port: one of a switch stands for all ports of its leaf on its members."""
    found: dict[int, Incident] = {}
    about = [
        i for i in facts.open_incidents()
        if is_warning(i) and i.cause in OF_PORTS and i.kind in (IncidentKind.LINK, IncidentKind.STRAGGLER)
    ]  # fmt: skip
    for incident in sorted(about, key=worst_first):
        named, leafs = {e.port for e in incident.evidence}, incident.snapshot_of(LINKS).get("leafs", {})
        for node, _ in incident.members:
            for k in layout.of_node.get(facts.index.node_number.get(node, -1), ()):
                port = layout.ports[k]
                if port.group in leafs if incident.scope == "leaf" and port.group else port.name in named:
                    found.setdefault(k, incident)
    return found


class _Leafs:
    """What is known about each leaf, arrays [F] in the order of the fleet file."""

    def __init__(self, index: FleetIndex, ports: Ports) -> None:
        self._index, self._ports, layout = index, ports, ports.layout
        count = len(layout.leafs)
        self._states = {
            state: np.bincount(layout.leaf[ports.state == state], minlength=count)
            for state in ("down", "unused", "unknown")
        }
        self._size = np.bincount(layout.leaf, minlength=count)
        self._sums = {"errors": self._sum(ports.errors), "downs": self._sum(ports.downs)}
        self._median = group_medians(ports.saturation, layout.leaf, count)[0]
        self._most = np.full(count, -np.inf)
        np.fmax.at(self._most, layout.leaf, np.where(np.isnan(ports.saturation), -np.inf, ports.saturation))
        pairs = len(layout.pair_leaf)
        bad = np.array(list(ports.trouble), np.int64)
        self._bad = np.bincount(layout.pair[bad], minlength=pairs) > 0  # pairs
        unknown = np.bincount(layout.pair[ports.state == "unknown"], minlength=pairs)
        self._unknown = unknown == np.bincount(layout.pair, minlength=pairs)
        self._nodes = np.bincount(layout.pair_leaf, minlength=count)
        self._troubled = np.bincount(layout.pair_leaf[self._bad], minlength=count)
        self._rows: dict[int, pb.LeafRow] = {}
        self._worst: dict[int, Incident] = {}
        for k, incident in ports.incident.items():
            code = int(layout.leaf[k])
            held = self._worst.get(code)
            if held is None or _rank(incident) < _rank(held):
                self._worst[code] = incident

    def _sum(self, values: Floats) -> Floats:
        """NaN where none of a leaf's ports is known."""
        layout, there = self._ports.layout, ~np.isnan(values)
        count = len(layout.leafs)
        sums = np.bincount(layout.leaf[there], values[there], count)
        return np.where(np.bincount(layout.leaf[there], minlength=count) > 0, sums, np.nan)

    def order(self) -> list[int]:
        """Return codes of leafs: first those with an incident of the switch, then the gravest, then by nodes."""
        count = len(self._ports.layout.leafs)
        graded = [(0, 0)] * count
        for code, incident in self._worst.items():
            graded[code] = int(incident.scope == "leaf"), 1 + SEVERITY_ORDER.index(incident.severity)
        switch, severity = np.array(graded, np.int64).reshape(count, 2).T
        keys = (
            -np.nan_to_num(self._most, neginf=0), -np.nan_to_num(self._sums["errors"]),
            -np.nan_to_num(self._sums["downs"]), -self._troubled / np.maximum(1, self._nodes), -severity, -switch,
        )  # fmt: skip
        order: list[int] = np.lexsort(keys).tolist()
        return order

    def row(self, code: int) -> pb.LeafRow:
        """Made once: every console that is open asks for it."""
        if code not in self._rows:
            self._rows[code] = self._row(code)
        return self._rows[code]

    def _row(self, code: int) -> pb.LeafRow:
        index, ports, layout = self._index, self._ports, self._ports.layout
        states = {state: int(counts[code]) for state, counts in self._states.items()}
        row = pb.LeafRow(
            name=layout.leafs[code], ports=int(self._size[code]), ports_down=states["down"],
            ports_unused=states["unused"], ports_unknown=states["unknown"], nodes_troubled=int(self._troubled[code]),
            errors=known(self._sums["errors"][code]), downs=known(self._sums["downs"][code]),
            saturation_median=known(self._median[code]), saturation_max=known(self._most[code]),
        )  # fmt: skip
        for pair in np.flatnonzero(layout.pair_leaf == code).tolist():
            n, why, state = int(layout.pair_node[pair]), "", "ok"
            if self._bad[pair]:
                mine = [k for k in layout.of_node[n] if layout.pair[k] == pair]
                state, why = "trouble", ports.trouble[ports.worst(mine)[0]]
            elif self._unknown[pair]:
                state, why = "unknown", "its ports are not known"
            row.nodes.add(node=index.nodes[n].name, state=state, why=why)
        worst = self._worst.get(code)
        if worst is not None:
            row.incident, row.severity, row.switch = worst.id, worst.severity, worst.scope == "leaf"
        row.verdict = _verdict(row, [node for node in row.nodes if node.state == "trouble"], worst)
        return row


def _rank(incident: Incident) -> tuple[bool, tuple[bool, int, int, int, str]]:
    """Of the switch before those of its nodes."""
    return incident.scope != "leaf", worst_first(incident)


def _verdict(row: pb.LeafRow, troubled: Sequence[pb.LeafNode], worst: Incident | None) -> str:
    """The switch or its nodes: what an incident says, else how many of them it is."""
    if row.switch and worst is not None:
        return worst.summary
    if not troubled:
        return ""
    names = listing([node.node for node in troubled])
    if len(troubled) == 1:
        return f"One of {len(row.nodes)} nodes, not the switch: {names}. {troubled[0].why}"
    return f"{len(troubled)} of {len(row.nodes)} nodes: {names}; nothing says that it is the switch."


def _absent(buckets: Sequence[Bucket], ports: Ports) -> list[str]:
    ports_known = ports.layout.ports
    if not ports_known:
        return [NO_LINKS]
    if not buckets:
        return ["Nothing was stored in the last minute: are the agents running, and do they reach the collector?"]
    link, found = buckets[-1].link, []
    if "link_up" not in link:
        found.append("No agent reports whether its ports are up: `drover-agent sources` on a node says why.")
        return found
    if "rate_gbps" not in link or not {"rx_bytes", "tx_bytes"} & link.keys():
        found.append("Saturation: needs rate_gbps, and rx_bytes or tx_bytes, of the ports.")
    if not {*ERRORS} & link.keys():
        found.append("Errors: no port reports an error counter.")
    if not any(port.leaf for port in ports_known):
        found.append(
            "Leafs: fleet.toml names none, so that a switch is known only by ports of several nodes that go down"
            " together; give leaf = there."
        )
    return found


NVLINK_COUNTERS = ("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries")


def _nvlinks(facts: ApiSnapshot, buckets: Sequence[Bucket], n: int) -> list[pb.NvlinkRow]:
    index = facts.index
    first, end = int(index.first_gpu[n]), int(index.first_gpu[n + 1])
    size = index.gpu_count
    up, rx, tx = (
        last_known(buckets, Scope.GPU, name, size)
        for name in ("nvlink_active_links", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s")
    )
    _, grown = counted(facts, buckets, Scope.GPU, NVLINK_COUNTERS, size)
    counts = [grown.get(name, np.full(size, np.nan)) for name in NVLINK_COUNTERS]
    kind = (index.sku == index.sku[n])[index.gpu_node]
    usual = up[kind & ~np.isnan(up)]
    incidents = [
        i for i in facts.open_by_node().get(index.nodes[n].name, ())
        if is_warning(i) and i.cause.startswith("nvlink")
    ]  # fmt: skip
    rows = []
    for g in range(first, end):
        row = pb.NvlinkRow(
            gpu=g - first, links_up=known(up[g]), links_usual=float(np.median(usual)) if len(usual) else None,
            crc_errors=known(counts[0][g]), replays=known(counts[1][g]), recoveries=known(counts[2][g]),
            rx_bytes_per_s=known(rx[g]), tx_bytes_per_s=known(tx[g]),
        )  # fmt: skip
        members = {(index.nodes[n].name, g - first), (index.nodes[n].name, None)}
        row.incident = next((i.id for i in incidents if members.intersection(i.members)), "")
        if not row.HasField("links_up"):
            row.absent = "not reported: no NVLinks, or the driver does not report them"
        rows.append(row)
    return rows
