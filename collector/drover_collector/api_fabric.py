"""The fabric: leaf switches with what is wrong at them, their ports, and the NVLinks of a node.

What is wrong is what open incidents say, and ports that are down; figures beside it are of the newest buckets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.api_facts import Facts, not_found, worst_first
from drover_collector.api_recent import counted, known, last_known, per_second, recent, told, total
from drover_collector.buckets import Bucket, Floats
from drover_collector.detectors.links import Port, ports_of
from drover_collector.detectors.texts import listing
from drover_collector.fleet_index import FleetIndex
from drover_proto import fleet_pb2 as pb
from drover_proto.catalog import Scope
from drover_proto.events import SEVERITY_ORDER, Incident, IncidentKind, Severity

LEAFS, LEAFS_MAX = 200, 5000
PORTS_MAX = 1000
SHOWN_NODES = 3  # named in a verdict
BITS = 8
ERRORS = (
    "symbol_errors", "rx_errors", "local_integrity_errors", "buffer_overruns", "link_error_recoveries",
)  # fmt: skip
COUNTED = (*ERRORS, "link_downed", "tx_discards")
OF_PORTS = frozenset({"port_down", "port_flaps", "port_errors", "nic", "switch"})  # causes of incidents about ports
NO_LEAF = "no leaf"
NO_LINKS = (
    'No port is known: fleet.toml names none. Give each node its links, as in links = [{link = "mlx5_0", gpu = 0,'
    ' leaf = "leaf01"}]; `drover-agent once` on a node lists the names of its ports.'
)


@dataclass(frozen=True, slots=True)
class Ports:
    """All ports of the fleet file, arrays [L]; NaN where not known.

    Attributes:
        state: up, down, unused or unknown. rx, tx: B/s. saturation: 0..1 of the rate, the busier direction.
        errors, downs, discards: counted since `since_ms` (0: nothing is).
        incident: the worst open one about the port, None without one.
    """

    ports: Sequence[Port]
    state: Sequence[str]
    rate_gbps: Floats
    rx: Floats
    tx: Floats
    saturation: Floats
    errors: Floats
    downs: Floats
    discards: Floats
    since_ms: int
    incident: Sequence[Incident | None]
    end_ms: int

    def trouble(self, k: int) -> str:
        """A sentence; empty where nothing is wrong."""
        found = self.incident[k]
        if found is not None:
            return found.summary
        name = self.ports[k].name
        if self.state[k] == "down":
            return f"Port {name} is down."
        return f"Port {name} went down {self.downs[k]:.0f} times." if self.downs[k] > 0 else ""

    def row(self, index: FleetIndex, k: int) -> pb.PortRow:
        port, found = self.ports[k], self.incident[k]
        return pb.PortRow(
            node=index.nodes[port.node].name, link=port.name, leaf=port.leaf, gpu=_gpu(index, port),
            state=self.state[k], rate_gbps=known(self.rate_gbps[k]), rx_bytes_per_s=known(self.rx[k]),
            tx_bytes_per_s=known(self.tx[k]), saturation=known(self.saturation[k]), errors=known(self.errors[k]),
            downs=known(self.downs[k]), discards=known(self.discards[k]), trouble=self.trouble(k),
            incident=found.id if found else "",
        )  # fmt: skip

    def worst(self, which: Iterable[int]) -> list[int]:
        """In trouble, then with errors, then the busiest."""
        return sorted(
            which,
            key=lambda k: (
                not self.trouble(k), -np.nan_to_num(self.errors[k]), -np.nan_to_num(self.saturation[k]), k,
            ),
        )  # fmt: skip


def _gpu(index: FleetIndex, port: Port) -> int | None:
    return next((link.gpu for link in index.nodes[port.node].links if link.link == port.name), None)


def all_ports(facts: Facts, buckets: Sequence[Bucket]) -> Ports:
    ports = ports_of(facts.index)
    size = len(ports)
    up, rate = (last_known(buckets[-1:], Scope.LINK, name, size) for name in ("link_up", "rate_gbps"))
    rx, tx = (per_second(buckets, Scope.LINK, name, size) for name in ("rx_bytes", "tx_bytes"))
    carried = total(
        {name: last_known(buckets, Scope.LINK, name, size) for name in ("rx_bytes", "tx_bytes")},
        ("rx_bytes", "tx_bytes"), size,
    )  # fmt: skip
    since_ms, grown = counted(facts, buckets, Scope.LINK, COUNTED, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        saturation = np.where(rate > 0, np.fmax(rx, tx) * BITS / (rate * 1e9), np.nan)
    state = np.where(
        np.isnan(up), "unknown", np.where(up > 0, "up", np.where(np.nan_to_num(carried) > 0, "down", "unused"))
    )
    nothing = np.full(size, np.nan)
    return Ports(
        ports, state.tolist(), rate, rx, tx, saturation, total(grown, ERRORS, size), grown.get("link_downed", nothing),
        grown.get("tx_discards", nothing), since_ms, _incidents(facts, ports), buckets[-1].end_ms if buckets else 0,
    )  # fmt: skip


def get_fabric(facts: Facts, request: pb.FabricRequest) -> pb.Fabric:
    index, buckets = facts.index, recent(facts)
    ports = all_ports(facts, buckets)
    of_leaf: dict[str, list[int]] = {}
    for k, port in enumerate(ports.ports):
        of_leaf.setdefault(port.leaf or NO_LEAF, []).append(k)
    leafs = [_leaf(facts, name, mine, ports) for name, mine in of_leaf.items()]
    leafs.sort(key=_worst_leaf)
    limit = min(request.limit or LEAFS, LEAFS_MAX)
    reply = pb.Fabric(
        ts_ms=ports.end_ms, counted_from_ms=ports.since_ms, leafs=leafs[:limit], leafs_total=len(leafs),
        absent=_absent(buckets, ports),
    )  # fmt: skip
    shown: list[int] = []
    if request.node:
        n = facts.node_number(request.node)
        shown = [k for k, port in enumerate(ports.ports) if port.node == n]
        reply.nvlinks.extend(_nvlinks(facts, buckets, n))
    elif request.leaf:
        if request.leaf not in of_leaf:
            raise not_found(f"no leaf {request.leaf!r} in the fleet file; the Fabric page lists them")
        shown = of_leaf[request.leaf]
    reply.ports.extend(ports.row(index, k) for k in ports.worst(shown)[:PORTS_MAX])
    reply.ports_total = len(shown)
    return reply


def _incidents(facts: Facts, ports: Sequence[Port]) -> list[Incident | None]:
    """The worst open incident about each port: those of a switch stand for all ports of its leaf on its members."""
    found: list[Incident | None] = [None] * len(ports)
    of_node: dict[int, list[int]] = {}
    for k, port in enumerate(ports):
        of_node.setdefault(port.node, []).append(k)
    about = [
        i for i in facts.open_incidents()
        if told(i) and i.cause in OF_PORTS and i.kind in (IncidentKind.LINK, IncidentKind.STRAGGLER)
    ]  # fmt: skip
    for incident in sorted(about, key=worst_first):
        words = set(re.findall(r"[^\s,;:()]+", " ".join([incident.summary, *(e.text for e in incident.evidence)])))
        words |= {word.rstrip(".") for word in words}
        for node, _ in incident.members:
            for k in of_node.get(facts.index.node_number.get(node, -1), ()):
                named = ports[k].leaf in words if incident.scope == "leaf" else ports[k].name in words
                if named and found[k] is None:
                    found[k] = incident
    return found


def _leaf(facts: Facts, name: str, mine: Sequence[int], ports: Ports) -> pb.LeafRow:
    index = facts.index
    by_node: dict[int, list[int]] = {}
    for k in mine:
        by_node.setdefault(ports.ports[k].node, []).append(k)
    row = pb.LeafRow(name=name, ports=len(mine))
    for n, its in by_node.items():
        why = next((text for k in ports.worst(its) if (text := ports.trouble(k))), "")
        unknown = all(ports.state[k] == "unknown" for k in its)
        state = "trouble" if why else "unknown" if unknown else "ok"
        row.nodes.add(node=index.nodes[n].name, state=state, why=why or ("its ports are not known" if unknown else ""))
    troubled = [node for node in row.nodes if node.state == "trouble"]
    states = [ports.state[k] for k in mine]
    row.nodes_troubled = len(troubled)
    row.ports_down, row.ports_unused, row.ports_unknown = (states.count(s) for s in ("down", "unused", "unknown"))
    for field, values in (("errors", ports.errors), ("downs", ports.downs)):
        if not np.isnan(values[mine]).all():
            setattr(row, field, float(np.nansum(values[mine])))
    busy = ports.saturation[mine]
    if not np.isnan(busy).all():
        row.saturation_median, row.saturation_max = float(np.nanmedian(busy)), float(np.nanmax(busy))
    incidents = {i.id: i for k in mine if (i := ports.incident[k]) is not None}
    worst = min(incidents.values(), key=lambda i: (i.scope != "leaf", worst_first(i)), default=None)
    if worst is not None:
        row.incident, row.severity, row.switch = worst.id, worst.severity, worst.scope == "leaf"
    row.verdict = _verdict(row, troubled, worst)
    return row


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


def _worst_leaf(row: pb.LeafRow) -> tuple[bool, int, float, float, float, float, str]:
    severity = SEVERITY_ORDER.index(Severity(row.severity)) if row.severity else -1
    share = row.nodes_troubled / max(1, len(row.nodes))
    return not row.switch, -severity, -share, -row.downs, -row.errors, -row.saturation_max, row.name


def _absent(buckets: Sequence[Bucket], ports: Ports) -> list[str]:
    if not ports.ports:
        return [NO_LINKS]
    if not buckets:
        return ["Nothing was stored in the last minute: are the agents running, and do they reach the collector?"]
    link, found = buckets[-1].link, []
    if "link_up" not in link:
        found.append("No agent reports the ports that fleet.toml names: `drover-agent sources` on a node says why.")
        return found
    if "rate_gbps" not in link or not {"rx_bytes", "tx_bytes"} & link.keys():
        found.append("Saturation: needs rate_gbps, and rx_bytes or tx_bytes, of the ports.")
    if not {*ERRORS} & link.keys():
        found.append("Errors: no port reports an error counter.")
    if not any(port.leaf for port in ports.ports):
        found.append("Leafs: fleet.toml names none, so that a switch cannot be told from its nodes; give leaf = there.")
    return found


NVLINK_COUNTERS = ("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries")


def _nvlinks(facts: Facts, buckets: Sequence[Bucket], n: int) -> list[pb.NvlinkRow]:
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
        if told(i) and i.cause.startswith("nvlink")
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
            row.absent = "not reported: no NVLinks, or the driver does not tell"
        rows.append(row)
    return rows
