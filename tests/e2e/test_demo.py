"""The main job with real processes: simulated fleet -> gRPC -> collector -> command line; export and replay."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from drover_core.times import from_iso
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub

pytestmark = pytest.mark.timeout(1800)  # the first test pays for the demo

NODES = 16
BUCKET_MS = 10_000


def drover(*args: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "drover_cli.main", *args], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []


def newest_tick_ms(fleet: FleetStub) -> int:
    return int(fleet.GetStatus(pb.StatusRequest(), timeout=120).newest_tick_ms)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@dataclass
class Demo:
    folder: Path
    collector: str
    labels: list[dict[str, Any]]
    incidents: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    explained: dict[str, Any] = field(default_factory=dict)
    explained_text: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    log: str = ""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo that ran until all faults were reported (or 150 s), with what the command line said of it while it ran."""
    folder = tmp_path_factory.mktemp("demo")
    log = (folder / "demo.err").open("w+")
    child = subprocess.Popen(
        [sys.executable, "-m", "drover_cli.main", "demo", "--nodes", str(NODES), "--no-dashboard", "--json",
         "--dir", str(folder / "data")],
        stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 400
        while not (found := re.search(r"--collector (\S+)", Path(log.name).read_text())):
            assert child.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.2)
        run = Demo(folder, found[1], [])
        labels = folder / "data/labels.jsonl"
        with grpc.insecure_channel(run.collector) as channel:  # a look by the command costs as much as 100 of these
            fleet = FleetStub(channel)
            deadline = time.monotonic() + 600
            reported = 0
            while reported < 5 and time.monotonic() < deadline:
                time.sleep(1)
                assert child.poll() is None, Path(log.name).read_text()
                run.labels = lines(labels.read_text()) if labels.exists() else []
                if len(run.labels) == 5:
                    found = fleet.ListIncidents(pb.ListIncidentsRequest(state="all"), timeout=120).incidents_json
                    reported = sum(json.loads(text)["severity"] != "info" for text in found)
            # two more buckets, so that what the end of a fault's first minutes brings is there too
            until_ms = newest_tick_ms(fleet) + 2 * BUCKET_MS
            while newest_tick_ms(fleet) < until_ms:
                assert child.poll() is None and time.monotonic() < deadline + 60, Path(log.name).read_text()
                time.sleep(1)
        run.incidents = lines(drover("incidents", "--collector", run.collector, "--state", "all", "--json"))
        run.status = json.loads(drover("status", "--collector", run.collector, "--json"))
        run.nodes = lines(drover("nodes", "--collector", run.collector, "--json"))
        worst = run.incidents[0]["id"]
        run.explained = json.loads(drover("explain", worst, "--collector", run.collector, "--json"))
        run.explained_text = drover("explain", worst, "--collector", run.collector)
        drover("export", str(folder / "exported"), "--since", "1h", "--collector", run.collector)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=120)
        run.summary = json.loads(out.splitlines()[-1])
        run.code = child.returncode
        run.log = Path(log.name).read_text()
        yield run
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(120)
        log.close()


def test_every_fault_is_found_and_nothing_else(demo: Demo) -> None:
    assert demo.summary["injected"] == 5, demo.log
    assert demo.summary["found"] == 5, demo.log
    assert demo.summary["false_incidents"] == 0, demo.log
    assert demo.code == 0
    assert demo.summary["samples"] > NODES * 8 * 30


def test_each_fault_is_one_incident_with_where_why_and_what_to_do(demo: Demo) -> None:
    above_info = [i for i in demo.incidents if i["severity"] != "info"]
    for label in demo.labels:
        mine = [i for i in above_info if i["node"] == label["node"]]
        assert len(mine) == 1, (label, mine)
        incident = mine[0]
        assert incident["gpu"] == label["gpu"], (label, incident)
        assert incident["cause"] and incident["evidence"] and incident["summary"] and incident["advice"]
        assert incident["action"] != "none"
        assert from_iso(incident["since"]) <= from_iso(incident["opened"])


def test_status_and_nodes_say_the_same(demo: Demo) -> None:
    assert demo.status["nodes_expected"] == NODES
    assert demo.status["nodes_reporting"] == NODES - 1, "the silent node does not report"
    assert demo.status["samples_stored"] > 0 and demo.status["batches_rejected"] == 0
    assert not demo.status["troubles"]
    sick = {label["node"] for label in demo.labels}
    by_name = {row["name"]: row for row in demo.nodes}
    assert len(by_name) == NODES
    for name, row in by_name.items():
        assert (row["health"] != "healthy") == (name in sick), row
        assert (row["reason"] != "") == (name in sick), row
    assert {row["name"] for row in demo.nodes[:5]} == sick, "the worst come first"


def test_explain_has_evidence_timeline_and_decision(demo: Demo) -> None:
    assert demo.explained["evidence"] and demo.explained["decisions"]
    # of 16 nodes the guard lets one out of service; the decisions on the others are held, and stored too
    assert all(d["mode"] == "observe" and d["outcome"] in ("would_act", "held") for d in demo.explained["decisions"])
    for word in ("evidence", "timeline", "do:"):
        assert word in demo.explained_text
    for decision in demo.explained["decisions"]:
        said = f"{decision['wanted']} {decision['node']}: {decision['outcome'].replace('_', ' ')}: {decision['reason']}"
        assert said in demo.explained_text


def test_an_exported_live_run_replays_to_the_same_incidents(demo: Demo) -> None:
    def essence(incidents: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
        return {
            (i["kind"], i["scope"], i["node"], i["gpu"], i["severity"], i["cause"], i["action"], i["opened"])
            for i in incidents
        }

    kept = lines((demo.folder / "exported/incidents.jsonl").read_text())
    replayed = lines(drover("replay", str(demo.folder / "exported"), "--json"))
    assert essence(replayed) == essence(kept)


def test_a_terminated_demo_takes_its_processes_along(tmp_path: Path) -> None:
    """SIGTERM comes from `timeout`, service managers and closing terminals; Ctrl-C is not the only end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "drover_cli.main", "demo", "--nodes", "8", "--no-dashboard",
         "--dir", str(tmp_path / "d")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    printed = ""
    for line in child.stdout:
        printed += line
        if "command line:" in line:
            break
    address = printed.rsplit("--collector ", 1)[1].strip()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=120)
    assert child.returncode == 130, printed
    drover("status", "--collector", address, code=3)
    left = [found for p in psutil.process_iter() if str(tmp_path) in " ".join(found := _command(p))]
    assert not left
