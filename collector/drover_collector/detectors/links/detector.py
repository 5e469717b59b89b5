"""Links: network ports that go down, flap or err, leaf switches that take many along, NVLink and PCIe that lost lanes.

Every port that an agent reports is judged once it was up, whether or not the fleet file lists it. Only a port that
serves a GPU asks for a drain. One that serves none and is not listed (storage, management) is a warning, never more.

Limits of port counters: NVSentinel's ADR-046; flaps: gpud and Azure's node health checks; NVLink and PCIe: DCGM 4.6.
What many ports of a leaf show at once is the switch's, not the nodes'. What a tenth of all ports show is congestion or
a way of counting, and tells nobody apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from itertools import groupby, pairwise

import numpy as np

from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.texts import duration, listing
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.links.gpu import MINUTE_S, gpu_links
from drover_collector.detectors.links.ports import (
    DOWN_MS,
    FLAPS_CRITICAL,
    FLAPS_KEPT,
    FLAPS_MS,
    FLAPS_WARNING,
    PERSIST,
    RATES,
    Port,
    PortState,
    flaps_of,
    graded,
    own_flaps,
    ports_of,
    ports_version,
)
from drover_collector.detectors.links.texts import of_node
from drover_collector.fleet.buckets import BUCKET_MS, Floats
from drover_collector.fleet.index import FleetIndex
from drover_collector.fleet.ports import FOUND_MAX, fitted, name_key
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "links"
VERSION = 1
QUIET_MS = 300_000  # a port that flaps is up for minutes in between

COMMON_SHARE = 0.1  # of all ports that show the same: it tells nobody apart
COMMON_LEAST = 3  # ports, in a small fleet
LEAF_SHARE = 0.5  # of a leaf's ports that are down: the switch
LEAF_NODES = 3  # at least, on so many nodes
GONE_BUCKETS = 30  # without a value, of a card that its node does not name any more: a starting agent names some later
TOGETHER_MS = 60_000  # ports whose leafs are not sure and that go down within this of each other share something


def restored(incidents: Sequence[Incident]) -> PortState:
    """State that still knows the ports of which a former run of the collector told that they are down, or flap."""
    return PortState(left=[i for i in incidents if NAME in i.detectors and i.closed_ms is None])


def detect(window: Window, state: PortState | None, now_ms: int) -> tuple[list[Finding], PortState]:
    s = state if state is not None else PortState()
    if not window.fresh:
        return [], s
    found = list(gpu_links(window, s.gpu, now_ms))
    if s.index is not window.index:
        s = PortState(gpu=s.gpu, index=window.index, left=s.left)
    if s.version != ports_version(window.index, window.inventory):
        _lay_out(s, window)
    if s.ports and len(window.newest.link):
        found += _ports(window, s.ports, s, now_ms)
    return found, s


def _lay_out(s: PortState, window: Window) -> None:
    """Take in ports that are new, which come after those that are known, and what the PCI bus says of all of them."""
    s.version = ports_version(window.index, window.inventory)
    s.ports, known = ports_of(window.index, window.inventory), len(s.seen_up)
    new = len(s.ports) - known
    s.of_node = np.array([port.node for port in s.ports], np.int64)
    s.computes = np.array([port.computes for port in s.ports], bool)
    s.there = np.array([port.listed or port.there for port in s.ports], bool)
    of_leaf: dict[str, list[int]] = {}
    for k, port in enumerate(s.ports):
        of_leaf.setdefault(port.leaf, []).append(k)
    s.of_leaf = {leaf: np.array(mine, np.int64) for leaf, mine in of_leaf.items()}
    if new:
        nothing, nobody = np.zeros(new, np.int64), np.zeros(new, bool)
        s.seen_up, s.was_up = np.append(s.seen_up, nobody), np.append(s.was_up, nobody)
        s.down_ms, s.errs = np.append(s.down_ms, nothing), np.append(s.errs, nothing)
        s.gone = np.append(s.gone, nothing)
        s.downed = np.append(s.downed, np.full(new, np.nan))
        _take_over(s, window.index, s.left, known)


def _take_over(s: PortState, index: FleetIndex, incidents: Sequence[Incident], first: int) -> None:
    """What a former run told of ports: which were up once, since when they are down, when they went down.

    Args:
        first: of the ports from this one on; the others are known already.
    """
    if not incidents:
        return
    of_node: dict[int, list[int]] = {}
    for k in range(first, len(s.ports)):
        of_node.setdefault(s.ports[k].node, []).append(k)
    seen_up, down_ms = s.seen_up.copy(), s.down_ms.copy()
    for incident in incidents:
        facts = [e for e in incident.evidence if e.metric in ("link_up", "link_downed")]
        if not first:
            _take_over_resets(s, incident)
        for n in {index.node_number.get(node, -1) for node, _ in incident.members} if facts else ():
            for k in of_node.get(n, ()):
                mine = [e for e in facts if e.port == s.ports[k].name]
                seen_up[k] |= bool(mine) or (incident.cause == "switch" and s.ports[k].computes)
                for e in mine:
                    if e.metric == "link_up" and e.from_ms is not None:
                        down_ms[k] = e.from_ms
                    elif e.metric == "link_downed" and e.value and e.from_ms is not None and e.to_ms is not None:
                        # How often, first and last are known; in between they are taken as even.
                        # More than a warning's worth, and yet a warning: the switch's, which drain nobody.
                        grave = incident.severity is Severity.CRITICAL or not graded(s.ports[k])
                        most = FLAPS_KEPT if grave else FLAPS_CRITICAL - 1
                        times = np.linspace(e.from_ms, e.to_ms, min(int(e.value), most)).astype(np.int64)
                        s.flaps[k] = deque(times.tolist(), maxlen=FLAPS_KEPT)
    s.seen_up, s.down_ms = seen_up, down_ms


def _take_over_resets(s: PortState, incident: Incident) -> None:
    """When a switch took its ports along: how often, first and last are known."""
    for leaf, count, from_ms, to_ms in incident.snapshot_of(NAME).get("resets", ()):
        s.shared[leaf] = set(np.linspace(from_ms, to_ms, count).astype(np.int64).tolist())


def could_not_judge(window: Window) -> list[str]:
    bucket, result = window.newest, []
    over = window.index.ports.left_out
    if over:
        some = f"{sum(over.values())} network ports of {listing(sorted(over))}"
        result.append(f"{some}: {FOUND_MAX} that fleet.toml does not list are judged of each node; list the others")
    if "link_up" not in bucket.link and "link_downed" not in bucket.link:
        result.append("network ports that go down: needs link_up or link_downed of links")
    if not RATES.keys() & bucket.link.keys():
        result.append("network ports with errors: needs symbol_errors, rx_errors or the like")
    if "nvlink_active_links" not in bucket.gpu:
        result.append("lost NVLinks: needs nvlink_active_links")
    if "pcie_width" not in bucket.gpu:
        result.append("PCIe links with fewer lanes: needs pcie_width")
    return result


def _ports(window: Window, ports: Sequence[Port], s: PortState, now_ms: int) -> Iterator[Finding]:
    index, bucket = window.index, window.newest
    up = fitted(bucket.link.get("link_up"), len(ports))
    s.gone = np.where(np.isnan(up) & ~s.there, s.gone + 1, 0)
    _forget(s, s.gone >= GONE_BUCKETS)
    went_down = s.seen_up & (up == 0) & (s.down_ms == 0)
    downed = fitted(bucket.link.get("link_downed"), len(ports))
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
    # Switches of which nothing is seen; where no leaf is named, a port of the same use must be up.
    hit = {ports[k].leaf for k in np.flatnonzero(down).tolist()}
    dark = {leaf for leaf in hit if not (s.was_up & (s.computes | bool(leaf)))[s.of_leaf[leaf]].any()}
    of_leafs = {member[0] for finding in leafs for member in finding.members}
    together = list(_together(window, s, down, of_leafs))
    shared = np.zeros(len(ports), bool)
    shared[[k for some in together for k in some]] = True
    leafs += [_common(window, s, some, now_ms) for some in together if _is_due(s, some, bucket.end_ms)]
    for k in [k for k in s.flaps if down[k] and (shared[k] or index.nodes[ports[k].node].name in of_leafs)]:
        while s.flaps[k] and s.flaps[k][-1] >= s.down_ms[k]:  # its switch went, not the port
            s.flaps[k].pop()
        if not s.flaps[k]:
            del s.flaps[k]
    yield from leafs
    yield from _resets(window, ports, s, now_ms)
    down &= ~shared
    for n, mine in groupby(_told(ports, s, down, bucket.end_ms), lambda k: ports[k].node):
        if index.nodes[n].name not in of_leafs:
            yield of_node(window, ports, list(mine), s, down, dark, rates, now_ms)


def _forget(s: PortState, gone: Bools) -> None:
    """Ports of cards that their nodes do not have any more: renamed or taken out, nobody will ever see them up."""
    for k in np.flatnonzero(gone & (s.seen_up | (s.down_ms > 0))).tolist():
        s.flaps.pop(k, None)
    s.seen_up, s.down_ms = s.seen_up & ~gone, np.where(gone, 0, s.down_ms)


def _together(window: Window, s: PortState, down: Bools, of_leafs: Set[str]) -> Iterator[list[int]]:
    """Ports whose leafs are not sure and that went down together, on several nodes: they share something that is
    broken, a switch most likely, and their nodes are well."""
    some = [k for k in np.flatnonzero(down & (s.down_ms > 0)).tolist() if not s.ports[k].sure]
    some = [k for k in some if window.index.nodes[s.ports[k].node].name not in of_leafs]
    some.sort(key=lambda k: int(s.down_ms[k]))
    starts = [at for at, k in enumerate(some) if not at or s.down_ms[k] - s.down_ms[some[at - 1]] > TOGETHER_MS]
    for first, end in pairwise([*starts, len(some)]):
        if len({s.ports[k].node for k in some[first:end]}) >= LEAF_NODES:
            yield sorted(some[first:end])


def _is_due(s: PortState, some: list[int], end_ms: int) -> bool:
    return end_ms - min(int(s.down_ms[k]) for k in some) >= DOWN_MS


def _common(window: Window, s: PortState, some: list[int], now_ms: int) -> Finding:
    nodes = sorted({window.index.nodes[s.ports[k].node].name for k in some})
    since, end_ms = min(int(s.down_ms[k]) for k in some), window.newest.end_ms
    return Finding(
        NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms, since,
        Severity.CRITICAL, 0.8, RecommendedAction.ADVISE,
        f"{len(some)} ports on {len(nodes)} nodes went down together: it is what they share, most likely a switch.",
        "Look at the switch of these ports, not at the nodes; name the leaf of each port in fleet.toml, so that Drover"
        " knows which switch it is.",
        (Evidence(f"ports down on {listing(nodes)}", "link_up", 0.0, 1.0, None, len(some), since, end_ms),),
    )  # fmt: skip


def _note_shared(ports: Sequence[Port], s: PortState, flapped: list[int], at_ms: int) -> None:
    """Remember when most of a switch's ports went down together, on several nodes: it was the switch, for less than the
    time after which `_leafs` tells of it. Such flaps are told of the switch, not of its nodes."""
    of_leaf: dict[str, list[int]] = {}
    for k in flapped:
        of_leaf.setdefault(ports[k].group, []).append(k)
    many = {leaf: mine for leaf, mine in of_leaf.items() if len({ports[k].node for k in mine}) >= LEAF_NODES}
    if not many:
        return
    used = Counter(ports[k].group for k in np.flatnonzero(s.seen_up).tolist())
    for leaf, mine in many.items():
        if not leaf or len(mine) >= LEAF_SHARE * used[leaf]:
            s.shared[leaf] = {ms for ms in s.shared.get(leaf, ()) if at_ms - ms <= FLAPS_MS} | {at_ms}


def _told(ports: Sequence[Port], s: PortState, down: Bools, end_ms: int) -> list[int]:
    """Ports of which something is to be told, those of a node one after another."""
    flapping = [k for k in s.flaps if flaps_of(own_flaps(ports[k], k, s), end_ms) >= FLAPS_WARNING]
    gone = np.flatnonzero(down & (end_ms - s.down_ms >= DOWN_MS)).tolist()
    told = {*flapping, *gone, *np.flatnonzero(s.errs >= PERSIST).tolist()}
    # By node; there as the fleet file has them, then by name, in whatever order they came.
    return sorted(
        told, key=lambda k: (ports[k].node, not ports[k].listed, name_key("" if ports[k].listed else ports[k].name), k)
    )


def _rates(window: Window, count: int) -> dict[str, Floats]:
    """Growth per second of each counter over the window, float64 [L]; NaN where it began anew or is not known."""
    first, last = window.buckets[0], window.buckets[-1]
    elapsed_s = (last.end_ms - first.end_ms) / 1000
    result = {}
    for metric in RATES:
        before, now = first.link.get(metric), last.link.get(metric)
        if before is None or now is None or not elapsed_s:
            continue
        grown = fitted(now, count) - fitted(before, count)
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


def _leafs(window: Window, ports: Sequence[Port], s: PortState, down: Bools, now_ms: int) -> Iterator[Finding]:
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
            Severity.CRITICAL, 0.9, RecommendedAction.ADVISE,
            f"{len(gone)} of {len(mine)} ports at leaf {leaf} are down, on {len(nodes)} nodes: it is the switch.",
            "Look at the switch, not at the nodes; keep new work that needs the fabric off them until it is back.",
            (Evidence(f"ports down on {listing(nodes)}", "link_up", 0.0, 1.0, None, len(mine), since, end_ms),),
            snapshot={"leafs": {leaf: True}},
        )  # fmt: skip


def _resets(window: Window, ports: Sequence[Port], s: PortState, now_ms: int) -> Iterator[Finding]:
    """Leaf switches that took their ports along again and again, each time for moments."""
    end_ms = window.newest.end_ms
    for leaf, moments in s.shared.items():
        times = sorted(at_ms for at_ms in moments if end_ms - at_ms <= FLAPS_MS)
        if len(times) < FLAPS_WARNING:
            continue
        mine = [k for k in s.flaps if ports[k].group == leaf]
        if not leaf:  # those that went each time, or often: others may hang elsewhere
            mine = [k for k in mine if len(moments.intersection(s.flaps[k])) >= FLAPS_WARNING]
        nodes = sorted({window.index.nodes[ports[k].node].name for k in mine})
        if not leaf and len(nodes) < LEAF_NODES:
            continue
        where = f"at leaf {leaf}, on {len(nodes)} nodes" if leaf else f"on {len(nodes)} nodes"
        what = "the switch" if leaf else "what they share, most likely a switch"
        text = f"went down together for moments, {len(times)} times in {duration(end_ms - times[0])}"
        yield Finding(
            NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms,
            times[0], Severity.WARNING, 0.85, RecommendedAction.ADVISE,
            f"{len(mine)} ports {where}, {text}: it is {what}.",
            "Look at the switch (its log, its power, a restart under way), not at the nodes and their cables.",
            (Evidence(f"ports of {listing(nodes)} {text}", "link_downed", float(len(times)), 0.0, None, len(mine),
                      times[0], times[-1]),),
            snapshot={"resets": [[leaf, len(times), times[0], times[-1]]], "leafs": {leaf: True} if leaf else {}},
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
