"""Rollups: whatever came when, was sent twice, left out or cut off by a crash, in the end they say what samples say."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from drover_collector.fleet import buckets
from drover_collector.store import SampleBatch, Store, StoreError
from drover_collector.store.rollups import dirty_ranges as marks
from drover_collector.store.samples import fold, rows
from drover_collector.store.samples.rows import PARTS_S
from drover_core.metrics.catalog import Scope, of_scope
from testbed.databases import Databases
from testbed.fleets import GPUS, T0, everything, gpu_row, index_of, node_row, random_values, samples
from testbed.rolled import (
    BUCKET,
    CHUNK,
    METRICS,
    assert_complete,
    assert_same,
    distinct_samples,
    finish,
    random_batch,
    store_batch,
)


def cut(table: pa.Table, names: Sequence[str], low: int, high: int) -> pa.Table:
    """Some of its rows, as an insert has them: without empty columns."""
    rows = table.slice(low, high - low)
    return rows.drop([name for name in names if rows[name].null_count == rows.num_rows])


@pytest.mark.parametrize("seed", range(6))
def test_folding_is_the_aggregate_in_numpy(seed: int) -> None:
    """Every metric, uneven groups, gaps, rows sent twice and in parts."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 400))
    ids = np.sort(rng.integers(0, 1 << 64, 9, np.uint64))
    entity = rng.integers(0, len(ids), count)
    ts = T0 + rng.integers(0, (40, 3, 400)[seed % 3], count) * 500
    table = {"entity_id": pa.array(ids[entity]), "ts_ms": pa.array(ts)}
    stored = {}
    for metric in of_scope(Scope.GPU):
        drawn = random_values(rng, metric, 997, (0.3, 0.0, 0.9)[seed % 3])
        values = drawn[(entity * 31 + ts // 500) % 997]  # of one moment always the same
        batch = SampleBatch.of_values(Scope.GPU, ids[entity], ts, {metric.name: values})
        sent = rng.random(count) < (0.7 if seed > 2 else 1.0)  # in parts
        number, mask = batch.columns[metric.name]
        mask = mask & sent
        table[metric.name] = pa.array(number, mask=~mask)
        stored[metric.name] = np.where(mask, number.astype(np.float64) * (metric.step or 1), np.nan)
    table["present"] = pa.array(sum((~np.isnan(v)).astype(np.uint16) for v in stored.values()))
    names = [metric.name for metric in of_scope(Scope.GPU)]
    whole = pa.table(table)
    found = fold.fold_raw([whole], names, 10_000)
    cuts = np.sort(rng.integers(0, count, 3)).tolist()
    tables = [cut(whole, names, *ends) for ends in itertools.pairwise([0, *cuts, count])]
    assert_same(fold.fold_raw(tables, names, 10_000), found)
    ends = tuple(np.sort(rng.choice(np.unique(ts // 10_000), 2)).tolist())
    span = (ends[0] * 10_000, ends[1] * 10_000)
    within = (found.start_ms >= span[0]) & (found.start_ms < span[1])
    assert_same(fold.fold_raw(tables, names, 10_000, span), found.where(within))
    starts = ts // 10_000 * 10_000
    for start in np.unique(starts):
        inside, there = starts == start, found.start_ms == start
        at = np.searchsorted(ids, found.ids[there])
        for name in names:
            want = buckets.aggregate(name, entity[inside], ts[inside], stored[name][inside], len(ids))
            got = np.full(len(ids), np.nan)
            if name in found.columns:
                got[at] = fold.units(name, *found.columns[name])[there]
            np.testing.assert_array_equal(got, want, err_msg=name)
        rows_in = [len(np.unique(ts[inside & (entity == e)])) for e in range(len(ids))]
        assert found.rows[there].tolist() == [n for n in rows_in if n]
    moments = {(e, t) for e, t in zip(entity.tolist(), ts.tolist(), strict=True)}
    assert found.rows.sum() == len(moments)
    keys = entity * (1 << 44) + ts
    present = sum(len(np.unique(keys[~np.isnan(v)])) for v in stored.values())
    assert found.present.sum() == present


def test_the_network_sorts_any_number_of_rows() -> None:
    rng = np.random.default_rng(1)
    for count in range(1, 40):
        drawn = rng.integers(0, 50, (count, 200)).astype(np.uint16)
        ranked = drawn.copy()
        fold._rank(ranked)
        np.testing.assert_array_equal(ranked, np.sort(drawn, axis=0))


def in_pieces(monkeypatch: pytest.MonkeyPatch, rows_each: int) -> None:
    monkeypatch.setattr(rows, "PIECE_ROWS", rows_each)
    monkeypatch.setattr("drover_collector.store.rollups.rollups.PIECE_ROWS", rows_each)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the fleet were large: questions and late work come in many pieces."""
    in_pieces(monkeypatch, 1000)


@pytest.mark.usefixtures("small_pieces")
def test_rollups_become_what_the_samples_say(store: Store) -> None:
    """Buckets judged and left out, rows late by seconds or an hour, resends, and charts that ask all the while."""
    rng = np.random.default_rng(0)
    index = index_of()
    store.entities.write(everything())
    kept: list[SampleBatch] = [random_batch(rng, T0 - CHUNK, T0)]  # from before there were rollups
    store_batch(store, kept[0])
    steps = 50
    for n in range(steps):
        now = T0 + n * BUCKET
        if rng.random() < 0.8:
            kept.append(random_batch(rng, now, now + BUCKET))
            store_batch(store, kept[-1])
        if rng.random() < 0.2:
            kept.append(random_batch(rng, T0 - 2 * CHUNK, now + BUCKET, 20))
            store_batch(store, kept[-1])
        if rng.random() < 0.2:
            store_batch(store, kept[int(rng.integers(len(kept)))])
        if rng.random() < 0.8:  # else the detectors skipped it
            store.buckets.read_closing(index, now)
            store.rollups.roll_up()
        if rng.random() < 0.1:
            store.rollups.roll_up_late(0)
        if n % 25 == 24:
            end = now + BUCKET
            for step in (BUCKET, 60_000, CHUNK):
                targets = [("n1", g, None) for g in range(GPUS)]
                span = (T0 - 2 * CHUNK + 3000, end - 2000)
                asked = store.series.read(Scope.GPU, targets, METRICS, *span, (span[1] - span[0]) // step + 2)
                assert asked[0] == step
                ids = np.array([gpu_row(1, g).entity_id for g in range(GPUS)], np.uint64)
                want = store.rows.fold(Scope.GPU, [span], BUCKET, ids=ids, metrics=METRICS)
                if step % CHUNK == 0:
                    want = fold.fold_again([want], CHUNK)
                want = fold.fold_again([want], step)
                for g in range(GPUS):
                    mine = want.ids == gpu_row(1, g).entity_id
                    for name in METRICS:
                        line = np.full(len(asked[1]), np.nan, np.float32)
                        if name in want.columns:
                            values = fold.units(name, *want.columns[name])[mine]
                            line[(want.start_ms[mine] - asked[1][0]) // step] = values
                        np.testing.assert_array_equal(asked[2]["n1", g, None, name], line, err_msg=f"{name} {step}")
    last = T0 + steps * BUCKET
    store.buckets.read_closing(index, last)
    store.rollups.roll_up()
    finish(store)
    assert_complete(store, T0 - 2 * CHUNK, last)
    store.buckets.read_closing(
        index, last + CHUNK
    )  # late rows of 5 minutes that are not over are counted with their end
    store.rollups.roll_up()
    finish(store)
    assert store.rollups.totals().samples == distinct_samples(store)
    for start in range(T0 - 20_000, last, 60_000):  # buckets out of rollups are those out of samples
        rolled = store.buckets.read(index, start)
        raw = store.buckets._bucket(
            index, start, BUCKET, {Scope.GPU: store.rows.fold(Scope.GPU, [(start, start + BUCKET)], BUCKET)}
        )
        assert rolled.gpu_rows.tolist() == raw.gpu_rows.tolist()
        assert set(rolled.gpu) == set(raw.gpu)
        for name, column in raw.gpu.items():
            np.testing.assert_array_equal(rolled.gpu[name], column)


@pytest.mark.parametrize("by_another", [False, True], ids=["here", "by another collector"])
def test_a_chart_shows_at_once_what_is_older_than_all_that_was_known(store: Store, by_another: bool) -> None:
    """For 10 s, the time of spooled samples was taken for one that has only rollups left."""
    rng = np.random.default_rng(5)
    index = index_of()
    store.entities.write(everything())
    store_batch(store, random_batch(rng, T0, T0 + BUCKET))
    store.buckets.read_closing(index, T0)
    store.rollups.roll_up()
    store.rows._parts_at = -PARTS_S
    assert (store.rows.oldest_ms("gpu_samples") or 0) >= T0  # known from here on
    late = random_batch(rng, T0 - 2 * CHUNK, T0, 1500)  # each GPU in each step, nearly
    if by_another:
        store.samples.write(late)
        marks = [
            store.dirty_ranges._new_range(Scope.GPU, low, low + CHUNK, None) for low in (T0 - 2 * CHUNK, T0 - CHUNK)
        ]
        store.dirty_ranges._insert(marks)
        store.dirty_ranges._ranges.clear()
        store.dirty_ranges.load()
    else:
        store_batch(store, late)
    targets = [(f"n{n}", g, None) for n in range(3) for g in range(GPUS)]
    _, _, shown = store.series.read(Scope.GPU, targets, ["power_w"], T0 - 2 * CHUNK, T0, 62)
    held = store.rows.fold(Scope.GPU, [(T0 - 2 * CHUNK, T0)], BUCKET, metrics=["power_w"])
    values = np.sort(fold.units("power_w", *held.columns["power_w"]))
    assert len(values)
    found = np.concatenate(list(shown.values()))
    np.testing.assert_array_equal(np.sort(found[~np.isnan(found)]), values[~np.isnan(values)])


class Cut(BaseException):
    """What no code catches: the process is gone."""


def ends_after(store: Store, number: int, work: Callable[[], None]) -> bool:
    """Whether the store's process ended: when so many of the work's inserts were durable, before the next one."""
    insert, left = store.clients.insert, [number]

    def counted(table: str, data: pa.Table, note: str = "") -> None:
        if not left[0]:
            raise Cut
        insert(table, data, note)
        left[0] -= 1

    store.clients.insert = counted
    try:
        work()
    except Cut:
        return True
    finally:
        store.clients.insert = insert
    return False


@pytest.mark.parametrize("began", range(3))  # the first three inserts are others in a store that was never rolled up
def test_a_crash_at_any_insert_leaves_no_hole(store: Store, store_url: str, databases: Databases, began: int) -> None:
    """The same work, its late part in two pieces, in one ten minutes after the other. Each time it ends three inserts
    later: before any, after the first, and so on."""
    index = index_of()
    store.entities.write(everything())
    number, ended = began, True
    while ended:
        rng = np.random.default_rng(number)
        over = T0 + (2 * number + 1) * CHUNK  # where 5 minutes end on the way
        first, last = over - BUCKET, over + 2 * BUCKET
        store.samples.write(random_batch(rng, first, last, 240))
        late = random_batch(rng, first, last - BUCKET, 20)

        def work(first: int = first, last: int = last, late: SampleBatch = late, store: Store = store) -> None:
            for start in range(first, last, BUCKET):
                store.buckets.read_closing(index, start)
                store.rollups.roll_up()
                if start == last - 2 * BUCKET:
                    store_batch(store, late)
            while store.rollups.roll_up_late(60):
                pass

        with pytest.MonkeyPatch.context() as patch:
            in_pieces(patch, 1900)
            ended = ends_after(store, number, work)
        store.close()
        with databases.opening(store_url.rpartition("=")[2]):
            store = Store.open(store_url, retention_days=3650)
        store_batch(store, late)  # the agent sends again what was not acknowledged
        finish(store)
        # The next bucket at once, or only one after the end of the 5 minutes, so that all are counted.
        for start in [last, over + CHUNK] if number % 2 == 0 else [over + CHUNK]:
            store.buckets.read_closing(index, start)
            store.rollups.roll_up()
            finish(store)
            assert_complete(store, first, start)
        assert store.rollups.sample_count() == distinct_samples(store), number
        number += 3
    assert number > 15, "each insert was cut once"
    store.close()


def test_a_resend_marks_its_entities_and_no_others(store: Store) -> None:
    index = index_of()
    store.entities.write(everything())
    early = samples(Scope.GPU, [(gpu_row(0, 0), T0 + 1000, {"power_w": 100.0})])
    store_batch(store, early)
    assert store.dirty_ranges.all() == [], "in time"
    store.buckets.read_closing(index, T0)
    store.rollups.roll_up()
    assert store.dirty_ranges.late_rows == 0
    store_batch(store, early)
    store_batch(store, samples(Scope.NODE, [(node_row(1), T0 - CHUNK, {"load1": 1.0})]))
    found = [
        (m.scope, m.from_ms, m.to_ms, m.entities.tolist()) for m in store.dirty_ranges.all() if m.entities is not None
    ]
    assert found == [
        (Scope.GPU, T0, T0 + CHUNK, [gpu_row(0, 0).entity_id]),
        (Scope.NODE, T0 - CHUNK, T0, [node_row(1).entity_id]),
    ]
    assert store.dirty_ranges.late_rows == 2
    assert store.dirty_ranges.lag(store.dirty_ranges.all()[0].at_ms + 500)[0] == 2


def test_very_many_late_entities_are_one_mark(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "NAMED_MAX", 5)
    index = index_of()
    store.entities.write(everything())
    store.buckets.read_closing(index, T0)
    store.rollups.roll_up()
    for slot in range(3):
        every = [(gpu_row(n, slot), T0 + 1000, {"power_w": 100.0 + slot}) for n in range(3)]
        store_batch(store, samples(Scope.GPU, every))
    found = [None if m.entities is None else len(m.entities) for m in store.dirty_ranges.all()]
    assert found == [3, None], "the third is covered by the second"
    finish(store)
    assert_complete(store, T0, T0 + BUCKET)


@pytest.mark.parametrize("found", ["at the start", "while it runs"])
def test_marks_that_are_damaged_hide_nothing_that_came_late(store: Store, store_url: str, found: str) -> None:
    store.entities.write(everything())
    store_batch(store, samples(Scope.GPU, [(gpu_row(0, 0), T0 + 1000, {"power_w": 100.0})]))
    store.buckets.read_closing(index_of(), T0)
    store.rollups.roll_up()
    store_batch(store, samples(Scope.GPU, [(gpu_row(0, 1), T0 + 2000, {"power_w": 200.0})]))
    (part,) = store.clients.rows(f"SELECT name, path FROM {store.clients.parts} WHERE table = 'rollup_marks'")
    with (Path(part["path"]) / "data.bin").open("r+b") as file:
        file.seek(30)
        file.write(b"damaged")
    if found == "while it runs":
        assert store.integrity is not None
        assert store.integrity._check("rollup_marks", part["name"])
        assert len(store.dirty_ranges.all()) == 1
    store.close()
    again = Store.open(store_url, retention_days=3650)
    assert again.integrity is not None
    assert [damage.table for damage in again.integrity.damages] == ["rollup_marks"]
    finish(again)
    assert_complete(again, T0, T0 + BUCKET)
    again.close()


def test_marks_are_kept_when_the_store_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of()
    store.entities.write(everything())
    store.buckets.read_closing(index, T0)
    store.rollups.roll_up()
    store_batch(store, samples(Scope.GPU, [(gpu_row(0, 0), T0 + 1000, {"power_w": 100.0})]))

    def full(*_: object) -> None:
        raise StoreError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(store.rollups, "_write", full)
        with pytest.raises(StoreError):
            store.rollups.roll_up_late(60)
        assert len(store.dirty_ranges.all()) == 1
        store.buckets.read_closing(index, T0 + BUCKET)
        with contextlib.suppress(StoreError):
            store.rollups.roll_up()
    store_batch(store, samples(Scope.GPU, [(gpu_row(0, 1), T0 + 12_000, {"power_w": 100.0})]))
    store.buckets.read_closing(index, T0 + 2 * BUCKET)
    store.rollups.roll_up()
    finish(store)
    assert_complete(store, T0, T0 + 3 * BUCKET)


def test_buckets_left_out_of_five_minutes_that_are_open_are_counted(store: Store) -> None:
    index = index_of()
    store.entities.write(everything())
    begin = marks.chunk_of(T0)
    for n in range(3):
        store_batch(store, samples(Scope.GPU, [(gpu_row(0, 0), begin + n * BUCKET, {"power_w": 100.0})]))
    store.buckets.read_closing(index, begin + 2 * BUCKET)
    store.rollups.roll_up()
    assert store.rollups.totals().samples == 3
    finish(store)
    assert store.rollups.totals().samples == 3
    store.buckets.read_closing(index, begin + 3 * BUCKET)
    store.rollups.roll_up()
    assert store.rollups.totals().samples == 3


def test_an_old_answer_about_the_state_undoes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server the state is read again for each chart: from a replica that lags, or begun before a write."""
    index = index_of()
    store.entities.write(everything())
    rows_of = store.clients.rows
    said: list[list[dict[str, int]]] = []

    def answer(sql: str) -> list[dict[str, int]]:
        if "FROM rollup_state" in sql:
            said.append(rows_of(sql))
            return said[0]
        return rows_of(sql)

    store.buckets.read_closing(index, T0)
    store.rollups.roll_up()
    with monkeypatch.context() as patched:
        patched.setattr(store.clients, "rows", answer)
        store.dirty_ranges.progress.read()
        store_batch(store, samples(Scope.GPU, [(gpu_row(0, 0), T0 + BUCKET, {"power_w": 100.0})]))
        store.buckets.read_closing(index, T0 + BUCKET)
        store.rollups.roll_up()
        store.dirty_ranges.progress.read()
    store.buckets.read_closing(index, T0 + 2 * BUCKET)
    store.rollups.roll_up()
    assert said[0] != said[1]
    assert store.dirty_ranges.all() == []
    assert store.rollups.totals().samples == 1


def test_after_a_start_with_a_clock_that_went_back_the_newer_one_counts(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.entities.write(everything())
    with monkeypatch.context() as patch:
        ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + 10**15, monotonic=time.monotonic)
        patch.setattr("drover_collector.store.rollups.rollups.time", ahead)
        store.buckets.read_closing(index_of(), T0)
        store.rollups.roll_up()
        for second in (3, 5):
            store_batch(store, samples(Scope.GPU, [(gpu_row(0, 0), T0 + second * 1000, {"power_w": 300.0 + second})]))
            finish(store)
    store.close()
    again = Store.open(store_url, retention_days=3650)
    store_batch(again, samples(Scope.GPU, [(gpu_row(0, 0), T0 + 1000, {"power_w": 100.0})]))
    finish(again)
    assert_same(again.rows.fold(Scope.GPU, [(T0, T0 + BUCKET)], BUCKET, level="10s"),
                again.rows.fold(Scope.GPU, [(T0, T0 + BUCKET)], BUCKET))  # fmt: skip
    again.close()


def test_rollups_answer_when_the_samples_are_gone(store: Store) -> None:
    """The step becomes what is left, and a late row does not hide what was rolled up with it."""
    index = index_of()
    store.entities.write(everything())
    began = T0 - 8 * 3_600_000
    times = range(began, began + 2 * CHUNK, 1000)
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), t, {"power_w": 100.0 + t // 1000 % 7}) for t in times]))
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 50.0})]))
    store.buckets.read_closing(index, T0)
    store.rollups.roll_up()
    finish(store)
    ask = (Scope.GPU, [("n0", 0, None)], ["power_w"], began, began + 2 * CHUNK)
    fine = store.series.read(*ask, 1000)
    whole = store.series.read(*ask, 100)
    assert (fine[0], whole[0]) == (1000, 10_000)
    oldest = store.clients.rows("SELECT min(_partition_id) AS id FROM gpu_samples")[0]["id"]
    store.clients.command(f"ALTER TABLE gpu_samples DROP PARTITION ID '{oldest}'")
    store.rows._parts_at = -1e9  # as after some seconds
    again = store.series.read(*ask, 1000)
    assert again[0] == 10_000
    np.testing.assert_array_equal(again[2]["n0", 0, None, "power_w"], whole[2]["n0", 0, None, "power_w"])
    assert store.rollups.totals().samples == 1


def test_a_fresh_mark_waits_for_more_of_its_kind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of late work reads 5 minutes, so what comes in drops is worked on together."""
    store.entities.write(everything())
    store_batch(store, random_batch(np.random.default_rng(1), T0, T0 + BUCKET))
    store.buckets.read_closing(index_of(), T0)
    store.rollups.roll_up()
    finish(store)
    store_batch(store, random_batch(np.random.default_rng(2), T0, T0 + BUCKET))
    (mark,) = store.dirty_ranges.all()
    store.dirty_ranges.settle_ms = 60_000
    for age_ms, worked in ((59_000, False), (-1, True)):  # one of the future is of a clock that was set back
        monkeypatch.setattr("time.time_ns", lambda at_ms=mark.at_ms + age_ms: at_ms * 1_000_000)
        while store.rollups.roll_up_late(60):
            pass
        assert (store.dirty_ranges.all() == []) is worked
    assert_complete(store, T0, T0 + BUCKET)
