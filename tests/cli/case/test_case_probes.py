"""probes.jsonl of a case: read, imported, and judged by in a replay."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from drover_cli.case.lines import CaseError
from drover_cli.case.probes import read_probes
from drover_collector.fleet.index import FleetIndex
from drover_collector.store import ProbeRow, Store
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
)
from testbed.fleets import T0, index_of

INDEX: FleetIndex = index_of()
RESULT = ProbeResult("p1/0", "n0", 1, "hbm_copy", T0, None, 4300.0, "GB/s", request="p1", device="NVIDIA H200")
KEY = Key("NVIDIA H200", "570")
VERDICT = ProbeVerdict("p1", "n0", 1, True, "", "good", T0 + 5, ProbeReason.IDLE, good=("hbm_copy",))


def order(id_: str, state: str) -> ProbeOrder:
    return ProbeOrder(id_, "n0", (), "quick", (), ProbeReason.IDLE, state, T0)


def lines(path: Path, *rows: object) -> Path:
    file = path / "probes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_case_into_a_store_and_again(store: Store, tmp_path: Path) -> None:
    notes: list[str] = []
    stranger = asdict(VERDICT) | {"node": "n9"}
    file = lines(
        tmp_path,
        {"result": asdict(RESULT), "key": asdict(KEY), "serial": "S", "uuid": "U", "received_ms": T0 + 1},
        *({"order": asdict(order("p1", state))} for state in ("asked", "sent", "done")),
        {"order": asdict(order("p2", "asked"))}, {"verdict": asdict(VERDICT)}, {"verdict": stranger},
    )  # fmt: skip
    found = read_probes(file, INDEX, notes)
    assert notes == ["probes.jsonl: 1 lines of nodes that fleet.json does not list were left out"]
    assert found.write(store) == found.write(store) == 5
    assert store.probes.results.of_order("p1") == [ProbeRow(RESULT, KEY, "S", "U", T0 + 1)]
    assert [o.state for o in store.probes.orders.versions("p1")] == ["asked", "sent", "done"]
    assert store.probes.verdicts.read() == [VERDICT]
    assert store.probes.orders.open() == []  # else the old order of another time would be sent


def test_without_the_file_there_is_nothing(tmp_path: Path) -> None:
    assert read_probes(tmp_path / "probes.jsonl", INDEX, []).verdicts == []


@pytest.mark.parametrize("row", [{"verdikt": {}}, {"verdict": {"node": "n0"}}, {"result": 3}], ids=str)
def test_a_line_that_cannot_be_used(tmp_path: Path, row: object) -> None:
    with pytest.raises(CaseError, match="line 1: expected"):
        read_probes(lines(tmp_path, row), INDEX, [])
