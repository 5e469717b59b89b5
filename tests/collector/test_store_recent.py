"""Newest values out of what was written last say what the store says, and nothing where that is not sure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from drover_collector.store import SampleBatch, Store, StoreError, recent
from drover_collector.store.recent import Recent
from drover_proto.catalog import BY_NAME, Scope
from drover_proto.events import Absence
from testbed.fleets import GPUS, T0, everything, gpu_row, index_of, random_values, samples

METRICS = ("power_w", "gpu_temp_c", "sm_active_ratio")
OTHER = gpu_row(0, 1, "S-new", T0 + 40_000)  # stands where another stood


def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Statements about samples."""
    arrow, found = store._clients.arrow, []

    def note(sql: str, parameters: object = None) -> pa.Table:
        if "gpu_samples" in sql:
            found.append(sql)
        return arrow(sql, parameters)  # type: ignore[arg-type]  # as it is called

    monkeypatch.setattr(store._clients, "arrow", note)
    return found


def of_the_store(store: Store, ask: Callable[[], np.ndarray]) -> np.ndarray:
    """The same answer by statements."""
    held, store._recent = store._recent, Recent()
    try:
        return ask()
    finally:
        store._recent = held


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_says_what_the_store_says(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each insert: late rows, resends, gaps, a row in two parts, rows of the future, a GPU that was swapped."""
    rng = np.random.default_rng(seed)
    rows = [gpu_row(n, g) for n in range(3) for g in range(GPUS)] + [OTHER]
    store.write_entities([*everything(), OTHER])
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
            store.write_samples(
                SampleBatch.of_values(Scope.GPU, ids[picked[again, 0]], T0 + 1000 * picked[again, 1], values)
            )
        if rng.random() < 0.5:
            store.write_absences([Absence("n0", 0, "power_w", "lost", T0 + 1000 * int(rng.integers(0, 60)), None)])
        for now_s in (5, 41, 80):
            for metric in METRICS[::2]:

                def ask(metric: str = metric, now_ms: int = T0 + now_s * 1000) -> np.ndarray:
                    return store.latest_gpu(index_of(), metric, now_ms)

                said.clear()
                held = ask()
                assert not said
                assert held.tobytes() == of_the_store(store, ask).tobytes()
                assert said


def test_what_was_there_before_a_start_is_asked_for(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not, once the newest seconds came after it."""
    store.write_entities(everything())
    store.write_samples(samples(Scope.GPU, [(gpu_row(0, g), T0, {"power_w": 300.0}) for g in range(GPUS)]))
    store.close()
    store = Store.open(store_url, retention_days=3650)
    said = asked(store, monkeypatch)
    assert store.latest_gpu(index_of(1), "power_w", T0 + 1000).tolist() == [300.0] * GPUS
    assert len(said) == 1
    later = [(gpu_row(0, g), T0 + 20_000, {"power_w": 310.0}) for g in range(GPUS - 1)]
    store.write_samples(samples(Scope.GPU, later))
    said.clear()
    assert store.latest_gpu(index_of(1), "power_w", T0 + 21_000).tolist() == [310.0] * (GPUS - 1) + [300.0]
    assert len(said) == 1  # of the one that was silent since
    store.close()


@pytest.mark.parametrize("written", [False, True])
def test_after_an_insert_that_failed_the_store_is_asked(
    store: Store, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have written all."""
    store.write_entities(everything())
    row = gpu_row(0, 0)
    insert = store._clients.insert

    def failing(table: str, data: pa.Table, note: str = "") -> None:
        if written:
            insert(table, data, note)
        raise StoreError("no room")

    store.write_samples(samples(Scope.GPU, [(row, T0, {"power_w": 300.0})]))
    with monkeypatch.context() as broken:
        broken.setattr(store._clients, "insert", failing)
        with pytest.raises(StoreError):
            store.write_samples(samples(Scope.GPU, [(row, T0 + 1000, {"power_w": 310.0})]))
    assert store.latest_gpu(index_of(), "power_w", T0 + 2000)[0] == (310.0 if written else 300.0)


def test_before_it_is_begun_nothing_is_held() -> None:
    """As with a server, into which others write too."""
    found = Recent()
    found.add(table_of(T0), T0)
    assert found.newest("power_w", np.array([1], np.uint64), (T0 - 1, T0 + 1)) is None


def table_of(*moments: int) -> pa.Table:
    ts = pa.array(moments, pa.timestamp("ms", "UTC"))
    return pa.table({"entity_id": pa.array([1] * len(moments), pa.uint64()), "ts": ts})


def test_what_is_held_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes and in time; what went, and what is from before it, is not answered for."""
    one, now_s = np.array([1], np.uint64), [0.0]
    found = Recent(lambda: now_s[0])
    found.begin(0)

    def first() -> int:
        """From which second on it answers."""
        return next(s for s in range(40) if found.newest("power_w", one, (T0 + 1000 * s, T0 + 99_000)) is not None)

    assert first() == 0
    for second in range(20):
        now_s[0] = second
        found.add(table_of(T0 + 1000 * second), T0 + 1000 * second)
    assert first() == 0
    now_s[0] = recent.HELD_S + 9.5
    found.add(table_of(T0 + 20_000), T0 + 20_000)
    assert first() == 10
    monkeypatch.setattr(recent, "HELD_BYTES", 3 * (recent.TABLE_BYTES + 100))
    found.add(table_of(T0 + 5_000), T0 + 5_000)  # a late one; the newest three stay
    assert first() == 19
    found.add(table_of(*[T0 + 30_000] * 10_000), T0 + 30_000)  # more than all that may be held
    assert first() == 31
