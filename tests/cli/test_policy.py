"""`drover policy`, `decisions`, `approve`, `reject`, `audit`: what they say, and with which exit code."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_cli.commands import policy_table
from drover_cli.commands.policy_table import HEALTHY, SICK, Table
from drover_cli.main import main
from drover_cli.scoring.score import Label
from drover_collector.policy.backtest import Backtest, Outage
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Audit,
    Decision,
    Incident,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_core.model.fleet import FleetSpec, NodeSpec, dump_json
from drover_core.model.reports import incident_report
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from testbed.deciding import incident

T0 = 1_800_000_000_000
HOUR_MS = 3_600_000
MINE = """
[[rules]]
kind = ["xid"]
action = "watch"
[[rules]]
name = "late"
kind = ["xid"]
xid = [79]
action = "drain"
"""
ASKED = Decision(
    "d00d", "i1", T0, "n001", RecommendedAction.DRAIN, "approve", "pending_approval", "fatal XID", "asks to drain n001"
)


def drain_incident(node: str, cause: str, hour: float, hours: float | None, **more: Any) -> Incident:
    at_ms = T0 + round(hour * HOUR_MS)
    closed_ms = None if hours is None else at_ms + round(hours * HOUR_MS)
    return replace(
        incident(node, cause, at_ms, round(hour * 10)), closed_ms=closed_ms, asked=RecommendedAction.DRAIN, **more
    )


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """Forty nodes: one dead GPU for 10 h, 8 nodes at once after a day, an application's fault; a fault unnoticed."""
    folder = tmp_path / "case"
    folder.mkdir()
    (folder / "fleet.json").write_text(dump_json(FleetSpec(tuple(NodeSpec(f"n{n:03d}", f"r{n}") for n in range(40)))))
    app = replace(
        drain_incident("n039", "xid_31", 2, 1),
        severity=Severity.INFO,
        asked=RecommendedAction.NONE,
        action=RecommendedAction.NONE,
    )
    incidents = [
        drain_incident("n000", "xid_79", 1, 10),
        app,
        *(drain_incident(f"n{n:03d}", "xid_48", 24, 2) for n in range(10, 18)),
    ]
    (folder / "incidents.jsonl").write_text("".join(json.dumps(incident_report(i)) + "\n" for i in incidents))
    labels = [
        label("1", "xid", "n000", 1, 10, cause="xid_79"), label("2", "memory", "n020", 30, 5, cause="remap_failed"),
        label("3", "xid", "n039", 2, 1, cause="app_crash", hardware=False), label("4", "risk", "n001", 0, 90),
    ]  # fmt: skip
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    return folder


def label(id_: str, kind: str, node: str, hour: float, hours: float, **more: Any) -> dict[str, Any]:
    start_ms = T0 + round(hour * HOUR_MS)
    end_ms = start_ms + round(hours * HOUR_MS)
    return {"id": id_, "kind": kind, "node": node, "gpu": 0, "start": iso(start_ms), "end": iso(end_ms),
            "cause": "", "hardware": True} | more  # fmt: skip


