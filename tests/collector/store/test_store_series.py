"""Series for charts, and tables for a case."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from drover_collector.store import Store
from drover_collector.store.samples import export as export_module
from drover_collector.store.samples.series import STEPS_MS, step_for
from drover_core.metrics.catalog import Scope, of_scope
from testbed.fleets import GPUS, T0, everything, gpu_row, index_of, node_row, samples


def test_step_is_the_shortest_that_fits() -> None:
    assert step_for(60_000, 1000) == 1000
    assert step_for(1_800_000, 1000) == 2000
    assert step_for(3_600_000, 1000) == 10_000
    for span in (1, 999, 10_000, 86_400_000, 400 * 86_400_000):
        for points in (2, 10, 1000):
            step = step_for(span, points)
            for start in (0, step - 1):  # however the span lies on the grid
                assert (start + span - 1) // step - start // step + 1 <= points
    assert list(STEPS_MS) == sorted(STEPS_MS)


def test_series_downsamples_and_leaves_gaps(store: Store) -> None:
    row = gpu_row(0, 0)
    store.entities.write([row])
    rows = [(row, T0 + 1000 * t, {"power_w": float(t), "energy_j": 10.0 * t}) for t in range(100) if not 40 <= t < 60]
    store.samples.write(samples(Scope.GPU, rows))
    target = ("n0", 0, None)
    step, ts, found = store.series.read(Scope.GPU, [target], ["power_w", "energy_j"], T0, T0 + 100_000, 12)
    assert step == 10_000
    assert (ts - T0).tolist() == list(range(0, 100_000, 10_000))
    gap = [4, 5]
    power = [np.nan if n in gap else 10 * n + 4 for n in range(10)]  # the lower median of ten
    energy = [np.nan if n in gap else 10.0 * (10 * n + 9) for n in range(10)]  # the last
    assert found[*target, "power_w"].dtype == np.float32
    np.testing.assert_array_equal(found[*target, "power_w"], np.array(power, np.float32))
    np.testing.assert_array_equal(found[*target, "energy_j"], np.array(energy, np.float32))


def test_a_sum_of_time_begins_with_0_so_that_its_growth_is_exact_after_months(store: Store) -> None:
    rows, keys = [gpu_row(0, 0), gpu_row(0, 1)], [("n0", 0, None), ("n0", 1, None)]
    store.entities.write(rows)
    months_us = 90 * 86_400_000_000
    written = [
        (row, T0 + 1000 * t, {"throttle_power_us": float(months_us + 300_000 * t)})
        for row, first in zip(rows, (0, 3), strict=True)
        for t in range(first, 20)
    ]
    store.samples.write(samples(Scope.GPU, written))
    _, _, found = store.series.read(Scope.GPU, [*keys, ("n9", 0, None)], ["throttle_power_us"], T0, T0 + 20_000, 100)
    first, second, none = (found[*key, "throttle_power_us"] for key in [*keys, ("n9", 0, None)])
    np.testing.assert_array_equal(first, np.arange(20, dtype=np.float32) * 300_000)
    np.testing.assert_array_equal(second[:3], [np.nan] * 3)
    np.testing.assert_array_equal(second[3:], np.arange(17, dtype=np.float32) * 300_000)
    assert np.isnan(none).all()


def test_a_long_chart_ends_with_the_newest_rollup_unless_rollups_lag(store: Store) -> None:
    row, target = gpu_row(0, 0), ("n0", 0, None)
    store.entities.write([row])
    end = T0 + 2_400_000

    def write(from_ms: int, to_ms: int) -> None:
        rows = [(row, at, {"power_w": float(at - T0) / 1e4}) for at in range(from_ms, to_ms, 10_000)]
        store.samples.write(samples(Scope.GPU, rows))

    def line(from_ms: int, to_ms: int) -> list[float]:
        step, ts_ms, found = store.series.read(
            Scope.GPU, [target], ["power_w"], from_ms, to_ms, 1000 if to_ms > end else 245
        )
        assert step == 10_000
        peers = store.series.read_peers(index_of(), np.array([0]), ["power_w"], from_ms, int(ts_ms[-1]) + step, step)
        np.testing.assert_array_equal(peers["power_w"][1], found[*target, "power_w"])
        values: list[float] = found[*target, "power_w"].tolist()
        return values

    write(T0, end)
    store.buckets.read_closing(index_of(), end - 20_000)
    store.rollups.roll_up()
    while store.rollups.roll_up_late(10):
        pass
    rows = [float(n) for n in range(240)]
    assert line(T0, end) == rows[:239]  # the last is not closed: it is left out, not shown as absent
    assert line(end - 600_000, end)[-1] == 239  # a short span has it
    write(end, end + 30_000)
    assert line(T0, end + 30_000) == [*rows, 240.0, 241.0, 242.0]  # rollups are behind: samples answer


def test_a_slow_agent_gives_a_line_not_dots(store: Store) -> None:
    row = node_row(0)
    store.entities.write([row])
    store.samples.write(samples(Scope.NODE, [(row, T0 + 30_000 * t, {"load1": float(t)}) for t in range(20)]))
    step, ts, found = store.series.read(Scope.NODE, [("n0", None, None)], ["load1"], T0, T0 + 600_000, 1000)
    assert step == 30_000
    assert found["n0", None, None, "load1"].tolist() == list(map(float, range(20)))
    assert len(ts) == 20


def test_unknown_targets_are_gaps_and_bad_questions_are_refused(store: Store) -> None:
    _, ts, found = store.series.read(Scope.GPU, [("nowhere", 0, None)], ["power_w"], T0, T0 + 5000, 100)
    assert np.isnan(found["nowhere", 0, None, "power_w"]).all()
    assert len(ts) == 5
    for scope, metric, to_ms, points in (
        (Scope.GPU, "load1", T0 + 1, 10),
        (Scope.GPU, "power_w'; DROP", T0 + 1, 10),
        (Scope.GPU, "power_w", T0, 10),
        (Scope.GPU, "power_w", T0 + 1, 1),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            store.series.read(scope, [("n0", 0, None)], [metric], T0, to_ms, points)


def test_peers(store: Store) -> None:
    index = index_of()
    store.entities.write(everything())
    rows = [
        (gpu_row(n, g), T0 + 1000 * t, {"power_w": 100.0 * (n * GPUS + g) + t % 2})
        for n in range(3)
        for g in range(GPUS)
        for t in range(10)
        if (n, g) != (2, 3)
    ]
    store.samples.write(samples(Scope.GPU, rows))
    low, middle, high = store.series.read_peers(index, np.arange(11), ["power_w"], T0, T0 + 30_000, 10_000)["power_w"]
    np.testing.assert_allclose(low, [100.0, np.nan, np.nan])
    np.testing.assert_allclose(middle, [500.0, np.nan, np.nan])
    np.testing.assert_allclose(high, [900.0, np.nan, np.nan])
    only = store.series.read_peers(index, np.array([11]), ["power_w"], T0, T0 + 10_000, 10_000)["power_w"]
    assert all(np.isnan(line).all() for line in only)


def test_export_has_each_row_once_in_order_and_in_units(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "ROWS", 7)  # slices within an hour
    store.entities.write(everything())
    rows = [
        (gpu_row(n, g), T0 + 1000 * t, {"power_w": 100.1 + t} if (n + g + t) % 3 else {"gpu_temp_c": 50.0})
        for n in range(2)
        for g in range(GPUS)
        for t in (0, 1, 3_599, 3_600, 9_000)
    ]
    store.samples.write(samples(Scope.GPU, rows))
    store.samples.write(samples(Scope.GPU, rows[::2]))
    tables = list(store.export.tables(Scope.GPU, T0 + 1000, T0 + 9_000_000))
    table = pa.concat_tables(tables)
    assert len(tables) == 3  # slices with nothing in them give none
    assert table.schema.names == ["ts", "node", "gpu", *(m.name for m in of_scope(Scope.GPU))]
    assert table.schema.field("ts").type == pa.timestamp("ms", "UTC")
    assert table.schema.field("gpu").type == pa.uint8()
    assert table.schema.field("power_w").type == pa.float64()
    keys = [
        (int(r["ts"].timestamp() * 1000), r["node"], r["gpu"]) for r in table.select(["ts", "node", "gpu"]).to_pylist()
    ]
    wanted = sorted((ts, row.node, row.gpu) for row, ts, _ in rows if T0 + 1000 <= ts < T0 + 9_000_000)
    assert keys == wanted
    values = {(row.node, row.gpu, ts): v for row, ts, v in rows}
    for (ts, node, gpu), power in zip(keys, table["power_w"].to_pylist(), strict=True):
        assert power == (
            pytest.approx(values[node, gpu, ts]["power_w"]) if "power_w" in values[node, gpu, ts] else None
        )
    assert list(store.export.tables(Scope.LINK, T0, T0 + 10_000)) == []
