"""What others do, on the same buckets: each file one method, `Baseline(index, threshold)` with `step(bucket, events)`.

A step takes one bucket and the events since the last, and says which GPUs and which nodes it holds to be faulty now
(bool [G] and [N]). THRESHOLD is what `bench_detection.py --tune` found best (F1) among GRID on the tuning fleets; the
thresholds of `fixed` are its sources' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.buckets import Bucket
from drover_core.model.events import Event

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# What training shows of a slow or sick machine, in Minder's order of priority as far as the catalog has it (network
# errors, CPU, GPU duty, clocks, power, heat, memory and interconnect traffic).
METRICS = (
    "tensor_active_ratio", "sm_active_ratio", "gpu_util_ratio", "sm_clock_mhz", "power_w", "gpu_temp_c",
    "dram_active_ratio", "nvlink_tx_bytes_per_s", "pcie_tx_bytes_per_s",
)  # fmt: skip
BUSY = 0.5  # of utilisation: below it nothing is compared


class Baseline(Protocol):
    def step(self, bucket: Bucket, events: Sequence[Event], /) -> tuple[Bools, Bools]: ...


def gpu(bucket: Bucket, metric: str, count: int) -> Floats:
    """float64 [G]; NaN where nobody reported it."""
    found = bucket.gpu.get(metric)
    return np.full(count, np.nan) if found is None else found


def node_means(values: Floats, gpu_node: npt.NDArray[np.int32], nodes: int) -> Floats:
    """Mean over the GPUs of each node: float64 [..., G] -> [..., N]; NaN where none is known."""
    known = ~np.isnan(values)
    flat = values.reshape(-1, values.shape[-1])
    sums = np.array([np.bincount(gpu_node, np.nan_to_num(row), nodes) for row in flat])
    counts = np.array([np.bincount(gpu_node, row, nodes) for row in known.reshape(flat.shape).astype(float)])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / counts).reshape(*values.shape[:-1], nodes)


def node_jobs(bucket: Bucket, gpu_node: npt.NDArray[np.int32], nodes: int) -> npt.NDArray[np.int64]:
    """The job of each node (of its last GPU that has one), -1 none: int64 [N]."""
    jobs = np.full(nodes, -1, np.int64)
    held = bucket.jobs >= 0
    jobs[gpu_node[held]] = bucket.jobs[held]
    return jobs
