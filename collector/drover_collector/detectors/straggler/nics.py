"""Detect network ports below the rate of their kind: the slowest port sets the pace of its job's collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints, boards
from drover_collector.detectors._lib.robust import Bools, peers
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.links.ports import (
    Port,
    ports_of,
    ports_version,
)
from drover_collector.detectors.straggler.texts import nic_finding
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.ports import fitted
from drover_core.model.events import Finding

MIN_PEERS = 4
PERSIST = 2  # buckets
NIC_RATE_RATIO = 0.97
FABRIC_GBPS = 100.0  # an unlisted port without a known GPU is judged from this rate on


@dataclass(slots=True)
class Nics:
    version: tuple[int, int] = (0, 0)  # of the ports, see `ports_version`
    ports: list[Port] = field(default_factory=list)  # as buckets have them
    names: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # ports of one name have one number
    nodes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    serves: Bools = field(default_factory=lambda: np.zeros(0, bool))  # the port serves a GPU
    listed: Bools = field(default_factory=lambda: np.zeros(0, bool))  # in the fleet file
    rates: Floats = field(default_factory=lambda: np.zeros(0))  # of the last bucket
    boards: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of the ports' nodes in the last bucket
    usual: tuple[Floats, Floats] = field(default_factory=lambda: (np.zeros(0), np.zeros(0)))  # peers' median and count
    streak: dict[int, int] = field(default_factory=dict)  # port -> buckets in a row
    since_ms: dict[int, int] = field(default_factory=dict)


def slow_nics(window: Window, s: Nics, now_ms: int) -> Iterator[Finding]:
    """Report ports below the rate of the same ports on nodes with the same boards."""
    rates = window.newest.link.get("rate_gbps")
    version = ports_version(window.index, window.inventory)
    if s.version != version:
        s.version, s.ports = version, ports_of(window.index, window.inventory)
        # Ports of one name serve one purpose; a port for storage or management may be slower by design.
        names = {name: number for number, name in enumerate(dict.fromkeys(port.name for port in s.ports))}
        s.names = np.array([names[port.name] for port in s.ports], np.int64)
        s.nodes = np.array([port.node for port in s.ports], np.int64)
        s.serves = np.array([port.computes for port in s.ports], bool)
        s.listed = np.array([port.listed for port in s.ports], bool)
        s.rates = np.zeros(0)  # the peers change
    if rates is None or not s.ports:
        return
    rates = fitted(rates, len(s.ports))
    board = boards(window)[s.nodes] + 1  # without an SKU they are known from the first memory clocks on
    # Seldom true: ports keep the rate that they trained to.
    if not (np.array_equal(rates, s.rates, equal_nan=True) and np.array_equal(board, s.boards)):
        usual = peers(rates, board * (int(s.names.max()) + 1) + s.names)
        others = peers(rates, np.where(s.serves, board, -1))
        few = usual.count < MIN_PEERS  # a small fleet: compare all ports that serve a GPU
        s.usual = np.where(few, others.median, usual.median), np.where(few, others.count, usual.count)
        s.rates, s.boards = rates.copy(), board
    median, count = s.usual
    with np.errstate(invalid="ignore"):
        slow = (rates <= NIC_RATE_RATIO * median) & (rates > 0) & (count >= MIN_PEERS)
        slow &= s.listed | s.serves | (median >= FABRIC_GBPS)
    s.streak = {k: s.streak.get(k, 0) + 1 for k in np.flatnonzero(slow).tolist()}
    s.since_ms = {k: s.since_ms.get(k, window.newest.start_ms) for k in s.streak}
    for k, streak in s.streak.items():
        port = s.ports[k]
        if streak >= PERSIST:
            values = float(rates[k]), float(median[k]), int(count[k]) - 1
            yield nic_finding(window, port.node, port.name, values, s.since_ms[k], now_ms)
