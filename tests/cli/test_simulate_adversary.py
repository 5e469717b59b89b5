"""`drover simulate --adversary` writes a case that a replay reads as the fleet gave it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from drover_cli.case.read import read_case
from drover_cli.main import main
from drover_cli.scoring.score import label_of
from drover_core.metrics.catalog import BY_NAME
from drover_simulator.adversary import draw


def test_the_case_holds_what_the_fleet_gave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case"
    code = main(
        ["simulate", "--adversary", "--out", str(path), "--nodes", "16", "--hours", "0.5", "--seed", "1003", "--json"]
    )
    assert code == 0
    answer = json.loads(capsys.readouterr().out)
    fleet = draw(1003, gpus=128, hours=0.5)
    assert answer["gpus"] == 128 and answer["faults"] + answer["hard_negatives"] == len(fleet.labels) > 0
    case = read_case(path)
    assert case.spec.jobs == fleet.spec.jobs and case.interval_ms == 10_000
    # A clock that is off by seconds moves its rows into another bucket: those nodes are left out here.
    right = np.abs(fleet.realism.skew_s) < 1
    right &= ~np.isin(fleet.hardware.names, [x["node"] for x in fleet.labels if x["cause"] == "clock_wrong"])
    gpus = right[fleet.hardware.gpu_node]
    compared = 0
    for tick, bucket in zip(fleet.ticks(), case.buckets(), strict=True):
        assert bucket.end_ms == tick.ts_ms and np.array_equal(bucket.jobs, fleet.holders(tick.ts_ms))
        assert np.array_equal(bucket.gpu_rows[gpus] > 0, tick.gpu_present[gpus])
        for name in ("power_w", "sm_clock_mhz", "tensor_active_ratio", "ecc_dram_corrected"):
            seen = bucket.gpu.get(name, np.full(len(gpus), np.nan))[gpus]
            assert np.allclose(seen, tick.gpu[name][gpus], atol=BY_NAME[name].step / 2 + 1e-9, equal_nan=True)
            compared += int(np.count_nonzero(~np.isnan(seen)))
    assert compared > 10_000
    labels = [label_of(json.loads(line)) for line in (path / "labels.jsonl").read_text().splitlines()]
    assert [label.id for label in labels] == [label["id"] for label in fleet.labels]
    rows = [json.loads(line) for line in (path / "inventory.jsonl").read_text().splitlines()]
    assert {row["node"] for row in rows} == set(fleet.hardware.names) and rows[0]["inventory"]["driver"]


def test_faults_of_ones_own_are_for_the_friendly_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", "--adversary", "--faults", "x.json", "--out", str(tmp_path / "case")])
    assert code == 2 and "leave out --faults" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
