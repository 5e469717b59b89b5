"""Rows of a case that carry a node's own wrong clock are put right by what the node says of it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drover_cli.case.clocks import put_right
from drover_cli.case.samples import Samples, read_samples
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import Scope
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec

START = 1_767_225_600_000
INDEX = FleetIndex(FleetSpec(tuple(NodeSpec(f"n{n}", gpus=2, links=(LinkSpec("mlx5_0"),)) for n in range(2))))
Times = npt.NDArray[np.int64]
Rows = list[dict[str, object]]


def step(times: Times, begin_s: float, end_s: float, by_s: float) -> Times:
    """Return ms by which a clock is off that somebody sets wrong, and then right."""
    return np.where((times >= begin_s * 1000) & (times < end_s * 1000), round(by_s * 1000), 0)


class Made:
    """Rows of two nodes: n0's clock is off by `offset_ms`; its rows carry that clock, or the collector's.

    `times`: when n0's rows were taken, in ms after START. `lacking`: rows that GPU 1 does not have.
    """

    def __init__(
        self, folder: Path, times: Times, offset_ms: Times, own: bool = True,
        interval_ms: int = 10_000, lacking: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.times, notes = times, list[str]()
        said = offset_ms / 1000
        stamps = START + times + (offset_ms if own else 0)
        right = START + np.arange(0, int(times.max()) + 1, interval_ms)
        node: Rows = [
            {"ts": int(t), "node": "n0", "clock_offset_s": float(o), "uptime_s": float(k)}
            for k, (t, o) in enumerate(zip(stamps, said, strict=True))
        ]
        node += [{"ts": int(t), "node": "n1", "clock_offset_s": 0.0, "uptime_s": 0.0} for t in right]
        gpu: Rows = [
            {"ts": int(t) + 300, "node": "n0", "gpu": g, "power_w": float(k)}
            for k, t in enumerate(stamps) for g in range(2) if not (g and k in lacking)
        ]  # fmt: skip
        gpu += [{"ts": int(t), "node": "n1", "gpu": 0, "power_w": 0.0} for t in right]
        link: Rows = [
            {"ts": int(t) + 300, "node": "n0", "link": "mlx5_0", "rate_gbps": float(k)} for k, t in enumerate(stamps)
        ]
        self.node, self.gpu, self.link = (
            self._written(folder / f"{name}.parquet", rows, scope, notes)
            for name, rows, scope in (("node", node, Scope.NODE), ("gpu", gpu, Scope.GPU), ("link", link, Scope.LINK))
        )
        self.before = self.stamps()
        self.notes = put_right(self.gpu, self.node, self.link, INDEX, interval_ms)

    @staticmethod
    def _written(path: Path, rows: Rows, scope: Scope, notes: list[str]) -> Samples:
        pq.write_table(pa.Table.from_pylist(rows), path)
        made = read_samples(path, scope, INDEX, notes)
        assert made is not None
        return made

    def stamps(self) -> list[list[int]]:
        """Return times of rows of each kind, ms after START."""
        return [(part.ts_ms - START).tolist() for part in (self.node, self.gpu, self.link)]

    def wrong_by_ms(self) -> list[int]:
        """Return how far each kind's rows of n0 lie at most from the collector's time."""
        found = []
        for part, of, late in ((self.node, 1, 0), (self.gpu, 2, 300), (self.link, 1, 300)):
            mine = np.sort(part.ts_ms[part.entity < of]) - START - late
            expected = np.sort(np.repeat(self.times, of))
            assert len(mine) == len(expected)
            found.append(int(np.abs(mine - expected).max()))
        return found


def every(interval_ms: int, count: int = 200, jitter_ms: int = 0) -> Times:
    noise = np.random.default_rng(1).integers(-jitter_ms, jitter_ms + 1, count)
    return np.arange(1, count + 1) * interval_ms + noise


@pytest.mark.parametrize("by_s", [-120, 120, 45, -3600])
@pytest.mark.parametrize(("interval_ms", "jitter_ms"), [(10_000, 0), (10_000, 900), (1_000, 100), (60_000, 2_000)])
def test_rows_with_the_nodes_clock_get_the_collectors(
    tmp_path: Path, by_s: int, interval_ms: int, jitter_ms: int
) -> None:
    times = every(interval_ms, 120, jitter_ms)
    off = step(times, interval_ms * 0.04, interval_ms * 0.08, by_s)
    made = Made(tmp_path, times, off, interval_ms=interval_ms)
    assert made.wrong_by_ms() == [0, 0, 0], made.notes
    assert made.notes == [
        f"node n0: rows carried its wrong clock, {by_s:+d} s off; they were moved to the collector's time"
    ]


def test_rows_with_the_collectors_clock_stay(tmp_path: Path) -> None:
    times = every(10_000, jitter_ms=900)
    made = Made(tmp_path, times, step(times, 600, 1800, -120), own=False)
    assert (made.notes, made.stamps()) == ([], made.before)


def test_a_clock_that_is_wrong_in_the_whole_case_stays_as_nothing_shows_whose_clock_rows_carry(tmp_path: Path) -> None:
    times = every(10_000, jitter_ms=900)
    for own in (True, False):
        made = Made(tmp_path, times, np.full(len(times), -120_000), own)
        assert (made.notes, made.stamps()) == ([], made.before)


@pytest.mark.parametrize("own", [True, False])
def test_a_clock_that_drifts(tmp_path: Path, own: bool) -> None:
    """It gains 83 s in 50 minutes, and is then set right. Distances between rows grow by 3 %."""
    times = every(10_000, 400, jitter_ms=300)
    off = np.where(times < 3_000_000, times // 36, 0)
    made = Made(tmp_path, times, off, own)
    if not own:
        assert (made.notes, made.stamps()) == ([], made.before)
        return
    assert len(made.notes) == 1
    assert max(made.wrong_by_ms()) <= 5_000  # less than which no clock is called wrong


@pytest.mark.parametrize("own", [True, False])
def test_rows_that_are_lost_or_come_late_make_no_difference(tmp_path: Path, own: bool) -> None:
    times = every(10_000, jitter_ms=500)
    times = np.delete(times, [*range(20, 50), 65, 66, 110, 170])
    times[150] += 9_000
    made = Made(tmp_path, times, step(times, 700, 1400, -120), own)
    if own:
        assert made.wrong_by_ms() == [0, 0, 0]
    else:
        assert (made.notes, made.stamps()) == ([], made.before)


def test_a_gap_of_the_node_itself_is_not_filled_with_rows_of_the_collectors_clock(tmp_path: Path) -> None:
    """It is away for ten minutes, and its clock is off by an hour for some minutes after that."""
    times = np.delete(every(10_000, jitter_ms=500), range(90, 150))
    made = Made(tmp_path, times, step(times, 1500, 1900, 3600), own=False)
    assert (made.notes, made.stamps()) == ([], made.before)


def test_rows_that_one_gpu_lacks_move_as_those_next_to_them(tmp_path: Path) -> None:
    times = every(10_000)
    made = Made(tmp_path, times, step(times, 700, 1400, -120), lacking=range(0, 200, 7))
    assert made.notes
    mine = made.gpu.ts_ms[made.gpu.entity == 1] - START - 300
    lost = [k for k in range(200) if k % 7 == 0]
    kept = np.delete(times, lost)
    # Where the clock went back, two rows have one stamp: of a pair, the one that is left may be taken for the other.
    assert (np.abs(mine - kept) <= 120_000).all()
    assert (np.isin(mine, times)).all()
    assert np.isin(mine, kept).mean() > 0.95
