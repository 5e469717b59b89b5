"""A real training loop of two ranks that gets slower: its own reports, through the agent's socket, to the detector."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.steps import StepsSource
from drover_collector.detectors._lib.examples import LAG_MS, START_MS, small_fleet
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown import detector as slowdown
from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Workloads
from drover_core.model.events import Finding

STEP_S, STEPS, SLOWER_FROM, FACTOR = 0.008, 650, 400, 2.0
T = 1_800_000_000_000


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install 'drover[probe]'")
def test_a_real_loop_that_gets_slower_by_a_sleep_is_found(tmp_path: Path) -> None:
    """Each report is a bucket: twenty minutes of buckets pass in eight seconds."""
    path = tmp_path / "steps.sock"
    source = StepsSource("n00", path, Gpus())
    source.read(T)
    words = [str(tmp_path / "store"), STEP_S, STEPS, SLOWER_FROM, FACTOR]
    loop = Path(__file__).parents[2] / "testbed/gloo_loop.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(loop), *map(str, words)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "DROVER_STEPS_SOCKET": str(path)},
        )
        for rank in range(2)
    ]
    times: list[float] = []
    try:
        seen = 0
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.005)
            if source.received >= seen + 2:  # a report of each rank
                seen = source.received
                times += [values["step_time_s"] for _, values in source.read(T).rows]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        source.close()
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = judged(times)
    assert found, times
    first = found[0]
    assert (first.job, first.cause) == ("pretrain", "slower")
    assert first.evidence[0].expected is not None and first.evidence[0].value is not None
    assert first.evidence[0].value > 1.3 * first.evidence[0].expected  # a busy machine adds to both


def judged(times: list[float]) -> list[Finding]:
    """Return the findings of a fleet in which the loop reports these step times, one a bucket."""
    index, found = small_fleet(1), []
    state = None
    count = np.full(1, 10, np.int32)
    for number, step_s in enumerate(times):
        work = Workloads.of(
            np.zeros(1, np.int32), ["pretrain"],
            {"step_time_s": np.array([step_s]), "tokens_per_step": np.array([1e6])},
        )  # fmt: skip
        bucket = Bucket(
            START_MS + number * BUCKET_MS, BUCKET_MS, {}, {}, count[index.gpu_node], count,
            np.full(index.gpu_count, -1, np.int32), work=work,
        )  # fmt: skip
        window = Window(index, (bucket,), True, (), START_MS)
        findings, state = slowdown.detect(window, state, bucket.end_ms + LAG_MS)
        found += findings
    return found
