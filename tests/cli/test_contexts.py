"""Which cluster a command asks, and that an act goes to no other."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_cli import client, contexts
from drover_cli.main import build_parser, main
from drover_core.model.events import Incident, IncidentKind, RecommendedAction, Severity, to_json
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from testbed.system_processes import free_port

T0 = 1_800_000_000_000


class Collector(FleetServicer):
    """Has a node n1, as the other one does."""

    def __init__(self, name: str, severity: Severity) -> None:
        self.name, self.severity, self.acts = name, severity, []
        self.judged, self.sick, self.role = True, True, "active"

    def GetStatus(self, request: Any, context: Any) -> pb.Status:
        return pb.Status(
            fleet=self.name, mode="observe", gpus_expected=9, gpus_by_health={"healthy": 7, "suspect": 1}, ts_ms=T0,
            newest_tick_ms=T0 if self.judged else 0, role=self.role,
        )  # fmt: skip

    def ListNodes(self, request: Any, context: Any) -> pb.NodeList:
        fits = request.contains in "n1"
        return pb.NodeList(nodes=[pb.NodeRow(name="n1", health="healthy")] * fits, total=int(fits))

    def Search(self, request: pb.SearchRequest, context: Any) -> pb.SearchReply:
        hits = [pb.SearchHit(kind="node", name="n1"), pb.SearchHit(kind="incident", incident=f"{self.name}1")]
        return pb.SearchReply(hits=hits * (request.text == "n1"))

    def ListIncidents(self, request: Any, context: Any) -> pb.IncidentList:
        if not self.sick:
            return pb.IncidentList()
        one = Incident(
            f"{self.name}1", IncidentKind.XID, "xid_79", "node", "n1", None, (("n1", None),), T0, T0, None,
            self.severity, 0.9, RecommendedAction.DRAIN, f"n1 of {self.name} is sick", "", (), (), ("xid",),
        )  # fmt: skip
        return pb.IncidentList(incidents_json=[to_json(one)], total=1)

    def ActOnNode(self, request: pb.ActRequest, context: Any) -> pb.ActReply:
        self.acts.append(request.node)
        return pb.ActReply(state="done")

    def PreviewAct(self, request: pb.ActRequest, context: Any) -> pb.ActPreview:
        return pb.ActPreview()

    def EndSilence(self, request: Any, context: Any) -> pb.SilenceReply:
        self.acts.append("silence")
        context.abort(grpc.StatusCode.NOT_FOUND, "no such silence")


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, tuple[Collector, str]]]:
    found, servers = {}, []
    for name, severity in (("west", Severity.WARNING), ("east", Severity.CRITICAL)):
        collector = Collector(name, severity)
        server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        add_FleetServicer_to_server(collector, server)
        found[name] = collector, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
    yield found
    for server in servers:
        server.stop(None)


@pytest.fixture
def two(served: dict[str, tuple[Collector, str]], file: Path) -> dict[str, Collector]:
    """West and east in the file; west is the current one."""
    write(file, 'current = "west"', {name: address for name, (_, address) in served.items()})
    for collector, _ in served.values():
        collector.acts.clear()
        collector.judged, collector.sick, collector.role = True, True, "active"
    return {name: collector for name, (collector, _) in served.items()}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (client.COLLECTOR, client.CA, client.CERT, client.KEY, contexts.CLUSTER, contexts.FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "drover" / "clusters.toml"


def write(file: Path, head: str, clusters: dict[str, str], more: str = "") -> None:
    tables = [f'[[clusters]]\nname = "{name}"\ncollector = "{address}"\n{more}' for name, address in clusters.items()]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join([head, *tables]))
    file.chmod(0o600)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, str]:
    assert main(args) == code
    out, err = capsys.readouterr()
    return out, err


DRAIN = ("drain", "n1", "--why", "fan")


@pytest.mark.parametrize("args", [("--cluster", "east", *DRAIN), (*DRAIN, "--cluster", "east")])
def test_a_named_cluster_gets_the_act_and_is_shown_before_and_after(two, capsys, args: tuple[str, ...]) -> None:
    out, err = said(capsys, *args)
    assert two["east"].acts == ["n1"]
    assert not two["west"].acts
    assert err.startswith("cluster east (127.0.0.1:")
    assert "drain n1" in err
    assert out.startswith("drain n1 in cluster east: done")


def test_the_environment_names_one_too(two, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contexts.CLUSTER, "east")
    said(capsys, *DRAIN)
    assert (two["east"].acts, two["west"].acts) == (["n1"], [])


@pytest.mark.parametrize("args", [DRAIN, ("unsilence", "s1", "--why", "over")])
def test_a_script_that_names_none_does_nothing(two, capsys, monkeypatch, args: tuple[str, ...]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("west\n"))
    _, err = said(capsys, *args, code=2)
    assert not two["west"].acts
    assert not two["east"].acts
    assert "not done: there are several clusters" in err
    assert "--cluster west" in err


@pytest.mark.parametrize(("typed", "acts"), [("west", ["n1"]), ("east", []), ("y", []), ("", [])])
def test_a_person_types_the_current_cluster(two, capsys, monkeypatch, typed: str, acts: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(f"{typed}\n"))
    _, err = said(capsys, *DRAIN, code=0 if acts else 2)
    assert (two["west"].acts, two["east"].acts) == (acts, [])
    assert err.index("cluster west (") < err.index("Do it in cluster west?")


def test_a_look_asks_the_current_one_and_nobody_a_question(two, capsys) -> None:
    out, err = said(capsys, "status")
    assert "west" in out.splitlines()[0]
    assert not err
    out, err = said(capsys, "drain", "n1", "--check")
    assert out.startswith("drain n1 in cluster west: nothing is against it")
    assert not err


def test_with_one_cluster_nothing_is_asked(served, file: Path, capsys) -> None:
    collector, address = served["west"]
    collector.acts.clear()
    write(file, "", {"west": address})
    _, err = said(capsys, *DRAIN)
    assert collector.acts == ["n1"]
    assert err.startswith("cluster west (")


def test_without_a_file_all_is_as_before(served, file: Path, capsys) -> None:
    collector, address = served["west"]
    collector.acts.clear()
    assert not file.exists()
    out, err = said(capsys, *DRAIN, "--collector", address)
    assert (collector.acts, err) == (["n1"], "")
    assert out.startswith("drain n1: done")


def test_a_collector_that_is_named_counts_more_than_the_file(two, served, capsys, monkeypatch) -> None:
    monkeypatch.setenv(client.COLLECTOR, served["east"][1])
    out, _ = said(capsys, "status")
    assert "east" in out.splitlines()[0]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    said(capsys, *DRAIN, code=2)
    assert not two["east"].acts, "the environment's collector is no name on this command"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--cluster", "north", "status"), "no cluster 'north' in"),
        (("--cluster", "all", *DRAIN), "`drover drain` asks one cluster"),
        (("status", "--cluster", "east", "--collector", "x:1"), "give one of them"),
        (("--cluster", "east", "drane"), "did you mean `drover drain`?"),
        (("config", "use", "north"), "known are west, east"),
    ],
)
def test_what_is_not_clear_is_refused(two, capsys, args: tuple[str, ...], text: str) -> None:
    _, err = said(capsys, *args, code=2)
    assert text in err
    assert not two["west"].acts
    assert not two["east"].acts


def test_several_and_no_current_one(served, file: Path, capsys) -> None:
    write(file, "", {name: address for name, (_, address) in served.items()})
    _, err = said(capsys, "status", code=2)
    assert "which cluster?" in err
    said(capsys, "config", "current", code=1)


def test_use_changes_one_line_and_keeps_the_rest(two, file: Path, capsys) -> None:
    text = "# ours\n" + file.read_text()
    file.write_text(text)
    assert said(capsys, "config", "use", "east")[0].startswith("commands now ask cluster east (")
    assert file.read_text() == text.replace('current = "west"', 'current = "east"')
    assert file.stat().st_mode & 0o777 == 0o600
    rows = [json.loads(line) for line in said(capsys, "config", "list", "--json")[0].splitlines()]
    assert [(row["cluster"], row["current"]) for row in rows] == [("west", False), ("east", True)]
    file.write_text(text.replace('current = "west"\n', ""))
    said(capsys, "config", "use", "west")
    assert contexts.known().current == "west"


def test_a_file_that_others_may_read_is_refused(two, file: Path, capsys) -> None:
    file.chmod(0o644)
    _, err = said(capsys, "status", code=2)
    assert "is open to every user" in err


def test_the_certificates_of_one_cluster_never_go_to_another(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, "", {"west": "w:1"})
    monkeypatch.setenv(client.CA, "other-ca.pem")
    args = build_parser().parse_args(["status", "--cluster", "west"])
    contexts.resolve(args)
    assert (args.collector, args.ca, args.cert, args.key) == ("w:1", None, None, None)


def test_files_that_are_named_are_not_completed_from_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, "", {"west": "w:1"})
    for name in (client.CA, client.CERT, client.KEY):
        monkeypatch.setenv(name, "east.pem")
    args = build_parser().parse_args(["status", "--cluster", "west", "--ca", "west-ca.pem"])
    contexts.resolve(args)
    assert (str(args.ca), args.cert, args.key) == ("west-ca.pem", None, None)


def test_no_incident_is_none_only_where_something_was_judged(two, served, file: Path, capsys) -> None:
    for collector in two.values():
        collector.sick = False
    assert said(capsys, "incidents")[0] == "no open incidents\n"
    assert said(capsys, "--cluster", "all", "incidents")[0] == "no open incidents\n"
    two["east"].judged = False
    merged = said(capsys, "--cluster", "all", "incidents")[0]
    assert merged == "what is open is not known in east (nothing is judged yet); no open incidents in the others\n"
    assert "what is open is not known" in said(capsys, "--cluster", "east", "incidents", "--state", "all")[0]
    assert said(capsys, "--cluster", "east", "incidents", "--state", "closed")[0] == "no closed incidents\n"
    rows = {line.split()[0]: line.split() for line in said(capsys, "clusters")[0].splitlines()[2:]}
    assert (rows["west"][7], rows["east"][7]) == ("none", "?")
    two["east"].role = "standby"  # it never judges anything: "yet" would have an on-call wait for it
    asked = said(capsys, "--cluster", "east", "incidents")[0]
    assert asked == "another collector judges: what is open is not known\n"
    write(file, "", {"west": served["west"][1], "north": f"127.0.0.1:{free_port()}"})
    assert said(capsys, "--cluster", "all", "incidents", code=3)[0] == "no open incidents in the clusters that answer\n"
    write(file, "", {"north": f"127.0.0.1:{free_port()}"})
    assert said(capsys, "--cluster", "all", "incidents", code=3)[0].startswith("no cluster answers")


def test_all_clusters_merged_the_worst_first_and_who_is_away_is_named(two, served, file: Path, capsys) -> None:
    addresses = {name: address for name, (_, address) in served.items()} | {"north": f"127.0.0.1:{free_port()}"}
    write(file, "", addresses)
    out, err = said(capsys, "--cluster", "all", "incidents", "--json", code=3)
    assert [json.loads(line)["cluster"] for line in out.splitlines()] == ["east", "west"]
    assert "cluster north is not in this" in err
    out, _ = said(capsys, "--cluster", "all", "nodes", code=3)
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [["west", "n1"], ["east", "n1"]]
    out, _ = said(capsys, "clusters", code=3)
    rows = {line.split()[0]: line.split() for line in out.splitlines()[2:]}
    assert rows["west"][:6] == ["west", "observe", "9", "7", "1", "1"], "a GPU that no word covers is unknown"
    assert rows["north"][1:9] == ["?"] * 8
    out, err = said(capsys, "find", "n1", "--json")
    assert sorted((h["cluster"], h["kind"]) for h in map(json.loads, out.splitlines())) == [
        ("east", "incident"), ("east", "node"), ("west", "incident"), ("west", "node"),
    ]  # fmt: skip
    said(capsys, "find", "nowhere", code=3)
    assert "north" in err
