"""What the detector of stragglers finds in training whose values a test changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from drover_collector.detectors._lib.examples import START_MS, play, small_fleet
from drover_collector.detectors.straggler import detector as straggler
from drover_core.model.events import Finding

Columns = dict[str, np.ndarray]
SLOW = 13  # GPU 5 of n01


def run(
    change: Callable[[int, Columns, Columns], None] | None = None,
    count: int = 10,
    jobs: Callable[[int], np.ndarray] | None = None,
) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(), count, change):
        if jobs is not None:
            number = (window.newest.start_ms - START_MS) // 10_000
            held = dataclasses.replace(window.newest, jobs=jobs(number), job_names=("812", "813"))
            window = dataclasses.replace(window, buckets=(*window.buckets[:-1], held))
        findings, state = straggler.detect(window, state, now_ms)
        reported += findings
    return reported


def waits(gpu: Columns, slow: float, who: int = SLOW) -> None:
    """The job runs at the pace of `who`, `slow` times slower: everyone else works less."""
    others = np.arange(len(gpu["power_w"])) != who
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        gpu[metric][others] /= slow
