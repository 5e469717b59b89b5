"""Time series for charts: values on a grid of steps, NaN where there is none, and the spread of peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex
from drover_collector.store.records import Ids, Millis, Stored
from drover_collector.store.rollups.rollups import Rollups
from drover_collector.store.samples.entities import FOREVER, EntityRegistry, Stay, Target
from drover_collector.store.samples.fold import Folded, fold_again, highest, join, units
from drover_collector.store.samples.rows import LEVELS_MS, RAW_MS, SampleRows
from drover_collector.store.samples.spans import Span, merged, without
from drover_collector.store.samples.table import LastQuery
from drover_collector.store.schema.tables import rollup_table, samples_table
from drover_collector.store.sql import in_units
from drover_core.metrics.catalog import BY_NAME, Scope

Floats32 = npt.NDArray[np.float32]
Spread = tuple[Floats32, Floats32, Floats32]  # p10, median, p90
SeriesKey = tuple[str, int | None, str | None, str]  # node, gpu, link, metric

# Steps that read well on a chart; none is shorter than the shortest interval of an agent. From 10 s and 5 min on they
# are multiples of those, so that rollups answer them.
STEPS_MS = tuple(
    1000 * s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400, 604_800)
)

FINE_MS = 1_800_000  # longer spans are not shown finer than in steps of 10 s
OPEN_MS = 30_000  # they end with the newest bucket that is rolled up, if it is at most this old
PEER_ROWS = 600_000  # read for the peers of one chart
PEERS_MIN = 64


Stepped = tuple[Ids, Millis, dict[str, npt.NDArray[np.float64]]]  # entity, start of its step, metric -> value


@dataclass(frozen=True, slots=True)
class _Grid:
    """The steps of a chart: the first begins at `first_ms`, a multiple of `step`."""

    first_ms: int
    step: int
    points: int

    @classmethod
    def over(cls, span: Span, step: int) -> _Grid:
        first = span[0] // step * step
        return cls(first, step, (span[1] - 1 - first) // step + 1)

    def at(self, starts: Millis) -> Millis:
        """Return the number of the step that begins at each of these times."""
        return (starts - self.first_ms) // self.step

    def times(self) -> Millis:
        """Return the start of each step."""
        return self.first_ms + self.step * np.arange(self.points, dtype=np.int64)


def step_for(span_ms: int, max_points: int) -> int:
    """Return the shortest step that covers `span_ms` with at most `max_points`; for a long span one of a rollup."""
    for step in STEPS_MS:
        if _points(span_ms, step) <= max_points and (step >= LEVELS_MS["10s"] or span_ms <= FINE_MS):
            return step
    return -(-span_ms // max(1, max_points - 1) // STEPS_MS[-1]) * STEPS_MS[-1]


def _points(span_ms: int, step_ms: int) -> int:
    return span_ms // step_ms + 2  # the grid is aligned to its step, so the span may begin and end within one


@dataclass(slots=True)
class PeerRead:
    """Peers that are read with a chart's own line in one query, and what was read."""

    ids: Ids
    span: Span = (0, 0)
    step: int = 0
    folded: Folded | None = None


