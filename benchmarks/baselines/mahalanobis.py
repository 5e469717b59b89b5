"""Mahalanobis distance of a machine from the others of its job, over all metrics at once.

The baseline of Minder's paper (Deng et al., NSDI 2025, section 6): mean, variance, skewness and kurtosis of each
metric in a window, principal components of them over the machines, and the distance in that space; an alarm when one
machine stays beyond the threshold for 4 min. Windows are of 4 minutes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from baselines import BUSY, METRICS, Bools, Floats, gpu, node_jobs, node_means
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event

GRID = (0.80, 0.86, 0.90, 0.93, 0.96)
THRESHOLD = 0.80  # of the largest distance that a job of n machines allows: (n - 1) / sqrt(n)
WINDOW = 24  # buckets
EVERY = 6
CONTINUITY_S = 240.0
MIN_MACHINES = 6
KEPT = 0.95  # of the variance in the components


class Baseline:
    def __init__(self, index: FleetIndex, threshold: float = THRESHOLD) -> None:
        self._index, self._threshold = index, threshold
        self._held: deque[Floats] = deque(maxlen=WINDOW)
        self._jobs: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._for_s = np.zeros(index.node_count)
        self._number = 0

    def step(self, bucket: Bucket, __events: Sequence[Event]) -> tuple[Bools, Bools]:
        index, nodes = self._index, self._index.node_count
        x = np.array([gpu(bucket, metric, index.gpu_count) for metric in METRICS])
        self._held.append(node_means(x, index.gpu_node, nodes))
        jobs = node_jobs(bucket, index.gpu_node, nodes)
        self._jobs.append(np.array([*bucket.job_names, ""], dtype=object)[jobs])
        self._number += 1
        if self._number % EVERY == 0 and len(self._held) == WINDOW:
            far = self._far(jobs)
            self._for_s = np.where(far, self._for_s + EVERY * bucket.length_ms / 1000, 0.0)
        return np.zeros(index.gpu_count, bool), self._for_s >= CONTINUITY_S

    def _far(self, jobs: np.ndarray) -> Bools:
        windows = np.array(self._held)  # [WINDOW, metrics, N]
        same = (np.array(self._jobs) == self._jobs[-1]).all(axis=0) & (jobs >= 0)
        busy = ~(windows[:, METRICS.index("gpu_util_ratio")].mean(axis=0) < BUSY)
        far = np.zeros(len(jobs), bool)
        for job in np.unique(jobs[same]).tolist():
            machines = np.flatnonzero(same & (jobs == job) & busy)
            if len(machines) < MIN_MACHINES:
                continue
            features = _features(windows[:, :, machines])
            features = features[:, ~np.isnan(features).any(axis=0)]
            if not features.shape[1]:
                continue
            score = _distances(features) / ((len(machines) - 1) / len(machines) ** 0.5)
            far[machines] = (score > self._threshold) & (score == score.max())
        return far


def _features(windows: Floats) -> Floats:
    """Moments of [WINDOW, metrics, n] -> [n, 4 * metrics]; skewness and kurtosis are 0 for what does not vary."""
    mean, sd = windows.mean(axis=0), windows.std(axis=0)
    z = (windows - mean) / np.maximum(sd, 1e-12)
    steady = sd <= 1e-9 * np.abs(mean)
    skew, kurtosis = np.where(steady, 0, (z**3).mean(axis=0)), np.where(steady, 0, (z**4).mean(axis=0))
    return np.concatenate([mean, sd, skew, kurtosis]).T


def _distances(features: Floats) -> Floats:
    """Mahalanobis distance of each row from the mean, in the first principal components, float64 [n]."""
    sd = features.std(axis=0)
    scaled = (features - features.mean(axis=0)) / np.where(sd > 0, sd, 1)
    u, singular, _ = np.linalg.svd(scaled, full_matrices=False)
    share = np.cumsum(singular**2) / max(float((singular**2).sum()), 1e-12)
    keep = min(int(np.searchsorted(share, KEPT)) + 1, max(1, len(features) // 3))
    return np.asarray(np.sqrt((u[:, :keep] ** 2).sum(axis=1) * len(features)))
