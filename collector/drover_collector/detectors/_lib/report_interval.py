"""Learn from the buckets how often each node reports, so that silence counts missed reports, not only seconds.

A healthy node that is read every 15 s, or whose agent sends every 30 s, leaves buckets empty. Its silence begins when
MISSED reports in a row are missing, and never before the limits of a node that reports in each bucket. Only the newest
gaps are kept; a few long ones (an outage, a pause of the collector) change nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex

MISSED = 3  # reports in a row until a node counts as silent: two may be lost
SILENT_BUCKETS = 3  # without a row, at least: covers an agent's restart and a reconnect
SILENT_MS = 30_000  # and at least this long
UNKNOWN_MS = 60_000  # and this long while the node's report interval is unknown
KEPT = 32  # gaps of each node
LEAST = 3  # gaps until a node's spacing is known; one bucket with two samples is enough too
LONGEST_MS = 660_000  # an agent reads every 10 min at least; a longer gap is an outage
# A spacing up to this factor over one bucket counts as one bucket: a node that is read every 10 s and loses one sample
# in ten is not slower. Intervals of 10 to 11 s therefore count as 10 s.
SLACK = 1.1
GROUPED_SHARE = 0.25  # of the gaps have an empty bucket in them: the agent sends its samples in groups

Bools = npt.NDArray[np.bool_]
Times = npt.NDArray[np.int64]


class ReportInterval:
    """The report interval of each node. Call `add_bucket` for each bucket, in order of time."""

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self._gaps = np.zeros((index.node_count, KEPT), np.int32)  # ms from one bucket with rows to the next
        self._rows = np.zeros((index.node_count, KEPT), np.int32)  # of the later bucket
        self._count = np.zeros(index.node_count, np.int64)  # gaps so far
        self._newest_ms = np.zeros(index.node_count, np.int64)  # start of the newest bucket with rows; 0: none
        self._newest_rows = np.zeros(index.node_count, np.int32)
        self._new = np.ones(index.node_count, bool)  # no report yet from this run of its agent
        self._spacing = np.zeros(index.node_count, np.int64)
        self._stale = np.ones(index.node_count, bool)  # `_spacing` must be computed again
        self._length_ms = 0  # bucket length that `_spacing` was computed for

    def add_bucket(self, bucket: Bucket) -> None:
        """Learn from the next bucket."""
        index = self._index
        of_gpus = np.zeros(index.node_count, np.int32)
        np.maximum.at(of_gpus, index.gpu_node, bucket.gpu_rows)
        rows = np.maximum(bucket.node_rows, of_gpus)
        reporting = rows > 0
        gaps = bucket.start_ms - self._newest_ms
        learn = np.flatnonzero(reporting & ~self._new & (gaps > 0) & (gaps <= LONGEST_MS))
        at = self._count[learn] % KEPT
        self._gaps[learn, at], self._rows[learn, at] = gaps[learn], rows[learn]
        self._count[learn] += 1
        self._newest_ms[reporting], self._newest_rows[reporting] = bucket.start_ms, rows[reporting]
        self._new[reporting] = False
        self._stale |= reporting

    def forget(self, node: str) -> None:
        """Forget what was learnt of a node whose agent restarted, perhaps with another interval."""
        n = self._index.node_number.get(node)
        if n is not None:
            self._count[n], self._new[n], self._stale[n] = 0, True, True

    def spacing_ms(self, length_ms: int, quiet: Bools) -> Times:
        """Return the time between two reports of each node, int64 [N], at least one bucket; 0 where unknown.

        Args:
            quiet: bool [N], nodes to compute it for; the others get the length of a bucket.
        """
        self._stale |= self._length_ms != length_ms
        self._length_ms = length_ms
        nodes = np.flatnonzero(quiet & self._stale)
        if len(nodes):  # usually few: a quiet node sends nothing new to learn from
            self._spacing[nodes], self._stale[nodes] = self._learnt(nodes, length_ms), False
        return np.where(quiet, self._spacing, length_ms)

    def silent_after_ms(self, length_ms: int, quiet: Bools) -> Times:
        """Return the time without a report after which each node counts as silent, int64 [N]. `quiet`: as above."""
        spacing, least = self.spacing_ms(length_ms, quiet), least_silence_ms(length_ms)
        return np.where(spacing > 0, np.maximum(least, MISSED * spacing), max(least, UNKNOWN_MS))

    def late_ms(self, n: int, length_ms: int) -> int:
        """Return `silent_after_ms` of one node without changing state; for other threads."""
        spacing, least = int(self._learnt(np.array([n]), length_ms)[0]), least_silence_ms(length_ms)
        return max(least, MISSED * spacing if spacing > 0 else UNKNOWN_MS)

    def last_ms(self, n: int, length_ms: int) -> int:
        """Return about when node `n` was last read; 0: never. Its newest bucket may have ended well after that."""
        start_ms, rows, count = int(self._newest_ms[n]), int(self._newest_rows[n]), min(int(self._count[n]), KEPT)
        usual = int(np.median(self._rows[n, :count])) if count else rows
        full = start_ms == 0 or rows >= usual
        return start_ms + (length_ms * bool(start_ms) if full else length_ms * rows // usual)

    def _learnt(self, nodes: Times, length_ms: int) -> Times:
        count, gaps = np.minimum(self._count[nodes], KEPT), self._gaps[nodes]
        known = np.arange(KEPT) < count[:, None]
        ordered = np.sort(np.where(known, gaps, np.iinfo(np.int32).max), axis=1)
        median = ordered[np.arange(len(count)), np.maximum(count - 1, 0) // 2].astype(np.int64)
        usual = known & (gaps <= 2 * median[:, None])
        total = np.where(usual, gaps, 0).sum(axis=1, dtype=np.int64)
        rows = np.where(usual, self._rows[nodes], 0).sum(axis=1, dtype=np.int64)
        breaks = (usual & (gaps > length_ms)).sum(axis=1)
        # The first sample may lie up to one bucket before these gaps.
        spacing = (total + length_ms) / np.maximum(rows, 1)
        grouped = (rows >= 2 * usual.sum(axis=1)) & (breaks > GROUPED_SHARE * count)
        spacing = np.where(grouped, (total + length_ms) / np.maximum(breaks, 1), spacing)
        learnt = np.where(spacing <= SLACK * length_ms, length_ms, np.ceil(spacing)).astype(np.int64)
        often = (self._newest_rows[nodes] >= 2) & ~self._new[nodes]
        return np.where(count >= LEAST, learnt, np.where(often, length_ms, 0))


def least_silence_ms(length_ms: int) -> int:
    """Return the time without a report after which a node that reports in each bucket counts as silent."""
    return max(SILENT_MS, SILENT_BUCKETS * length_ms)
