"""`drover simulate --probes`: idle nodes are probed with the faults that they have; a replay judges by the verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drover_cli.case.simulated_probes import SimulatedProbes
from drover_cli.commands.simulate import START_MS
from drover_cli.main import main
from drover_core.model.fleet import JobSpec
from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.workload import planned_jobs

SEED, NODES, HOURS = 1007, 6, 0.6


def idle_nodes() -> list[str]:
    """Nodes on which nothing runs in all that time."""
    spec = build_fleet(NODES, SEED)
    plan = planned_jobs(spec, SEED, HOURS * 3600)
    return [spec.nodes[n].name for group, jobs in plan if not jobs for n in group.nodes]


def test_slow_and_corrupting_gpus_are_found_by_probes_and_a_replay_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, *_ = idle_nodes()
    faults = [{"kind": "sdc", "cause": "wrong_results", "node": wrong, "gpu": 3, "start_s": 300}]
    (tmp_path / "faults.json").write_text(json.dumps({"faults": faults}))
    case = tmp_path / "case"
    words = ["--nodes", str(NODES), "--hours", str(HOURS), "--seed", str(SEED), "--interval", "30", "--json"]
    assert main(["simulate", "--out", str(case), "--faults", str(tmp_path / "faults.json"), "--probes", *words]) == 0
    made = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (case / "probes.jsonl").read_text().splitlines()]
    verdicts = [line["verdict"] for line in lines if "verdict" in line]
    assert made["probes"] == sum(line["order"]["state"] == "done" for line in lines if "order" in line) > 1
    failed = {(v["node"], v["gpu"], v["probe"]) for v in verdicts if v["passed"] is False}
    assert {(node, gpu) for node, gpu, _ in failed} == {(wrong, 3), (wrong, None)}
    assert {probe for _, _, probe in failed} == {"sdc"}
    before = [v for v in verdicts if v["node"] == wrong and v["ts_ms"] < START_MS + 300_000]
    assert before and all(v["passed"] is not False for v in before), "it was right before"
    assert main(["replay", str(case), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sdc = [i for i in found if i["kind"] == "sdc"]
    assert [(i["node"], i["gpu"], i["severity"], i["action"]) for i in sdc] == [(wrong, 3, "critical", "drain")]


def test_a_gpu_that_stays_slow_when_its_job_is_over_fails_and_no_other() -> None:
    spec = build_fleet(4, SEED)
    members = tuple((node.name, gpu) for node in spec.nodes for gpu in range(node.gpus))
    job = JobSpec("train", START_MS, START_MS + 60_000, members)
    fleet = SimulatedFleet(spec, SEED, [Fault("straggler", "hbm", "r01n02", 5, 10.0, None, 0.5)], START_MS, [job])
    probes = SimulatedProbes(fleet, SEED)
    for _ in range(15):
        fleet.step(10.0)
        probes.take()
        held = any(fleet.steps.job_at(gpu) for gpu in range(32))
        assert not (held and probes.orders), "nobody is disturbed"
    verdicts = [line["verdict"] for line in probes.lines() if "verdict" in line]
    assert probes.orders == 4
    failed = {(v["node"], v["gpu"], v["probe"]) for v in verdicts if v["passed"] is False}
    assert {(node, gpu) for node, gpu, _ in failed} == {("r01n02", 5), ("r01n02", None)}


def test_an_adversary_has_no_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--out", str(tmp_path / "case"), "--adversary", "--probes"]) == 2
    assert "leave out --adversary" in capsys.readouterr().err