class SeriesReader:
    """Reads series of targets and of their peers. Thread-safe."""

    def __init__(self, registry: EntityRegistry, rows: SampleRows, rollups: Rollups, last_query: LastQuery) -> None:
        self._registry = registry
        self._rows = rows
        self._rollups = rollups
        self._last_query = last_query

    def with_peers(self, index: FleetIndex, gpus: npt.NDArray[np.integer], from_ms: int, to_ms: int) -> PeerRead | None:
        """Prepare `read` and then `read_peers` of these GPUs in one query; None: they are too many."""
        places = self._registry.map(index, Scope.GPU, to_ms)
        ids = places.ids[np.isin(places.target, gpus)]
        return PeerRead(ids) if 0 < len(ids) <= _peers_most(RAW_MS, from_ms, to_ms) else None

    def read(
        self,
        scope: Scope,
        targets: Sequence[Target],
        metrics: Sequence[str],
        from_ms: int,
        to_ms: int,
        max_points: int,
        peers: PeerRead | None = None,
    ) -> tuple[int, Millis, dict[SeriesKey, Floats32]]:
        """Return values of (node, gpu, link) targets within [from_ms, to_ms).

        A step's value is the lower median of a gauge, the last of a counter or state, NaN if there is none. A counter
        that sums time begins with 0: after days its microseconds do not fit into a float32. The step is never shorter
        than the samples' interval, so that a slow agent gives a line and not dots. If the span is longer than half an
        hour, the steps end with the newest rollup, up to 30 s before `to_ms`.

        Returns:
            (step_ms, start of each step int64 [P], (node, gpu, link, metric) -> float32 [P]), P <= max_points.

        Raises:
            ValueError: an empty span, fewer than 2 points, or a metric that the scope does not have.
        """
        _check(scope, metrics, from_ms, to_ms, max_points)
        self._last_query.note()
        stays = self._registry.stays(targets, scope)
        step = max(step_for(to_ms - from_ms, max_points), self._finest_ms(scope, from_ms))
        span = (from_ms, self._end(scope, (from_ms, to_ms), step))
        grid = _Grid.over(span, step)
        found = self._stepped(scope, stays, metrics, span, step, peers)
        spacing = _spacing(found[0], found[1] // step)
        if spacing > 1:
            step = next((s for s in STEPS_MS if s >= step * spacing), step * spacing)
            grid = _Grid.over(span, step)
            found = self._stepped(scope, stays, metrics, span, step, peers)
        lines = _lay_out(found, stays, metrics, len(targets), grid, span)
        result: dict[SeriesKey, Floats32] = {
            (*target, metric): lines[m, t] for t, target in enumerate(targets) for m, metric in enumerate(metrics)
        }
        return step, grid.times(), result

    def read_peers(
        self,
        index: FleetIndex,
        gpus: npt.NDArray[np.integer],
        metrics: Sequence[str],
        from_ms: int,
        to_ms: int,
        step_ms: int,
        peers: PeerRead | None = None,
    ) -> dict[str, Spread]:
        """Return metric -> (p10, median, p90) over GPUs per step, on the grid of `read`; NaN where there is none.

        Of very many GPUs over a long time an even selection is read, so that the answer stays quick.
        """
        _check(Scope.GPU, metrics, from_ms, to_ms, 2)
        grid = _Grid.over((from_ms, to_ms), step_ms)
        upto_ms = self._end(Scope.GPU, (from_ms, to_ms), step_ms)
        result: dict[str, Spread] = {}
        places = self._registry.map(index, Scope.GPU, to_ms)
        wanted = places.ids[np.isin(places.target, gpus)]
        most = _peers_most(_width(step_ms), from_ms, to_ms)
        if len(wanted) > most:
            wanted = wanted[np.linspace(0, len(wanted) - 1, most).astype(np.intp)]
        if (
            peers is not None
            and peers.folded is not None
            and (peers.span, peers.step) == ((from_ms, upto_ms), step_ms)
            and np.isin(wanted, peers.ids).all()
        ):
            folded = peers.folded.of(wanted)
        else:
            folded = self._folded(Scope.GPU, wanted, metrics, (from_ms, upto_ms), step_ms) if len(wanted) else join([])
        at = grid.at(folded.start_ms)
        for metric in metrics:
            lines = tuple(np.full(grid.points, np.nan, np.float32) for _ in range(3))
            if metric in folded.columns:
                stored, there = folded.columns[metric]
                if stored.dtype.kind == "f":
                    there = there & ~np.isnan(stored)
                whole = there.all()
                _spread(metric, at if whole else at[there], stored if whole else stored[there], lines)
            result[metric] = lines[0], lines[1], lines[2]
        return result

    def _stepped(
        self,
        scope: Scope,
        stays: Sequence[Stay],
        metrics: Sequence[str],
        span: Span,
        step: int,
        peers: PeerRead | None,
    ) -> Stepped:
        """Return values per step, by entity and time."""
        from_ms, to_ms = span
        stays = [stay for stay in stays if stay.from_ms < to_ms and stay.to_ms > from_ms]
        if not stays:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64), {metric: np.zeros(0) for metric in metrics}
        ids = np.array(sorted({stay.entity_id for stay in stays}), np.uint64)
        low, high = max(from_ms, min(s.from_ms for s in stays)), min(to_ms, max(s.to_ms for s in stays))
        if peers is None or (low, high) != (from_ms, to_ms):
            folded = self._folded(scope, ids, metrics, (low, high), step)
        else:
            whole = self._folded(scope, np.union1d(ids, peers.ids), metrics, (low, high), step)
            peers.span, peers.step, peers.folded = (low, high), step, whole
            folded = whole.of(ids)
        nothing = np.full(len(folded.ids), np.nan)
        held = {metric: units(metric, *folded.columns[metric]) for metric in metrics if metric in folded.columns}
        return folded.ids, folded.start_ms, {metric: held.get(metric, nothing) for metric in metrics}

    def _folded(self, scope: Scope, ids: Ids, metrics: Sequence[str], span: Span, step: int) -> Folded:
        """Return values per step.

        Steps of 10 s or more are always made from values of 10 s, then of 5 min, rolled up or computed from samples.
        So an answer does not change when samples are rolled up or dropped.
        """
        if step % LEVELS_MS["10s"]:
            return self._rows.fold(scope, [span], step, metrics=metrics, ids=ids, counts=False)
        if step % LEVELS_MS["5m"]:
            parts = self._tens(scope, ids, metrics, span)
            parts_with_rows = [part for part in parts if len(part.ids)]
            if step == LEVELS_MS["10s"] and len(parts_with_rows) == 1:
                return parts_with_rows[0]
        else:
            kept = self._rolled_up(scope, "5m", span, ids)
            parts = [
                self._rows.fold(scope, kept, LEVELS_MS["5m"], level="5m", metrics=metrics, ids=ids, counts=False),
                fold_again(self._tens(scope, ids, metrics, *without(span, kept)), LEVELS_MS["5m"], counts=False),
            ]
        return fold_again(parts, step, counts=False)

    def _end(self, scope: Scope, span: Span, step: int) -> int:
        """Return where a chart of a span ends. A long one lacks the newest seconds.

        A step that is not over would change its value, and reading its samples may cost more than all rollups.
        """
        if step % LEVELS_MS["10s"] or span[1] - span[0] <= FINE_MS:
            return span[1]
        upto_ms, _ = self._rollups.rolled_up(scope, "10s", (span[1], span[1]))
        return upto_ms if span[1] - upto_ms <= OPEN_MS else span[1]

    def _tens(self, scope: Scope, ids: Ids, metrics: Sequence[str], *spans: Span) -> list[Folded]:
        """Return values of 10 s in parts: those that are rolled up, and those computed from samples."""
        found = []
        for span in spans:
            kept = self._rolled_up(scope, "10s", span, ids)
            for level, parts in (("10s", kept), (None, without(span, kept))):
                found.append(
                    self._rows.fold(scope, parts, LEVELS_MS["10s"], level=level, metrics=metrics, ids=ids, counts=False)
                )
        return found

    def _rolled_up(self, scope: Scope, level: str, span: Span, ids: Ids) -> list[Span]:
        """Return the parts of a span that a rollup answers, in whole buckets."""
        width = LEVELS_MS[level]
        upto_ms, holes = self._rollups.rolled_up(scope, level, span, ids)
        begin = -(-span[0] // width) * width
        end = max(begin, upto_ms // width * width)
        return without((begin, end), merged((low // width * width, -(-high // width) * width) for low, high in holes))

    def _finest_ms(self, scope: Scope, from_ms: int) -> int:
        """Return the shortest step that the store has data for: samples are deleted before their rollups."""
        tables = {samples_table(scope): 1, **{rollup_table(scope, level): ms for level, ms in LEVELS_MS.items()}}
        oldest = {ms: self._rows.oldest_ms(name) for name, ms in tables.items()}
        held = [each for each in oldest.values() if each is not None]
        if not held:
            return 1
        wanted = max(from_ms, min(held)) + 2 * LEVELS_MS["5m"]
        return next(ms for ms, each in oldest.items() if each is not None and each <= wanted)


def _lay_out(
    found: Stepped, stays: Sequence[Stay], metrics: Sequence[str], targets: int, grid: _Grid, span: Span
) -> npt.NDArray[np.float32]:
    """Return the values of each target on the grid, float32 [metrics, targets, points], NaN where there is none."""
    result = _lay_out_wide(found, stays, metrics, targets, grid, span)
    for metric, lines in zip(metrics, result, strict=True):
        if BY_NAME[metric].sums_time:
            known = np.isfinite(lines)
            lines -= np.take_along_axis(lines, known.argmax(axis=1)[:, None], axis=1)
    return result.astype(np.float32)


def _lay_out_wide(
    found: Stepped, stays: Sequence[Stay], metrics: Sequence[str], targets: int, grid: _Grid, span: Span
) -> npt.NDArray[np.float64]:
    ids, starts, columns = found
    result = np.full((len(metrics), targets, grid.points), np.nan)
    places = grid.at(starts)
    wanted = np.array([stay.entity_id for stay in stays], np.uint64)
    lows, highs = (np.searchsorted(ids, wanted, side) for side in ("left", "right"))
    whole = all(stay.from_ms <= span[0] and stay.to_ms >= span[1] for stay in stays)
    if whole and len({stay.target for stay in stays}) == len(stays):  # each was there all the time, as is usual
        counts = highs - lows
        rows = np.repeat(lows - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        line, at = np.repeat(np.array([stay.target for stay in stays], np.intp), counts), places[rows]
        for metric, lines in zip(metrics, result, strict=True):
            lines[line, at] = columns[metric][rows]
        return result
    for stay, low, high in sorted(zip(stays, lows.tolist(), highs.tolist(), strict=True), key=_since):
        mine = starts[low:high]
        part = slice(
            low + int(np.searchsorted(mine, stay.from_ms - grid.step, "right")),
            low + int(np.searchsorted(mine, stay.to_ms)),
        )
        at = places[part]
        for metric, lines in zip(metrics, result[:, stay.target], strict=True):
            column = columns[metric][part]
            lines[at] = np.where(np.isnan(column), lines[at], column)
    return result


def _since(found: tuple[Stay, int, int]) -> int:
    return found[0].from_ms


def _spread(metric: str, at: npt.NDArray[np.int64], stored: Stored, lines: Sequence[Floats32]) -> None:
    """Write percentiles of the stored values of each step into the lines, interpolated as numpy does.

    Values are in order of entity and time, and sorted as they are stored: numpy sorts 32 bits at a time fastest.
    """
    if not len(at):
        return
    if stored.dtype.kind in "iu" and stored.dtype.itemsize < 4:
        stored = stored.astype(np.int32)
    per_entity = int(np.argmin(at[1:] > at[:-1])) + 1 if len(at) > 1 else 1
    if len(at) % per_entity == 0 and (at.reshape(-1, per_entity) == at[:per_entity]).all():  # as is usual
        filled, ranked = at[:per_entity], stored.reshape(-1, per_entity).T.copy()
        counts = np.full(per_entity, len(ranked[0]))
    else:
        order = np.argsort(
            at.astype(np.uint16) if at.max() < 1 << 16 else at, kind="stable"
        )  # 16 bits are sorted without comparisons
        at, stored = at[order], stored[order]
        begins = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
        filled, counts = at[begins], np.diff(np.append(begins, len(at)))
        ranked = np.full((len(begins), int(counts.max())), highest(stored.dtype), stored.dtype)
        ranked[np.repeat(np.arange(len(begins)), counts), np.arange(len(at)) - np.repeat(begins, counts)] = stored
    ranked.sort(axis=1)
    steps = np.arange(len(filled))
    for share, line in zip((0.1, 0.5, 0.9), lines, strict=True):
        rank = share * (counts - 1)
        below = np.floor(rank).astype(np.intp)
        less, more = (
            in_units(metric, ranked[steps, place].astype(np.float64))
            for place in (below, np.minimum(below + 1, counts - 1))
        )
        line[filled] = less + (more - less) * (rank - below)


def _peers_most(width_ms: int, from_ms: int, to_ms: int) -> int:
    return max(PEERS_MIN, PEER_ROWS * width_ms // (to_ms - from_ms))


def _width(step_ms: int) -> int:
    """Return the time between the rows that a step's value is made of."""
    return next((ms for ms in sorted(LEVELS_MS.values(), reverse=True) if step_ms % ms == 0), min(step_ms, RAW_MS))


def _check(scope: Scope, metrics: Sequence[str], from_ms: int, to_ms: int, max_points: int) -> None:
    if not 0 <= from_ms < to_ms <= FOREVER:
        raise ValueError(f"from {from_ms} to {to_ms} is not a span of time")
    if max_points < 2:
        raise ValueError(f"{max_points} points are too few for a series; ask for 2 or more")
    for metric in metrics:
        if metric not in BY_NAME or BY_NAME[metric].scope is not scope:
            raise ValueError(f"{metric!r} is not a metric of scope {scope}")


def _spacing(ids: Ids, steps: Millis) -> int:
    """Return how many steps usually lie between one row of an entity and the next; 1 if it is not known."""
    gaps = np.diff(steps)[ids[1:] == ids[:-1]]
    return int(np.median(gaps)) if len(gaps) else 1
