"""`drover silence`, `silences` and `unsilence`, and what other commands say of what is silenced."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from drover_cli.main import main
from drover_core.model.events import Silence, to_json
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn
from testbed.outboxes import fault

NOW_MS = round(time.time() * 1000)
ONE = Silence("5f0c", NOW_MS, NOW_MS, NOW_MS + 7_200_000, "anna", "firmware", rack=("r1",), kind=("xid",))
SILENCED = "silenced by anna until 2027-01-15T10:00:00Z: firmware"


class Stub(FleetStandIn):
    """A collector that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.known = [ONE, replace(ONE, id="77aa", from_ms=NOW_MS + 3_600_000, maintenance=True)]

    def CreateSilence(self, request: pb.SilenceAsk) -> pb.SilenceReply:
        self.asked.append(request)
        return pb.SilenceReply(silence_json=to_json(replace(ONE, maintenance=request.maintenance)), covers=3)

    def EndSilence(self, request: pb.SilenceEnd) -> pb.SilenceReply:
        self.asked.append(request)
        return pb.SilenceReply(silence_json=to_json(replace(ONE, ended_by="bo")), covers=3)

    def ReportMaintenance(self, request: pb.MaintenanceReport) -> pb.SilenceReply:
        self.asked.append(request)
        made = replace(ONE, maintenance=True, event=f"{request.source}:{request.id}")
        return pb.SilenceReply(silence_json=to_json(made), covers=0)

    def ListSilences(self, request: pb.SilencesRequest) -> pb.SilenceList:
        self.asked.append(request)
        return pb.SilenceList(silences_json=[to_json(s) for s in self.known])

    def ListIncidents(self, request: pb.ListIncidentsRequest) -> pb.IncidentList:
        found = [to_json(fault("i1")), to_json(fault("i2"))]
        return pb.IncidentList(incidents_json=found, total=2, silenced={"i1": SILENCED})

    def GetIncident(self, request: pb.IncidentRequest) -> pb.IncidentDetail:
        return pb.IncidentDetail(incident_json=to_json(fault("i1")), silenced=SILENCED)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()

    made.install(monkeypatch)
    return made


def test_a_silence_is_asked_for_with_its_places_time_and_reason(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--node", "n1", "n2", "--gpu", "3", "--rack", "r1", "--leaf", "l1", "--pool", "p1", "--kind", "xid"]
    assert main(["silence", *places, "--for", "90m", "--why", "new firmware"]) == 0
    (asked,) = stub.asked
    assert (list(asked.node), list(asked.gpu), list(asked.rack), list(asked.leaf)) == (
        ["n1", "n2"],
        [3],
        ["r1"],
        ["l1"],
    )
    assert (list(asked.pool), list(asked.kind), asked.hours, asked.from_ms) == (["p1"], ["xid"], 1.5, 0)
    assert (asked.why, asked.maintenance) == ("new firmware", False)
    out = capsys.readouterr().out
    assert "silence 5f0c of rack r1, kind xid: until " in out
    assert "3 open incidents are covered; to end it: drover unsilence 5f0c --why ..." in out


def test_maintenance_says_that_nothing_is_done(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["silence", "--rack", "r1", "--for", "1d", "--from", "2027-01-15T08:00:00Z", "--maintenance", "--why", "w"]
    assert main(argv) == 0
    (asked,) = stub.asked
    assert (asked.maintenance, asked.hours, asked.from_ms) == (True, 24, 1_800_000_000_000)
    assert "nothing is done to its nodes until then" in capsys.readouterr().out


@pytest.mark.parametrize("lasts", ["2", "0h", "-2h", "2027-01-15", "2020-01-15T00:00:00Z", "for ever", "nan"])
def test_a_silence_without_an_end_is_refused(stub: Stub, capsys: pytest.CaptureFixture[str], lasts: str) -> None:
    assert main(["silence", "--node", "n1", f"--for={lasts}", "--why", "w"]) == 2
    assert f"--for '{lasts}' is no time that it lasts; write 30m, 2h or 3d" in capsys.readouterr().err
    assert stub.asked == []


def test_how_long_and_why_are_required(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["silence", "i1", "--why", "w"], ["silence", "i1", "--for", "2h"], ["unsilence", "5f0c"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
    assert stub.asked == []
    assert "--why" in capsys.readouterr().err


def test_the_list(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["silences"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["5f0c", "77aa"]
    assert "in force" in lines[2]
    assert "to come   yes" in lines[3]
    assert main(["silences", "--json"]) == 0
    silences = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(t["id"], t["rack"], t["why"]) for t in silences] == [
        ("5f0c", ["r1"], "firmware"),
        ("77aa", ["r1"], "firmware"),
    ]
    stub.known = []
    assert main(["silences", "--since", "7d"]) == 0
    assert capsys.readouterr().out == "no silences\n"
    assert stub.asked[-1].since_ms > 0


def test_ending_one(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unsilence", "5f", "--why", "done"]) == 0
    assert (stub.asked[0].id, stub.asked[0].why) == ("5f", "done")
    assert "ended by bo" in capsys.readouterr().out
    assert main(["unsilence", "5f", "--why", "done", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended_by"] == "bo"


def test_incidents_and_explain_say_what_is_silenced(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents"]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert f"({SILENCED}) a GPU fell" in first
    assert "silenced" not in second
    assert main(["incidents", "--json"]) == 0
    assert [json.loads(line)["silenced"] for line in capsys.readouterr().out.splitlines()] == [SILENCED, None]
    assert main(["explain", "i1"]) == 0
    out = capsys.readouterr().out
    assert f"  {SILENCED}\n" in out
    assert "nobody was notified: it is silenced" in out
    assert main(["explain", "i1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["silenced"] == SILENCED


def test_planned_work_is_reported_listed_and_ended(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    begin, end = "2027-01-15T08:00:00Z", "2027-01-15T10:00:00Z"
    named = ["--source", "aws", "--id", "i-1"]
    assert main(["maintenance", "n1", "n2", "--from", begin, "--until", end, *named, "--why", "host"]) == 0
    (asked,) = stub.asked
    assert (list(asked.node), asked.from_ms, asked.until_ms) == (["n1", "n2"], 1_800_000_000_000, 1_800_007_200_000)
    assert (asked.source, asked.id, asked.why, asked.over) == ("aws", "i-1", "host", False)
    assert main(["maintenance", "--over", *named, "--why", "cancelled"]) == 0
    assert stub.asked[-1].over
    capsys.readouterr()
    assert main(["maintenance"]) == 0
    out = capsys.readouterr().out
    assert ("77aa" in out, "5f0c" in out) == (True, False), "silences that hold messages alone are not planned work"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["n1", "--why", "w"], "--until"), (["n1", "--until", "1h"], "--why"), (["--over", "--why", "w"], "--id")],
)
def test_planned_work_needs_an_end_a_reason_and_its_name(
    stub: Stub, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["maintenance", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert stub.asked == []
