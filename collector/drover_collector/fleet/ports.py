"""The network ports of a fleet: those of its file, then those that agents report, in the order in which they came."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_core.model.fleet import LinkSpec, NodeSpec

FOUND_MOST = 64  # ports of one node beyond those that its file lists: an agent may report thousands of names
_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FleetPort:
    """`listed`: what the fleet file says of it, None where an agent reported it and the file does not list it."""

    node: int
    name: str
    listed: LinkSpec | None = None


class FleetPorts:
    """Ports by number. Number k is one port for ever and ports are only added, so that an array that was laid out
    before a port came is the beginning of one that is laid out later. Any thread may use it.

    Attributes:
        left_out: node -> how many of its ports are not judged because it reports more than FOUND_MOST.
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
        """The ports by number."""
        with self._lock:
            if len(self._all) != len(self._ports):
                self._all = tuple(self._ports)
            return self._all

    def number(self, node: str, name: str) -> int | None:
        return self._numbers.get((node, name))

    def add(self, found: Iterable[tuple[str, str]]) -> None:
        """Take in ports that agents report, each as (node, port); the first ones count where a node has too many."""
        with self._lock:
            over: Counter[str] = Counter()
            for node, name in found:
                n = self._nodes.get(node)
                if n is None or not name or (node, name) in self._numbers:
                    continue
                if self._found[n] >= FOUND_MOST:
                    over[node] += 1
                    continue
                self._found[n] += 1
                self._numbers[node, name] = len(self._ports)
                self._ports.append(FleetPort(n, name))
            self.left_out |= over


def in_order(names: Iterable[str]) -> list[str]:
    """mlx5_2 before mlx5_10."""
    return sorted(names, key=name_key)


def name_key(name: str) -> tuple[tuple[str, int], ...]:
    parts = _NUMBERS.split(name)
    return tuple((parts[at], int(parts[at + 1]) if at + 1 < len(parts) else -1) for at in range(0, len(parts), 2))


def fitted(values: npt.NDArray[np.float64] | None, size: int) -> npt.NDArray[np.float64]:
    """A column of ports laid out for `size` of them: those that it does not have yet are NaN."""
    if values is None:
        return np.full(size, np.nan)
    if len(values) >= size:
        return values[:size]
    return np.concatenate([values, np.full(size - len(values), np.nan)])
