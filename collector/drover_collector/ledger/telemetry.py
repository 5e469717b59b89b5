"""What buckets of telemetry show of each GPU: whether it works, what was not reported, and the energy that it took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors.idle import IDLE_UTIL
from drover_collector.ledger.facts import Activity
from drover_collector.ledger.spans import GpuSpans, Ints

Floats = npt.NDArray[np.float64]

DAY_MS = 86_400_000
JITTER_MS = 10_000  # less than this that lacks in a bucket is a late row, and no gap
# Over a longer gap the counter may have begun again and passed its old value.
GAP_MOST_MS = 21_600_000
WATTS_MOST = 6000  # of a board, as in the metric catalog: a faster counter is wrong


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of GPUs that reported, of one length, in any order.

    Attributes:
        gpu, start_ms: int64 [B]; rows: int64 [B], moments that were reported.
        busy: float64 [B], the highest of the shares of time in which the GPU worked; NaN: none is known.
        energy_mj: int64 [B], the counter's last value in the bucket; -1: absent.
    """

    length_ms: int
    gpu: Ints
    start_ms: Ints
    rows: Ints
    busy: Floats
    energy_mj: Ints

    def where(self, kept: npt.NDArray[np.generic]) -> Buckets:
        return Buckets(
            self.length_ms, self.gpu[kept], self.start_ms[kept], self.rows[kept], self.busy[kept], self.energy_mj[kept]
        )

    def in_order(self) -> Buckets:
        """Return the buckets by GPU and time, one of each: two GPUs may have stood in one slot after each other."""
        whole = self.where(np.argsort(self.gpu, kind="stable"))  # readers give each GPU's rows in order of time
        if not len(whole.gpu):
            return whole
        same = whole.gpu[1:] == whole.gpu[:-1]
        if (~same | (whole.start_ms[1:] > whole.start_ms[:-1])).all():
            return whole
        whole = self.where(np.lexsort((self.rows, self.start_ms, self.gpu)))
        last = np.append((whole.gpu[1:] != whole.gpu[:-1]) | (whole.start_ms[1:] != whole.start_ms[:-1]), True)
        return whole.where(last)


