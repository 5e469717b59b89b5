"""fleet.toml and fleet.json: valid files are read, errors name the place and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drover_core.model.fleet import (
    FleetError,
    FleetSpec,
    JobSpec,
    LinkSpec,
    NodeSpec,
    ObjectiveSpec,
    RackSpec,
    dump_json,
    dump_toml,
    expand,
    load_json,
    load_toml,
)

RACKS = "[[nodes]]\nnames = 'a'\nrack = 'r1'\n[[racks]]\n"


def test_host_lists() -> None:
    assert list(expand("r01n[01-03,7]")) == ["r01n01", "r01n02", "r01n03", "r01n7"]
    assert list(expand("r[1-2]n[1-2]")) == ["r1n1", "r1n2", "r2n1", "r2n2"]


def test_toml_round_trip(tmp_path: Path) -> None:
    links = (LinkSpec("mlx5_0", 0, "l1"), LinkSpec("eth0"))
    spec = FleetSpec((NodeSpec("a1", "r1", "l1", "train", "H100-SXM", 8, links), NodeSpec("a2", gpus=4)), name="prod")
    path = tmp_path / "fleet.toml"
    path.write_text(dump_toml(spec))
    assert load_toml(path) == spec


def test_objectives_are_read_and_written_in_both_forms(tmp_path: Path) -> None:
    objectives = (
        ObjectiveSpec("llama*", "", "step_time_s", 2.2), ObjectiveSpec("", "chat", "ttft_p95_s", 0.8, 10.0),
    )  # fmt: skip
    spec = FleetSpec((NodeSpec("a"),), objectives=objectives)
    toml, json_ = tmp_path / "fleet.toml", tmp_path / "fleet.json"
    toml.write_text(dump_toml(spec))
    json_.write_text(dump_json(spec))
    assert load_toml(toml).objectives == load_json(json_).objectives == objectives
    assert "objectives" not in dump_json(FleetSpec((NodeSpec("a"),))), "old cases stay unchanged"


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("step_time_s = 1", 'write either job = "llama*" or service = "chat"'),
        ("job = 'a'\nservice = 'b'\nstep_time_s = 1", "write either job"),
        ("job = 'a'\nttft_p95_s = 1", "an objective of a job is step_time_s = SECONDS"),
        ("service = 'a'\nttft_p95_s = -1", "ttft_p95_s must be a number above 0"),
        ("job = 'a'\nstep_time_s = 1\nminutes = true", "minutes must be a number above 0"),
        ("job = 'a'\nstep_times = 1", "unknown key 'step_times'"),
    ],
)
def test_an_objective_that_cannot_be_used_says_why(tmp_path: Path, entry: str, what: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f"[[nodes]]\nnames = 'a'\n[[objectives]]\n{entry}\n")
    with pytest.raises(FleetError, match=re.escape(f"[[objectives]] number 1: {what}")):
        load_toml(path)


def test_racks_have_a_row_and_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    nodes = "".join(f"[[nodes]]\nnames = 'a{n}'\nrack = 'r{n}'\n" for n in (1, 2, 3))
    path.write_text(f"{nodes}[[racks]]\nnames = 'r[1-2]'\nrow = 'A'\npower_budget_w = 40800\n[[racks]]\nnames = 'r3'")
    spec = load_toml(path)
    assert spec.racks == (RackSpec("r1", "A", 40_800.0), RackSpec("r2", "A", 40_800.0), RackSpec("r3"))
    path.write_text(dump_toml(spec))
    assert load_toml(path) == spec


def test_json_round_trip(tmp_path: Path) -> None:
    node = NodeSpec("a1", "r1", "l1", "train", "H100-SXM", 8, (LinkSpec("mlx5_0", 0, "l1"),))
    spec = FleetSpec((node,), (JobSpec("812", 1000, None, (("a1", 0), ("a1", 7))),))
    path = tmp_path / "fleet.json"
    path.write_text(dump_json(spec))
    assert load_json(path) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 3", "expected a list"),
        ("", "no [[nodes]] entry"),
        ("[[nodes]]\nrack = 'r1'", "names is missing"),
        ("[[nodes]]\nnames = 'a'\nracks = 'r1'", "unknown key 'racks'"),
        ("[[nodes]]\nnames = 'a'\ngpus = -1", "gpus must be"),
        ("[[nodes]]\nnames = 'a'\ngpus = true", "gpus must be"),
        ("[[nodes]]\nnames = 'a'\nrack = 7", "rack must be a string"),
        ("[[nodes]]\nnames = 'a[3-1]'", "has its end before its start"),
        ("[[nodes]]\nnames = 'a[x]'", "not a number"),
        ("[[nodes]]\nnames = 'a; rm'", "not a node name"),
        ("[[nodes]]\nnames = 'a'\n[[nodes]]\nnames = 'a'", "listed twice"),
        ("[[nodes]\n", "not valid TOML"),
        (f"{RACKS}names = 'r2'", "no node is in rack 'r2'"),
        (f"{RACKS}names = 'r1'\n[[racks]]\nnames = 'r1'", "has two entries"),
        (f"{RACKS}row = 'A'", "names is missing"),
        (f"{RACKS}names = 'r1'\npower_budget_w = 0", "watts above 0, found 0"),
        (f"{RACKS}names = 'r1'\npower_budget_kw = 4", "unknown key 'power_budget_kw'"),
    ],
)
def test_what_is_wrong_is_reported(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(FleetError) as error:
        load_toml(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="No such file"):
        load_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected an object"),
        ("{", "not valid JSON"),
        ('{"nodes": []}', "no nodes"),
        ('{"nodes": [{"name": "a"}], "jobs": [{"id": "1"}]}', "members"),
        (
            '{"nodes": [{"name": "a"}], "jobs": [{"id": "1", "start": 0, "end": null, "members": [["b", 0]]}]}',
            "no node",
        ),
        ('{"nodes": [{"name": "a"}], "jobs": [{"id": "1", "start": 0, "end": null, "members": [["a", 8]]}]}', "GPU 8"),
    ],
)
def test_wrong_json_is_reported(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(text)
    with pytest.raises(FleetError, match=said):
        load_json(path)
