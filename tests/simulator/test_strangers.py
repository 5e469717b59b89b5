"""Fleets of strangers: what each generator writes is a case, the same for the same seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from drover_cli.case.read import read_case, read_jsonl
from drover_cli.scoring.score import label_of
from drover_simulator.strangers import a, b, c, d, f

GENERATORS = {"a": a.write_case, "b": b.write_case, "c": c.write_case, "d": d.write_case, "f": f.write_case}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_writes_a_case_that_can_be_read_and_scored(name: str, tmp_path: Path) -> None:
    GENERATORS[name](tmp_path / "case", 3, nodes=8, hours=0.5)
    case = read_case(tmp_path / "case")
    labels = [label_of(row) for _, row in read_jsonl(tmp_path / "case/labels.jsonl")]
    nodes = {node.name for node in case.spec.nodes}
    assert len(nodes) == 8 and case.gpu is not None and len(case.gpu.ts_ms) > 100
    assert all(node in nodes for label in labels for node, _ in label.members)
    assert not [note for note in case.notes if "unknown" in note]
    assert json.loads((tmp_path / "case/fleet.json").read_text())["generator"] in (name, f"stranger {name}")


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        GENERATORS[name](tmp_path / folder, 5, nodes=8, hours=0.3)
    GENERATORS[name](tmp_path / "other", 6, nodes=8, hours=0.3)
    assert digest(tmp_path / "one") == digest(tmp_path / "two") != digest(tmp_path / "other")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_healthy_fleet_has_hard_negatives_and_no_fault(name: str, tmp_path: Path) -> None:
    GENERATORS[name](tmp_path / "case", 4, nodes=16, hours=2.0, healthy=True)
    labels = [label_of(row) for _, row in read_jsonl(tmp_path / "case/labels.jsonl")]
    assert labels and not any(label.hardware for label in labels)