def test_check_says_good_and_warns_of_rules_that_never_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert main(["policy", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "good; mine, 2 rules, does at most: observe" in out
    assert "rule 2 (late) never decides" in out
    assert main(["policy", "check", "strict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'name = "x"\n[guard]\nper_hours = 1\n',
            "mine.toml:3: guard.per_hours: unknown key; did you mean guard.per_hour?",
        ),
        ("[[rules]\n", "not valid TOML"),
    ],
)
def test_check_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert main(["policy", "check", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_diff_shows_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "diff", "nvidia", "nvidia"]) == 0
    assert "decide the same" in capsys.readouterr().out
    assert main(["policy", "diff", "nvidia", "cautious"]) == 1
    out = capsys.readouterr().out
    assert "guard.fleet_ratio" in out
    assert "0.03" in out
    assert main(["policy", "diff", "nvidia", "nowhere"]) == 2


def test_backtest_counts_what_two_policies_would_have_done(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "backtest", "strict", "--case", str(case), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["incidents"] == 10
    assert found["against"]["wanted"] == {"drain": 9}
    assert found["new"]["wanted"] == {"isolate": 9, "drain": 1}
    assert found["against"]["nodes_out"] == ["n000"]  # the eight at once are no eight faults
    assert (found["against"]["node_hours_out"], found["new"]["node_hours_out"]) == (10.0, 11.0)
    assert (found["against"]["mass_events"], found["against"]["held"]) == (1, 8)
    assert (found["against"]["gpu_hours_out"], found["new"]["gpu_hours_out"]) == (80.0, 88.0), "nodes of 8 GPUs"
    for word in ("against", "new"):
        assert (found[word]["sick_out"], found[word]["faults_left"]) == (1, 1), "of risk nobody drains"
    assert (found["against"]["healthy_out"], found["new"]["healthy_out"]) == (0, 1)
    assert len(found["changed"]) == 10
    sick, app = found["drains"]
    assert (sick["node"], sick["against"], sick["new"], sick["truth"]) == (
        "n000",
        "drain",
        "isolate",
        "sick: xid/xid_79",
    )
    assert (app["node"], app["against"], app["new"], app["truth"]) == (
        "n039", "nothing", "drain", "healthy: xid/app_crash",
    )  # fmt: skip
    assert app["gpu_hours_out"] == [0.0, 8.0]
    assert main(["policy", "backtest", "strict", "--case", str(case)]) == 0
    out = capsys.readouterr().out
    assert "8 further incidents would be decided differently" in out
    assert "mass event" in out
    assert "nvidia (against)" in out, "a preset, not what is in force"
    (line,) = [line for line in out.splitlines() if " n039 " in line]
    assert line.split()[1:6] == ["n039", "nothing", "drain", "-", "8.0"]
    assert "healthy: xid/app_crash" in line
    assert "xid_31 on n039." in line, "the evidence"


def outage(from_h: float, to_h: float) -> Outage:
    from_ms, to_ms = (T0 + round(hour * HOUR_MS) for hour in (from_h, to_h))
    return Outage("n1", 8, RecommendedAction.DRAIN, "fatal XID", from_ms, ["i1"], to_ms)


def compared(old: list[Outage], new: list[Outage], fault_h: tuple[float, float]) -> Table:
    """Two policies and one fault of n1."""
    start_ms, end_ms = (T0 + round(hour * HOUR_MS) for hour in fault_h)
    label = Label("f1", "xid", (("n1", 0),), start_ms, end_ms, "fallen_off_bus", True)
    results = [Backtest(name, outages=found, until_ms=T0 + 9 * HOUR_MS) for name, found in (("a", old), ("b", new))]
    return Table((results[0], results[1]), [replace(incident("n1", "xid_79", T0, 1), id="i1")], [label])


def test_each_policy_is_judged_by_when_it_took_the_node_out_itself() -> None:
    """The old one came after the fault had ended, the new one within it."""
    table = compared([outage(4, 5)], [outage(2, 3)], (1.9, 3))
    assert [table.times_out(0, word) for word in (SICK, HEALTHY)] == [0, 1]
    assert [table.times_out(1, word) for word in (SICK, HEALTHY)] == [1, 0]
    assert table.drains[0].truth_text == "sick: xid/fallen_off_bus", "at the earlier of both"


@pytest.mark.parametrize(("out", "missed"), [((1, 4), 0), ((1, 1.9), 1), ((2.5, 9), 0), ((4, 5), 1)])
def test_a_fault_is_missed_unless_its_node_was_out_during_it(out: tuple[float, float], missed: int) -> None:
    table = compared([outage(*out)], [], (2, 3))
    assert [len(table.missed(number)) for number in (0, 1)] == [missed, 1]


def test_only_what_json_has_too_is_said_to_be_there(
    case: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_table, "SHOWN", 1)
    assert main(["policy", "backtest", "strict", "--case", str(case)]) == 0
    held = capsys.readouterr().out.partition("held back under")[2]
    assert "1 of 8 shown" in held
    assert "--json" not in held


def test_backtest_of_what_nobody_knows_the_truth_of_claims_none(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case / "labels.jsonl").unlink()
    assert main(["policy", "backtest", "strict", "--case", str(case), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [drain["truth"] for drain in found["drains"]] == [None, None]
    assert (found["new"]["sick_out"], found["new"]["healthy_out"], found["new"]["faults_left"]) == (None, None, None)
    assert main(["policy", "backtest", "strict", "--case", str(case)]) == 0
    out = capsys.readouterr().out
    assert "sick" not in out
    assert "healthy" not in out


def test_backtest_of_a_broken_export_names_the_line(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case / "incidents.jsonl").write_text('{"id": "x"}\n')
    assert main(["policy", "backtest", "strict", "--case", str(case)]) == 2
    assert "incidents.jsonl: line 1: no incident as an export writes it" in capsys.readouterr().err


class Fleet(FleetServicer):
    def __init__(self) -> None:
        self.answers: list[tuple[bool, str, str]] = []
        self.follows = [ASKED]
        self.policy = dataclasses.asdict(Policy.named("cautious"))

    def ListDecisions(self, request: pb.DecisionsRequest, _: grpc.ServicerContext) -> pb.DecisionList:
        return pb.DecisionList(decisions_json=[] if request.outcome == "act" else [to_json(ASKED)])

    def ApproveDecision(self, request: pb.Answer, _: grpc.ServicerContext) -> pb.Answered:
        self.answers.append((True, request.decision, request.why))
        return pb.Answered(decisions_json=[to_json(decision) for decision in self.follows])

    def RejectDecision(self, request: pb.Answer, _: grpc.ServicerContext) -> pb.Answered:
        self.answers.append((False, request.decision, request.why))
        return pb.Answered(decisions_json=[to_json(ASKED)])

    def ListAudit(self, request: pb.AuditRequest, _: grpc.ServicerContext) -> pb.AuditList:
        return pb.AuditList(audit_json=[to_json(Audit("a", T0, "anna", "approve", request.subject, "seen"))])

    def GetLayout(self, request: pb.LayoutRequest, _: grpc.ServicerContext) -> pb.Layout:
        return pb.Layout(racks=[pb.Rack(name="r", nodes=[pb.RackNode(name="n000", gpus=8, pool="p")])])

    def GetPolicy(self, request: pb.PolicyRequest, _: grpc.ServicerContext) -> pb.PolicyState:
        held = {key: value for key, value in self.policy.items() if key not in ("name", "mode")}
        return pb.PolicyState(name="ours", mode=self.policy["mode"], policy_json=json.dumps(held))

    def ListActions(self, request: pb.ActionsRequest, _: grpc.ServicerContext) -> pb.ActionList:
        now_ms = time.time_ns() // 1_000_000
        rows = (
            ("n000", "drain", "done", "drover", now_ms), ("n000", "isolate", "done", "anna", now_ms),
            ("n001", "drain", "failed", "drover", now_ms), ("n002", "resume", "done", "anna", now_ms),
            ("n003", "drain", "done", "drover", 1_700_000_000_000),
        )  # fmt: skip
        return pb.ActionList(
            actions=[pb.ActionLine(node=n, act=act, state=s, by=by, ts_ms=ts) for n, act, s, by, ts in rows]
        )

    def ListIncidents(self, request: pb.ListIncidentsRequest, _: grpc.ServicerContext) -> pb.IncidentList:
        return pb.IncidentList(incidents_json=[to_json(drain_incident("n000", "xid_79", 1, 2))], total=1)


Drover = Callable[..., tuple[int, str]]


@pytest.fixture
def served() -> Iterator[tuple[Fleet, str]]:
    fleet = Fleet()
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_FleetServicer_to_server(fleet, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fleet, address
    server.stop(None).wait()


def test_an_approval_that_the_guard_holds_back_is_refused_for_now(
    served: tuple[Fleet, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, address = served
    held = replace(ASKED, outcome="held", reason="2 of 8 nodes of the fleet would be out")
    fleet.follows = [replace(ASKED, outcome="approved"), held]
    assert main(["approve", "d00d", "--why", "seen the log", "--collector", address]) == 1
    assert "held back for now: 2 of 8 nodes" in capsys.readouterr().err
    assert main(["approve", "d00d", "--why", "seen the log", "--collector", address, "--json"]) == 1
    assert [json.loads(line)["outcome"] for line in capsys.readouterr().out.splitlines()] == ["approved", "held"]


def test_decisions_answers_and_audit(served: tuple[Fleet, str], capsys: pytest.CaptureFixture[str]) -> None:
    fleet, address = served
    there = ["--collector", address]
    assert main(["decisions", *there]) == 0
    assert "pending approval" in capsys.readouterr().out
    assert main(["decisions", *there, "--outcome", "act"]) == 0
    assert capsys.readouterr().out == "no decisions\n"
    assert main(["approve", "d00d", "--why", "seen the log", *there]) == 0
    assert main(["reject", "d00d", "--why", "no", *there, "--json"]) == 0
    assert fleet.answers == [(True, "d00d", "seen the log"), (False, "d00d", "no")]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["id"] == "d00d"
    assert main(["audit", "i1", *there]) == 0
    out = capsys.readouterr().out
    assert "anna" in out
    assert "i1" in out
    with pytest.raises(SystemExit):  # nobody answers without a reason
        main(["approve", "d00d", *there])


def test_backtest_of_a_collectors_history_is_held_against_the_policy_in_force_there(
    served: tuple[Fleet, str], capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--collector", served[1]]
    assert main(["policy", "backtest", "strict", *there, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["against"]["policy"], found["against"]["present"]) == ("ours", True)
    assert found["new"]["policy"] == "strict"
    assert (found["against"]["times_out"], found["new"]["times_out"]) == (1, 1)
    assert [(line["node"], line["act"], line["by"]) for line in found["in_fact"]] == [
        ("n000", "drain", "drover"), ("n000", "isolate", "anna"),
    ]  # fmt: skip
    assert main(["policy", "backtest", "strict", *there]) == 0
    out = capsys.readouterr().out
    assert "ours (present)" in out
    assert "nodes that Drover took out in that time: 1; by itself 1 times, for a person 1 times" in out
    assert main(["policy", "backtest", "strict", "--against", "nvidia", *there]) == 0
    assert "nvidia (against)" in capsys.readouterr().out


def test_a_policy_in_force_that_this_version_cannot_read_is_said(
    served: tuple[Fleet, str], capsys: pytest.CaptureFixture[str]
) -> None:
    served[0].policy["rules"] = [{"action": "drain", "moon": "full"}]
    assert main(["policy", "backtest", "strict", "--collector", served[1]]) == 2
    assert "rules that this version does not know; name one: --against" in capsys.readouterr().err
