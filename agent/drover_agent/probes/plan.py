"""What the command and the probe service share: from names, level and GPUs to a request for the runner."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Sequence

from drover_agent.probes import PROBES, Level, of_level
from drover_agent.probes.eligible import Gpu
from drover_agent.probes.exchange import LONGEST_S
from drover_agent.probes.runner import START_S, GpuRef, Request
from drover_agent.probes.timing import COPIES, PAIRS, PRODUCTS

PATIENCE = 3.0  # times the probes' own lengths: a slow device is what they are for
MEMORY_BYTES = 32 << 30
# What the measurements of a level may take together, warming up too, so that the level keeps its promise on a node of
# many GPUs: a minute, and five. The rest goes to importing torch, contexts and NCCL's start.
LEVEL_S = {Level.QUICK: 40.0, Level.STANDARD: 210.0}
LEAST = 0.02  # of a probe's length: what is measured in the least number of repeats anyway
SDC_S = 0.6  # three products each of five types and three sizes; an H100's share of it is 0.2 s, the rest drawing them
# Modules -> what they take of each device, and p2p of each pair, however short they are made.
FIXED_S = {
    "gemm": PRODUCTS.least_s, "hbm": COPIES.least_s, "pcie": COPIES.least_s, "p2p": PAIRS.least_s, "sdc": SDC_S,
}  # fmt: skip
OF_THE_NODE = frozenset(
    {"collectives", "disk", "host_memory", "soak", "together", "train_step"}
)  # modules that run once, not for each device
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


def own_s(names: Sequence[str], level: Level, devices: int) -> float:
    """What they take together, one device after the other."""
    return sum(
        PROBES[name].seconds[level is not Level.QUICK] * (1 if PROBES[name].module in OF_THE_NODE else max(devices, 1))
        for name in names
    )


def fixed_s(names: Iterable[str], devices: int) -> float:
    """Return the seconds that do not shrink with the probes: warming up, and the least number of repeats."""
    each = [(PROBES[name].module, FIXED_S.get(PROBES[name].module, 0.0)) for name in names]
    return sum(s * devices * (devices - 1 if module == "p2p" else 1) for module, s in each)


def scale(names: Sequence[str], level: Level, devices: int) -> float:
    """Of each probe's length, so that the level takes no longer than it says; 1 where it does not anyway."""
    left_s = LEVEL_S.get(level, math.inf) - fixed_s(names, max(devices, 1))
    return min(1.0, max(LEAST, left_s / own_s(names, level, devices)))


def timeout_s(names: Sequence[str], level: Level, devices: int) -> float:
    """Far more than they take."""
    return min(START_S + PATIENCE * (own_s(names, level, devices) + fixed_s(names, devices)), LONGEST_S)


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
        names,
        tuple(GpuRef(gpu.slot, gpu.uuid) for gpu in gpus),
        level=level,
        timeout_s=limit_s or timeout_s(names, level, len(gpus)),
        memory_bytes=memory_bytes(),
        folder=folder,
        scale=scale(names, level, len(gpus)),
    )
