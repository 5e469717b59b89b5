"""Which devices are near each other on the PCI bus, by their paths in sysfs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def nearest(sys: Path, gpu: str, others: Mapping[str, str]) -> str | None:
    """Of `others` (name -> PCI address) those that are nearest to the GPU at address `gpu`, with commas between: those
    that share the most bridges with it, else those of its NUMA node; None where none is nearer than the rest."""
    mine = _path(sys, gpu)
    shared = {name: _common(mine, _path(sys, address)) for name, address in others.items() if address}
    most = max(shared.values(), default=0)
    found = [name for name, count in shared.items() if count == most] if most else []
    if not most and (own := _numa(sys, gpu)) >= 0:
        found = [name for name, address in others.items() if address and _numa(sys, address) == own]
    return ",".join(sorted(found)) or None


def distance(sys: Path, one: str, other: str) -> str:
    """How far two devices are from each other, in the words of `nvidia-smi topo -m`: PIX (one PCIe switch), PXB
    (several), PHB (the same root complex), NODE (the same NUMA node), SYS (between NUMA nodes)."""
    a, b = _path(sys, one), _path(sys, other)
    common = _common(a, b)
    if common > 1:
        return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"  # its port of the switch, and the device
    if common:
        return "PHB"
    own = _numa(sys, one)
    return "NODE" if own >= 0 and own == _numa(sys, other) else "SYS"


def _numa(sys: Path, address: str) -> int:
    """-1 where the kernel does not know."""
    try:
        return int((sys / "bus/pci/devices" / address.lower() / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return -1


def _path(sys: Path, address: str) -> list[str]:
    """`pci0000:17`, bridge, ..., device; empty for a device that is not there."""
    folder = sys / "bus/pci/devices" / address.lower()
    if not address or not folder.exists():
        return []
    parts = os.path.realpath(folder).split("/")
    roots = [at for at, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[0] :] if roots else []


def _common(a: list[str], b: list[str]) -> int:
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
