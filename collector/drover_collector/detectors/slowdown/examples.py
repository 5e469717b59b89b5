"""Examples of the detector of slowdowns: a job with checkpoints and uneven batches, and one whose steps get longer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from drover_collector.detectors._lib.examples import LAG_MS, Example, play, small_fleet
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Bucket, Floats, Workloads
from drover_collector.fleet.index import FleetIndex

STEP_S, TOKENS, FLOPS = 2.0, 4e6, 1.7e17
SLOWER_FROM, COUNT = 70, 95


def _play(step_s: Callable[[int], float]) -> Iterator[tuple[Window, int]]:
    """Yield windows of a job whose loop reports on each node."""
    index = small_fleet()

    def change(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
        gpu["tensor_active_ratio"] *= STEP_S / step_s(number)  # as much work in a longer time

    for number, (window, _) in enumerate(play(index, COUNT, change)):
        bucket = with_steps(index, window.newest, step_s(number))
        yield replace(window, buckets=(*window.buckets[:-1], bucket)), bucket.end_ms + LAG_MS


def with_steps(index: FleetIndex, bucket: Bucket, step_s: float) -> Bucket:
    """Return the bucket with a loop that reports on each node."""
    nodes = index.node_count
    values = {"step_time_s": step_s, "tokens_per_step": TOKENS, "flops_per_step": FLOPS}
    work = Workloads.of(
        np.arange(nodes, dtype=np.int32), ["pretrain"] * nodes, {m: np.full(nodes, v) for m, v in values.items()}
    )
    return replace(bucket, work=work)


def _noise(number: int) -> float:
    return float(np.random.default_rng(number).normal(1, 0.004))


def _uneven(number: int) -> float:
    if number % 18 == 17:  # a checkpoint, in a step
        return STEP_S * 9
    if number in range(60, 66):  # an evaluation, whose steps are shorter
        return STEP_S * 0.4
    return STEP_S * (1 + 0.01 * math.sin(number / 4)) * _noise(number)


def _slower(number: int) -> float:
    return STEP_S * (1.07 if number >= SLOWER_FROM else 1.0) * _noise(number)


EXAMPLES = (
    Example("checkpoints, an evaluation and uneven batches", lambda: _play(_uneven), frozenset()),
    Example(
        "a job that is 7 % slower as a whole",
        lambda: _play(_slower),
        frozenset({("slowdown", "waits_alike", "job", "warning")}),
    ),
)
