"""The buckets of before a start, read together: each the same as when read alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.store import Store, entity_id
from drover_collector.store.records import EntityRow, storage_dtype
from drover_collector.store.samples.buckets import packed
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.fold import units
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Holding
from testbed.collected import gpu_key, small_index, write_entities, write_ticks

T0 = 1_800_000_000_000


def same(one: Bucket, other: Bucket) -> None:
    for name in ("gpu", "node", "link"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert sorted(mine) == sorted(theirs)
        for metric in mine:
            np.testing.assert_array_equal(mine[metric], theirs[metric])
    np.testing.assert_array_equal(one.gpu_rows, other.gpu_rows)
    np.testing.assert_array_equal(one.node_rows, other.node_rows)
    assert [who(one, g) for g in range(len(one.jobs))] == [who(other, g) for g in range(len(other.jobs))]
    assert (one.start_ms, one.length_ms) == (other.start_ms, other.length_ms)


def who(bucket: Bucket, gpu: int) -> str:
    return "" if bucket.jobs[gpu] < 0 else bucket.job_names[bucket.jobs[gpu]]


@pytest.mark.parametrize(
    "metric", ["gpu_util_ratio", "energy_j", "gpu_temp_c", "clock_offset_s", "mfu_ratio", "link_up"]
)
@pytest.mark.parametrize("kind", ["alike", "small", "extreme", "absent"])
def test_a_column_is_what_it_was_however_small_it_is_held(metric: str, kind: str) -> None:
    dtype = storage_dtype(metric)
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-1e30, 1e30)
    values = {"alike": [7] * 9, "small": range(9), "extreme": [low, high, 1] * 3, "absent": [0, high, 0] * 3}[kind]
    stored, present = np.array(values, dtype), np.ones(9, np.bool_)
    present[::3] = kind != "absent"
    np.testing.assert_array_equal(packed(metric, stored, present)(), units(metric, stored, present))


def test_columns_that_are_alike_all_over_the_fleet_take_no_room() -> None:
    held = packed("energy_j", np.zeros(100_000, storage_dtype("energy_j")), np.ones(100_000, np.bool_))
    assert isinstance(held, partial)
    assert held.args[1].base is not None
    assert held.args[1].base.nbytes < 16


def test_what_rows_say_alike_is_one_text() -> None:
    entities = [
        EntityRow(n, Scope.GPU, f"SN{n}", "".join(("n", "0")), n, serial=f"SN{n}", pci="", model="".join(("H", "100")))
        for n in range(2)
    ]
    one, other = EntityRegistry(entities).rows()
    assert one.model is other.model
    assert one.node is other.node
    assert one.serial is one.key
    assert [one, other] == entities


def test_buckets_read_together_are_those_read_alone(store: Store) -> None:
    """Rolled up or not, marked as late, silent, with a GPU that moves and jobs that come and go."""
    index = small_index()
    write_entities(store, index)
    write_ticks(store, index, T0, T0 + 4 * BUCKET_MS, changed={("n0", 1): {"power_w": float("nan")}})
    write_ticks(store, index, T0 + 4 * BUCKET_MS, T0 + 6 * BUCKET_MS, silent=("n1", "n2"))
    moved = gpu_key("n0", 0)
    place = EntityRow(
        entity_id(Scope.GPU, moved), Scope.GPU, moved, "n3", 1, uuid=f"GPU-{moved}", serial=moved,
        first_ms=T0 + 5 * BUCKET_MS,
    )  # fmt: skip
    store.entities.write([place])
    store.jobs.write_holdings(
        [
            Holding("n0", 0, "a", T0 - 1000), Holding("n0", 1, "b", T0 - 1000), Holding("n0", 1, None, T0 + 25_000),
            Holding("n1", 0, "c", T0 + 15_000), Holding("n1", 0, "d", T0 + 35_000), Holding("stranger", 0, "e", T0),
            Holding("n2", 0, "f", T0 + 90_000),
        ]
    )  # fmt: skip
    for n in range(4):
        store.buckets.read_closing(index, T0 + n * BUCKET_MS)
        store.rollups.roll_up()
    changed = {("n2", 1): {"gpu_temp_c": 90.0}}
    write_ticks(store, index, T0 + 2 * BUCKET_MS, T0 + 2 * BUCKET_MS + 1000, changed=changed)
    found = store.buckets.read_past(index, T0 - BUCKET_MS, 9)
    assert [who(bucket, index.gpu("n1", 0) or 0) for bucket in found] == ["", "", "c", "c", "d", "d", "d", "d", "d"]
    assert [bool(bucket.gpu_rows.any()) for bucket in found] == [False, *[True] * 6, False, False]
    holders = store.buckets.past_jobs(index, T0 - BUCKET_MS, 9)
    assert [[who(b, g) for g in range(8)] for b in holders] == [[who(b, g) for g in range(8)] for b in found]
    without = store.buckets.read_past(index, T0 - BUCKET_MS, 9, values=False)
    assert [(b.gpu_rows.tolist(), b.node_rows.tolist(), len(b.gpu)) for b in without] == [
        (b.gpu_rows.tolist(), b.node_rows.tolist(), 0) for b in found
    ]
    for n, bucket in enumerate(found):
        same(bucket, store.buckets.read(index, T0 + (n - 1) * BUCKET_MS))


def test_of_who_held_a_gpu_long_ago_only_the_last_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a large job has begun, the history of all its GPUs is asked: all there ever was fills the memory."""
    index = small_index()
    past_jobs = [Holding("n0", 0, f"old{n}", T0 - 1_000_000 + n) for n in range(100)]
    store.jobs.write_holdings([*past_jobs, Holding("n0", 0, "a", T0 + 15_000), Holding("n0", 0, "b", T0 + 90_000)])
    arrow, rows = store.clients.arrow, list[int]()

    def counted(query: str, *values: Any) -> pa.Table:
        found = arrow(query, *values)
        if "hold" in query:  # the store's own looks at itself ask too
            rows.append(found.num_rows)
        return found

    monkeypatch.setattr(store.clients, "arrow", counted)
    found = store.buckets.past_jobs(index, T0, 3)
    assert [who(bucket, index.gpu("n0", 0) or 0) for bucket in found] == ["old99", "a", "a"]
    assert sum(rows) == 3  # the newest holder, the one before and the one since


def test_an_empty_store_has_silent_buckets(store: Store) -> None:
    found = store.buckets.read_past(small_index(), T0, 2)
    assert [(b.start_ms, int(b.gpu_rows.sum()), b.job_names) for b in found] == [(T0, 0, ()), (T0 + BUCKET_MS, 0, ())]
