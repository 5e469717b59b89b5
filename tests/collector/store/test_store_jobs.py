"""Jobs and workloads in the store, and values at a time laid out by the fleet."""

from __future__ import annotations

import numpy as np

from drover_collector.store import EntityRow, JobSpan, SampleBatch, Store, WorkloadRow, entity_id
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Holding
from testbed.collected import small_index, write_entities, write_ticks

T0 = 1_800_000_000_000
MINUTE = 60_000


def test_jobs_that_ended_are_those_that_no_gpu_holds_any_more(store: Store) -> None:
    holdings = [
        Holding("n0", 0, "done", T0), Holding("n0", 1, "done", T0 + 10), Holding("n1", 0, "half", T0),
        Holding("n1", 1, "half", T0), Holding("n2", 0, "runs", T0 + 5),
        Holding("n0", 0, None, T0 + MINUTE), Holding("n0", 1, "next", T0 + 2 * MINUTE), Holding("n1", 0, None, T0 + 70),
    ]  # fmt: skip
    store.jobs.write_holdings(holdings)
    store.jobs.write_holdings(holdings[:2])  # sent again after an agent's restart
    assert store.jobs.ended(T0, T0 + 3 * MINUTE) == [JobSpan("done", T0, T0 + 2 * MINUTE, 2, 1)]
    assert store.jobs.ended(T0 + 3 * MINUTE, T0 + 4 * MINUTE) == [], "it ended before"
    assert store.jobs.started(["half", "runs", "no such"], T0 + MINUTE) == {"half": T0, "runs": T0 + 5}
    assert store.jobs.started([], T0) == {}
    assert store.jobs.members("done") == [("n0", 0), ("n0", 1)]
    assert store.jobs.members("it's no job") == []


def test_a_name_like_sql_is_a_name_in_a_question_with_a_deadline(store: Store) -> None:
    names = ["a SETTINGS b", "it's \\' SETTINGS max_threads = 1"]
    store.jobs.write_holdings([Holding("n0", gpu, name, T0) for gpu, name in enumerate(names)])
    with store.limited(60):
        assert store.jobs.started(names, T0 + MINUTE) == dict.fromkeys(names, T0)
        assert store.samples.latest_values("n0", T0) == {}  # and one with settings of its own
        assert store.buckets.values_at(small_index(), Scope.GPU, T0, 10_000, ["power_w"]) == {}


def test_a_workload_has_its_newest_values(store: Store) -> None:
    keys = ["n0/pretrain", "n1/llm"]
    store.entities.write(
        [
            EntityRow(entity_id(Scope.WORKLOAD, key), Scope.WORKLOAD, key, key[:2], None, link=key.partition("/")[2])
            for key in keys
        ]
    )
    ids = np.array([entity_id(Scope.WORKLOAD, key) for key in keys], np.uint64)
    nan = np.nan
    for at, steps, tokens in ((T0, [2.0, nan], [nan, 900.0]), (T0 + 1000, [3.0, nan], [nan, nan])):
        values = {"step_time_s": np.array(steps), "tokens_per_s": np.array(tokens)}
        store.samples.write(SampleBatch.of_values(Scope.WORKLOAD, ids, np.full(2, at), values))
    assert store.samples.workloads(T0 + 5000, MINUTE) == [
        WorkloadRow("n0", "pretrain", T0 + 1000, {"step_time_s": 3.0}),
        WorkloadRow("n1", "llm", T0 + 1000, {"tokens_per_s": 900.0}),
    ]
    assert store.samples.workloads(T0 + 10 * MINUTE, MINUTE) == []


def test_values_of_a_moment_are_laid_out_by_the_fleet(store: Store) -> None:
    index = small_index()
    write_entities(store, index)
    write_ticks(store, index, T0, T0 + 30_000, silent=["n1"], changed={("n2", 1): {"power_w": np.nan}})
    found = store.buckets.values_at(index, Scope.GPU, T0 // MINUTE * MINUTE, MINUTE, ["power_w", "fp64_active_ratio"])
    nan = np.nan
    np.testing.assert_array_equal(found["power_w"], [600, 600, nan, nan, 600, nan, 600, 600])
    assert "fp64_active_ratio" not in found, "nobody reported it"
    assert store.buckets.values_at(index, Scope.GPU, T0 + 10 * MINUTE, MINUTE, ["power_w"]) == {}
