"""Links: network ports that go down, flap or err, leaf switches that take many along, NVLink and PCIe that lost lanes.

Limits of port counters: NVSentinel's ADR-046; flaps: gpud and Azure's node health checks; NVLink and PCIe: DCGM 4.6.
What many ports of a leaf show at once is the switch's, not the nodes'. What a tenth of all ports show is congestion or
a way of counting, and tells nobody apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from drover_collector.buckets import BUCKET_MS, Floats
from drover_collector.detectors.example import Example, play, small_fleet
from drover_collector.detectors.links_gpu import MINUTE_S, gpu_links
from drover_collector.detectors.links_ports import (
    DOWN_MS,
    FLAPS_CRITICAL,
    FLAPS_KEPT,
    FLAPS_MS,
    FLAPS_WARNING,
    PERSIST,
    RATES,
    Port,
    State,
    flaps_of,
    own_flaps,
    ports_of,
)
from drover_collector.detectors.links_texts import of_node
from drover_collector.detectors.robust import Bools
from drover_collector.detectors.texts import duration, listing
from drover_collector.detectors.window import Window
from drover_collector.fleet_index import FleetIndex
from drover_proto.events import Evidence, Finding, Incident, IncidentKind, Severity, Wanted

NAME = "links"
VERSION = 1
QUIET_MS = 300_000  # a port that flaps is up for minutes in between

COMMON_SHARE = 0.1  # of all ports that show the same: it tells nobody apart
COMMON_LEAST = 3  # ports, in a small fleet
LEAF_SHARE = 0.5  # of a leaf's ports that are down: the switch
LEAF_NODES = 3  # at least, on so many nodes
RESET = "went down together for moments,"  # as evidence tells it, for a restart


def restored(incidents: Sequence[Incident]) -> State:
    """State that still knows the ports of which a former run of the collector told that they are down, or flap."""
    return State(left=[i for i in incidents if NAME in i.detectors and i.closed_ms is None])


def detect(window: Window, state: State | None, now_ms: int) -> tuple[list[Finding], State]:
    s = state if state is not None else State()
    if not window.fresh:
        return [], s
    found = list(gpu_links(window, s.gpu, now_ms))
    if s.index is not window.index:
        ports = ports_of(window.index)
        none, nobody = np.zeros(len(ports), np.int64), np.zeros(len(ports), bool)
        of_node = np.array([port.node for port in ports], np.int64)
        of_leaf: dict[str, list[int]] = {}
        for k, port in enumerate(ports):
            of_leaf.setdefault(port.leaf, []).append(k)
        left = s.left
        s = State(
            nobody.copy(), none, none, nobody, np.full(len(ports), np.nan), {}, s.gpu, window.index, ports, of_node,
            {leaf: np.array(mine, np.int64) for leaf, mine in of_leaf.items()},
        )  # fmt: skip
        _take_over(s, window.index, left)
    if s.ports and any(len(column) == len(s.ports) for column in window.newest.link.values()):
        found += _ports(window, s.ports, s, now_ms)
    return found, s


def _take_over(s: State, index: FleetIndex, incidents: Sequence[Incident]) -> None:
    """What a former run told of ports: which were up once, since when they are down, when they went down."""
    if not incidents:
        return
    of_node = {n: list(mine) for n, mine in groupby(range(len(s.ports)), lambda k: s.ports[k].node)}
    seen_up, down_ms = s.seen_up.copy(), s.down_ms.copy()
    for incident in incidents:
        facts = [e for e in incident.evidence if e.metric in ("link_up", "link_downed")]
        _take_over_resets(s, index, incident)
        for n in {index.node_number.get(node, -1) for node, _ in incident.members} if facts else ():
            for k in of_node.get(n, ()):
                mine = [e for e in facts if e.text.startswith(f"port {s.ports[k].name} ")]
                seen_up[k] |= bool(mine) or (incident.cause == "switch" and s.ports[k].computes)
                for e in mine:
                    if e.metric == "link_up" and e.from_ms is not None:
                        down_ms[k] = e.from_ms
                    elif e.metric == "link_downed" and e.value and e.from_ms is not None and e.to_ms is not None:
                        # How often, first and last are known; in between they are taken as even.
                        # More than a warning's worth, and yet a warning: the switch's, which drain nobody.
                        most = FLAPS_KEPT if incident.severity is Severity.CRITICAL else FLAPS_CRITICAL - 1
                        times = np.linspace(e.from_ms, e.to_ms, min(int(e.value), most)).astype(np.int64)
                        s.flaps[k] = deque(times.tolist(), maxlen=FLAPS_KEPT)
    s.seen_up, s.down_ms = seen_up, down_ms


def _take_over_resets(s: State, index: FleetIndex, incident: Incident) -> None:
    """When a switch took its ports along: how often, first and last are known."""
    leafs = {link.leaf or index.spec.by_name[node].leaf for node, _ in incident.members if node in index.node_number
             for link in index.spec.by_name[node].links}  # fmt: skip
    for e in incident.evidence:
        if RESET in e.text and e.value and e.from_ms is not None and e.to_ms is not None and incident.scope == "leaf":
            for leaf in leafs:
                if leaf and f"leaf {leaf}," in incident.summary:
                    s.shared[leaf] = set(np.linspace(e.from_ms, e.to_ms, int(e.value)).astype(np.int64).tolist())


def could_not_judge(window: Window) -> list[str]:
    bucket, result = window.newest, []
    if "link_up" not in bucket.link and "link_downed" not in bucket.link:
        result.append("network ports that go down: needs link_up or link_downed of links")
    if not RATES.keys() & bucket.link.keys():
        result.append("network ports with errors: needs symbol_errors, rx_errors or the like")
    if "nvlink_active_links" not in bucket.gpu:
        result.append("lost NVLinks: needs nvlink_active_links")
    if "pcie_width" not in bucket.gpu:
        result.append("PCIe links with fewer lanes: needs pcie_width")
    return result


def _ports(window: Window, ports: Sequence[Port], s: State, now_ms: int) -> Iterator[Finding]:
    index, bucket, nothing = window.index, window.newest, np.full(len(ports), np.nan)
    up = bucket.link.get("link_up", nothing)
    went_down = s.seen_up & (up == 0) & (s.down_ms == 0)
    downed = bucket.link.get("link_downed", nothing)
    # A port that was down and up again between two looks shows only in its counter.
    counted = (downed > s.downed) & (s.down_ms == 0)
    # What comes down with its node, which is silent meanwhile, flaps no more than what never was looked at.
    flapped = np.flatnonzero((went_down & s.was_up) | counted).tolist()
    _note_shared(ports, s, flapped, bucket.start_ms)
    for k in flapped:
        times = s.flaps.setdefault(k, deque(maxlen=FLAPS_KEPT))
        if not times or bucket.start_ms > times[-1]:  # after a restart: what was told before is seen again
            times.append(bucket.start_ms)
    s.downed, s.was_up = downed, up == 1
    s.seen_up |= s.was_up
    since_ms = max(bucket.start_ms, bucket.end_ms - BUCKET_MS)  # a long bucket tells how it ended
    s.down_ms = np.where(went_down, since_ms, np.where(s.was_up, 0, s.down_ms))
    for k in [k for k, times in s.flaps.items() if bucket.end_ms - times[-1] > FLAPS_MS]:
        del s.flaps[k]
    rates = _rates(window, len(ports))
    over = _over(rates, len(ports))
    s.errs = np.where(over, s.errs + 1, 0)

    # Of a node that is silent nobody knows; a port that is gone from a node that is heard is down as before.
    heard = (bucket.node_rows > 0) | (np.bincount(index.gpu_node, bucket.gpu_rows, index.node_count) > 0)
    down = (s.down_ms > 0) & (heard[s.of_node] | ~np.isnan(up))
    leafs = list(_leafs(window, ports, s, down, now_ms))
    hit = {ports[k].leaf for k in np.flatnonzero(down).tolist()} - {""}
    dark = {leaf for leaf in hit if not s.was_up[s.of_leaf[leaf]].any()}  # switches of which nothing is seen
    of_leafs = {member[0] for finding in leafs for member in finding.members}
    for k in [k for k in s.flaps if down[k] and index.nodes[ports[k].node].name in of_leafs]:
        while s.flaps[k] and s.flaps[k][-1] >= s.down_ms[k]:  # its switch went, not the port
            s.flaps[k].pop()
        if not s.flaps[k]:
            del s.flaps[k]
    yield from leafs
    yield from _resets(window, ports, s, now_ms)
    for n, mine in groupby(
        _told(ports, s, down, bucket.end_ms), lambda k: ports[k].node
    ):  # ports are in the nodes' order
        if index.nodes[n].name not in of_leafs:
            yield of_node(window, ports, list(mine), s, down, dark, rates, now_ms)


def _note_shared(ports: Sequence[Port], s: State, flapped: list[int], at_ms: int) -> None:
    """Remember when most of a switch's ports went down together, on several nodes: it was the switch, for less than the
    time after which `_leafs` tells of it. Such flaps are told of the switch, not of its nodes."""
    of_leaf: dict[str, list[int]] = {}
    for k in flapped:
        if ports[k].leaf:
            of_leaf.setdefault(ports[k].leaf, []).append(k)
    many = {leaf: mine for leaf, mine in of_leaf.items() if len({ports[k].node for k in mine}) >= LEAF_NODES}
    if not many:
        return
    used = Counter(ports[k].leaf for k in np.flatnonzero(s.seen_up).tolist())
    for leaf, mine in many.items():
        if len(mine) >= LEAF_SHARE * used[leaf]:
            s.shared[leaf] = {ms for ms in s.shared.get(leaf, ()) if at_ms - ms <= FLAPS_MS} | {at_ms}


def _told(ports: Sequence[Port], s: State, down: Bools, end_ms: int) -> list[int]:
    """Ports of which something is to be told."""
    flapping = [k for k in s.flaps if flaps_of(own_flaps(ports[k], k, s), end_ms) >= FLAPS_WARNING]
    gone = np.flatnonzero(down & (end_ms - s.down_ms >= DOWN_MS)).tolist()
    return sorted({*flapping, *gone, *np.flatnonzero(s.errs >= PERSIST).tolist()})


def _rates(window: Window, count: int) -> dict[str, Floats]:
    """Growth per second of each counter over the window, float64 [L]; NaN where it began anew or is not known."""
    first, last = window.buckets[0], window.buckets[-1]
    elapsed_s = (last.end_ms - first.end_ms) / 1000
    result = {}
    for metric in RATES:
        before, now = first.link.get(metric), last.link.get(metric)
        if before is None or now is None or not elapsed_s or len(now) != count:
            continue
        grown = now - before
        over_s = elapsed_s if RATES[metric] >= 1 else max(elapsed_s, MINUTE_S)
        result[metric] = np.where(grown >= 0, grown / over_s, np.nan)
    return result


def _over(rates: dict[str, Floats], count: int) -> Bools:
    found = np.zeros(count, bool)
    for metric, rate in rates.items():
        over = rate > RATES[metric]
        if over.sum() <= max(COMMON_LEAST, COMMON_SHARE * count):
            found |= over
    return found


def _leafs(window: Window, ports: Sequence[Port], s: State, down: Bools, now_ms: int) -> Iterator[Finding]:
    """Leaf switches of which most ports are down, on several nodes: it is the switch."""
    end_ms = window.newest.end_ms
    if down.sum() < 2:
        return
    hit = {ports[k].leaf for k in np.flatnonzero(down).tolist()} - {""}
    used = {leaf: some[s.seen_up[some]].tolist() for leaf, some in s.of_leaf.items() if leaf in hit}
    for leaf, mine in sorted(((leaf, mine) for leaf, mine in used.items() if mine), key=lambda item: item[1][0]):
        gone = [k for k in mine if down[k]]
        nodes = sorted({window.index.nodes[ports[k].node].name for k in gone})
        most = len(nodes) >= LEAF_NODES and len(gone) >= LEAF_SHARE * len(mine)
        if not most and (len(nodes) < 2 or len(gone) < len(mine)):  # of a small leaf: all of it
            continue
        since = int(min(s.down_ms[k] for k in gone))
        if end_ms - since < DOWN_MS:
            continue
        yield Finding(
            NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms, since,
            Severity.CRITICAL, 0.9, Wanted.ADVISE,
            f"{len(gone)} of {len(mine)} ports at leaf {leaf} are down, on {len(nodes)} nodes: it is the switch.",
            "Look at the switch, not at the nodes; keep new work that needs the fabric off them until it is back.",
            (Evidence(f"ports down on {listing(nodes)}", "link_up", 0.0, 1.0, None, len(mine), since, end_ms),),
        )  # fmt: skip


def _resets(window: Window, ports: Sequence[Port], s: State, now_ms: int) -> Iterator[Finding]:
    """Leaf switches that took their ports along again and again, each time for moments."""
    end_ms = window.newest.end_ms
    for leaf, moments in s.shared.items():
        times = sorted(at_ms for at_ms in moments if end_ms - at_ms <= FLAPS_MS)
        if len(times) < FLAPS_WARNING:
            continue
        mine = [k for k in s.flaps if ports[k].leaf == leaf]
        nodes = sorted({window.index.nodes[ports[k].node].name for k in mine})
        text = f"{RESET} {len(times)} times in {duration(end_ms - times[0])}"
        yield Finding(
            NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms,
            times[0], Severity.WARNING, 0.85, Wanted.ADVISE,
            f"{len(mine)} ports at leaf {leaf}, on {len(nodes)} nodes, {text}: it is the switch.",
            "Look at the switch (its log, its power, a restart under way), not at the nodes and their cables.",
            (Evidence(f"ports of {listing(nodes)} {text}", "link_downed", float(len(times)), 0.0, None, len(mine),
                      times[0], times[-1]),),
        )  # fmt: skip


def _flap(number: int, link: dict[str, Floats]) -> None:
    """One port of a node goes down every 40 s, and comes back."""
    if number >= 2:
        link["link_up"][20] = 0.0 if number % 4 in (2, 3) else 1.0
        link["link_downed"][20] += (number + 2) // 4


def _congest(number: int, link: dict[str, Floats]) -> None:
    """All ports of the fleet wait for acknowledgements: congestion, nobody's fault; and one was never plugged in."""
    link["ack_timeouts"] += 50.0 * number
    link["link_up"][3] = 0.0


def _lose_switch(number: int, link: dict[str, Floats]) -> None:
    if number >= 2:
        link["link_up"][:32] = 0.0


_FLAPPING = (("port_down", "warning"), ("port_flaps", "warning"), ("port_flaps", "critical"))
EXAMPLES = (
    Example(
        "congestion everywhere, and a port that is not in use",
        lambda: play(small_fleet(ports=8), 9, links=_congest),
        frozenset(),
    ),
    Example(
        "a leaf switch goes, and takes the ports of four nodes along: one finding",
        lambda: play(small_fleet(ports=8), 6, links=_lose_switch),
        frozenset({("link", "switch", "leaf", "critical")}),
    ),
    Example(
        "one port flaps",
        lambda: play(small_fleet(ports=8), 15, links=_flap),
        frozenset({("link", cause, "node", severity) for cause, severity in _FLAPPING}),
    ),
)
