"""Choose codec and block size of each metric's column, as measured by `benchmarks/bench_codecs.py` (decision 11).

They depend on the kind and unit, so that a new metric gets a good codec without a measurement. Simulated values may be
smoother or noisier than real ones: of similar codecs the one with the cheapest worst case is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from drover_core.metrics.catalog import Kind, Metric

PLAIN = "ZSTD(1)"

# A chart reads a few rows each of many entities, and unpacks a block of each column for each. For varying values small
# blocks take as little room as large ones (measured, decision 11); for constant values a block is all overhead.
SMALL_BLOCK = 1 << 14
_BLOCKS: Mapping[str, int] = MappingProxyType(
    {"ratio": SMALL_BLOCK, "W": SMALL_BLOCK, "J": SMALL_BLOCK, "degC": 1 << 16, "MHz": 1 << 16}
)

# Exceptions from the rules of kind and unit.
OVERRIDES: Mapping[str, str] = MappingProxyType(
    {
        "framebuffer_used_bytes": PLAIN,  # a job keeps its memory: runs, which T64 breaks up
        "framebuffer_total_bytes": PLAIN,
        "power_limit_w": PLAIN,
        "gpu_util_ratio": f"GCD, {PLAIN}",  # NVML reports whole percents, mostly equal
        "memory_util_ratio": f"GCD, {PLAIN}",
        "root_used_ratio": f"Delta(2), {PLAIN}",  # changes slowly
        "inlet_temp_c": f"Delta(2), {PLAIN}",
        "tx_wait": f"Delta(8), T64, {PLAIN}",  # always counts, unlike counters of errors
    }
)


def block_of(metric: Metric) -> int:
    """Return how many bytes of a column are compressed together; 0: as the table says."""
    return _BLOCKS.get(metric.unit, 0)


def of_metric(metric: Metric) -> str:
    """Return the content of CODEC(...), as the engine shows it."""
    if metric.name in OVERRIDES:
        return OVERRIDES[metric.name]
    width = np.dtype(metric.type).itemsize
    if metric.type == "d":
        return f"Gorilla(8), {PLAIN}"
    if metric.kind is Kind.STATE:
        return PLAIN  # runs of one code
    if metric.kind is Kind.COUNTER:
        # Bytes and joules always count, in steps of few bits; other counters mostly stand still.
        return f"Delta({width}), T64, {PLAIN}" if metric.unit in ("B", "J") else f"Delta({width}), {PLAIN}"
    if metric.unit == "degC":
        return "DoubleDelta, ZSTD(3)"
    if metric.unit == "B/s":
        return f"GCD, T64('bit'), {PLAIN}"  # agents report MB/s; noise
    if metric.unit in ("ratio", "MHz"):
        return f"GCD, T64, {PLAIN}"  # sensors may be coarser than our steps of thousandths, percents or MHz
    return f"T64, {PLAIN}"  # noise in few bits
