"""Which devices are near each other on the PCI bus, by their paths in sysfs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def nearest(sys: Path, gpu: str, others: Mapping[str, str]) -> str | None:
    """Of `others` (name -> PCI address) those that share the most bridges with the GPU at address `gpu`, with commas
    between; None where it shares not even a root complex with one of them, so that none is nearer than the rest."""
    mine = _path(sys, gpu)
    shared = {name: _common(mine, _path(sys, address)) for name, address in others.items() if address}
    most = max(shared.values(), default=0)
    return ",".join(sorted(name for name, count in shared.items() if count == most)) if most else None


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
