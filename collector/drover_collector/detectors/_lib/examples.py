"""Build the small windows of each detector's EXAMPLES, at least a healthy and a faulty one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.report_interval import ReportInterval
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.risk.model import Trouble
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec

START_MS = 1_800_000_000_000
LAG_MS = 7_000
KEPT = 6  # buckets in a window, as the engine keeps

Change = Callable[[int, dict[str, npt.NDArray[np.float64]], dict[str, npt.NDArray[np.float64]]], None]
"""Changes the GPU and node columns of one bucket: (bucket number, gpu columns, node columns)."""
LinkChange = Callable[[int, dict[str, npt.NDArray[np.float64]]], None]
"""Changes the port columns of one bucket."""


@dataclass(frozen=True, slots=True)
class Example:
    """Windows to play to a detector, and the (kind, cause, scope, severity) of all findings expected."""

    name: str
    play: Callable[[], Iterator[tuple[Window, int]]]
    expected: frozenset[tuple[str, str, str, str]]


def small_fleet(nodes: int = 8, gpus: int = 8, per_rack: int = 4, ports: int = 0) -> FleetIndex:
    """Return a fleet in racks of `per_rack` nodes, with `ports` per node that serve one GPU each."""
    links = tuple(LinkSpec(f"mlx5_{p}", p) for p in range(ports))
    return FleetIndex(
        FleetSpec(
            tuple(
                NodeSpec(f"n{n:02d}", f"r{n // per_rack:02d}", f"l{n // per_rack:02d}", "train", "H100", gpus, links)
                for n in range(nodes)
            )
        )
    )


@functools.lru_cache(4096)  # the buckets of many examples and tests have the same numbers
def _drawn(seed: int, count: int) -> npt.NDArray[np.float64]:
    found = np.random.default_rng(seed).normal(0, 1, count)
    found.flags.writeable = False
    return found


def training_columns(index: FleetIndex, number: int) -> tuple[dict[str, npt.NDArray[np.float64]], ...]:
    """Return GPU and node columns of a fleet in steady training. Units differ a little, in each bucket the same way."""
    unit, noise = _drawn(7, index.gpu_count), _drawn(number, index.gpu_count)
    power = 650 + 6 * unit + 2 * noise
    elapsed_us = number * BUCKET_MS * 1000.0
    gpu = {
        "sm_clock_mhz": 1755 + 8 * unit + 3 * noise,
        "memory_clock_mhz": np.full(index.gpu_count, 2619.0),
        "power_w": power,
        "power_limit_w": np.full(index.gpu_count, 700.0),
        "gpu_temp_c": 26 + 0.055 * power * (1 + 0.03 * unit),
        "thermal_margin_c": 87 - (26 + 0.055 * power * (1 + 0.03 * unit)),
        "gpu_util_ratio": np.full(index.gpu_count, 0.99),
        "sm_active_ratio": 0.80 - 0.003 * unit,
        "tensor_active_ratio": 0.55 - 0.002 * unit,
        "dram_active_ratio": 0.45 + 0.002 * noise,
        "clock_event_reasons": np.zeros(index.gpu_count),
        "throttle_power_us": np.full(index.gpu_count, 0.02 * elapsed_us),
        "throttle_thermal_sw_us": np.zeros(index.gpu_count),
        "throttle_thermal_hw_us": np.zeros(index.gpu_count),
        "pcie_width": np.full(index.gpu_count, 16.0),
        "pcie_generation": np.full(index.gpu_count, 5.0),
        "nvlink_active_links": np.full(index.gpu_count, 18.0),
        "row_remap_pending": np.zeros(index.gpu_count),
        "row_remap_failed": np.zeros(index.gpu_count),
        "ecc_dram_uncorrected": np.zeros(index.gpu_count),
        "remapped_rows_uncorrected": np.zeros(index.gpu_count),
    }
    node = {
        "inlet_temp_c": np.full(index.node_count, 26.0),
        "cpu_util_ratio": np.full(index.node_count, 0.3),
    }
    return gpu, node


def port_columns(index: FleetIndex) -> dict[str, npt.NDArray[np.float64]]:
    """Return columns of ports that are up and count no errors; empty for a fleet without ports."""
    count = len(index.ports)
    values = {"link_up": 1.0, "rate_gbps": 400.0, "link_downed": 3.0, "symbol_errors": 0.0, "ack_timeouts": 0.0}
    return {name: np.full(count, value) for name, value in values.items()} if count else {}


def training_bucket(
    index: FleetIndex,
    number: int,
    change: Change | None = None,
    silent: Sequence[int] = (),
    start_ms: int = START_MS,
    job: str = "812",
    links: LinkChange | None = None,
) -> Bucket:
    """Return bucket `number` of a fleet whose GPUs all train in one job; nodes in `silent` send nothing."""
    gpu, node = training_columns(index, number)
    link = port_columns(index)
    if change is not None:
        change(number, gpu, node)
    if links is not None:
        links(number, link)
    node_rows = np.full(index.node_count, 10, np.int32)
    node_rows[list(silent)] = 0
    gpu_rows = node_rows[index.gpu_node]
    for column in gpu.values():
        column[gpu_rows == 0] = np.nan
    for column in node.values():
        column[node_rows == 0] = np.nan
    return Bucket(
        start_ms + number * BUCKET_MS, BUCKET_MS, gpu, node, gpu_rows, node_rows,
        np.zeros(index.gpu_count, np.int32), (job,), link,
    )  # fmt: skip


def play(
    index: FleetIndex,
    count: int,
    change: Change | None = None,
    silent: Callable[[int], Sequence[int]] = lambda _number: (),
    events: Mapping[int, Sequence[Event]] | None = None,
    links: LinkChange | None = None,
    inventory: Inventory | None = None,
    troubles: Mapping[str, Mapping[str, Trouble]] | None = None,
) -> Iterator[tuple[Window, int]]:
    """Yield windows of `count` buckets as the engine builds them. `events`: bucket number -> events right after it."""
    held, interval = Buckets(KEPT), ReportInterval(index)
    for number in range(count):
        bucket = training_bucket(index, number, change, silent(number), links=links)
        held.append(bucket)
        interval.add_bucket(bucket)
        now_ms = bucket.end_ms + LAG_MS
        for fresh, new in ((True, ()), (False, tuple((events or {}).get(number, ())))):
            if fresh or new:
                yield Window(index, held.all(), fresh, new, START_MS, inventory, troubles, interval), now_ms
