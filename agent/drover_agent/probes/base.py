"""What a probe is given and what it gives. Only the child process imports this with torch at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drover_agent.probes import Level

MOST_NODES = 256  # of a group
JOIN_S = 60.0  # for the nodes of a group to find each other
LONGEST_JOIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Result:
    """One figure.

    Attributes:
        gpu: slot (NVML index), None: of the node. peer: the other GPU of a pair.
        value: None when it could not be measured: `detail` says why.
        ok: of probes that judge themselves, because only one answer is right; None elsewhere.
        spread: coefficient of variation over `repeats`, None for a single one.
    """

    probe: str
    gpu: int | None
    value: float | None
    unit: str
    detail: str = ""
    peer: int | None = None
    ok: bool | None = None
    spread: float | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """A device under test. `name`: as torch writes it ("cuda:0", "cpu"); `slot`: NVML's index, which may differ."""

    slot: int | None
    name: str
    model: str
    memory_bytes: int

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Group:
    """Where the nodes of a collective meet, and which one this is: `node` 0 .. `nodes` - 1; the first one listens.

    Attributes:
        names, addresses: of the nodes, by number; only these addresses may connect. No addresses: any.
        key: of this group alone, and of nobody else's knowledge. join_s: how long each waits for the others.
    """

    address: str
    port: int
    node: int
    nodes: int
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    key: str = ""
    join_s: float = JOIN_S

    def name(self, node: int) -> str:
        """ "rank 1 (r12n03)"."""
        return f"rank {node} ({self.names[node]})" if node < len(self.names) else f"rank {node}"

    def check(self) -> None:
        """Raises ValueError, with what is wrong."""
        if not 2 <= self.nodes <= MOST_NODES or not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} of a group of {self.nodes}: groups have 2 to {MOST_NODES} nodes")
        if not self.address or not 0 < self.port < 65_536:
            raise ValueError(f"a group meets at an address with a port, and not at {self.address[:80]!r}:{self.port}")
        if not 0 < self.join_s <= LONGEST_JOIN_S:
            raise ValueError(f"nodes of a group wait for each other for up to {LONGEST_JOIN_S:g} s")


@dataclass(frozen=True, slots=True)
class Context:
    """What a probe may use.

    Attributes:
        torch: the module, so that a probe's file can be imported without it.
        seconds: how long it should take at most, per device.
        show_progress: takes one line of progress, such as "GPU 3: bf16 8192".
        stopping: whether to end at once; asked between two measurements, at least each half second where possible.
        seed: of random data; the same seed gives the same data on every device and in every run.
        folder: where files may be written (disk), removed afterwards. shared: of storage that nodes share; "": none.
        inlet_c: temperature of the air or coolant that enters the node. group: of a collective over several nodes.
        names: all probes of the request: those of a group are measured at one meeting.
    """

    torch: Any
    devices: tuple[Device, ...]
    level: Level
    seconds: float
    show_progress: Callable[[str], None]
    stopping: Callable[[], bool]
    seed: int = 1
    folder: str = ""
    shared: str = ""
    inlet_c: float | None = None
    group: Group | None = None
    names: tuple[str, ...] = ()
