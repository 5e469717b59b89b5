"""`drover fabric`, `thermals`, `capacity` and `explain NODE`: the answer in the first lines, and what is not known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest

from drover_cli import node_story
from drover_cli.days import day, named
from drover_cli.errors import CliError
from drover_cli.main import main
from drover_cli.node_story import Story
from drover_cli.node_story import show as show_story
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

T0 = 1_795_320_000_000  # Sunday 2026-11-22 04:00 UTC
DAY_MS = 86_400_000
TUESDAY_MS = T0 - 5 * DAY_MS
STORY = Incident(
    "7ue5", IncidentKind.XID, "xid_79", "gpu", "n1", 3, (("n1", 3),), TUESDAY_MS, TUESDAY_MS, TUESDAY_MS + DAY_MS,
    Severity.CRITICAL, 0.9, RecommendedAction.DRAIN, "GPU 3 of node n1 fell off the bus", "Reset it.",
)  # fmt: skip
DRAIN = Action("a1", "d1", "7ue5", "n1", Act.DRAIN, "slurm", ActionState.DONE, TUESDAY_MS + 60_000, "drained")


class Fleet(FleetServicer):
    def ListRisk(self, request: pb.RiskRequest, context: grpc.ServicerContext) -> pb.RiskList:
        rows = [pb.RiskRow(node="n7", chance=0.4, reasons=["2 failures in 30 days"])] if request.limit > 1 else []
        hurt = pb.TroubledNode(
            node="n4", incident_id="i4", kind="xid", cause="xid_79", severity="critical", since_ms=T0,
            summary="GPU 3 fell off the bus.",
        )  # fmt: skip
        return pb.RiskList(
            nodes=[*rows, pb.RiskRow(node="n1", chance=0.023)], total=10, days=7, in_trouble=[hurt], in_trouble_total=1
        )

    def GetFabric(self, request: pb.FabricRequest, context: grpc.ServicerContext) -> pb.Fabric:
        if request.leaf and request.leaf != "leaf02":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such leaf")
        if request.node and request.node != "n7":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such node")
        leafs = [
            pb.LeafRow(
                name="leaf02", nodes=[pb.LeafNode(node="n7", state="trouble")], nodes_troubled=1, ports=8, ports_down=3,
                errors=12, switch=True, verdict="leaf02: the switch, 6 of 8 nodes flap",
            ),
            pb.LeafRow(name="leaf01", nodes=[pb.LeafNode(node="n1", state="ok")], ports=8),
        ]  # fmt: skip
        ports = [pb.PortRow(node="n7", link="mlx5_0", leaf="leaf02", state="down", trouble="down 3 times", downs=3)]
        asked = bool(request.leaf or request.node)
        return pb.Fabric(
            ts_ms=T0, leafs=leafs, leafs_total=2, ports=ports if asked else [], ports_total=9 if asked else 0,
            absent=["saturation: no rate is known"],
        )  # fmt: skip

    def GetThermals(self, request: pb.ThermalsRequest, _: grpc.ServicerContext) -> pb.Thermals:
        racks = [
            pb.RackHeat(name="r1", nodes=8, gpus=64, inlet_c=24.5, gpu_max_c=91.0, gpu_max_at="n1 GPU 3"),
            pb.RackHeat(name="r2", nodes=8, gpus=64),
            pb.RackHeat(
                name="r4", nodes=8, gpus=64, inlet_c=35.1, incident="i4", cause="inlet", summary="Rack r4 gets hot air"
            ),
            pb.RackHeat(name="r5", nodes=8, gpus=64, inlet_c=29.0),
        ]
        nodes = [pb.NodeHeat(node="n1", inlet_c=24.0)] if request.rack else []
        hot = [pb.HotGpu(node="n1", gpu=3, rack="r1", temp_c=91.0, margin_c=1.5, summary="cools badly")]
        return pb.Thermals(ts_ms=T0, racks=racks, hot=hot, hot_total=1, nodes=nodes)

    def GetCapacity(self, request: pb.CapacityRequest, _: grpc.ServicerContext) -> pb.Capacity:
        assert request.to_ms - request.from_ms == 7 * DAY_MS
        lost = [
            pb.LostHours(kind="xid", cause="xid_79", incidents=2, lost=200.0, waited=40.0, cost=600.0, worst="7ue5"),
            pb.LostHours(kind="straggler", cause="power_cap", incidents=1, lost=1.0, waited=9.0),
        ]
        pools = [pb.PoolCapacity(pool="train", nodes=16, gpus=128, held=96, free=24, out=8)]
        return pb.Capacity(from_ms=T0 - 7 * DAY_MS, to_ms=T0, lost=lost, pools=pools, currency="EUR", untold=1)

    def GetIncident(self, request: pb.IncidentRequest, context: grpc.ServicerContext) -> pb.IncidentDetail:
        if request.id != "7ue5":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.id!r} is no incident id")
        return pb.IncidentDetail(incident_json=to_json(STORY), actions_json=[to_json(DRAIN)])

    def GetNode(self, request: pb.NodeRequest, context: grpc.ServicerContext) -> pb.NodeDetail:
        if request.node != "n1":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no node {request.node!r}")
        fell, out = STORY.since_ms + 1, DRAIN.ts_ms + 1
        moments = [
            pb.HealthMoment(ts_ms=fell, health="confirmed", reason="it fell off"),
            pb.HealthMoment(ts_ms=fell, gpu=3, health="confirmed", reason="it fell off"),
            *(pb.HealthMoment(ts_ms=out, gpu=gpu, health="draining") for gpu in range(3)),
            pb.HealthMoment(ts_ms=out, health="draining", reason="it fell off"),
        ]
        return pb.NodeDetail(
            row=pb.NodeRow(name="n1", rack="r1", leaf="leaf01", health="healthy", last_seen_ms=T0),
            health=[change for change in moments if request.health_from_ms <= change.ts_ms < request.health_to_ms],
        )

    def ListIncidents(self, request: pb.ListIncidentsRequest, _: grpc.ServicerContext) -> pb.IncidentList:
        known = (STORY.closed_ms or 0) >= request.since_ms
        return pb.IncidentList(incidents_json=[to_json(STORY)] if known else [], total=1)

    def ListActions(self, request: pb.ActionsRequest, _: grpc.ServicerContext) -> pb.ActionList:
        line = pb.ActionLine(
            id="a1", node="n1", act="drain", state="done", by="drover", why="fell off", ts_ms=DRAIN.ts_ms,
            incident_id="7ue5",
        )  # fmt: skip
        return pb.ActionList(actions=[line])

    def ListAudit(self, request: pb.AuditRequest, _: grpc.ServicerContext) -> pb.AuditList:
        assert request.subject == "n1"
        line = Audit("u1", TUESDAY_MS + DAY_MS, "kim", "resume", "n1", "board reseated")
        return pb.AuditList(audit_json=[to_json(line)])


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_FleetServicer_to_server(Fleet(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def say(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    for command in ("explain", "capacity"):  # not time.time itself: gRPC's deadlines are made of it
        monkeypatch.setattr(f"drover_cli.commands.{command}.time", SimpleNamespace(time=lambda: T0 / 1000))

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words, "--collector", address])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_one_node_or_the_switch_is_the_first_line(say: Say) -> None:
    code, out, _ = say("fabric")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "leaf02: leaf02: the switch, 6 of 8 nodes flap")
    assert "the switch" in lines[3]
    assert "-" in lines[4], "errors of leaf01 are not known, and are no 0"
    assert lines[-1] == "not known: saturation: no rate is known"


@pytest.mark.parametrize("place", ["leaf02", "n7"])
def test_ports_of_a_leaf_or_of_a_node(say: Say, place: str) -> None:
    code, out, _ = say("fabric", place)
    assert code == 0
    assert out.startswith("leaf02: leaf02: the switch")
    assert "leaf01" not in out
    assert "down 3 times" in out
    assert "1 of 9 ports shown" in out


def test_rows_of_several_kinds_say_which_they_are(say: Say) -> None:
    fabric = [json.loads(line)["type"] for line in say("fabric", "--json")[1].splitlines()]
    thermals = [json.loads(line)["type"] for line in say("thermals", "r1", "--json")[1].splitlines()]
    assert set(fabric) <= {"leaf", "port"}
    assert "leaf" in fabric
    assert {"rack", "node"} <= set(thermals) <= {"rack", "gpu", "node"}


def test_no_such_place_is_4(say: Say) -> None:
    code, _, err = say("fabric", "nowhere")
    assert (code, err) == (4, "drover: no leaf and no node 'nowhere'; `drover fabric` and `drover nodes` list them\n")


def test_the_rack_that_an_incident_names_is_first_and_the_unknown_one_last(say: Say) -> None:
    code, out, _ = say("thermals")
    assert (code, out.splitlines()[0]) == (0, "r4: Rack r4 gets hot air")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("r") and ":" not in line]
    assert rows == ["r4", "r5", "r1", "r2"]
    assert "n1 GPU 3" in out
    one = say("thermals", "r1")[1]
    assert "91.0 °C" in one
    assert "r5" not in one


def test_a_node_about_which_nothing_is_known_is_in_no_ranking(say: Say) -> None:
    code, out, _ = say("risk")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("n")] == ["n4", "n7"]
    assert "of the other 8 nodes nothing is known" in out
    out = say("risk", "--limit", "1")[1]
    assert out.endswith("of 9 nodes nothing is known that sets one apart: 2.3% each within 7 days\n")


def test_nodes_in_trouble_come_first_and_apart_from_those_that_may_fail_next(say: Say) -> None:
    head, _, ranking = say("risk")[1].partition("\n\n")
    assert "IN TROUBLE NOW" in head
    assert "n4" in head
    assert "GPU 3 fell off the bus." in head
    assert "n4" not in ranking
    rows = [json.loads(line) for line in say("risk", "--json")[1].splitlines()]
    assert [(row["node"], row["in_trouble"]) for row in rows] == [("n4", True), ("n7", False), ("n1", False)]
    assert rows[0]["incident"] == "i4"
    assert "since" not in rows[0] and isinstance(rows[0]["since_ms"], int), "times as in each command's JSON"


def test_what_faults_cost(say: Say) -> None:
    code, out, _ = say("capacity")
    assert code == 0
    assert out.startswith("faults took 250.0 GPU-hours, at least 600 EUR, from 2026-11-15T04:00:00Z to")
    assert "what 1 more incident took is not known" in out
    assert "what is not held is unknown" in out


@pytest.mark.parametrize("command", ["fabric", "thermals", "capacity"])
def test_json_is_one_object_a_line(say: Say, command: str) -> None:
    code, out, _ = say(command, "--json")
    assert code == 0
    assert all(isinstance(json.loads(line), dict) for line in out.splitlines())


def test_why_a_node_was_drained_last_tuesday(say: Say) -> None:
    code, out, _ = say("explain", "n1", "--day", "tuesday")
    assert code == 0
    assert "\nTuesday 2026-11-17\n" in out
    assert "GPU 3 of node n1 fell off the bus [7ue5]" in out
    assert out.count("drain n1") == 1
    assert "board reseated" not in out, "that was on Wednesday"
    assert "resume by kim: board reseated" in say("explain", "n1")[1]
    assert "nothing was noted of it then" in say("explain", "n1", "--day", "today")[1]
    answer = json.loads(say("explain", "n1", "--day", "2026-11-17", "--json")[1])
    assert [moment["text"] for moment in answer["life"] if moment["source"] == "health"] == [
        "n1 and GPU 3 confirmed: it fell off", "n1 draining: it fell off",
    ]  # fmt: skip
    assert [m["source"] for m in answer["life"] if m["source"] != "health"] == ["incident", "action"]
    times = [*answer["life"], *answer["duties"]]
    assert all(isinstance(row.get("ts_ms", row.get("since_ms")), int) for row in times), "as numbers too"


def test_neither_incident_nor_node_is_4(say: Say) -> None:
    code, _, err = say("explain", "n9")
    lists = "`drover incidents --state all` and `drover nodes` list them"
    assert (code, err) == (4, f"drover: no incident and no node 'n9'; {lists}\n")


def test_days_as_people_name_them() -> None:
    for text in ("tuesday", "last tuesday", "last-Tuesday", "tue", "2026-11-17"):
        from_ms, to_ms = day(text, T0)
        assert (named(from_ms), to_ms - from_ms) == ("Tuesday 2026-11-17", DAY_MS)
    assert named(day("sunday", T0)[0]) == "Sunday 2026-11-15", "today is a Sunday: the one before is meant"
    assert named(day("yesterday", T0)[0]) == "Saturday 2026-11-21"
    for text in ("2026-12-01", "someday", "t", ""):
        with pytest.raises(CliError):
            day(text, T0)


@pytest.mark.parametrize(
    ("rack", "leaf", "head"),
    [
        ("r1", "l1", "  rack r1, leaf l1; jobs: none"),
        ("", "l1", "  leaf l1; jobs"),
        ("", "", "  jobs: none; last report"),
    ],
)
def test_a_node_that_stands_nowhere_has_no_place(
    rack: str, leaf: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_story(Story(pb.NodeRow(name="n1", rack=rack, leaf=leaf), (), (), ()), T0, T0 + DAY_MS, False)
    assert capsys.readouterr().out.splitlines()[1].startswith(head)


def test_gpus_that_become_the_same_at_the_same_time_are_one_line() -> None:
    seen = [pb.HealthMoment(ts_ms=1000, gpu=gpu, health="healthy") for gpu in range(3)]
    seen += [pb.HealthMoment(ts_ms=2000, gpu=1, health="suspect", reason="slow", incident_id="i")]
    lines = [(moment.text, incident) for moment, incident in node_story._health("n1", seen)]
    assert lines == [("n1 GPUs 0, 1, 2 healthy", ""), ("n1 GPU 1 suspect: slow", "i")]
