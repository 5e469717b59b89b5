"""What is known of network ports: whose they are, which are down since when, how often they went down."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.buckets import Floats
from drover_collector.detectors.links_gpu import GpuState
from drover_collector.detectors.robust import Bools
from drover_collector.detectors.steady import Ints
from drover_collector.fleet_index import FleetIndex
from drover_proto.events import Incident

DOWN_MS = 20_000  # told: NCCL's and the adapters' own retries end at about 20 s
DOWN_CRITICAL_MS = 240_000  # gpud: a port is dropped after 4 minutes
FLAPS_MS = 3 * 3_600_000  # Azure: three flaps in three hours
FLAPS_WARNING, FLAPS_CRITICAL = 2, 3
FLAPS_KEPT = 8  # the newest of a port
RATES = {  # per second, over the window: NVSentinel ADR-046, those that it calls degraded
    "symbol_errors": 10.0,
    "rx_errors": 10.0,
    "link_error_recoveries": 5 / 60,
    "ack_timeouts": 1.0,
    "local_integrity_errors": 1 / 60,
    "buffer_overruns": 1 / 60,
}
PERSIST = 2  # buckets


@dataclass(frozen=True, slots=True)
class Port:
    node: int
    name: str
    leaf: str
    computes: bool  # it serves a GPU


def ports_of(index: FleetIndex) -> list[Port]:
    """In the layout of a bucket's link columns."""
    return [
        Port(n, link.link, link.leaf or node.leaf, link.gpu is not None)
        for n, node in enumerate(index.nodes)
        for link in node.links
    ]


@dataclass(slots=True)
class State:
    seen_up: Bools = field(default_factory=lambda: np.zeros(0, bool))  # a port that never was up is not in use, [L]
    down_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # since when it is down, 0: it is not
    errs: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row with errors
    was_up: Bools = field(default_factory=lambda: np.zeros(0, bool))  # in the last bucket
    downed: Floats = field(default_factory=lambda: np.zeros(0))  # link_downed in the last bucket
    flaps: dict[int, deque[int]] = field(default_factory=dict)  # port -> when it went down
    gpu: GpuState = field(default_factory=GpuState)
    index: FleetIndex | None = None  # whose ports these are:
    ports: list[Port] = field(default_factory=list)
    of_node: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # each port's
    of_leaf: dict[str, Ints] = field(default_factory=dict)  # leaf -> its ports, in order
    shared: dict[str, set[int]] = field(default_factory=dict)  # leaf -> when most of its ports flapped together
    left: Sequence[Incident] = ()  # open at the start: their ports were up once, and have flapped


def own_flaps(port: Port, k: int, s: State) -> list[int]:
    """When a port went down by itself, not with its switch."""
    shared = s.shared.get(port.leaf, ())
    return [at_ms for at_ms in s.flaps.get(k, ()) if at_ms not in shared]


def flaps_of(times: Collection[int], end_ms: int) -> int:
    return sum(end_ms - at_ms <= FLAPS_MS for at_ms in times)
