"""Time series for charts: values on a grid of steps, NaN where there is nothing, and the spread of peers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drover_collector.fleet_index import FleetIndex
from drover_collector.store.base import Base, aggregate_sql, during, numbers, values
from drover_collector.store.placements import FOREVER, Stay, Target
from drover_collector.store.records import Ids, Millis
from drover_collector.store.schema import samples_table
from drover_proto.catalog import BY_NAME, Scope

Floats32 = npt.NDArray[np.float32]
SeriesKey = tuple[str, int | None, str | None, str]  # node, gpu, link, metric

# Steps a chart reads well at; none is shorter than the shortest interval of an agent.
STEPS_MS = tuple(
    1000 * s for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400, 604_800)
)


def step_for(span_ms: int, max_points: int) -> int:
    """The shortest step that covers `span_ms` with `max_points` or fewer."""
    for step in STEPS_MS:
        if _points(span_ms, step) <= max_points:
            return step
    return -(-span_ms // max(1, max_points - 1))


def _points(span_ms: int, step_ms: int) -> int:
    return span_ms // step_ms + 2  # the grid is aligned to its step, so the span may begin and end within one


class Series(Base):
    def series(
        self, scope: Scope, targets: Sequence[Target], metrics: Sequence[str], from_ms: int, to_ms: int, max_points: int
    ) -> tuple[int, Millis, dict[SeriesKey, Floats32]]:
        """Values of (node, gpu, link) targets within [from_ms, to_ms).

        A step's value is the lower median of a gauge, the last of a counter or state, NaN where nothing came. The step
        is never shorter than the samples' own interval, so that a slow agent gives a line and not dots.

        Returns:
            (step_ms, start of each step int64 [P], (node, gpu, link, metric) -> float32 [P]), P <= max_points.

        Raises:
            ValueError: a span that is empty, fewer than 2 points, or a metric that this scope does not have.
        """
        _check(scope, metrics, from_ms, to_ms, max_points)
        stays = self._placements.stays(targets, scope)
        step = step_for(to_ms - from_ms, max_points)
        first, points = _grid(from_ms, to_ms, step)
        found = self._stepped(scope, stays, metrics, from_ms, to_ms, step)
        spacing = _spacing(found[0], found[1] // step)
        if spacing > 1:
            step = next((s for s in STEPS_MS if s >= step * spacing), step * spacing)
            first, points = _grid(from_ms, to_ms, step)
            found = self._stepped(scope, stays, metrics, from_ms, to_ms, step)
        ids, starts, columns = found
        at = (starts - first) // step
        result: dict[SeriesKey, Floats32] = {
            (*target, metric): np.full(points, np.nan, np.float32) for target in targets for metric in metrics
        }
        for stay in sorted(stays, key=lambda s: s.from_ms):
            mine = np.flatnonzero((ids == stay.entity_id) & (starts + step > stay.from_ms) & (starts < stay.to_ms))
            for metric in metrics:
                column = columns[metric][mine]
                held = ~np.isnan(column)
                result[(*targets[stay.target], metric)][at[mine][held]] = column[held]
        return step, first + step * np.arange(points, dtype=np.int64), result

    def peers_series(
        self, index: FleetIndex, gpus: npt.NDArray[np.integer], metric: str, from_ms: int, to_ms: int, step_ms: int
    ) -> tuple[Floats32, Floats32, Floats32]:
        """(p10, median, p90) over GPUs per step, on the grid that `series` has with this step; NaN where none came."""
        _check(Scope.GPU, [metric], from_ms, to_ms, 2)
        first, points = _grid(from_ms, to_ms, step_ms)
        low, middle, high = (np.full(points, np.nan, np.float32) for _ in range(3))
        places = self._placements.map(index, Scope.GPU, to_ms)
        wanted = places.ids[np.isin(places.target, gpus)]
        if len(wanted):
            table = self._clients.arrow(
                "SELECT step, quantilesExactInclusive(0.1, 0.5, 0.9)(v) AS q"
                f" FROM (SELECT entity_id, {_step(step_ms)} AS step, {aggregate_sql(metric, 'v')}"
                f" FROM {samples_table(Scope.GPU)} FINAL"
                f" WHERE entity_id IN ({_ids(wanted)}) AND {during(from_ms, to_ms)} GROUP BY entity_id, step)"
                " WHERE isNotNull(v) GROUP BY step"
            )
            if table.num_rows:
                at = (numbers(table, "step") - first) // step_ms
                spread = np.array(table["q"].to_pylist(), np.float64) * (BY_NAME[metric].step or 1)
                low[at], middle[at], high[at] = spread.T
        return low, middle, high

    def _stepped(
        self, scope: Scope, stays: Sequence[Stay], metrics: Sequence[str], from_ms: int, to_ms: int, step: int
    ) -> tuple[Ids, Millis, dict[str, npt.NDArray[np.float64]]]:
        """(entity, start of its step, metric -> value), by entity and time."""
        stays = [stay for stay in stays if stay.from_ms < to_ms and stay.to_ms > from_ms]
        if not stays:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64), {metric: np.zeros(0) for metric in metrics}
        ids = np.array(sorted({stay.entity_id for stay in stays}), np.uint64)
        low, high = max(from_ms, min(s.from_ms for s in stays)), min(to_ms, max(s.to_ms for s in stays))
        table = self._clients.arrow(
            f"SELECT entity_id, {_step(step)} AS step, {', '.join(map(aggregate_sql, metrics))}"
            f" FROM {samples_table(scope)} FINAL WHERE entity_id IN ({_ids(ids)}) AND {during(low, high)}"
            " GROUP BY entity_id, step ORDER BY entity_id, step"
        )
        columns = {metric: values(table, metric) for metric in metrics}
        return numbers(table, "entity_id"), numbers(table, "step"), columns


def _check(scope: Scope, metrics: Sequence[str], from_ms: int, to_ms: int, max_points: int) -> None:
    if not 0 <= from_ms < to_ms <= FOREVER:
        raise ValueError(f"from {from_ms} to {to_ms} is no span of time")
    if max_points < 2:
        raise ValueError(f"{max_points} points make no series; ask for 2 or more")
    for metric in metrics:
        if metric not in BY_NAME or BY_NAME[metric].scope is not scope:
            raise ValueError(f"{metric!r} is no {scope} metric")


def _grid(from_ms: int, to_ms: int, step: int) -> tuple[int, int]:
    first = from_ms // step * step
    return first, (to_ms - 1 - first) // step + 1


def _step(step: int) -> str:
    return f"intDiv(toUnixTimestamp64Milli(ts), {int(step)}) * {int(step)}"


def _spacing(ids: Ids, steps: Millis) -> int:
    """How many steps lie between one row of an entity and the next, as a rule; 1 when that cannot be told."""
    gaps = np.diff(steps)[ids[1:] == ids[:-1]]
    return int(np.median(gaps)) if len(gaps) else 1


def _ids(ids: Ids) -> str:
    return ", ".join(map(str, ids.tolist()))
