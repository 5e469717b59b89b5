"""Newest values out of what was written last say what the store says, and nothing where that is not sure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.store import SampleBatch, Store, StoreError
from drover_collector.store.records import storage_dtype
from drover_collector.store.samples import recent
from drover_collector.store.samples.fold import Folded
from drover_collector.store.samples.packed import Packed
from drover_collector.store.samples.recent import Recent
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope
from drover_core.model.events import Absence
from testbed.fleets import GPUS, T0, everything, gpu_row, index_of, node_row, random_values, samples

METRICS = ("power_w", "gpu_temp_c", "sm_active_ratio")
OTHER = gpu_row(0, 1, "S-new", T0 + 40_000)  # stands where another stood


def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Statements about samples."""
    arrow, found = store.clients.arrow, []

    def note(sql: str, parameters: object = None) -> pa.Table:
        if "_samples" in sql:
            found.append(sql)
        return arrow(sql, parameters)  # type: ignore[arg-type]  # as it is called

    monkeypatch.setattr(store.clients, "arrow", note)
    return found


def of_the_store(store: Store, ask: Callable[[], np.ndarray]) -> np.ndarray:
    """The same answer by statements."""
    held, store.samples._recent = store.samples._recent, Recent()
    try:
        return ask()
    finally:
        store.samples._recent = held


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_says_what_the_store_says(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each insert: late rows, resends, gaps, a row in two parts, rows of the future, a GPU that was swapped."""
    rng = np.random.default_rng(seed)
    rows = [gpu_row(n, g) for n in range(3) for g in range(GPUS)] + [OTHER]
    store.entities.write([*everything(), OTHER])
    ids = np.array([row.entity_id for row in rows], np.uint64)
    said = asked(store, monkeypatch)
    every = [(e, t) for e in range(len(rows)) for t in range(-20, 90) if rng.random() < 0.3]
    order = rng.permutation(len(every)) if seed % 2 else np.argsort([t + rng.integers(0, 9) for _, t in every])
    picked = np.array(every)[order]
    whole = {name: random_values(rng, BY_NAME[name], len(picked)) for name in METRICS}
    for part in np.array_split(np.arange(len(picked)), 4):
        again = np.concatenate([part, rng.choice(part[0] + 1, 9)])  # some were there before
        for names in (METRICS[:2], METRICS[2:]) if seed % 3 else (METRICS,):
            values = {name: whole[name][again] for name in names}
            store.samples.write(
                SampleBatch.of_values(Scope.GPU, ids[picked[again, 0]], T0 + 1000 * picked[again, 1], values)
            )
        if rng.random() < 0.5:
            store.absences.write([Absence("n0", 0, "power_w", "lost", T0 + 1000 * int(rng.integers(0, 60)), None)])
        for now_s in (5, 41, 80):
            for metric in METRICS[::2]:

                def ask(metric: str = metric, now_ms: int = T0 + now_s * 1000) -> np.ndarray:
                    return store.samples.latest_gpu(index_of(), metric, now_ms)

                said.clear()
                held = ask()
                assert not said
                assert held.tobytes() == of_the_store(store, ask).tobytes()
                assert said


def test_what_was_there_before_a_start_is_asked_for(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not, once the newest seconds came after it."""
    store.entities.write(everything())
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, g), T0, {"power_w": 300.0}) for g in range(GPUS)]))
    store.close()
    store = Store.open(store_url, retention_days=3650)
    said = asked(store, monkeypatch)
    assert store.samples.latest_gpu(index_of(1), "power_w", T0 + 1000).tolist() == [300.0] * GPUS
    assert len(said) == 1
    later = [(gpu_row(0, g), T0 + 20_000, {"power_w": 310.0}) for g in range(GPUS - 1)]
    store.samples.write(samples(Scope.GPU, later))
    said.clear()
    assert store.samples.latest_gpu(index_of(1), "power_w", T0 + 21_000).tolist() == [310.0] * (GPUS - 1) + [300.0]
    assert len(said) == 1  # of the one that was silent since
    store.close()