def find_activity(buckets: Buckets) -> GpuSpans:
    """Return what telemetry shows, as spans with an `Activity`. Where nothing was reported there is none.

    A bucket that lacks rows was reported in part: its length is cut to the share of rows that are there, of as many as
    the GPU reports in its fullest bucket of that day. Which part lacks follows from the bucket before: after a gap its
    begin, else its end.
    """
    b = buckets
    if not len(b.gpu):
        return GpuSpans.of(())
    day = b.start_ms // DAY_MS
    first = np.flatnonzero(np.append(True, (b.gpu[1:] != b.gpu[:-1]) | (day[1:] != day[:-1])))
    full = np.maximum(np.repeat(np.maximum.reduceat(b.rows, first), np.diff(np.append(first, len(b.gpu)))), 1)
    lacking = full - b.rows
    whole = (lacking <= 1) | (lacking * b.length_ms <= JITTER_MS * full)
    seen_ms = np.where(whole, b.length_ms, b.rows * b.length_ms // full)
    follows = np.append(False, (b.gpu[1:] == b.gpu[:-1]) & (b.start_ms[1:] == b.start_ms[:-1] + b.length_ms))
    from_ms = np.where(whole | follows, b.start_ms, b.start_ms + b.length_ms - seen_ms)
    shown = np.where(np.isnan(b.busy), Activity.UNCLEAR, np.where(b.busy > IDLE_UTIL, Activity.WORKING, Activity.IDLE))
    return GpuSpans(b.gpu, from_ms, from_ms + seen_ms, shown.astype(np.int64)).merged()


@dataclass(frozen=True, slots=True)
class EnergySpans:
    """Energy between two readings of a counter, by GPU and time, without overlaps. `spans.value`: millijoules."""

    spans: GpuSpans

    def within(self, asked: GpuSpans) -> tuple[Ints, Ints]:
        """Return (energy in mJ, time in ms for which it is known) of each span that is asked for, int64 [K].

        The energy of a span that ends between two readings is its share of the time between them.
        """
        known_mj, known_ms = self._upto(asked.gpu, asked.to_ms)
        before_mj, before_ms = self._upto(asked.gpu, asked.from_ms)
        return known_mj - before_mj, known_ms - before_ms

    def _upto(self, gpu: Ints, ts_ms: Ints) -> tuple[Ints, Ints]:
        """Return energy and known time of all GPUs before this one, and of this one before a time."""
        s = self.spans
        if not len(s):
            return np.zeros(len(gpu), np.int64), np.zeros(len(gpu), np.int64)
        low = int(min(s.from_ms.min(), ts_ms.min(initial=s.from_ms.min())))
        width = int(max(s.to_ms.max(), ts_ms.max(initial=0))) - low + 1
        at = np.searchsorted(s.gpu * width + (s.from_ms - low), gpu * width + (ts_ms - low), side="right") - 1
        there, at = at >= 0, np.maximum(at, 0)
        length = s.to_ms - s.from_ms
        totals = np.append(0, np.cumsum(s.value)), np.append(0, np.cumsum(length))
        part_ms = np.where(s.gpu[at] == gpu, np.minimum(ts_ms - s.from_ms[at], length[at]), length[at])
        energy = totals[0][at] + s.value[at] * part_ms // length[at]
        return np.where(there, energy, 0), np.where(there, totals[1][at] + part_ms, 0)


def find_energy(buckets: Buckets) -> EnergySpans:
    """Return the energy between readings. A counter that fell, a gap or a jump that no board can take give none."""
    b = buckets.where(buckets.energy_mj >= 0)
    if len(b.gpu) < 2:
        return EnergySpans(GpuSpans.of(()))
    grown = b.energy_mj[1:] - b.energy_mj[:-1]
    from_ms, to_ms = b.start_ms[:-1] + b.length_ms, b.start_ms[1:] + b.length_ms
    length = to_ms - from_ms
    kept = (b.gpu[1:] == b.gpu[:-1]) & (grown >= 0) & (length <= GAP_MOST_MS) & (grown <= WATTS_MOST * length)
    return EnergySpans(GpuSpans(b.gpu[1:][kept], from_ms[kept], to_ms[kept], grown[kept]))


class EnergyMeter:
    """Adds up the energy of spans over pieces of telemetry, each of other GPUs, so that no piece has to be kept.

    Attributes:
        asked: spans of GPUs, such as their holds.
        mj, known_ms: int64 [K], so far.
        fleet_mj, fleet_known_ms: of all GPUs within [from_ms, to_ms), held or not.
    """

    def __init__(self, asked: GpuSpans, gpus: int, from_ms: int, to_ms: int) -> None:
        self.asked = asked
        self.mj, self.known_ms = np.zeros(len(asked), np.int64), np.zeros(len(asked), np.int64)
        self.fleet_mj = self.fleet_known_ms = 0
        self._gpus, self._span = gpus, (from_ms, to_ms)

    def add(self, energy: EnergySpans) -> None:
        """Add a piece. A GPU may be in one piece only."""
        mine = np.zeros(self._gpus, np.bool_)
        mine[energy.spans.gpu] = True
        rows = np.flatnonzero(mine[self.asked.gpu])
        self.mj[rows], self.known_ms[rows] = energy.within(self.asked.where(rows))
        gpus = np.flatnonzero(mine)
        whole = GpuSpans(gpus, *(np.full(len(gpus), number, np.int64) for number in (*self._span, 0)))
        mj, known_ms = energy.within(whole)
        self.fleet_mj += int(mj.sum())
        self.fleet_known_ms += int(known_ms.sum())
