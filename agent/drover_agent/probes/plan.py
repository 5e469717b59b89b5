"""What the command and the probe service share: from names, level and GPUs to a request for the runner."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence

from drover_agent.probes import PROBES, Level, of_level
from drover_agent.probes.eligible import Gpu
from drover_agent.probes.exchange import LONGEST_S
from drover_agent.probes.runner import START_S, GpuRef, Request

PATIENCE = 3.0  # times the probes' own lengths: a slow device is what they are for
MEMORY_BYTES = 32 << 30
NO_TORCH = "probes need torch on this node: pip install 'drover[probe]'"


def names_of(only: Iterable[str], level: Level) -> tuple[str, ...]:
    """The probes asked for, in the order of the table; all of the level when none is named.

    Raises:
        ValueError: one is not in the table; names all that are.
    """
    wanted = list(only)
    if unknown := [name for name in wanted if name not in PROBES]:
        raise ValueError(f"no probe is called {unknown[0][:80]}; there are {', '.join(PROBES)}")
    return tuple(name for name in PROBES if name in wanted) if wanted else tuple(p.name for p in of_level(level))


def timeout_s(names: Sequence[str], level: Level, devices: int) -> float:
    """Far more than they take together, one device after the other."""
    own = sum(PROBES[name].seconds[level is not Level.QUICK] for name in names)
    return min(START_S + PATIENCE * own * max(devices, 1), LONGEST_S)


def memory_bytes() -> int:
    """Half of a small host's, at most what NCCL's processes may need."""
    return min(MEMORY_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def has_torch() -> bool:
    """Without importing it."""
    return importlib.util.find_spec("torch") is not None


def request_of(
    names: tuple[str, ...], level: Level, gpus: Sequence[Gpu], limit_s: float | None, folder: str
) -> Request:
    """`limit_s` None: what suits them."""
    return Request(
        names, tuple(GpuRef(gpu.slot, gpu.uuid) for gpu in gpus), level, limit_s or timeout_s(names, level, len(gpus)),
        memory_bytes(), folder,
    )  # fmt: skip
