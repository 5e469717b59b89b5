"""Network ports that run below the rate of their kind: the slowest port sets the pace of its job's collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from drover_collector.buckets import Floats
from drover_collector.detectors.robust import Bools, peers
from drover_collector.detectors.steady import Ints, boards
from drover_collector.detectors.straggler_texts import nic_finding
from drover_collector.detectors.window import Window
from drover_proto.events import Finding
from drover_proto.fleet import LinkSpec

MIN_PEERS = 4
PERSIST = 2  # buckets
NIC_RATE_RATIO = 0.97


@dataclass(slots=True)
class Nics:
    ports: list[tuple[int, LinkSpec]] = field(default_factory=list)  # (node, port), as buckets have them
    names: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # ports of one name have one number
    nodes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    serves: Bools = field(default_factory=lambda: np.zeros(0, bool))  # a GPU
    rates: Floats = field(default_factory=lambda: np.zeros(0))  # of the last bucket, with the boards of their nodes,
    boards: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # and what they were held against:
    usual: tuple[Floats, Floats] = field(default_factory=lambda: (np.zeros(0), np.zeros(0)))  # median, how many
    streak: dict[int, int] = field(default_factory=dict)  # link -> buckets in a row
    since_ms: dict[int, int] = field(default_factory=dict)


def slow_nics(window: Window, s: Nics, now_ms: int) -> Iterator[Finding]:
    """Ports that run below the rate of the same ports on nodes with the same boards."""
    rates = window.newest.link.get("rate_gbps")
    if rates is None or not len(rates):
        return
    if len(s.ports) != len(rates):
        s.ports = [(n, link) for n, node in enumerate(window.index.nodes) for link in node.links]
        # Ports of one name serve one purpose; a port for storage or management may be slower by design.
        names = {name: number for number, name in enumerate(dict.fromkeys(link.link for _, link in s.ports))}
        s.names = np.array([names[link.link] for _, link in s.ports], np.int64)
        s.nodes = np.array([n for n, _ in s.ports], np.int64)
        s.serves = np.array([link.gpu is not None for _, link in s.ports], bool)
    if len(s.ports) != len(rates):
        return
    board = boards(window)[s.nodes] + 1  # where no SKU is named they are known from the first memory clocks on
    # Seldom: ports keep the rate that they trained to.
    if not (np.array_equal(rates, s.rates, equal_nan=True) and np.array_equal(board, s.boards)):
        usual = peers(rates, board * (int(s.names.max()) + 1) + s.names)
        others = peers(rates, np.where(s.serves, board, -1))
        few = usual.count < MIN_PEERS  # a small fleet: all ports that serve a GPU
        s.usual = np.where(few, others.median, usual.median), np.where(few, others.count, usual.count)
        s.rates, s.boards = rates.copy(), board
    median, count = s.usual
    with np.errstate(invalid="ignore"):
        slow = (rates <= NIC_RATE_RATIO * median) & (rates > 0) & (count >= MIN_PEERS)
    s.streak = {k: s.streak.get(k, 0) + 1 for k in np.flatnonzero(slow).tolist()}
    s.since_ms = {k: s.since_ms.get(k, window.newest.start_ms) for k in s.streak}
    for k, streak in s.streak.items():
        n, link = s.ports[k]
        if streak >= PERSIST:
            values = float(rates[k]), float(median[k]), int(count[k]) - 1
            yield nic_finding(window, n, link.link, values, s.since_ms[k], now_ms)
