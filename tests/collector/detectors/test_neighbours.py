"""Ids of GPUs: those of a rack lie side by side, and a card keeps its own wherever it goes (decision 29)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.fleet.index import RACK_NODES, FleetIndex
from drover_collector.store import Store, entity_id
from drover_collector.store.records import placed_id
from drover_collector.store.samples.rows import id_ranges
from drover_core.metrics.catalog import Scope
from drover_core.model.fleet import FleetSpec, NodeSpec
from testbed.fleets import T0, batch, block, gpu_key, gpu_row, hello, index_of, samples
from testbed.ingest import LIVE, Collector
from testbed.loop import in_loop
from testbed.waiting import until

KEY = gpu_key(0, 0)
HASH = entity_id(Scope.GPU, KEY)
PLACE = ("n0", 0, None)


def fleet(*racks: tuple[str, int]) -> FleetIndex:
    """Racks of so many nodes, named a, b, c... with 8 GPUs."""
    nodes = (f"{rack}{n}" for rack, count in racks for n in range(count))
    names = (rack for rack, count in racks for _ in range(count))
    return FleetIndex(FleetSpec(tuple(NodeSpec(n, r, "", "", "", 8, ()) for n, r in zip(nodes, names, strict=True))))


def test_gpus_of_a_rack_lie_side_by_side_in_the_store(store: Store) -> None:
    index = fleet(*((f"rack{r}-", 9) for r in range(200)))
    rack = index.rack[index.gpu_node]
    names = [index.member(g) for g in range(index.gpu_count)]
    ids = np.array([store.entities.gpu_id(f"{n}/{g}", n, index.near(n)) for n, g in names], np.uint64)
    assert len(np.unique(ids)) == len(ids)
    for bits in (14, 22):  # a bucket's and an hour's milliseconds leave room for a key of one sort
        assert len(np.unique(ids >> np.uint64(bits))) == len(ids)
    order = np.argsort(ids)
    runs = 1 + np.count_nonzero(np.diff(rack[order]))
    assert runs <= 1.25 * len(index.racks), "but for racks whose hashes are alike"
    assert 1 + np.count_nonzero(np.diff(index.gpu_node[order])) <= 1.1 * index.node_count


def test_a_neighbourhood_is_a_rack_that_can_be_one() -> None:
    index = fleet(("a", 2), ("", 2), ("b", RACK_NODES), ("c", RACK_NODES + 1))
    assert [index.near(n) for n in ("a0", "a1", "0", "1")] == ["a", "a", "0", "1"]
    assert index.near("b3") == "b"
    assert index.near("c3") == "c3"
    assert index.near("nobody") == "nobody"


def test_a_card_keeps_its_id_when_it_moves_and_after_a_restart(store_url: str) -> None:
    store = Store.open(store_url, retention_days=3650)
    mine = store.entities.gpu_id(KEY, "n0", "r1")
    assert mine == placed_id(HASH, "r1", "n0") != HASH
    store.entities.write([replace(gpu_row(0, 0), entity_id=mine)])
    assert store.entities.gpu_id(KEY, "n1", "r7") == mine
    store.entities.write([replace(gpu_row(1, 3, KEY, T0 + 1000), entity_id=mine)])
    store.close()
    again = Store.open(store_url, retention_days=3650)
    assert again.entities.gpu_id(KEY, "n1", "r7") == again.entities.gpu_id(KEY, "n0", "renamed") == mine
    again.close()


def test_what_a_store_of_before_knew_keeps_the_hash(store: Store) -> None:
    store.entities.write([gpu_row(0, 0)])
    assert store.entities.gpu_id(KEY, "n0", "r1") == store.entities.gpu_id(KEY, "n5", "r2") == HASH
    assert store.entities.gpu_id("another", "n0", "r1") != entity_id(Scope.GPU, "another")


def test_values_of_a_store_of_before_are_found_again_when_its_entities_were_lost(store_url: str) -> None:
    store = Store.open(store_url, retention_days=3650)
    store.entities.write([gpu_row(0, 0)])
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    store.clients.command("TRUNCATE TABLE entities")
    store.close()
    again = Store.open(store_url, retention_days=3650)
    assert again.entities.gpu_id(KEY, "n0", "r") == HASH
    assert again.entities.gpu_id("another", "n0", "r") != entity_id(Scope.GPU, "another")
    again.close()


def test_of_two_ids_of_one_name_a_start_takes_the_one_that_was_there_first(store_url: str) -> None:
    store = Store.open(store_url, retention_days=3650)
    second, first = (replace(gpu_row(n, 0, KEY, T0 - n), entity_id=placed_id(HASH, "r", f"n{n}")) for n in (0, 1))
    store.entities.write([second, first])
    assert store.entities.gpu_id(KEY, "n5", "r") == second.entity_id, "the first that was reported"
    store.close()
    for _ in range(2):
        again = Store.open(store_url, retention_days=3650)
        assert again.entities.gpu_id(KEY, "n5", "r") == first.entity_id
        again.close()


def test_a_line_of_two_ids_is_read_whole_after_a_collector_of_before(store: Store) -> None:
    ours, theirs = (
        replace(gpu_row(0, 0), entity_id=store.entities.gpu_id(KEY, "n0", "r")),
        gpu_row(0, 0, None, T0 + 20_000),
    )
    for row, first in ((ours, 0), (theirs, 20)):
        store.entities.write([row])
        rows = [(row, T0 + 1000 * t, {"power_w": 100.0 + t}) for t in range(first, first + 20)]
        store.samples.write(samples(Scope.GPU, rows))
    _, _, found = store.series.read(Scope.GPU, [PLACE], ["power_w"], T0, T0 + 40_000, 100)
    assert found[*PLACE, "power_w"].tolist()[:40] == [100.0 + t for t in range(40)]
    assert store.entities.gpu_id(KEY, "n0", "r") == HASH, "one from here on"


@in_loop
async def test_agents_of_two_nodes_shows_of_one_card_and_its_history_is_one(store: Store) -> None:
    moved = hello("n1")
    moved.entities[2].key = moved.entities[2].serial = KEY
    async with Collector(store) as collector:
        for node, entity, at in ((hello("n0"), 1, T0), (moved, 2, T0 + 20_000)):
            async with collector.agent(node) as agent:
                await agent.send(batch=batch(1, block([(at, entity, (300.0, 50.0))])))
                await agent.until_held(LIVE, 1)
            await until(lambda: collector.ingest.stats.connected == 0)
    mine = placed_id(HASH, index_of().near("n0"), "n0")
    rows = store.clients.rows("SELECT entity_id, toUnixTimestamp64Milli(ts) AS at FROM gpu_samples ORDER BY at")
    assert rows == [{"entity_id": mine, "at": T0}, {"entity_id": mine, "at": T0 + 20_000}]
    assert store.buckets.read(index_of(), T0).gpu_rows.nonzero()[0].tolist() == [0]
    assert store.buckets.read(index_of(), T0 + 20_000).gpu_rows.nonzero()[0].tolist() == [5]


def test_a_server_has_the_hash(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store.clients), "embedded", False)
    assert store.entities.gpu_id(KEY, "n0", "r1") == HASH


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=60), st.integers(0, 80))
def test_pieces_hold_all_ids_once_and_as_many_each(known: list[int], count: int) -> None:
    ids = np.sort(np.array(known, np.uint64))
    found = id_ranges(ids, count)
    assert len(found) == max(1, count)
    assert found[0][0] == 0 and found[-1][1] == 1 << 64
    assert all(before[1] == after[0] for before, after in pairwise(found))
    if len(ids) >= count:
        held = [sum(low <= id_ < high for id_ in known) for low, high in found]
        assert max(held) - min(held) <= 1
