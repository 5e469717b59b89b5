"""Find lasting changes of one series of log costs against its own past: a CUSUM with a budget of false alarms.

    r = x - median of the past;  S = max(0, S + clip(r) - k)        (Page 1954)

k is half of the smallest change to be found, plus the error of the median. The threshold h follows by Siegmund's
formula (Sequential Analysis, 1985) from the budget: observations between two false alarms = (exp(2Kb) - 2Kb - 1) / 2 /
K^2, with K = k / sigma and b = h / sigma + 1.166. Noise of uneven batches is correlated, so sigma is that of the means
of 1, 3, 6 and 12 observations, times the square root of their length, whichever is largest.

What is under suspicion does not enter the past. What comes and goes (an evaluation, a save in the background) is
remembered: the next excursion of that size must last longer. A series that becomes faster is the new normal after half
an hour, so that a phase of shorter steps makes the steps after it no slowdown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import MAD_TO_SIGMA, middle
from drover_collector.fleet.buckets import Floats

WEEK_MS = 7 * 86_400_000
PER_WEEK = 0.02  # false alarms of one series by noise alone; the goal of the whole is 0.1 a job and week
PAST = 360  # observations kept: an hour at 10 s
LEARN = 36  # until a series is judged: 6 minutes at 10 s
YOUNG = 3.0  # doubt about the noise of a young series, in LEARN observations
RENEW = 30  # observations between two estimates of the noise
SCALES = (1, 3, 6, 12)  # observations whose means are compared
FEW = 8  # means of a scale that are too few to estimate from
LEAST_SIGMA = 0.002  # of a log cost: what timers and medians round
CLIP_SIGMAS, CLIP = 3.0, 0.05  # most that one observation may count
SPIKE = 0.4  # log: a single step with a checkpoint in it, which says nothing of the others
DRIFTS = 1.5  # a change must be larger than the largest mean of RECENT observations in the past by this
SPIKES = 3  # in a row are no longer a single step
RECENT = 12
FASTER_MS = 1_800_000
# A larger change is likelier another kind of work, reported as steps (an evaluation), as long as nothing shows that the
# work is the same: ours. Above OTHER_WORK it is so nearly always.
LARGE, LARGE_MS = 0.11, 420_000
OTHER_WORK, OTHER_WORK_MS = math.log(1.4), 600_000
EXCURSIONS = 8  # that are remembered
EXCURSION_MS = 40_000  # shorter ones are noise
LONGER = 1.5  # than the longest known excursion of its size
EXCURSION_MOST_MS = 1_800_000
LEAST_OBSERVATIONS = 6
GAP = 1.5  # times the usual time between two observations: more is a pause
NOISE = 4.0  # deviations of the mean of some observations: less is noise
ENDS = 0.5  # of the change: recent observations nearer to the past than this end it
STILL = 5  # newest observations that must still be slow when a change is reported
ENDING = 9  # observations whose median must be so


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a change.

    Attributes:
        least: smallest change that is reported, log. delta: smallest that is tested for.
        least_ms: how long it lasts at least.
        stretched: of the other figures, usual and now, and the effect: whether they show the same work in more time.
            Without it, a large change must last longer, as an evaluation looks like that.
        must_stretch: a change without it is none, however long it lasts.
        figures: of observations, float64 [N, M], the other figures that `stretched` compares, float64 [M].
        steady: most deviation of a series that is judged, log.
    """

    least: float = 0.028
    delta: float = 0.03
    least_ms: int = 100_000
    stretched: Callable[[Floats, Floats, float], bool] | None = None
    must_stretch: bool = False
    figures: Callable[[Floats], Floats] = field(default_factory=lambda: medians)
    steady: float = math.inf


@dataclass(frozen=True, slots=True)
class Observation:
    """One value of a series, and what else was read at that time.

    Attributes:
        cost: log. extra: any other figures, float64 [M], NaN where absent.
    """

    ts_ms: int
    cost: float
    extra: Floats


def medians(values: Floats) -> Floats:
    """Return the median of each column without NaN, float64 [M]; NaN where nothing is known."""
    found = [column[~np.isnan(column)] for column in values.T]
    return np.array([middle(column) if len(column) else np.nan for column in found])


