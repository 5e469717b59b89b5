"""Detect faults of links: network ports that go down, flap or have errors, leaf switches, NVLink, PCIe.

Every reported port is judged once it was up, whether or not the fleet file lists it. Only a port that serves a GPU asks
for a drain. A port that serves none and is not listed (storage, management) gets a warning at most.

Limits of port counters: NVSentinel's ADR-046; flaps: gpud and Azure's node health checks; NVLink and PCIe: DCGM 4.6.
If many ports of a leaf fail at once, the switch is at fault, not the nodes. Errors on a tenth of all ports are
congestion or a way of counting, and are not reported.
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
from drover_collector.detectors.links.congestion import Congestion
from drover_collector.detectors.links.gpu import MINUTE_S, gpu_links
from drover_collector.detectors.links.port_state import (
    DOWN_MS,
    FLAPS_CRITICAL,
    FLAPS_KEPT,
    FLAPS_MS,
    FLAPS_WARNING,
    PERSIST,
    RATES,
    SLOW_ERRORS,
    SLOW_LEAST,
    SLOW_MINUTES,
    PortState,
    flaps_of,
    graded,
    own_flaps,
)
from drover_collector.detectors.links.ports import (
    Port,
    PortLayout,
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

COMMON_SHARE = 0.1  # of all ports: more with the same errors are not reported
COMMON_LEAST = 3  # ports, in a small fleet
LEAF_SHARE = 0.5  # of a leaf's ports that are down: the switch is at fault
LEAF_NODES = 3  # at least
GONE_BUCKETS = 30  # without a value and without the card in the inventory: a starting agent lists some cards late
TOGETHER_MS = 60_000  # ports without a sure leaf that go down within this time share a cause


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> PortState:
    """Return state that knows the ports with open incidents, which are down or flap."""
    return PortState(reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None])


def detect(window: Window, state: PortState | None, now_ms: int) -> tuple[list[Finding], PortState]:
    s = state if state is not None else PortState()
    if not window.fresh:
        return [], s
    found = list(gpu_links(window, s.gpu, now_ms))
    if s.layout is not None and s.layout.index is not window.index:
        s = PortState(gpu=s.gpu, reopened=s.reopened)
    layout = _lay_out(s, window)
    if layout.ports and len(window.newest.link):
        found += _ports(window, layout, s, now_ms)
        s.congestion = s.congestion or Congestion(len(layout.ports))
        found += s.congestion.findings(window, layout, now_ms)
    return found, s


def _lay_out(s: PortState, window: Window) -> PortLayout:
    """Return the layout of the ports, and extend the state by new ports, which follow the known ones."""
    if s.layout is not None and s.layout.version == ports_version(window.index, window.inventory):
        return s.layout
    s.layout = PortLayout(window.index, window.inventory)
    known = len(s.seen_up)
    new = len(s.layout.ports) - known
    if new:
        nothing, nobody = np.zeros(new, np.int64), np.zeros(new, bool)
        s.seen_up, s.was_up = np.append(s.seen_up, nobody), np.append(s.was_up, nobody)
        s.down_ms, s.errs = np.append(s.down_ms, nothing), np.append(s.errs, nothing)
        s.gone = np.append(s.gone, nothing)
        s.downed = np.append(s.downed, np.full(new, np.nan))
        _resume(s, s.layout, known)
    return s.layout


def _resume(s: PortState, layout: PortLayout, first: int) -> None:
    """Restore from open incidents which ports were up once, since when they are down, and when they flapped.

    Args:
        first: the first new port; earlier ones are known.
    """
    if not s.reopened:
        return
    ports, index = layout.ports, layout.index
    of_node: dict[int, list[int]] = {}
    for k in range(first, len(ports)):
        of_node.setdefault(ports[k].node, []).append(k)
    seen_up, down_ms = s.seen_up.copy(), s.down_ms.copy()
    for incident in s.reopened:
        facts = [e for e in incident.evidence if e.metric in ("link_up", "link_downed")]
        if not first:
            _resume_resets(s, incident)
        for n in {index.node_number.get(node, -1) for node, _ in incident.members} if facts else ():
            for k in of_node.get(n, ()):
                mine = [e for e in facts if e.port == ports[k].name]
                seen_up[k] |= bool(mine) or (incident.cause == "switch" and ports[k].computes)
                for e in mine:
                    if e.metric == "link_up" and e.from_ms is not None:
                        down_ms[k] = e.from_ms
                    elif e.metric == "link_downed" and e.value and e.from_ms is not None and e.to_ms is not None:
                        # Count, first and last are known; assume even gaps between them.
                        # A warning with a critical count includes flaps of the switch, which drain no node.
                        grave = incident.severity is Severity.CRITICAL or not graded(ports[k])
                        most = FLAPS_KEPT if grave else FLAPS_CRITICAL - 1
                        times = np.linspace(e.from_ms, e.to_ms, min(int(e.value), most)).astype(np.int64)
                        s.flaps[k] = deque(times.tolist(), maxlen=FLAPS_KEPT)
    s.seen_up, s.down_ms = seen_up, down_ms


def _resume_resets(s: PortState, incident: Incident) -> None:
    """Restore when a switch took its ports down, from the count, the first and the last time."""
    for leaf, count, from_ms, to_ms in incident.snapshot_of(NAME).get("resets", ()):
        s.shared[leaf] = set(np.linspace(from_ms, to_ms, count).astype(np.int64).tolist())


def could_not_judge(window: Window) -> list[str]:
    bucket, result = window.newest, []
    over = window.index.ports.left_out
    if over:
        some = f"{sum(over.values())} network ports of {listing(sorted(over))}"
        result.append(f"{some}: only {FOUND_MAX} unlisted ports of each node are judged; list the others in fleet.toml")
    if "link_up" not in bucket.link and "link_downed" not in bucket.link:
        result.append("network ports that go down: the data lacks link_up and link_downed")
    if not RATES.keys() & bucket.link.keys():
        result.append("network ports with errors: the data lacks symbol_errors, rx_errors and the other error counters")
    if "nvlink_active_links" not in bucket.gpu:
        result.append("lost NVLinks: the data lacks nvlink_active_links")
    if "pcie_width" not in bucket.gpu:
        result.append("PCIe links with fewer lanes: the data lacks pcie_width")
    return result


def _ports(window: Window, layout: PortLayout, s: PortState, now_ms: int) -> Iterator[Finding]:
    index, bucket, ports = window.index, window.newest, layout.ports
    up = fitted(bucket.link.get("link_up"), len(ports))
    s.gone = np.where(np.isnan(up) & ~layout.there, s.gone + 1, 0)
    _forget(s, s.gone >= GONE_BUCKETS)
    went_down = s.seen_up & (up == 0) & (s.down_ms == 0)
    downed = fitted(bucket.link.get("link_downed"), len(ports))
    # A port that was down between two samples shows only in its counter.
    counted = (downed > s.downed) & (s.down_ms == 0)
    # A port that goes down with its silent node does not flap.
    flapped = np.flatnonzero((went_down & s.was_up) | counted).tolist()
    _note_shared(ports, s, flapped, bucket.start_ms)
    for k in flapped:
        times = s.flaps.setdefault(k, deque(maxlen=FLAPS_KEPT))
        if not times or bucket.start_ms > times[-1]:  # after a restart known flaps are seen again
            times.append(bucket.start_ms)
    s.downed, s.was_up = downed, up == 1
    s.seen_up |= s.was_up
    since_ms = max(bucket.start_ms, bucket.end_ms - BUCKET_MS)  # a long bucket shows how it ended
    s.down_ms = np.where(went_down, since_ms, np.where(s.was_up, 0, s.down_ms))
    for k in [k for k, times in s.flaps.items() if bucket.end_ms - times[-1] > FLAPS_MS]:
        del s.flaps[k]
    rates = _rates(window, len(ports))
    over = _over(rates, len(ports))
    s.errs = np.where(over, s.errs + 1, 0)
    _add_slow_errors(window, layout, s)

    # The ports of a silent node are unknown; a port missing from a node that reports stays down.
    reporting = (bucket.node_rows > 0) | (np.bincount(index.gpu_node, bucket.gpu_rows, index.node_count) > 0)
    down = (s.down_ms > 0) & (reporting[layout.of_node] | ~np.isnan(up))
    leafs = list(_leafs(window, layout, s, down, now_ms))
    # Leafs without any port up; where no leaf is known, a port that serves a GPU must be up.
    hit = {ports[k].leaf for k in np.flatnonzero(down).tolist()}
    dark = {leaf for leaf in hit if not (s.was_up & (layout.computes | bool(leaf)))[layout.of_leaf[leaf]].any()}
    of_leafs = {member[0] for finding in leafs for member in finding.members}
    together = list(_together(window, ports, s, down, of_leafs))
    shared = np.zeros(len(ports), bool)
    shared[[k for some in together for k in some]] = True
    leafs += [_common(window, ports, s, some, now_ms) for some in together if _is_due(s, some, bucket.end_ms)]
    for k in [k for k in s.flaps if down[k] and (shared[k] or index.nodes[ports[k].node].name in of_leafs)]:
        while s.flaps[k] and s.flaps[k][-1] >= s.down_ms[k]:  # the switch went down, not the port
            s.flaps[k].pop()
        if not s.flaps[k]:
            del s.flaps[k]
    yield from leafs
    yield from _resets(window, ports, s, now_ms)
    down &= ~shared
    for n, mine in groupby(_faulty(ports, s, down, bucket.end_ms), lambda k: ports[k].node):
        if index.nodes[n].name not in of_leafs:
            yield of_node(window, ports, list(mine), s, down, dark, rates, now_ms)


def _forget(s: PortState, gone: Bools) -> None:
    """Forget ports of cards that their nodes no longer have, renamed or removed: they will not come up again."""
    for k in np.flatnonzero(gone & (s.seen_up | (s.down_ms > 0))).tolist():
        s.flaps.pop(k, None)
    s.seen_up, s.down_ms = s.seen_up & ~gone, np.where(gone, 0, s.down_ms)


def _together(
    window: Window, ports: Sequence[Port], s: PortState, down: Bools, of_leafs: Set[str]
) -> Iterator[list[int]]:
    """Yield ports without a sure leaf that went down together on several nodes: they probably share a broken switch."""
    some = [k for k in np.flatnonzero(down & (s.down_ms > 0)).tolist() if not ports[k].sure]
    some = [k for k in some if window.index.nodes[ports[k].node].name not in of_leafs]
    some.sort(key=lambda k: int(s.down_ms[k]))
    starts = [at for at, k in enumerate(some) if not at or s.down_ms[k] - s.down_ms[some[at - 1]] > TOGETHER_MS]
    for first, end in pairwise([*starts, len(some)]):
        if len({ports[k].node for k in some[first:end]}) >= LEAF_NODES:
            yield sorted(some[first:end])


def _is_due(s: PortState, some: list[int], end_ms: int) -> bool:
    return end_ms - min(int(s.down_ms[k]) for k in some) >= DOWN_MS


def _common(window: Window, ports: Sequence[Port], s: PortState, some: list[int], now_ms: int) -> Finding:
    nodes = sorted({window.index.nodes[ports[k].node].name for k in some})
    since, end_ms = min(int(s.down_ms[k]) for k in some), window.newest.end_ms
    return Finding(
        NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms, since,
        Severity.CRITICAL, 0.8, RecommendedAction.ADVISE,
        f"{len(some)} ports on {len(nodes)} nodes went down together: probably a switch that they share.",
        "Check the switch of these ports, not the nodes. Set each port's leaf in fleet.toml, so that Drover can name"
        " the switch.",
        (Evidence(f"ports down on {listing(nodes)}", "link_up", 0.0, 1.0, None, len(some), since, end_ms),),
    )  # fmt: skip


def _note_shared(ports: Sequence[Port], s: PortState, flapped: list[int], at_ms: int) -> None:
    """Note when most of a switch's ports went down together, on several nodes, for less time than `_leafs` reports.

    Such flaps count for the switch, not for its nodes.
    """
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


def _faulty(ports: Sequence[Port], s: PortState, down: Bools, end_ms: int) -> list[int]:
    """Return the ports to report, grouped by node."""
    flapping = [k for k in s.flaps if flaps_of(own_flaps(ports[k], k, s), end_ms) >= FLAPS_WARNING]
    gone = np.flatnonzero(down & (end_ms - s.down_ms >= DOWN_MS)).tolist()
    faulty = {*flapping, *gone, *np.flatnonzero((s.errs >= PERSIST) | s.slow_errors).tolist()}
    # By node; within it in the fleet file's order, then by name.
    return sorted(
        faulty,
        key=lambda k: (ports[k].node, not ports[k].listed, name_key("" if ports[k].listed else ports[k].name), k),
    )


def _rates(window: Window, count: int) -> dict[str, Floats]:
    """Return the growth per second of each counter over the window, float64 [L]; NaN where reset or unknown."""
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


def _add_slow_errors(window: Window, layout: PortLayout, s: PortState) -> None:
    """Note the ports whose errors come again and again; none where those of many nodes do."""
    count = len(layout.ports)
    s.bursts.add(window.newest.end_ms, *(fitted(window.newest.link.get(metric), count) for metric in SLOW_ERRORS))
    s.slow_errors = s.bursts.many(SLOW_MINUTES, SLOW_LEAST)
    nodes = np.unique(layout.of_node[s.slow_errors])
    if len(nodes) > max(COMMON_LEAST, COMMON_SHARE * window.index.node_count):
        s.slow_errors[:] = False


def _leafs(window: Window, layout: PortLayout, s: PortState, down: Bools, now_ms: int) -> Iterator[Finding]:
    """Report leaf switches with most of their ports down, on several nodes."""
    end_ms, ports = window.newest.end_ms, layout.ports
    if down.sum() < 2:
        return
    hit = {ports[k].leaf for k in np.flatnonzero(down).tolist()} - {""}
    used = {leaf: some[s.seen_up[some]].tolist() for leaf, some in layout.of_leaf.items() if leaf in hit}
    for leaf, mine in sorted(((leaf, mine) for leaf, mine in used.items() if mine), key=lambda item: item[1][0]):
        gone = [k for k in mine if down[k]]
        nodes = sorted({window.index.nodes[ports[k].node].name for k in gone})
        most = len(nodes) >= LEAF_NODES and len(gone) >= LEAF_SHARE * len(mine)
        if not most and (len(nodes) < 2 or len(gone) < len(mine)):  # a small leaf: all of its ports
            continue
        since = int(min(s.down_ms[k] for k in gone))
        if end_ms - since < DOWN_MS:
            continue
        yield Finding(
            NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms, since,
            Severity.CRITICAL, 0.9, RecommendedAction.ADVISE,
            f"{len(gone)} of {len(mine)} ports at leaf {leaf} are down, on {len(nodes)} nodes: the switch is at fault.",
            "Check the switch, not the nodes. Give these nodes no new jobs that need the fabric until it is back.",
            (Evidence(f"ports down on {listing(nodes)}", "link_up", 0.0, 1.0, None, len(mine), since, end_ms),),
            snapshot={"leafs": {leaf: True}},
        )  # fmt: skip


def _resets(window: Window, ports: Sequence[Port], s: PortState, now_ms: int) -> Iterator[Finding]:
    """Report leaf switches whose ports repeatedly went down together for a short time."""
    end_ms = window.newest.end_ms
    for leaf, resets_ms in s.shared.items():
        times = sorted(at_ms for at_ms in resets_ms if end_ms - at_ms <= FLAPS_MS)
        if len(times) < FLAPS_WARNING:
            continue
        mine = [k for k in s.flaps if ports[k].group == leaf]
        if not leaf:  # ports that went down often with the others; the rest may have another switch
            mine = [k for k in mine if len(resets_ms.intersection(s.flaps[k])) >= FLAPS_WARNING]
        nodes = sorted({window.index.nodes[ports[k].node].name for k in mine})
        if not leaf and len(nodes) < LEAF_NODES:
            continue
        where = f"at leaf {leaf}, on {len(nodes)} nodes" if leaf else f"on {len(nodes)} nodes"
        what = "the switch is at fault" if leaf else "probably a switch that they share"
        text = f"went down together for a short time, {len(times)} times in {duration(end_ms - times[0])}"
        yield Finding(
            NAME, IncidentKind.LINK, "switch", "leaf", None, None, tuple((name, None) for name in nodes), now_ms,
            times[0], Severity.WARNING, 0.85, RecommendedAction.ADVISE,
            f"{len(mine)} ports {where}, {text}: {what}.",
            "Check the switch (its log, its power, a restart in progress), not the nodes and their cables.",
            (Evidence(f"ports of {listing(nodes)} {text}", "link_downed", float(len(times)), 0.0, None, len(mine),
                      times[0], times[-1]),),
            snapshot={"resets": [[leaf, len(times), times[0], times[-1]]], "leafs": {leaf: True} if leaf else {}},
        )  # fmt: skip


def _flap(number: int, link: dict[str, Floats]) -> None:
    """Let one port of a node go down every 40 s and come back."""
    if number >= 2:
        link["link_up"][20] = 0.0 if number % 4 in (2, 3) else 1.0
        link["link_downed"][20] += (number + 2) // 4


def _congest(number: int, link: dict[str, Floats]) -> None:
    """Let all ports wait for acknowledgements, which is congestion; and leave one port unplugged."""
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
        "a leaf switch fails, and the ports of four nodes go down: one finding",
        lambda: play(small_fleet(ports=8), 6, links=_lose_switch),
        frozenset({("link", "switch", "leaf", "critical")}),
    ),
    Example(
        "one port flaps",
        lambda: play(small_fleet(ports=8), 15, links=_flap),
        frozenset({("link", cause, "node", severity) for cause, severity in _FLAPPING}),
    ),
)
