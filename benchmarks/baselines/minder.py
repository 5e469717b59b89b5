"""Minder's approach: the machine of a job that is unlike the others in one metric, for four minutes without a break.

Deng et al., "Minder: Faulty Machine Detection for Large-scale Distributed Model Training" (NSDI 2025): metrics one by
one in order of priority; each machine's window of a metric, min-max normalised over the job and denoised; the sum of
its distances to all others; the machine with the largest normal score of that sum is the candidate, if the score is
above a threshold; an alarm after 4 min with the same candidate; the first metric that gives one ends the search. Its
LSTM-VAE, which denoises, needs its training data: here a window is reconstructed as its mean and its slope, the
linear part of such a model. Windows are of a minute, for 10 s samples instead of 1 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from baselines import BUSY, METRICS, Bools, Floats, gpu, node_jobs, node_means
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event

GRID = (2.5, 3.5, 5.0, 8.0, 12.0)
THRESHOLD = 8.0
WINDOW = 6  # buckets
EVERY = 3  # buckets: how often a job is looked at
CONTINUITY_S = 240.0
MIN_MACHINES = 4
SPREAD = {"gpu_temp_c": 40.0, "sm_clock_mhz": 800.0, "power_w": 300.0}  # least range that normalisation takes for 1


class Baseline:
    def __init__(self, index: FleetIndex, threshold: float = THRESHOLD) -> None:
        self._index, self._threshold = index, threshold
        self._held: deque[Floats] = deque(maxlen=WINDOW)  # [metrics, N]
        self._jobs: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._lasts_s: dict[tuple[str, int], tuple[int, float]] = {}  # (job, metric) -> (machine, for how long)
        self._number = 0
        self._found = np.zeros(index.node_count, bool)
        t = np.linspace(-1, 1, WINDOW)
        basis = np.linalg.qr(np.stack([np.ones(WINDOW), t], axis=1))[0]
        self._denoise = basis @ basis.T

    def step(self, bucket: Bucket, __events: Sequence[Event]) -> tuple[Bools, Bools]:
        index, nodes = self._index, self._index.node_count
        x = np.array([gpu(bucket, metric, index.gpu_count) for metric in METRICS])
        self._held.append(node_means(x, index.gpu_node, nodes))
        jobs = node_jobs(bucket, index.gpu_node, nodes)
        self._jobs.append(np.array([*bucket.job_names, ""], dtype=object)[jobs])
        self._number += 1
        if self._number % EVERY == 0 and len(self._held) == WINDOW:
            self._look(jobs, bucket)
        return np.zeros(index.gpu_count, bool), self._found

    def _look(self, jobs: np.ndarray, bucket: Bucket) -> None:
        windows = np.array(self._held).transpose(1, 2, 0)  # [metrics, N, WINDOW]
        same = (np.array(self._jobs) == self._jobs[-1]).all(axis=0) & (jobs >= 0)
        found = np.zeros(len(jobs), bool)
        lasts: dict[tuple[str, int], tuple[int, float]] = {}
        busy = ~(windows[METRICS.index("gpu_util_ratio")].mean(axis=1) < BUSY)
        for job in np.unique(jobs[same]).tolist():
            machines = np.flatnonzero(same & (jobs == job) & busy)
            if len(machines) < MIN_MACHINES:
                continue
            name = bucket.job_names[job]
            for m, metric in enumerate(METRICS):
                values = windows[m, machines]
                known = ~np.isnan(values).any(axis=1)
                if known.sum() < MIN_MACHINES:
                    continue
                candidate, score = self._unlike(values[known], SPREAD.get(metric))
                if score <= self._threshold:
                    continue
                machine = int(machines[known][candidate])
                last, for_s = self._lasts_s.get((name, m), (machine, 0.0))
                for_s = for_s + EVERY * bucket.length_ms / 1000 if last == machine else 0.0
                lasts[name, m] = machine, for_s
                if for_s >= CONTINUITY_S:
                    found[machine] = True
                    break
        self._lasts_s, self._found = lasts, found

    def _unlike(self, values: Floats, spread: float | None) -> tuple[int, float]:
        """Machine with the largest sum of distances, and the normal score of that sum among the others'."""
        low, high = values.min(), values.max()
        least = spread if spread is not None else abs(float(np.median(values))) * 0.5
        scaled = (values - low) / max(high - low, least, 1e-12) @ self._denoise
        squares = (scaled * scaled).sum(axis=1)
        distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * scaled @ scaled.T, 0))
        sums = distances.sum(axis=1)
        at = int(sums.argmax())
        others = np.delete(sums, at)
        # Against the others alone: with itself in, the score of one in n cannot pass (n - 1) / sqrt(n).
        return at, float((sums[at] - others.mean()) / max(others.std(), 0.02 * len(sums) ** 0.5, 1e-12))