def means(values: Floats) -> Floats:
    """Return the mean of each column without NaN, float64 [M]; NaN where nothing is known."""
    known = ~np.isnan(values)
    number = known.sum(axis=0)
    return np.where(number > 0, np.where(known, values, 0.0).sum(axis=0) / np.maximum(number, 1), np.nan)


class Past:
    """The newest PAST normal observations: their costs and what else was read, in order of time."""

    def __init__(self) -> None:
        self._costs = np.zeros(LEARN)
        self._extra: npt.NDArray[np.float32] | None = None
        self._count = self._at = 0

    def __len__(self) -> int:
        return self._count

    @property
    def costs(self) -> Floats:
        """float64 [count]."""
        return np.roll(self._costs, -self._at)[:PAST] if self._count == PAST else self._costs[: self._count]

    def usual_extra(self, figures: Callable[[Floats], Floats] = medians) -> Floats:
        """Return the median of each of the other figures (or what `figures` makes of them), NaN where none is known."""
        if self._extra is None or not self._count:
            return np.zeros(0)
        return figures(self._extra[: self._count].astype(np.float64))

    def append(self, seen: Observation) -> None:
        if self._extra is None:
            self._extra = np.full((len(self._costs), len(seen.extra)), np.nan, np.float32)
        if self._count == len(self._costs) < PAST:
            more = min(2 * self._count, PAST) - self._count
            self._costs = np.append(self._costs, np.zeros(more))
            self._extra = np.append(self._extra, np.full((more, self._extra.shape[1]), np.nan, np.float32), axis=0)
        at = self._at if self._count == PAST else self._count
        self._costs[at] = seen.cost
        if len(seen.extra) == self._extra.shape[1]:
            self._extra[at] = seen.extra
        self._at = (at + 1) % PAST if self._count == PAST else 0
        self._count = min(self._count + 1, PAST)

    def extend(self, some: Iterable[Observation]) -> None:
        for seen in some:
            self.append(seen)

    def copy(self) -> Past:
        """Return the same observations, to go on with by itself."""
        other = Past()
        other._costs, other._count, other._at = self._costs.copy(), self._count, self._at
        other._extra = None if self._extra is None else self._extra.copy()
        return other


