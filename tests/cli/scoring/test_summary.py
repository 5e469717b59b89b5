"""Scores of several cases, summed by generator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drover_cli.main import main
from drover_cli.scoring.score import Score, found_of, label_of, score
from drover_cli.scoring.summary import summarize, wilson

BASE = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def one(faults: int, found: int, false: int) -> Score:
    labels = [
        label_of({
            "id": f"f{k}", "kind": "xid", "node": f"n{k}", "gpu": 0, "start": BASE, "end": None, "cause": "gone",
            "hardware": True,
        })
        for k in range(faults)
    ]  # fmt: skip
    incidents = [
        found_of({
            "id": f"i{k}", "kind": "xid", "node": f"n{k if k < found else k + 1000}", "gpu": 0, "opened": BASE + 5_000,
            "severity": "critical", "cause": "xid_79", "action": "drain",
        })
        for k in range(found + false)
    ]  # fmt: skip
    return score(labels, incidents, 2.0)


def test_counts_of_cases_are_added() -> None:
    total = summarize([one(10, 8, 1), one(10, 10, 0)])
    assert (total.cases, total.gpu_days, total.faults, total.reported, total.false) == (2, 4.0, 20, 18, 1)
    assert total.recall == 0.9 and total.precision == 18 / 19
    assert total.causes["xid/gone"].faults == 20 and total.false_causes == {"xid/xid_79": 1}
    assert total.false_drain_causes == {"xid/xid_79": 1}
    assert total.rate(0) == "0 (<= 750.00)" and total.rate(total.false_drains) == "250.00"


def test_nothing_is_no_share() -> None:
    total = summarize([])
    assert total.precision is None and total.recall is None and total.f1 is None
    assert total.rate(0) == "unknown" and wilson(0, 0) == (0.0, 1.0)


def test_the_interval_of_wilson() -> None:
    low, high = wilson(9, 10)  # Newcombe 1998, table I has 81/263; this one is by R's binom.confint
    assert (round(low, 4), round(high, 4)) == (0.5958, 0.9821)


def test_score_sums_by_the_generator_that_made_the_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs: list[str] = []
    for name in ("a1", "a2", "b1"):
        case, incidents = tmp_path / name, tmp_path / f"{name}.jsonl"
        assert main(["simulate", "--out", str(case), "--nodes", "2", "--hours", "0.05", "--seed", "3"]) == 0
        fleet = json.loads((case / "fleet.json").read_text())
        assert fleet["generator"] == "simulation"
        (case / "fleet.json").write_text(json.dumps({**fleet, "generator": name[0]}))
        incidents.write_text("")
        pairs += [str(case), str(incidents)]
    capsys.readouterr()
    assert main(["score", *pairs, "--json"]) == 0
    sums = json.loads(capsys.readouterr().out)
    assert {name: total["cases"] for name, total in sums.items()} == {"a": 2, "b": 1}
    assert main(["score", *pairs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("GENERATOR")
    assert [line.split()[:2] for line in lines[2:4]] == [["a", "2"], ["b", "1"]]
    assert main(["score", pairs[0]]) != 0
    assert "give pairs" in capsys.readouterr().err
