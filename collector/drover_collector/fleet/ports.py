"""Number the network ports of a fleet: those of its file, then those that agents report, in order of report."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_core.model.fleet import LinkSpec, NodeSpec

FOUND_MAX = 64  # ports of one node in addition to those of the file: an agent may report thousands of names
_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FleetPort:
    """A network port. `listed`: its entry in the fleet file; None: only an agent reported it."""

    node: int
    name: str
    listed: LinkSpec | None = None


class FleetPorts:
    """Ports by number. Thread-safe.

    Ports are only added, and a number never changes: an array that was laid out before a port was added is the
    beginning of one that is laid out later.

    Attributes:
        left_out: node -> how many of its ports are not judged, because it reports more than FOUND_MAX.
    """

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._lock = threading.Lock()
        self._nodes = {node.name: n for n, node in enumerate(nodes)}
        self._ports = [FleetPort(n, link.link, link) for n, node in enumerate(nodes) for link in node.links]
        self._numbers = {(nodes[port.node].name, port.name): k for k, port in enumerate(self._ports)}
        self._found: Counter[int] = Counter()
        self._all: tuple[FleetPort, ...] = tuple(self._ports)
        self.left_out: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ports)

    def all(self) -> tuple[FleetPort, ...]:
        """Return the ports by number."""
        with self._lock:
            if len(self._all) != len(self._ports):
                self._all = tuple(self._ports)
            return self._all

    def number(self, node: str, name: str) -> int | None:
        """Return the number of a port; None: it is not known."""
        return self._numbers.get((node, name))

    def add(self, found: Iterable[tuple[str, str]]) -> None:
        """Add ports that agents report, as (node, port). Of a node with too many the first ones count."""
        with self._lock:
            over: Counter[str] = Counter()
            for node, name in found:
                n = self._nodes.get(node)
                if n is None or not name or (node, name) in self._numbers:
                    continue
                if self._found[n] >= FOUND_MAX:
                    over[node] += 1
                    continue
                self._found[n] += 1
                self._numbers[node, name] = len(self._ports)
                self._ports.append(FleetPort(n, name))
            self.left_out |= over


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names in order: mlx5_2 before mlx5_10."""
    return sorted(names, key=name_key)


def name_key(name: str) -> tuple[tuple[str, int], ...]:
    """Return the key by which `in_order` sorts."""
    parts = _NUMBERS.split(name)
    return tuple((parts[at], int(parts[at + 1]) if at + 1 < len(parts) else -1) for at in range(0, len(parts), 2))


def fitted(values: npt.NDArray[np.float64] | None, size: int) -> npt.NDArray[np.float64]:
    """Return a column with `size` ports: those that it does not have are NaN."""
    if values is None:
        return np.full(size, np.nan)
    if len(values) >= size:
        return values[:size]
    return np.concatenate([values, np.full(size - len(values), np.nan)])
