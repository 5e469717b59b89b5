"""What is known of network ports: whose they are, which are down since when, how often they went down."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.steady import Ints
from drover_collector.detectors.links.gpu import GpuState
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Incident

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
    """
    Attributes:
        leaf: the switch that it hangs on, "" where nobody says.
        gpu: slot of the GPU that it serves: as the fleet file says, else as the PCI bus of the node has it; None: none,
            or it is not known.
        listed: the fleet file has it. sure: and its leaf.
        there: its node still has the card, by its own newest word.
    """

    node: int
    name: str
    leaf: str
    gpu: int | None = None
    listed: bool = True
    sure: bool = True
    there: bool = True

    @property
    def computes(self) -> bool:
        """It serves a GPU."""
        return self.gpu is not None

    @property
    def group(self) -> str:
        """Its leaf, where that is sure; "" stands for all of which it is not."""
        return self.leaf if self.sure else ""


def ports_of(index: FleetIndex, inventory: Inventory | None = None) -> list[Port]:
    """The ports of a fleet by number, in the layout of a bucket's link columns.

    The fleet file's word on a port's GPU and leaf comes first; a GPU below 0 stands for none. A port that the file does
    not list hangs on its node's leaf if it serves a GPU: those of storage and management have switches of their own.
    """
    found = []
    for port in index.ports.all():
        n, node, link = port.node, index.nodes[port.node], port.listed
        card = port.name.partition("/")[0]
        gpu = None if link is None else link.gpu
        if gpu is None and inventory is not None and n in inventory.serves:
            gpu = inventory.serves[n].get(card)
        gpu = None if gpu is None or gpu < 0 else gpu
        leaf = node.leaf if link is None and gpu is not None else "" if link is None else link.leaf or node.leaf
        cards = inventory.cards.get(n) if inventory is not None else None
        found.append(
            Port(n, port.name, leaf, gpu, link is not None, bool(leaf) and link is not None, not cards or card in cards)
        )
    return found


def ports_version(index: FleetIndex, inventory: Inventory | None) -> tuple[int, int]:
    """Another one whenever `ports_of` gives something else."""
    return len(index.ports), 0 if inventory is None else inventory.ports_version


@dataclass(slots=True)
class PortState:
    seen_up: Bools = field(default_factory=lambda: np.zeros(0, bool))  # a port that never was up is not in use, [L]
    down_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # since when it is down, 0: it is not
    errs: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row with errors
    was_up: Bools = field(default_factory=lambda: np.zeros(0, bool))  # in the last bucket
    downed: Floats = field(default_factory=lambda: np.zeros(0))  # link_downed in the last bucket
    flaps: dict[int, deque[int]] = field(default_factory=dict)  # port -> when it went down
    gpu: GpuState = field(default_factory=GpuState)
    index: FleetIndex | None = None  # whose ports these are:
    version: tuple[int, int] = (0, 0)  # of the ports, see `ports_version`
    ports: list[Port] = field(default_factory=list)
    of_node: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # each port's
    of_leaf: dict[str, Ints] = field(default_factory=dict)  # leaf -> its ports, in order
    # leaf -> when most of its ports flapped together; "": when ports of several nodes did whose leafs are not sure
    shared: dict[str, set[int]] = field(default_factory=dict)
    computes: Bools = field(default_factory=lambda: np.zeros(0, bool))  # it serves a GPU, [L]
    there: Bools = field(default_factory=lambda: np.zeros(0, bool))  # the node still has the card, [L]
    gone: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row without it and a value, [L]
    left: Sequence[Incident] = ()  # open at the start: their ports were up once, and have flapped


def graded(port: Port) -> bool:
    """Whether its faults may be critical: somebody listed it, or a GPU needs it."""
    return port.listed or port.computes


def own_flaps(port: Port, k: int, s: PortState) -> list[int]:
    """When a port went down by itself, not with its switch."""
    shared = s.shared.get(port.group, ())
    return [at_ms for at_ms in s.flaps.get(k, ()) if at_ms not in shared]


def flaps_of(times: Collection[int], end_ms: int) -> int:
    return sum(end_ms - at_ms <= FLAPS_MS for at_ms in times)
