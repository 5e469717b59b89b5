"""z-score of each GPU's metrics against its own history: the alarm of many monitoring systems.

Per metric an exponentially weighted mean and variance over an hour (West 1979); faulty is what deviates by more than
THRESHOLD standard deviations in any metric for three minutes. The history begins again with each job, and judges after
ten minutes of it: kinder than practice, where every start of a job is an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baselines import BUSY, METRICS, Bools, gpu
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event

GRID = (2.0, 2.5, 3.0, 4.0, 6.0)
THRESHOLD = 2.5
HISTORY_S, JUDGED_AFTER_S, LASTS_S = 3600.0, 600.0, 180.0
FLOOR = 0.004  # of the value: what sensors resolve


class Baseline:
    def __init__(self, index: FleetIndex, threshold: float = THRESHOLD) -> None:
        shape = len(METRICS), index.gpu_count
        self._index, self._threshold = index, threshold
        self._mean, self._var, self._seen = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._over_s = np.zeros(shape)
        self._jobs: np.ndarray = np.full(index.gpu_count, "", dtype=object)

    def step(self, bucket: Bucket, __events: Sequence[Event]) -> tuple[Bools, Bools]:
        count, length_s = self._index.gpu_count, bucket.length_ms / 1000
        names = np.array([*bucket.job_names, ""], dtype=object)[bucket.jobs]
        another = names != self._jobs
        self._jobs = names
        for array in (self._mean, self._var, self._seen, self._over_s):
            array[:, another] = 0.0
        x = np.array([gpu(bucket, metric, count) for metric in METRICS])
        busy = (bucket.jobs >= 0) & ~(gpu(bucket, "gpu_util_ratio", count) < BUSY)
        known = ~np.isnan(x) & busy
        rest = np.where(known, x - self._mean, 0.0)
        sigma = np.sqrt(self._var) + FLOOR * np.abs(self._mean)
        judged = known & (self._seen * length_s >= JUDGED_AFTER_S)
        with np.errstate(invalid="ignore", divide="ignore"):
            over = judged & (np.abs(rest) / sigma > self._threshold)
        self._over_s = np.where(over, self._over_s + length_s, np.where(known, 0.0, self._over_s))
        self._seen += known
        rate = np.where(known, np.maximum(1 / np.maximum(self._seen, 1), length_s / HISTORY_S), 0.0)
        self._mean += rate * rest
        self._var += rate * ((1 - rate) * rest * rest - self._var)
        return np.asarray((self._over_s >= LASTS_S).any(axis=0)), np.zeros(self._index.node_count, bool)
