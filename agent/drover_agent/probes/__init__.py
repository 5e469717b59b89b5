"""Micro-benchmarks that prove a suspect: each measures one thing with a physical meaning, one file each.

They run in a child process (`child.py`), never in the agent: `runner.py` starts it, bounds it in time and memory, and
makes a hang or a crash a result. Only the child imports torch. This table imports nothing of the probes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Level(StrEnum):
    """How thorough; each level has the probes of those before it."""

    QUICK = "quick"  # the whole node in less than 60 s
    STANDARD = "standard"  # less than 5 min
    DEEP = "deep"  # as long as it takes; bounded by the request's timeout


@dataclass(frozen=True, slots=True)
class Probe:
    """One row of the table below.

    Attributes:
        module: under `drover_agent.probes`; its `run(context, name)` yields `base.Result`; several rows may share one.
        level: the first that has it; None: asked for by name alone. Those over several nodes together (GROUP) only the
            collector can ask for; those of shared storage need a folder (`--shared`).
        unit: of its values. better: higher, lower, or exact (a wrong answer is a fault, whatever its size).
        seconds: about how long it takes, for each device or pair or the node, at level quick and at the others.
        what: its physical meaning, one sentence.
    """

    name: str
    module: str
    level: Level | None
    unit: str
    better: str
    seconds: tuple[float, float]
    what: str


GROUP = "_group"  # at the end of the names of those over several nodes

_Q, _S, _D = Level.QUICK, Level.STANDARD, Level.DEEP
_ROWS: tuple[Probe, ...] = (
    Probe(
        "launch", "launch", _Q, "us", "lower", (0.5, 1), "a small kernel, of many in a row: how fast they are issued"
    ),
    Probe(
        "launch_wait", "launch", _Q, "us", "lower", (0.5, 1), "from the call of a small kernel until its end is known"
    ),
    Probe("gemm_bf16", "gemm", _Q, "TFLOP/s", "higher", (1, 5), "products of bf16 matrices, by tensor cores"),
    Probe("gemm_fp8", "gemm", _Q, "TFLOP/s", "higher", (1, 5), "products of fp8 matrices, by tensor cores"),
    Probe("hbm_copy", "hbm", _Q, "GB/s", "higher", (1, 3), "copy within the device's memory, read plus written"),
    Probe("pcie_h2d", "pcie", _Q, "GB/s", "higher", (0.5, 2), "pinned host memory to the device"),
    Probe("pcie_d2h", "pcie", _Q, "GB/s", "higher", (0.5, 2), "the device to pinned host memory"),
    Probe("p2p", "p2p", _Q, "GB/s", "higher", (1, 4), "from one device to another one of the node"),
    Probe("sdc", "sdc", _Q, "products", "exact", (3, 30), "products that must be the same to the last bit"),
    Probe("allreduce", "collectives", _Q, "GB/s", "higher", (2, 5), "bus bandwidth of an all-reduce"),
    Probe("gemm_fp4", "gemm", _S, "TFLOP/s", "higher", (1, 5), "products of nvfp4 matrices (Blackwell)"),
    Probe("gemm_fp64", "gemm", _S, "TFLOP/s", "higher", (1, 5), "products of fp64 matrices"),
    Probe("gemm_fp32", "gemm", _S, "TFLOP/s", "higher", (1, 5), "products of fp32 matrices, without tensor cores"),
    Probe("gemm_tf32", "gemm", _S, "TFLOP/s", "higher", (1, 5), "products of fp32 matrices, rounded to tf32"),
    Probe("gemm_fp16", "gemm", _S, "TFLOP/s", "higher", (1, 5), "products of fp16 matrices, by tensor cores"),
    Probe("hbm_triad", "hbm", _S, "GB/s", "higher", (1, 3), "c = a + s b in the device's memory"),
    Probe("pcie_both", "pcie", _S, "GB/s", "higher", (0.5, 2), "both ways at once, in sum"),
    Probe("allgather", "collectives", _S, "GB/s", "higher", (2, 5), "bus bandwidth of an all-gather"),
    Probe("alltoall", "collectives", _S, "GB/s", "higher", (2, 5), "bus bandwidth of an all-to-all"),
    Probe("host_memory", "host_memory", _S, "GB/s", "higher", (2, 5), "copy within the host's memory, all cores"),
    Probe("disk_write", "disk", _S, "GB/s", "higher", (2, 10), "sequential writes to the local disk, with fsync"),
    Probe("disk_read", "disk", _S, "GB/s", "higher", (2, 10), "sequential reads from the local disk"),
    Probe("disk_random", "disk", _S, "operations/s", "higher", (2, 5), "random reads of 4 KiB from the local disk"),
    Probe("train_step", "train_step", _S, "tokens/s", "higher", (5, 20), "a small transformer, sharded; exact loss"),
    Probe("memory_pattern", "memory_pattern", _D, "B", "exact", (30, 120), "patterns over most of the device's memory"),
    Probe("soak", "soak", _D, "degC/W", "lower", (60, 600), "thermal resistance at steady full load"),
    Probe("storage_write", "disk", None, "GB/s", "higher", (2, 10), "sequential writes to shared storage, with fsync"),
    Probe("storage_read", "disk", None, "GB/s", "higher", (2, 10), "sequential reads from shared storage"),
    Probe("allreduce_group", "collectives", None, "GB/s", "higher", (2, 5), "bus bandwidth of one over several nodes"),
    Probe("allgather_group", "collectives", None, "GB/s", "higher", (2, 5), "bus bandwidth of one over several nodes"),
    Probe("alltoall_group", "collectives", None, "GB/s", "higher", (2, 5), "bus bandwidth of one over several nodes"),
    Probe("pairs_group", "together", None, "GB/s", "higher", (3, 20), "from a node to another one and back, in rounds"),
    Probe("fsdp_group", "together", None, "tokens/s", "higher", (5, 120), "a transformer, sharded over all nodes"),
    Probe("tp_group", "together", None, "tokens/s", "higher", (3, 40), "layers that are split over all nodes"),
)

PROBES: Mapping[str, Probe] = MappingProxyType({probe.name: probe for probe in _ROWS})


def of_level(level: Level) -> list[Probe]:
    """The probes that a level runs, in table order."""
    levels = list(Level)
    return [p for p in _ROWS if p.level is not None and levels.index(p.level) <= levels.index(level)]
