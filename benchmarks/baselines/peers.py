"""z-score of each GPU's metrics against its peers of the same moment: the outlier alarm of many fleets.

Peers are the busy GPUs of the same job and SKU; where no job is named, of the same SKU. Median and MAD, so that the
faulty ones do not hide themselves; faulty is what deviates by more than THRESHOLD robust standard deviations in any
metric for three minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baselines import BUSY, METRICS, Bools, gpu
from drover_collector.detectors._lib.robust import Grouping
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event

GRID = (3.0, 5.0, 8.0, 12.0, 20.0)
THRESHOLD = 5.0
LASTS_S, LEAST_PEERS = 180.0, 4
FLOOR = 0.01  # of the median: what healthy units differ by


class Baseline:
    def __init__(self, index: FleetIndex, threshold: float = THRESHOLD) -> None:
        self._index, self._threshold = index, threshold
        self._over_s = np.zeros((len(METRICS), index.gpu_count))

    def step(self, bucket: Bucket, __events: Sequence[Event]) -> tuple[Bools, Bools]:
        index, count = self._index, self._index.gpu_count
        x = np.array([gpu(bucket, metric, count) for metric in METRICS])
        busy = ~(gpu(bucket, "gpu_util_ratio", count) < BUSY)
        sku = index.sku[index.gpu_node].astype(np.int64)
        group = np.where(busy, (bucket.jobs.astype(np.int64) + 1) * (int(sku.max(initial=0)) + 1) + sku, -1)
        peers = Grouping(group).peers(x)
        sigma = peers.sigma + FLOOR * np.abs(peers.median)
        with np.errstate(invalid="ignore", divide="ignore"):
            over = (peers.count >= LEAST_PEERS) & (np.abs(x - peers.median) / sigma > self._threshold)
        known = ~np.isnan(x) & busy
        self._over_s = np.where(over, self._over_s + bucket.length_ms / 1000, np.where(known, 0.0, self._over_s))
        return np.asarray((self._over_s >= LASTS_S).any(axis=0)), np.zeros(index.node_count, bool)
