"""simulate, replay and score through the command, and a replay of a case that others recorded badly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drover_cli.main import main
from drover_core.times import iso

T0_MS = 1_793_491_200_000  # 2026-11-01
SEED = "1201"  # of the tuning seeds


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "case"
    args = ["--nodes", "16", "--hours", "0.75", "--seed", SEED, "--interval", "30", "--json"]
    assert main(["simulate", "--out", str(path), *args]) == 0
    return path


def replayed(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, object]], str]:
    capsys.readouterr()
    assert main(["replay", str(path), "--json"]) == 0
    done = capsys.readouterr()
    return [json.loads(line) for line in done.out.splitlines()], done.err


def test_the_same_seed_gives_the_same_case(case: Path, tmp_path: Path) -> None:
    args = ["--nodes", "16", "--hours", "0.75", "--seed", SEED, "--interval", "30", "--json"]
    assert main(["simulate", "--out", str(tmp_path / "again"), *args]) == 0
    for name in ("fleet.json", "events.jsonl", "labels.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (case / name).read_bytes()
    assert pq.read_table(tmp_path / "again/gpu.parquet").equals(pq.read_table(case / "gpu.parquet"))


def test_simulate_replay_score(case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = replayed(case, capsys)
    (tmp_path / "found.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert main(["score", str(case), str(tmp_path / "found.jsonl"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    labels = [json.loads(line) for line in (case / "labels.jsonl").read_text().splitlines()]
    assert result["faults"] == sum(label["hardware"] for label in labels) > 0
    assert result["found"] > 0
    assert result["false_incidents"] == []
    assert main(["score", str(case), str(tmp_path / "found.jsonl")]) == 0
    table = capsys.readouterr().out
    assert "precision" in table and "DELAY MEDIAN" in table and "per 1,000 GPU-days" in table


def test_a_mass_event_is_shown_and_is_no_detection(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = json.loads((case / "fleet.json").read_text())
    (tmp_path / "fleet.json").write_text(json.dumps(fleet | {"jobs": []}))
    names = [node["name"] for node in fleet["nodes"]]
    rows = {"ts": [T0_MS] * len(names), "node": names, "load1": [1.0] * len(names)}
    pq.write_table(pa.table({**rows, "ts": pa.array(rows["ts"], pa.timestamp("ms", "UTC"))}), tmp_path / "node.parquet")
    fell = {"gpu": 0, "kind": "xid", "code": "79", "message": "fallen off the bus"}
    events = [{"ts": iso(T0_MS + 1000 * n), "node": name, **fell} for n, name in enumerate(names[:8])]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    found, said = replayed(tmp_path, capsys)
    assert {row["scope"] for row in found} == {"gpu"}
    assert "mass event, not among the JSON lines: 2026-11-01" in said
    assert main(["replay", str(tmp_path)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "mass_event" in line]
    assert "fleet, " in row and "Drover takes no further node out" in row


def test_a_foreign_case_is_judged_as_far_as_it_goes(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the columns, a gap of ten minutes, rows out of order, no node or link file, a unit of its own."""
    table = pq.read_table(case / "gpu.parquet")
    columns = [name for name in table.column_names[3:] if name not in ("sm_active_ratio", "tensor_active_ratio")]
    table = table.select(["ts", "node", "gpu", *columns[::2]])
    ts_ms = table.column("ts").cast(pa.int64()).to_numpy()
    table = table.filter(pa.array((ts_ms < ts_ms[0] + 900_000) | (ts_ms >= ts_ms[0] + 1_500_000)))
    order = np.random.default_rng(1).permutation(len(table))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    pq.write_table(
        table.take(pa.array(order)).append_column("rack_kw", pa.array([1.0] * len(table))), foreign / "gpu.parquet"
    )
    for name in ("fleet.json", "events.jsonl"):
        (foreign / name).write_bytes((case / name).read_bytes())
    found, said = replayed(foreign, capsys)
    for line in (
        "rack_kw", "catalog columns are missing", "node.parquet is missing", "link.parquet is missing",
        "out of time order", "gaps longer than three intervals", "stragglers without a cause",
    ):  # fmt: skip
        assert line in said, said
    assert found, "what the events report is still judged"
    labels = [json.loads(line) for line in (case / "labels.jsonl").read_text().splitlines()]
    sick = {label["node"] for label in labels} | {m[0] for label in labels for m in label["members"]}
    drained = {row["node"] for row in found if row["action"] in ("drain", "isolate")}
    assert drained <= sick, "a hole in the data is no reason to drain anybody"


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Path) -> None:
    for args, said in (
        (["replay", str(tmp_path / "none")], "no such folder"),
        (["simulate", "--out", str(case)], "exists"),
        (["replay", str(case), "--policy", "bold"], "bold"),
        (["score", str(case), str(tmp_path / "none")], "no such file"),
    ):
        assert main(args) == 2
        error = capsys.readouterr().err.strip()
        assert said in error and len(error.splitlines()) == 1, error
