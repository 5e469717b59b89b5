"""Spans of time of GPUs in arrays, and their common refinement: the partition that every sum is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NONE = -1


@dataclass(frozen=True, slots=True)
class GpuSpans:
    """K spans [from_ms, to_ms), each of one GPU, int64 [K]. `value`: a number for each, such as its job."""

    gpu: Ints
    from_ms: Ints
    to_ms: Ints
    value: Ints

    @staticmethod
    def of(rows: Iterable[Sequence[int]]) -> GpuSpans:
        """Return the spans of rows (gpu, from_ms, to_ms, value)."""
        table = np.array([list(row) for row in rows], np.int64).reshape(-1, 4)
        return GpuSpans(*(np.ascontiguousarray(column) for column in table.T))

    @staticmethod
    def join(parts: Sequence[GpuSpans]) -> GpuSpans:
        if not parts:
            return GpuSpans.of(())
        return GpuSpans(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("gpu", "from_ms", "to_ms", "value"))
        )

    def __len__(self) -> int:
        return len(self.gpu)

    def where(self, kept: Bools | Ints) -> GpuSpans:
        return GpuSpans(self.gpu[kept], self.from_ms[kept], self.to_ms[kept], self.value[kept])

    def clipped(self, from_ms: int, to_ms: int) -> GpuSpans:
        """Return the parts within [from_ms, to_ms)."""
        low, high = np.maximum(self.from_ms, from_ms), np.minimum(self.to_ms, to_ms)
        kept = low < high
        return GpuSpans(self.gpu[kept], low[kept], high[kept], self.value[kept])

    def by_time(self) -> GpuSpans:
        """Return the spans by GPU and time."""
        later = (self.gpu[1:] > self.gpu[:-1]) | (
            (self.gpu[1:] == self.gpu[:-1]) & (self.from_ms[1:] >= self.from_ms[:-1])
        )
        if later.all():
            return self
        return self.where(np.lexsort((self.from_ms, self.gpu)))

    def merged(self) -> GpuSpans:
        """Return the spans by GPU and time, those that touch and have one value as one. They must not overlap."""
        if not len(self):
            return self
        s = self.by_time()
        same = (s.gpu[1:] == s.gpu[:-1]) & (s.value[1:] == s.value[:-1]) & (s.from_ms[1:] <= s.to_ms[:-1])
        first = np.flatnonzero(np.append(True, ~same))
        last = np.append(first[1:], len(s)) - 1
        return GpuSpans(s.gpu[first], s.from_ms[first], s.to_ms[last], s.value[first])

    def apart(self) -> GpuSpans:
        """Return the spans without overlaps on one GPU: a later one ends the one before it, as a job that takes over.

        Of two that begin at one time the last counts.
        """
        kept = self.where(self.from_ms < self.to_ms).by_time()
        if not len(kept):
            return kept
        same = np.append(kept.gpu[1:] == kept.gpu[:-1], False)
        following = np.append(kept.from_ms[1:], 0)
        to_ms = np.where(same, np.minimum(kept.to_ms, following), kept.to_ms)
        return GpuSpans(kept.gpu, kept.from_ms, to_ms, kept.value).where(kept.from_ms < to_ms)


@dataclass(frozen=True, slots=True)
class Axis:
    """All GPUs' times on one line: [from_ms, to_ms] of GPU 0, then of GPU 1, and so on."""

    from_ms: int
    to_ms: int

    @property
    def width(self) -> int:
        return self.to_ms - self.from_ms + 1

    def at(self, gpu: Ints, ts_ms: Ints) -> Ints:
        """Return the positions of times, which must be within the axis."""
        return gpu * self.width + (ts_ms - self.from_ms)


@dataclass(frozen=True, slots=True)
class Segments:
    """The pieces into which all edges cut the time of GPUs, by GPU and time: no edge is within one."""

    axis: Axis
    low: Ints  # positions on the axis
    high: Ints

    @staticmethod
    def cut(axis: Axis, *sets: GpuSpans) -> Segments:
        """Cut at the edges of all sets, whose spans are within the axis. What lies in no span may be missing."""
        edges = [axis.at(s.gpu, ts_ms) for s in sets for ts_ms in (s.from_ms, s.to_ms)]
        points = np.unique(np.concatenate(edges)) if edges else np.zeros(0, np.int64)
        low, high = points[:-1], points[1:]
        same = low // axis.width == high // axis.width
        return Segments(axis, low[same], high[same])

    def __len__(self) -> int:
        return len(self.low)

    def where(self, kept: Bools | Ints) -> Segments:
        return Segments(self.axis, self.low[kept], self.high[kept])

    @property
    def gpu(self) -> Ints:
        return self.low // self.axis.width

    @property
    def from_ms(self) -> Ints:
        return self.low % self.axis.width + self.axis.from_ms

    @property
    def to_ms(self) -> Ints:
        return self.high % self.axis.width + self.axis.from_ms

    @property
    def length_ms(self) -> Ints:
        return self.high - self.low

    def within(self, spans: GpuSpans) -> Ints:
        """Return the number of the span that each segment lies in, NONE: in none. The spans do not overlap."""
        if not len(spans):
            return np.full(len(self), NONE, np.int64)
        order = np.lexsort((spans.from_ms, spans.gpu))
        low = self.axis.at(spans.gpu, spans.from_ms)[order]
        high = self.axis.at(spans.gpu, spans.to_ms)[order]
        at = np.searchsorted(low, self.low, side="right") - 1
        inside = (at >= 0) & (self.low < high[np.maximum(at, 0)])
        return np.where(inside, order[np.maximum(at, 0)], NONE)

    def first(self, spans: GpuSpans) -> Ints:
        """Return the lowest value of the spans that each segment lies in, NONE: in none. The spans may overlap."""
        best = np.full(len(self), np.iinfo(np.int64).max)
        begin = np.searchsorted(self.low, self.axis.at(spans.gpu, spans.from_ms))
        end = np.searchsorted(self.low, self.axis.at(spans.gpu, spans.to_ms))
        counts = np.maximum(end - begin, 0)
        rows = np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        np.minimum.at(best, rows, np.repeat(spans.value, counts))
        return np.where(best == np.iinfo(np.int64).max, NONE, best)
