"""Inventories on their way from the store to the engine, and out of a case."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_cli.case.inventory import read_inventories
from drover_cli.case.lines import CaseError
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.engine.replay import Replay
from drover_collector.pipeline.restore import BEFORE_MS, Inventories
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import IncidentKind

T0 = START_MS


def test_a_start_reads_what_was_before_a_rollout_and_the_newest_and_then_only_news(store: Store) -> None:
    reader = Inventories(store)
    store.inventories.write_one("n0", T0 - BEFORE_MS - 1000, {"driver": "1"})
    store.inventories.write_one("n0", T0 - 5000, {"driver": "2"})
    store.inventories.write_one("n1", T0 - 4000, {"driver": "2"})
    found = [each for ask in reader.restore(T0, 5000) for each in ask()]
    assert sorted((ts, node, facts["driver"]) for ts, node, facts in found) == [
        (T0 - BEFORE_MS - 1000, "n0", "1"), (T0 - 5000, "n0", "2"), (T0 - 4000, "n1", "2"),
    ]  # fmt: skip
    assert [facts["driver"] for _, node, facts in found if node == "n0"] == ["1", "2"]
    reader.changed(T0)
    assert reader.changed(T0 + 1000) == []
    store.inventories.write_one("n1", T0 + 2000, {"driver": "3"})
    assert (T0 + 2000, "n1", {"driver": "3"}) in reader.changed(T0 + 3000)


def test_an_export_has_each_report_and_what_stood_before_them(store: Store) -> None:
    for ts_ms, node, driver in ((T0 - 9, "n0", "1"), (T0 - 5, "n0", "2"), (T0 - 7, "n1", "2"), (T0, "n0", "3")):
        store.inventories.write_one(node, ts_ms, {"driver": driver})
    store.inventories.write_one("n0", T0, {"driver": "3"})  # a resend
    store.inventories.write_one("n0", T0 + 10, {"driver": "4"})
    facts = [
        (ts_ms - T0, node, inventory["driver"]) for ts_ms, node, inventory in store.inventories.between(T0, T0 + 10)
    ]
    assert facts == [(-7, "n1", "2"), (-5, "n0", "2"), (0, "n0", "3")]
    halves = [row for half in (0, 1) for row in store.inventories.between(0, T0 + 20, half, 2)]
    assert sorted(ts_ms - T0 for ts_ms, _, _ in halves) == [-9, -7, -5, 0, 10]


def test_a_replay_with_inventories_finds_drift() -> None:
    index = small_fleet()
    facts = [(T0, node.name, {"driver_version": "535" if node.name == "n03" else "570"}) for node in index.nodes]
    replay = Replay(index, (training_bucket(index, n) for n in range(20)), [], Policy.named("nvidia"), facts)
    incidents = {i.id: i for outcome in replay for i in outcome.incidents}
    assert [(i.kind, i.node) for i in incidents.values()] == [(IncidentKind.DRIFT, "n03")]


def test_inventory_jsonl_of_a_case(tmp_path: Path) -> None:
    path, notes = tmp_path / "inventory.jsonl", []
    assert read_inventories(path, small_fleet(), notes) == []
    path.write_text(
        '{"ts": "2026-01-01T00:00:10Z", "node": "n01", "inventory": {"gpu0.vbios": "1", "x": null}}\n'
        '{"ts": "2026-01-01T00:00:00Z", "node": "stranger", "inventory": {}}\n'
    )
    assert [(node, facts) for _, node, facts in read_inventories(path, small_fleet(), notes)] == [
        ("n01", {"gpu0.vbios": "1"})
    ]
    assert "1 lines of nodes" in notes[0]
    path.write_text('{"ts": "2026-01-01T00:00:10Z", "node": "n01", "inventory": ["a"]}\n')
    with pytest.raises(CaseError, match="line 1: expected"):
        read_inventories(path, small_fleet(), notes)
