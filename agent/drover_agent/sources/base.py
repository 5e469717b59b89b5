"""What every source gives: a Reading. A new reader is one file here plus one line in `polled_sources.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from drover_core.metrics.catalog import Absent, Scope
from drover_core.model.kinds import EventKind

# B/s, to which the rates of GPM are rounded (decision 11). NVML gives them in MiB/s with fractions, whose digits would
# be most of the bytes that a GPU takes in the store; of a PCIe link this is less than a ten-thousandth.
RATE_STEP = 1e6


@dataclass(frozen=True, slots=True)
class Entity:
    """What a row describes. `key` is its identity: a GPU's serial (else UUID), a node's name, NODE/PORT for a link."""

    scope: Scope
    key: str
    gpu: int | None = None  # slot (NVML index), for GPUs
    uuid: str = ""
    serial: str = ""
    pci: str = ""
    model: str = ""
    mig: str = ""
    link: str = ""

    def __hash__(self) -> int:  # its key says nearly all, and the hash of a string is kept by Python
        return hash(self.key)


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An event before it gets its id and node (drover_core.model.events.Event)."""

    ts_ms: int
    gpu: int | None
    kind: EventKind
    code: str
    message: str
    source: str
    backlog: bool = False
    count: int = 1
    forgeable: bool = False
    up_ms: int = field(default=0, compare=False)  # since boot; 0: not known yet
    where: str = ""  # what distinguishes it from others with its code (device, port, severity); kept within the agent


@dataclass(slots=True)
class Reading:
    """Result of one read. Values are in catalog units; a value that could not be read is in `absent`, never 0."""

    rows: list[tuple[Entity, Mapping[str, float]]] = field(default_factory=list)
    absent: list[tuple[Entity, str, Absent]] = field(default_factory=list)
    quiet: list[tuple[Entity, str]] = field(default_factory=list)  # could be read, and there is nothing to report
    events: list[NodeEvent] = field(default_factory=list)
    holdings: list[tuple[int, str | None]] = field(default_factory=list)  # (GPU slot, job or None): changes only
    inventory: dict[str, str] = field(default_factory=dict)


class Source(Protocol):
    """A thing that can be read. `read` may block or raise: the sampler runs it where it can be abandoned."""

    name: str
    interval_s: float

    def read(self, now_ms: int) -> Reading: ...

    def close(self) -> None: ...
