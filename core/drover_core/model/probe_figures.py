"""The figures that probes measure: one row each, with its unit and which way is better.

Agent and collector do not import each other, so both use this table. A test compares the agent's own table (what runs,
at which level, how long) with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Better(StrEnum):
    """Which way a figure is better."""

    HIGHER = "higher"
    LOWER = "lower"
    EXACT = "exact"  # a wrong result is a fault, however small; the node itself judges it
    NEITHER = "neither"  # explains another figure and is not judged


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. `name` is that of ProbeResult.probe, `unit` that of ProbeResult.unit."""

    name: str
    unit: str
    better: Better


_ROWS: tuple[Figure, ...] = (
    Figure("launch", "us", Better.LOWER),
    Figure("launch_wait", "us", Better.LOWER),
    Figure("gemm_fp64", "TFLOP/s", Better.HIGHER),
    Figure("gemm_fp32", "TFLOP/s", Better.HIGHER),
    Figure("gemm_tf32", "TFLOP/s", Better.HIGHER),
    Figure("gemm_bf16", "TFLOP/s", Better.HIGHER),
    Figure("gemm_fp16", "TFLOP/s", Better.HIGHER),
    Figure("gemm_fp8", "TFLOP/s", Better.HIGHER),
    Figure("gemm_fp4", "TFLOP/s", Better.HIGHER),
    Figure("hbm_copy", "GB/s", Better.HIGHER),
    Figure("hbm_triad", "GB/s", Better.HIGHER),
    Figure("pcie_h2d", "GB/s", Better.HIGHER),
    Figure("pcie_d2h", "GB/s", Better.HIGHER),
    Figure("pcie_both", "GB/s", Better.HIGHER),
    Figure("p2p", "GB/s", Better.HIGHER),
    Figure("allreduce", "GB/s", Better.HIGHER),
    Figure("allgather", "GB/s", Better.HIGHER),
    Figure("alltoall", "GB/s", Better.HIGHER),
    Figure("host_memory", "GB/s", Better.HIGHER),
    Figure("disk_write", "GB/s", Better.HIGHER),
    Figure("disk_read", "GB/s", Better.HIGHER),
    Figure("disk_random", "operations/s", Better.HIGHER),
    Figure("storage_write", "GB/s", Better.HIGHER),
    Figure("storage_read", "GB/s", Better.HIGHER),
    Figure("train_step", "tokens/s", Better.HIGHER),
    Figure("memory_pattern", "B", Better.EXACT),
    Figure("sdc", "products", Better.EXACT),
    Figure("allreduce_group", "GB/s", Better.HIGHER),
    Figure("allgather_group", "GB/s", Better.HIGHER),
    Figure("alltoall_group", "GB/s", Better.HIGHER),
    Figure("pairs_group", "GB/s", Better.HIGHER),
    Figure("pairs_group_latency", "us", Better.LOWER),
    Figure("fsdp_group", "tokens/s", Better.HIGHER),
    Figure("fsdp_group_slowest", "tokens/s", Better.HIGHER),
    Figure("fsdp_group_solo", "tokens/s", Better.HIGHER),
    Figure("tp_group", "tokens/s", Better.HIGHER),
    Figure("tp_group_slowest", "tokens/s", Better.HIGHER),
    Figure("soak", "degC/W", Better.LOWER),
    Figure("soak_sm_clock_mhz", "MHz", Better.HIGHER),
    Figure("soak_power_w", "W", Better.NEITHER),
    Figure("soak_gpu_temp_c", "degC", Better.NEITHER),  # says little without the inlet temperature; `soak` uses both
)

FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in _ROWS})

# Measured over several nodes together: not a figure of one node, and in no level. Groups are judged by comparing them.
GROUP_FIGURES = ("allreduce_group", "allgather_group", "alltoall_group")
# Measured over several nodes too; `drover validate` asks for them and judges the nodes of one group against each other.
VALIDATION_PROBES = ("pairs_group", "fsdp_group", "tp_group")
VALIDATION_FIGURES = tuple(name for name in FIGURES if name.startswith(VALIDATION_PROBES))
# Of storage that several nodes share: in no level, since only a node with such a folder can measure it.
STORAGE_FIGURES = ("storage_write", "storage_read")

# Level -> how long a request may take on its node, in s. Each level has all figures of those before it.
LEVELS: Mapping[str, int] = MappingProxyType({"quick": 600, "standard": 1800, "deep": 4 * 3600})

WRONG = "wrong"  # ProbeVerdict.end after a wrong result
LOST = "lost"  # ProbeVerdict.end if the node's driver answered for none of its GPUs
