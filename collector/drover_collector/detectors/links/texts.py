"""Make the finding about the network ports of a node: its severity, action and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.texts import duration, listing
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.links.port_state import (
    DOWN_CRITICAL_MS,
    DOWN_MS,
    FLAPS_CRITICAL,
    FLAPS_MS,
    FLAPS_WARNING,
    PERSIST,
    RATES,
    SLOW_ERRORS,
    SLOW_LEAST,
    PortState,
    flaps_of,
    graded,
    own_flaps,
)
from drover_collector.detectors.links.ports import Port
from drover_collector.fleet.buckets import Floats
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "links"


@dataclass(frozen=True, slots=True)
class PortFault:
    """A fault of a port. `text` begins with the port's name; `since_ms`: when it began."""

    severity: Severity
    action: RecommendedAction
    cause: str
    text: str
    evidence: Evidence
    since_ms: int

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """A sort key: critical before warning, a drain before advice, and errors of a port last."""
        return (
            self.severity is Severity.CRITICAL,
            self.action is RecommendedAction.DRAIN,
            self.cause != "port_errors",
        )


def of_node(
    window: Window,
    ports: Sequence[Port],
    mine: list[int],
    s: PortState,
    down: Bools,
    dark: Set[str],
    rates: dict[str, Floats],
    now_ms: int,
) -> Finding:
    """Return one finding for all faults of a node's ports; the worst fault is the headline.

    Args:
        ports: of the fleet. mine: indices of the node's faulty ports. s: the state of all ports.
        down: bool [L], the port is down.
        dark: leafs without a port that is up.
        rates: metric -> errors per second of each port, float [L].
    """
    index, n = window.index, ports[mine[0]].node
    node = index.nodes[n].name
    # Ports that are down while no other port of their leaf is up: the switch may be at fault. Of ports whose leaf is
    # unknown, only those that serve a GPU count.
    gone = [k for k in mine if down[k] and ports[k].leaf in dark and (ports[k].leaf or ports[k].computes)]
    faults, doubted = [], []
    for k in mine:
        for one in _of_port(ports[k], k, s, bool(down[k]), rates, window):
            mild = replace(one, severity=Severity.WARNING, action=RecommendedAction.ADVISE) if k in gone else one
            faults.append(mild)
            doubted += [mild] if k in gone else []
    worst = max(faults, key=lambda one: one.rank)
    severity, action, summary = worst.severity, worst.action, f"Port {worst.text} (node {node})."
    advice = "Check the cable, its transceivers and the switch port. Swap the cable first, then the transceiver."
    if action is RecommendedAction.DRAIN:
        advice = f"Drain the node. {advice}"
    if any(worst is one for one in doubted):  # the node may be healthy
        leafs = listing({ports[k].leaf for k in gone} - {""})
        where = f"at leaf {leafs}" if leafs else "that serves a GPU"
        some = f"{len(gone)} ports" if len(gone) > 1 else f"Port {ports[gone[0]].name}"
        verb = "are" if len(gone) > 1 else "is"
        summary = (
            f"{some} of node {node} {verb} down, and no other port {where} is up: the switch or the node is at fault."
        )
        advice = "Check the switch first; if it is healthy, the node's adapters (lspci, mlxlink) and cables."
    return Finding(
        NAME, IncidentKind.LINK, worst.cause, "node", node, None, ((node, None),), now_ms,
        min(one.since_ms for one in faults), severity, 0.9 if severity is Severity.CRITICAL else 0.8, action, summary,
        advice,
        tuple(one.evidence for one in faults), window.job_of(int(index.first_gpu[n])) if index.nodes[n].gpus else None,
    )  # fmt: skip


def _of_port(
    port: Port, k: int, s: PortState, down: bool, rates: dict[str, Floats], window: Window
) -> Iterator[PortFault]:
    end_ms = window.newest.end_ms

    def fault(
        grave: bool, cause: str, text: str, since_ms: int, fact: tuple[str, float, float], to_ms: int = end_ms
    ) -> PortFault:
        metric, value, expected = fact
        return PortFault(
            Severity.CRITICAL if grave and graded(port) else Severity.WARNING,
            RecommendedAction.DRAIN if grave and port.computes else RecommendedAction.ADVISE,
            cause,
            f"{port.name} {text}",
            Evidence(f"port {port.name} {text}", metric, value, expected, None, None, since_ms, to_ms, port.name),
            since_ms,
        )

    down_ms = int(end_ms - s.down_ms[k]) if down else 0
    if down_ms >= DOWN_MS:
        text = f"has been down for {duration(down_ms)}"
        yield fault(down_ms >= DOWN_CRITICAL_MS, "port_down", text, end_ms - down_ms, ("link_up", 0.0, 1.0))
    times = own_flaps(port, k, s)
    flaps = flaps_of(times, end_ms)
    if flaps >= FLAPS_WARNING:
        first = min(at for at in times if at >= end_ms - FLAPS_MS)
        text = f"went down {flaps} times in {duration(end_ms - first)}"
        # The evidence spans the first to the last flap: after a restart the flaps are restored from it.
        fact = ("link_downed", float(flaps), 0.0)
        yield fault(flaps >= FLAPS_CRITICAL, "port_flaps", text, first, fact, times[-1])
    if s.errs[k] >= PERSIST:
        for metric, rate in rates.items():
            if rate[k] > RATES[metric]:
                text = f"has {rate[k] * 60:.0f} {BY_NAME[metric].label} per minute; the limit is {RATES[metric] * 60:g}"
                since = window.buckets[0].end_ms
                yield fault(False, "port_errors", text, since, (metric, float(rate[k]), RATES[metric]))
    elif len(s.slow_errors) and s.slow_errors[k]:
        metric, count = SLOW_ERRORS[s.bursts.main(k)], float(s.bursts.errors[:, k].sum())
        text = f"has about {count:,.0f} {BY_NAME[metric].label} in half an hour, in many of its minutes"
        yield fault(False, "port_errors", text, int(s.bursts.since_ms[k]), (metric, count, SLOW_LEAST))
