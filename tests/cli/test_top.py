"""`drover top`: a frame fits its terminal, shows the worst first, and no text of the fleet steers the terminal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from drover_cli.commands.top_screen import ScreenFacts, frame
from drover_cli.main import main
from drover_core.model.events import (
    Health,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

NOW_MS = 1_800_000_000_000
STEERS = "\x1b[2J\x07 is lost"


def incident(node: str = "n2", severity: Severity = Severity.CRITICAL) -> Incident:
    return Incident(
        f"i-{node}", IncidentKind.XID, "gpu_lost", "gpu", node, 1, ((node, 1),), NOW_MS, NOW_MS - 60_000, None,
        severity, 0.99, RecommendedAction.DRAIN, f"{node} GPU 1{STEERS}", "Drain it.",
    )  # fmt: skip


def facts(racks: int = 2, incidents: int = 1, jobs: int = 1, trouble: str = "") -> ScreenFacts:
    """Racks of four nodes of eight GPUs; the second GPU of n2 is confirmed, the last node unknown."""
    nodes = [f"n{n}" for n in range(4 * racks)]
    layout = pb.Layout(version="v1")
    for r in range(racks):
        rack = layout.racks.add(name=f"r{r}")
        for name in nodes[4 * r : 4 * r + 4]:
            rack.nodes.add(name=name, gpus=8)
    legend = [str(health) for health in Health]
    cells = bytearray([legend.index("healthy")] * 32 * racks)
    cells[17] = legend.index("confirmed")
    cells[-8:] = bytes([legend.index("unknown")] * 8)
    status = pb.Status(
        fleet="demo", mode="observe", nodes_expected=len(nodes), nodes_reporting=len(nodes) - 1, ts_ms=NOW_MS,
        gpus_by_health={"healthy": 32 * racks - 9, "confirmed": 1, "unknown": 8}, newest_sample_ms=NOW_MS - 3000,
        troubles=["the store is slow"],
    )  # fmt: skip
    return ScreenFacts(
        status, layout, pb.Picture(layout_version="v1", cells=bytes(cells), legend=legend),
        [incident(f"n{n}") for n in range(incidents)],
        [pb.JobRow(job=f"train{n}", gpus=32, nodes=4, severity="critical", hurt=STEERS) for n in range(jobs)],
        [pb.NodeRow(name="n2", rack="r0", health="confirmed", reason=STEERS, gpu_health=["healthy", "confirmed"])],
        NOW_MS, trouble,
    )  # fmt: skip


def drawn(found: ScreenFacts, width: int, height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(frame(found, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
@pytest.mark.parametrize(("racks", "incidents", "jobs"), [(1, 0, 0), (2, 1, 1), (40, 90, 50)])
def test_a_frame_fits(width: int, height: int, racks: int, incidents: int, jobs: int) -> None:
    lines = drawn(facts(racks, incidents, jobs), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert not any("\x1b" in line or "\x07" in line for line in lines)
    assert any("demo" in line for line in lines)


def test_a_job_is_not_hurt_only_once_something_was_judged() -> None:
    found = facts(incidents=0, jobs=0)
    found.jobs = [pb.JobRow(job="train", gpus=8, nodes=1)]
    assert any(line.rstrip().endswith("not known") for line in drawn(found, 120, 30))
    found.status.newest_tick_ms = NOW_MS
    assert any(line.rstrip().endswith("not hurt") for line in drawn(found, 120, 30))


def test_every_gpu_has_a_sign_that_needs_no_colour() -> None:
    lines = drawn(facts(), 100, 40)
    rack0, rack1 = (next(line for line in lines if line.startswith(rack)) for rack in ("r0", "r1"))
    assert rack0.split()[1:] == ["········", "········", "·!······", "········"]
    assert rack1.split()[1:] == ["········", "········", "········", "~~~~~~~~"]
    text = "\n".join(lines)
    for words in ("CRITICAL", "n0 GPU 1", "train0", "32 on 4", "MFU not reported", "! the store is slow", "is lost"):
        assert words in text, words


def test_a_picture_of_another_layout_is_not_drawn() -> None:
    found = facts()
    found.picture.layout_version = "v0"
    assert not any("····" in line for line in drawn(found, 100, 40))


def test_old_facts_are_marked() -> None:
    assert drawn(facts(trouble="since 10:00:00: it does not answer"), 80, 20)[0].startswith("OLD since 10:00:00")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts()
    answers = {
        "GetStatus": found.status, "GetLayout": found.layout, "GetPicture": found.picture,
        "ListIncidents": pb.IncidentList(incidents_json=[to_json(i) for i in found.incidents]),
        "ListJobs": pb.JobList(jobs=found.jobs), "ListNodes": pb.NodeList(nodes=found.nodes),
    }  # fmt: skip

    class Stub(FleetStandIn):
        def __getattr__(self, name: str) -> Any:
            return lambda _: answers[name]

    Stub().install(monkeypatch)


def test_once_prints_one_frame(served: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert "·!······" in out
    assert "\x1b" not in out


def test_json_has_what_a_frame_shows(served: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["status"]["nodes_expected"], answer["status"]["ts_ms"]) == (8, NOW_MS)
    assert [i["node"] for i in answer["incidents"]] == ["n0"]
    assert answer["jobs"][0]["job"] == "train0"
    assert answer["nodes"][0]["gpu_health"] == ["healthy", "confirmed"]


def test_live_wants_a_terminal(served: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "give --once" in capsys.readouterr().err
