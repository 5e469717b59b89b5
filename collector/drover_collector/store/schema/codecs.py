"""Which codec each metric's column has, and how much of it is one block. Codecs are chosen by
`benchmarks/bench_codecs.py`; decision 11 tells how.

By what a metric is, so that a new one gets a fair codec unmeasured. Simulated values may be smoother or noisier than a
real fleet's, so of codecs that are near each other the one stands here whose worst case costs least.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from drover_core.metrics.catalog import Kind, Metric

PLAIN = "ZSTD(1)"

# A chart reads a few rows each of many entities, and unpacks a block of every column for each. Of what varies a small
# block takes no more room than a large one (measured, decision 11); of what stands still each is all overhead.
SMALL_BLOCK = 1 << 14
_BLOCKS: Mapping[str, int] = MappingProxyType(
    {"ratio": SMALL_BLOCK, "W": SMALL_BLOCK, "J": SMALL_BLOCK, "degC": 1 << 16, "MHz": 1 << 16}
)

# What its kind and unit do not tell of a metric.
OVERRIDES: Mapping[str, str] = MappingProxyType(
    {
        "framebuffer_used_bytes": PLAIN,  # a job takes its memory and keeps it: runs, which T64 breaks up
        "framebuffer_total_bytes": PLAIN,
        "power_limit_w": PLAIN,
        "gpu_util_ratio": f"GCD, {PLAIN}",  # NVML tells whole percents, mostly the same
        "memory_util_ratio": f"GCD, {PLAIN}",
        "root_used_ratio": f"Delta(2), {PLAIN}",  # creeps
        "inlet_temp_c": f"Delta(2), {PLAIN}",
        "tx_wait": f"Delta(8), T64, {PLAIN}",  # a count that runs all the time, unlike those of errors
    }
)


def block_of(metric: Metric) -> int:
    """Bytes of a column that are compressed as one; 0: as many as the table says."""
    return _BLOCKS.get(metric.unit, 0)


def of_metric(metric: Metric) -> str:
    """What stands in CODEC(...), as the engine shows it."""
    if metric.name in OVERRIDES:
        return OVERRIDES[metric.name]
    width = np.dtype(metric.type).itemsize
    if metric.type == "d":
        return f"Gorilla(8), {PLAIN}"
    if metric.kind is Kind.STATE:
        return PLAIN  # runs of the same code
    if metric.kind is Kind.COUNTER:
        # Those of bytes and joules run all the time, and grow by what fits few bits; the others mostly stand still.
        return f"Delta({width}), T64, {PLAIN}" if metric.unit in ("B", "J") else f"Delta({width}), {PLAIN}"
    if metric.unit == "degC":
        return "DoubleDelta, ZSTD(3)"
    if metric.unit == "B/s":
        return f"GCD, T64('bit'), {PLAIN}"  # agents tell MB/s; noise
    if metric.unit in ("ratio", "MHz"):
        return f"GCD, T64, {PLAIN}"  # sensors may be coarser than our steps: thousandths, percents, 15 MHz
    return f"T64, {PLAIN}"  # noise in few bits