@pytest.mark.parametrize("written", [False, True])
def test_after_an_insert_that_failed_the_store_is_asked(
    store: Store, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have written all."""
    store.entities.write(everything())
    row = gpu_row(0, 0)
    insert = store.clients.insert

    def failing(table: str, data: pa.Table, note: str = "") -> None:
        if written:
            insert(table, data, note)
        raise StoreError("no room")

    store.samples.write(samples(Scope.GPU, [(row, T0, {"power_w": 300.0})]))
    with monkeypatch.context() as broken:
        broken.setattr(store.clients, "insert", failing)
        with pytest.raises(StoreError):
            store.samples.write(samples(Scope.GPU, [(row, T0 + 1000, {"power_w": 310.0})]))
    assert store.samples.latest_gpu(index_of(), "power_w", T0 + 2000)[0] == (310.0 if written else 300.0)


def test_before_it_is_begun_nothing_is_held() -> None:
    """As with a server, into which others write too."""
    found = Recent()
    found.add(Scope.GPU, rows_of(T0))
    assert found.newest("power_w", np.array([1], np.uint64), (T0 - 1, T0 + 1)) is None


def rows_of(*moments: int) -> Packed:
    ts = np.array(moments)
    batch = SampleBatch.of_values(Scope.GPU, np.full(len(ts), 1, np.uint64), ts, {})
    return Packed(batch, np.zeros(len(ts), np.uint16))


@pytest.mark.parametrize("metric", [metric.name for metric in of_scope(Scope.GPU)])
@pytest.mark.parametrize("spread", [0, 1, 1 << 32, 1 << 62])
def test_packed_rows_have_what_was_packed(metric: str, spread: int) -> None:
    """Of each storage type: all alike, near each other, far apart; all present, some, none."""
    rng = np.random.default_rng(spread % 97)
    dtype = storage_dtype(metric)
    if dtype.kind == "f":
        stored = (rng.random(50) * spread).astype(dtype)
    else:
        most = np.iinfo(dtype).max
        low = int(most) - min(spread, int(most))
        stored = np.array([low, most, *rng.integers(low, most, 48, dtype, endpoint=True)], dtype)
    for mask in (np.ones(50, np.bool_), rng.random(50) < 0.5, np.zeros(50, np.bool_)):
        batch = SampleBatch(Scope.GPU, np.arange(50, dtype=np.uint64), np.arange(50), {metric: (stored, mask)})
        packed = Packed(batch, mask.astype(np.uint16))
        assert (metric in packed.names) == mask.any()
        if mask.any():
            got, there = packed.get(metric)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got[mask], stored[mask])
            np.testing.assert_array_equal(mask if there is None else there, mask)
        rest = batch.entity_id.nbytes + batch.ts_ms.nbytes + 2 * 50
        alike, near = spread == 0, dtype.itemsize == 8 and dtype.kind != "f" and spread == 1
        each = 0 if alike else 4 if near else dtype.itemsize
        if mask.all():
            assert packed.nbytes - rest == (each * 50 or dtype.itemsize)


def test_an_absent_value_does_not_widen_a_packed_column() -> None:
    name, dtype = "throttle_power_us", storage_dtype("throttle_power_us")
    mask = np.ones(100, np.bool_)
    mask[7] = False
    for stored, each in ((np.arange(100) + 10**12, 4), (np.full(100, 10**12), 0)):
        values = stored.astype(dtype)
        values[7] = 0  # as SampleBatch.of_values fills it
        batch = SampleBatch(Scope.GPU, np.arange(100, dtype=np.uint64), np.arange(100), {name: (values, mask)})
        packed = Packed(batch, mask.astype(np.uint16))
        rest = batch.entity_id.nbytes + batch.ts_ms.nbytes + 2 * 100 + mask.nbytes
        assert packed.nbytes - rest == (each * 100 or dtype.itemsize)
        got, there = packed.get(name)
        np.testing.assert_array_equal(got[mask], values[mask])
        np.testing.assert_array_equal(there, mask)


def test_what_is_held_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes and in time; what went, and what is from before it, is not answered for."""
    one, now_s = np.array([1], np.uint64), [0.0]
    found = Recent(lambda: now_s[0])
    found.begin({})

    def first(scope: Scope = Scope.GPU) -> int:
        """From which second on it answers."""
        seconds = [s for s in range(40) if found.rows(scope, (T0 + 1000 * s, T0 + 99_000)) is not None]
        assert seconds == list(range(seconds[0], 40))
        return seconds[0]

    assert first() == 0
    for second in range(20):
        now_s[0] = second
        found.add(Scope.GPU, rows_of(T0 + 1000 * second))
    found.read(T0 + 40_000)
    assert first() == 0
    now_s[0] = recent.HELD_S + 9.5
    found.add(Scope.GPU, rows_of(T0 + 20_000))
    assert first() == 10
    each = recent.TABLE_BYTES + 100
    monkeypatch.setattr(recent, "HELD_BYTES", 3 * each)
    found.add(Scope.GPU, rows_of(T0 + 5_000))  # a late one; the newest three stay
    assert first() == 19
    monkeypatch.setattr(recent, "OPEN_BYTES", 6 * each)
    for second in range(41, 46):  # of a bucket that is not read yet
        found.add(Scope.GPU, rows_of(T0 + 1000 * second))
    assert first() == 21
    assert len(found.rows(Scope.GPU, (T0 + 41_000, T0 + 50_000)) or ()) == 5
    assert found.newest("power_w", one, (T0 + 41_000, T0 + 50_000)) is None  # so many that a statement costs less
    found.add(Scope.NODE, rows_of(*[T0 + 30_000] * 10_000))  # more than all that may be held
    assert first(Scope.NODE) == 31
    found.read(T0 + 50_000)
    assert found.rows(Scope.GPU, (T0 + 42_000, T0 + 50_000)) is None


def test_a_clock_far_ahead_does_not_end_it() -> None:
    """Its values are not returned for when its time comes; all other times are."""
    now_s = [0.0]
    found = Recent(lambda: now_s[0])
    found.begin({})
    found.read(T0)
    hour = T0 + 3_600_000
    found.add(Scope.GPU, rows_of(T0 + 1000, hour, hour + 5_000))
    found.add(Scope.GPU, rows_of(T0 + 2000))
    now_s[0] = 2 * recent.HELD_S
    found.read(T0 + 140_000)
    found.add(Scope.GPU, rows_of(T0 + 150_000))
    assert found.rows(Scope.GPU, (T0 + 2000, T0 + 10_000)) is None
    assert len(found.rows(Scope.GPU, (T0 + 3000, T0 + 160_000)) or ()) == 1
    assert len(found.rows(Scope.GPU, (hour - 10_000, hour)) or ()) == 0
    for start in (hour - 9_999, hour, hour + 5_000):
        assert found.rows(Scope.GPU, (start, start + 10_000)) is None
    assert found.rows(Scope.GPU, (hour + 5_001, hour + 10_000)) == []


@pytest.mark.parametrize("seed", [1, 4])  # with inserts of both scopes that fail before and after they are written
def test_buckets_that_close_are_what_the_store_has(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After inserts in any order: late rows, resends, rows in two parts, empty buckets, an insert that failed, a clock
    far ahead. It takes no statement but after what failed."""
    rng = np.random.default_rng(seed)
    store.entities.write(everything())
    targets = {
        Scope.GPU: [gpu_row(n, g) for n in range(3) for g in range(GPUS)],
        Scope.NODE: [node_row(n) for n in range(3)],
    }
    names = {Scope.GPU: METRICS, Scope.NODE: ("cpu_util_ratio", "load1", "oom_kills")}
    whole = {name: random_values(rng, BY_NAME[name], 997) for held in names.values() for name in held}
    said, unsure, folded = asked(store, monkeypatch), False, 0
    insert = store.clients.insert
    for bucket in range(8):
        start = T0 + bucket * BUCKET_MS
        before, unsure = unsure, False
        for _ in range(0 if bucket == 5 else int(rng.integers(1, 7))):
            scope = Scope.NODE if rng.random() < 0.3 else Scope.GPU
            entity = rng.integers(0, len(targets[scope]), 40)
            second = rng.integers(-12, 14, 40)
            if bucket:
                second[rng.random(40) < 0.02] = 3_600
            ids = np.array([row.entity_id for row in targets[scope]], np.uint64)[entity]
            ts = start + 1000 * second
            sent = names[scope][: int(rng.integers(1, 4))]
            values = {name: whole[name][(entity * 31 + ts // 500) % 997] for name in sent}  # always the same
            with monkeypatch.context() as broken:
                if rng.random() < 0.05:
                    unsure, written = True, rng.random() < 0.5

                    def failing(table: str, data: pa.Table, note: str = "", written: bool = written) -> None:
                        if written:
                            insert(table, data, note)
                        raise StoreError("no room")

                    broken.setattr(store.clients, "insert", failing)
                with contextlib.suppress(StoreError):
                    store.samples.write(SampleBatch.of_values(scope, ids, ts, values))
        said.clear()
        held = store.rollups.closing_folds(start)
        assert unsure or before or not said  # one that failed may hold rows of the next bucket, too
        folded += not said
        for scope, found in held.items():
            want = store.rows.fold(scope, [(start, start + BUCKET_MS)], BUCKET_MS)
            assert found.rows.sum() == want.rows.sum()
            same(found, want)
    assert folded >= 3


def same(found: Folded, want: Folded) -> None:
    """Also in the order of rows: both are by entity and time."""
    for name in ("ids", "start_ms", "rows", "present"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)
    assert set(found.columns) == set(want.columns)
    for name, (stored, mask) in want.columns.items():
        np.testing.assert_array_equal(found.columns[name][1], mask, err_msg=name)
        np.testing.assert_array_equal(found.columns[name][0][mask], stored[mask], err_msg=name)