@dataclass(slots=True)
class Change:
    """The test of one series. Call `add` with each observation in order of time.

    Attributes:
        past: normal observations. score: S. pending: observations since S left 0.
        usual, sigma: median of the past and its long-run deviation, log.
        open_since_ms: since when it is slower, None: it is not. effect: by how much then, log.
        excursions: (length in ms, effect) of what came and went.
    """

    past: Past = field(default_factory=Past)
    pending: list[Observation] = field(default_factory=list)
    faster: list[Observation] = field(default_factory=list)
    score: float = 0.0
    score_faster: float = 0.0
    usual: float = math.nan
    sigma: float = math.nan
    largest: float = 0.0
    open_since_ms: int | None = None
    effect: float = 0.0
    excursions: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=EXCURSIONS))
    _due: int = 0
    _spikes: int = 0

    @property
    def known(self) -> bool:
        """Whether enough of the past is known to judge."""
        return len(self.past) >= LEARN

    @property
    def recent(self) -> Sequence[Observation]:
        """The newest observations of a change that is open."""
        return self.pending[-RECENT:]

    def seed(self, past: Past) -> None:
        """Begin with the past of an earlier run."""
        self.past = past.copy()
        self._due = 0

    def interrupt(self) -> None:
        """Note that the series was interrupted: what was suspected before proves nothing, what is open stays open."""
        if self.open_since_ms is None:
            self.pending.clear()
            self.score = 0.0
        self.faster.clear()
        self.score_faster = 0.0

    def add(self, seen: Observation, limits: Limits) -> None:
        if not self.known:
            self.past.append(seen)
            return
        if self._due <= 0:
            self._estimate()
        self._due -= 1
        r = seen.cost - self.usual
        if self.open_since_ms is not None:
            self._follow(seen)
            return
        self._spikes = self._spikes + 1 if r > SPIKE else 0
        if 0 < self._spikes < SPIKES:
            return
        clip = max(CLIP, CLIP_SIGMAS * self.sigma)
        k = limits.delta / 2 + 1.25 * self.sigma / math.sqrt(len(self.past))
        counted = min(max(r, -clip), clip)
        self.score = max(0.0, self.score + counted - k)
        self.score_faster = max(0.0, self.score_faster - counted - k)
        if self.score > 0:
            self.pending.append(seen)
            if self._lasts(limits, k):
                self.open_since_ms = self.pending[0].ts_ms
                self.effect = self._effect()
            elif len(self.pending) >= PAST or self._is_over(k):
                self._excursion()
        elif self.score_faster > 0:
            self._excursion()
            self.faster.append(seen)
            if self._is_slow_again(k):
                self._end_faster()
            elif seen.ts_ms - self.faster[0].ts_ms >= FASTER_MS and len(self.faster) >= LEARN:
                self.past = Past()
                self.past.extend(self.faster)
                self.interrupt()
                self._due = 0
        else:
            self._excursion()
            self._end_faster()
            if abs(r) < SPIKE:
                self.past.append(seen)

    def resume(self, usual: float, sigma: float, since_ms: int, effect: float) -> None:
        """Go on with a change that was open before a restart."""
        self.past.extend(Observation(0, usual, np.zeros(0)) for _ in range(LEARN))
        self.usual, self.sigma, self._due = usual, sigma, PAST
        self.open_since_ms, self.effect = since_ms, effect

    def adopt(self) -> None:
        """Take what is pending as the new normal: the work has changed, not its speed."""
        self.past = Past()
        self.past.extend(self.pending)
        self._close()
        self._due = 0

    def _estimate(self) -> None:
        self._due = RENEW
        costs = self.past.costs
        self.usual = middle(costs)
        residuals = costs - self.usual
        each = MAD_TO_SIGMA * middle(np.abs(residuals))
        clipped = np.clip(residuals, -max(CLIP, CLIP_SIGMAS * each), max(CLIP, CLIP_SIGMAS * each))
        found = max(LEAST_SIGMA, each, float(clipped.std()))  # few steps that take far longer count, too
        for scale in SCALES[1:]:
            count = len(costs) // scale
            if count < FEW:
                break
            means = clipped[len(clipped) - count * scale :].reshape(count, scale).mean(axis=1)
            spread = float(means.std())
            # The deviation of few values is itself uncertain.
            found = max(found, spread * math.sqrt(scale) * (1 + 1 / math.sqrt(2 * count)))
        self.sigma = found * math.sqrt(1 + YOUNG * LEARN / len(costs))  # a young past knows little of its noise
        runs = np.lib.stride_tricks.sliding_window_view(residuals, RECENT)
        self.largest = max(0.0, float(np.partition(runs, RECENT // 2, axis=1)[:, RECENT // 2].max()))

    def _lasts(self, limits: Limits, k: float) -> bool:
        """Return whether what is pending is a lasting change."""
        self._trim()
        lasted = self._lasted()
        if lasted < limits.least_ms or len(self.pending) < LEAST_OBSERVATIONS:
            return False
        apart = WEEK_MS / max(1.0, lasted / (len(self.pending) - 1)) / PER_WEEK
        share = k / self.sigma
        h = self.sigma * (math.log(2 * share * share * apart + 2) / (2 * share) - 1.166)
        effect = self._effect()
        least = NOISE * self.sigma / math.sqrt(len(self.pending))
        if self.score <= h or effect < max(limits.least, DRIFTS * self.largest, least):
            return False
        if min(self._newest_median(), self._newest_median(STILL)) < ENDS * effect or not self._is_rare(effect, apart):
            return False
        needed = limits.least_ms
        if limits.must_stretch and (self.sigma > limits.steady or not self._is_stretched(limits, effect)):
            return False
        if effect > LARGE and not limits.must_stretch and not self._is_stretched(limits, effect):
            needed = max(needed, OTHER_WORK_MS if effect > OTHER_WORK else LARGE_MS)
        for length, size in self.excursions:
            if 0.5 < effect / size < 2.0:
                needed = max(needed, min(round(LONGER * length), EXCURSION_MOST_MS))
        return lasted >= needed

    def _lasted(self) -> float:
        """Return how long steps have been slow, in ms, without the time in which no step ended."""
        if len(self.pending) < 2:
            return 0.0
        times = np.array([one.ts_ms for one in self.pending], np.float64)
        apart = np.diff(times)
        return float(np.minimum(apart, GAP * middle(apart)).sum())

    def _trim(self) -> None:
        """Leave out what came before the change: noise that had raised the sum when it began."""
        costs = [one.cost - self.usual for one in self.pending]
        half = ENDS * middle(np.array(costs[len(costs) // 2 :]))
        first = 0
        while len(costs) - first > LEAST_OBSERVATIONS and sorted(costs[first : first + 3])[1] < half:
            first += 1
        del self.pending[:first]

    def _is_rare(self, effect: float, apart: float) -> bool:
        """Return whether so many observations beyond half of the effect come less often than once in `apart`.

        By Chernoff's bound, from the share of the past that is beyond it. If a tenth of the steps take far longer, that
        past shows several in a row now and then.
        """
        past = self.past.costs - self.usual
        usual = (float((past > ENDS * effect).sum()) + 1) / (len(past) + 2)
        count = len(self.pending)
        beyond = sum(one.cost - self.usual > ENDS * effect for one in self.pending)
        share = beyond / count
        if share <= usual:
            return False
        less = (1 - share) * math.log((1 - share) / (1 - usual)) if share < 1 else 0.0
        return count * (share * math.log(share / usual) + less) > math.log(apart)

    def _is_over(self, k: float) -> bool:
        """Return whether what is pending has ended, although its sum is still above 0."""
        return len(self.pending) >= ENDING and self._newest_median() < min(k, ENDS * self._effect())

    def _is_stretched(self, limits: Limits, effect: float) -> bool:
        if limits.stretched is None:
            return False
        now = limits.figures(np.array([one.extra for one in self.pending[-RECENT:]]))
        return limits.stretched(self.past.usual_extra(limits.figures), now, effect)

    def _effect(self) -> float:
        return middle(np.array([one.cost for one in self.pending])) - self.usual

    def _newest_median(self, count: int = ENDING) -> float:
        return middle(np.array([one.cost for one in self.pending[-count:]])) - self.usual

    def _follow(self, seen: Observation) -> None:
        """Follow a change that is open until it ends."""
        self.pending.append(seen)
        if len(self.pending) > PAST:
            del self.pending[0]
        if len(self.pending) >= ENDING and self._newest_median() < ENDS * self.effect:
            self._excursion()
            self._close()

    def _close(self) -> None:
        self.pending.clear()
        self.open_since_ms, self.score, self.effect = None, 0.0, 0.0

    def _excursion(self) -> None:
        """End what was pending: noise belongs to the past, what came and went is remembered."""
        if not self.pending:
            return
        if self.open_since_ms is not None:
            self.excursions.append((self.pending[-1].ts_ms - self.open_since_ms, self.effect))
        elif not self._keep(self.pending):
            length = self.pending[-1].ts_ms - self.pending[0].ts_ms
            if length >= EXCURSION_MS:
                self.excursions.append((length, self._effect()))
        self.pending.clear()
        self.score = 0.0

    def _is_slow_again(self, k: float) -> bool:
        """Return whether a faster phase has ended, although its sum is still above 0."""
        newest = middle(np.array([one.cost for one in self.faster[-ENDING:]])) - self.usual
        whole = middle(np.array([one.cost for one in self.faster])) - self.usual
        return len(self.faster) >= ENDING and newest > max(-k, ENDS * whole)

    def _end_faster(self) -> None:
        self._keep(self.faster)
        self.faster.clear()
        self.score_faster = 0.0

    def _keep(self, some: Sequence[Observation]) -> bool:
        """Add observations to the past if they are its noise; return whether they are."""
        if not some:
            return True
        off = abs(middle(np.array([one.cost for one in some])) - self.usual)
        if off > NOISE * self.sigma / math.sqrt(len(some)):
            return False
        self.past.extend(one for one in some if abs(one.cost - self.usual) < SPIKE)
        return True
