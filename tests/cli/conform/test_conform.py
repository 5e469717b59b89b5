"""`drover conform`: each part is answered by what the collector says, and turns when that breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from drover_cli.conform.answers import Answer, Evidence, Q, R, joined
from drover_cli.conform.sheet import ROWS
from drover_cli.main import main
from drover_collector.exporters.sending import SendStatus
from drover_collector.store import Store
from drover_core.model.events import (
    Audit,
    Event,
    EventKind,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    Silence,
)
from drover_core.model.jsonform import to_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import FleetMethod
from testbed.doctor_system import NOW_MS, well
from testbed.fleet_served import NOW, served

YES, PARTLY, NO, UNKNOWN = Answer.YES, Answer.PARTLY, Answer.NO, Answer.UNKNOWN
KINDS = ("otlp_metrics", "otlp_logs")
INVENTORY = {
    "host.serial": "C1", "host.board_serial": "B1", "host.bios_version": "1.2", "nic.mlx5_0.guid": "g",
    "nic.mlx5_0.firmware": "28.1", "gpu0.vbios": "96.0",
}  # fmt: skip


def _system() -> pb.System:
    system = well()
    for kind in KINDS:
        system.exporters.add(name=kind, kind=kind, sent=10, latency_s=3.0, taken_ms=NOW_MS - 20_000)
    return system


def _incident() -> Incident:
    return Incident(
        "i1", IncidentKind.XID, "xid_79", "gpu", "n1", 0, (("n1", 0),), NOW_MS - 9000, NOW_MS - 9000, NOW_MS - 1000,
        Severity.CRITICAL, 1.0, RecommendedAction.DRAIN, "lost", "drain it", updated_ms=NOW_MS - 1000,
    )  # fmt: skip


def _node() -> pb.NodeDetail:
    value = pb.Value(metric="nvlink_active_links", present=True, value=18)
    return pb.NodeDetail(
        row=pb.NodeRow(name="n1"), inventory=INVENTORY, gpus=[pb.GpuDetail(gpu=0, serial="S1", values=[value])],
        values=[
            pb.Value(metric=f"source_{name}_outcome", present=True, value=0) for name in ("kmsg", "jobs")
        ],
        links=[pb.LinkDetail(link="mlx5_0", values=[pb.Value(metric="link_up", present=True, value=1)])],
    )  # fmt: skip


def best() -> Evidence:
    """Return what a collector answers that meets all that Drover can meet."""
    row = pb.NodeRow(
        name="n1", sku="H100", health="healthy", gpu_health=["healthy"], jobs=["train"], last_seen_ms=NOW_MS
    )
    window = Silence("s1", NOW_MS, NOW_MS, NOW_MS + 9000, "ann", "fan", node=("n1",), maintenance=True)
    adopted = Audit("a1", NOW_MS, "ann", "adopt", "n1", "rack 7 is delivered", "adopted into the fleet")
    event = Event("e1", NOW_MS, "n1", 0, EventKind.XID, "79", "lost", "kmsg")
    replies: dict[FleetMethod[Any, Any], Message] = {
        methods.GET_STATUS: pb.Status(nodes_expected=1, gpus_expected=1, gpus_by_health={"healthy": 1}, ts_ms=NOW_MS),
        methods.GET_SYSTEM: _system(),
        methods.GET_POLICY: pb.PolicyState(opens_tickets=True),
        methods.GET_CAPACITY: pb.Capacity(judged_ms=NOW_MS, pools=[pb.PoolCapacity(pool="a", gpus=1, held=1)]),
        methods.LIST_REPORTING: pb.ReportingList(
            nodes=[pb.ReportingNode(name="n1", in_file=True, last_seen_ms=NOW_MS, adopted=True)]
        ),
        methods.LIST_SILENCES: pb.SilenceList(silences_json=[to_json(window)], may_change=True, max_hours=48),
        methods.LIST_ACTIONS: pb.ActionList(actions=[pb.ActionLine(act="repair", state="done")]),
        methods.LIST_INCIDENTS: pb.IncidentList(incidents_json=[to_json(_incident())]),
        methods.LIST_AUDIT: pb.AuditList(audit_json=[to_json(adopted)]),
        methods.LIST_EVENTS: pb.EventList(events_json=[to_json(event)]),
        methods.GET_FABRIC: pb.Fabric(leafs=[pb.LeafRow(name="l1", ports=4, ports_unknown=1)]),
        methods.LIST_NODES: pb.NodeList(nodes=[row], total=1),
    }
    previews = {("n1", act): pb.ActPreview(may_act=True) for act in ("drain", "reset", "reboot")}
    return Evidence({method.name: reply for method, reply in replies.items()}, {}, [_node()], previews)


Break = Callable[[Evidence], Evidence | None]


def _reply(method: FleetMethod[Q, R], change: Callable[[R], object]) -> Break:
    def broken(evidence: Evidence) -> None:
        change(evidence.of(method))

    return broken


def _node_gone(change: Callable[[pb.NodeDetail], object]) -> Break:
    def broken(evidence: Evidence) -> None:
        for node in evidence.nodes():
            change(node)

    return broken


def _lacks(*keys: str) -> Break:
    return _node_gone(lambda node: [node.inventory.pop(key) for key in keys])


def _hindered(act: str) -> Break:
    def broken(evidence: Evidence) -> None:
        evidence.previews["n1", act].hindrance = "no actuator has n1"

    return broken


def _no_incidents(incident: Incident) -> Break:
    def change(reply: pb.IncidentList) -> None:
        reply.incidents_json[:] = [to_json(incident)]

    return _reply(methods.LIST_INCIDENTS, change)


def _exporter(number: int, **values: object) -> Break:
    def change(system: pb.System) -> None:
        for name, value in values.items():
            setattr(system.exporters[number], name, value)

    return _reply(methods.GET_SYSTEM, change)


CAPACITY_OLD = _reply(methods.GET_CAPACITY, lambda reply: reply.ClearField("judged_ms"))
# Row, part, its answer at its best, what breaks, its answer then.
TURNS: list[tuple[str, str, Answer, Break, Answer]] = [
    ("TEL-DELIVERY", "metrics", YES, _exporter(0, trouble="refused"), NO),
    ("TEL-DELIVERY", "metrics", YES, _exporter(0, taken_ms=NOW_MS - 121_000), NO),
    ("TEL-DELIVERY", "metrics", YES, _exporter(0, latency_s=120.5), NO),
    ("TEL-DELIVERY", "metrics", YES, _exporter(0, oldest_s=130.0), NO),
    ("TEL-DELIVERY", "metrics", YES, _exporter(0, lost=1), PARTLY),
    ("TEL-DELIVERY", "metrics", YES, _exporter(0, kind="remote_write"), PARTLY),
    ("TEL-DELIVERY", "metrics", YES, _reply(methods.GET_SYSTEM, lambda s: s.ClearField("exporters")), NO),
    ("TEL-DELIVERY", "logs", YES, _exporter(1, trouble="answered 503"), NO),
    ("TEL-DELIVERY", "logs", YES,
     _reply(methods.GET_SYSTEM, lambda s: s.exporters[1].ClearField("latency_s")), UNKNOWN),
    ("TEL-NETWORK", "east-west network", PARTLY,
     _reply(methods.GET_FABRIC, lambda f: setattr(f.leafs[0], "ports_unknown", 4)), NO),
    ("TEL-NETWORK", "NVSwitch fabric", PARTLY, _node_gone(lambda n: n.gpus[0].ClearField("values")), NO),
    ("TEL-NETWORK", "host network", PARTLY, _node_gone(lambda n: n.ClearField("links")), NO),
    ("TEL-LOGS", "syslogs", PARTLY, _node_gone(lambda n: setattr(n.values[0], "value", 1)), NO),
    ("TEL-LOGS", "syslogs", PARTLY, _exporter(1, trouble="answered 503"), NO),
    ("BFX01", "power-cycle a node", YES, _hindered("reboot"), NO),
    ("BFX01", "reset the GPUs of a node", YES, _hindered("reset"), NO),
    ("BFX01", "cordon: no new jobs, running ones end", YES, _hindered("drain"), NO),
    ("BFX01", "report a node or rack for maintenance", YES,
     _reply(methods.LIST_SILENCES, lambda r: r.ClearField("may_change")), UNKNOWN),
    ("BFX01", "ask for a replacement", YES,
     _reply(methods.GET_POLICY, lambda s: setattr(s, "opens_tickets", False)), NO),
    ("BFX01", "ask for a replacement", YES, _reply(methods.GET_POLICY, lambda s: s.ClearField("opens_tickets")), NO),
    ("BFX02", "description of the fault", YES, _no_incidents(replace(_incident(), summary="")), NO),
    ("BFX02", "update date", YES, _no_incidents(replace(_incident(), updated_ms=0)), NO),
    ("BFX02", "close date", YES, _no_incidents(replace(_incident(), closed_ms=None)), UNKNOWN),
    ("BFX02", "description of the fault", YES,
     _reply(methods.LIST_INCIDENTS, lambda r: r.incidents_json.append('{"id": "i2", "kind": "of a newer collector"}')),
     UNKNOWN),
    ("BFX02", "ticket id", PARTLY, _reply(methods.LIST_ACTIONS, lambda r: r.ClearField("actions")), NO),
    ("BFX03", "serial of the chassis", YES, _lacks("host.serial"), NO),
    ("BFX03", "serial of the baseboard", YES, _lacks("host.board_serial"), NO),
    ("BFX03", "id of network adapters", YES, _lacks("nic.mlx5_0.guid"), NO),
    ("BFX03", "serials of GPUs", YES, _node_gone(lambda n: n.gpus[0].ClearField("serial")), NO),
    ("BFX03", "firmware of the host", YES, _lacks("host.bios_version"), NO),
    ("BFX03", "firmware of GPUs", YES, _lacks("gpu0.vbios"), NO),
    ("BFX03", "firmware of network adapters", YES, _lacks("nic.mlx5_0.firmware"), NO),
    ("CAP01", "delivered", PARTLY, _reply(methods.GET_STATUS, lambda s: s.ClearField("nodes_expected")), NO),
    ("CAP01", "healthy", PARTLY, _reply(methods.GET_STATUS, lambda s: s.gpus_by_health.update(unknown=1)), NO),
    ("CAP01", "in use", PARTLY, CAPACITY_OLD, NO),
    ("CAP02", "node id", YES, _reply(methods.LIST_NODES, lambda r: r.nodes[0].ClearField("name")), NO),
    ("CAP02", "health state", YES, _reply(methods.LIST_NODES, lambda r: setattr(r.nodes[0], "health", "unknown")), NO),
    ("CAP02", "hardware type", YES, _reply(methods.LIST_NODES, lambda r: r.nodes[0].ClearField("sku")), NO),
    ("CAP02", "GPU count", YES, _reply(methods.LIST_NODES, lambda r: r.nodes[0].ClearField("gpu_health")), NO),
    ("CAP02", "in use", YES, CAPACITY_OLD, NO),
    ("CAP02", "in use", YES, _node_gone(lambda n: n.values[1].ClearField("present")), UNKNOWN),
    ("CAP02", "hardware type", YES, _reply(methods.LIST_NODES, lambda r: setattr(r, "total", 2)), PARTLY),
    ("CAP03", "new nodes are listed", YES,
     _reply(methods.LIST_REPORTING, lambda r: r.nodes[0].ClearField("last_seen_ms")), NO),
    ("CAP03", "stable id", YES, _node_gone(lambda n: n.gpus[0].ClearField("serial")), NO),
    ("CAP03", "why it is provided", PARTLY, _reply(methods.LIST_AUDIT, lambda r: r.ClearField("audit_json")), NO),
]  # fmt: skip


def _answers(evidence: Evidence) -> Mapping[tuple[str, str], Answer]:
    return {(row.id, part.what): part.answer for row in ROWS for part in row.answered(evidence).parts}


@pytest.mark.parametrize(("row", "part", "good", "broken", "bad"), TURNS, ids=[f"{r} {p}" for r, p, *_ in TURNS])
def test_a_part_turns_when_what_it_asks_for_breaks(
    row: str, part: str, good: Answer, broken: Break, bad: Answer
) -> None:
    evidence = best()
    assert _answers(evidence)[row, part] is good
    broken(evidence)
    assert _answers(evidence)[row, part] is bad


def test_every_part_that_can_be_yes_has_such_a_test_or_is_a_question_that_is_answered() -> None:
    tested = {(row, part) for row, part, *_ in TURNS}
    rest = {at for at, answer in _answers(best()).items() if answer in (YES, PARTLY)} - tested
    assert rest == {  # the reply itself is the proof; without it they are unknown, see below
        ("BFX02", "maintenance now and to come"), ("BFX02", "repairs, then and now"),
        # as `description of the fault`; Incident has no value without these
        ("BFX02", "open date"), ("BFX02", "stable id of the hardware"), ("BFX02", "category of the hardware"),
        ("BFX02", "category of the action"),
    }  # fmt: skip


def test_what_cannot_be_read_is_unknown_and_never_yes() -> None:
    unread = dict.fromkeys(methods.METHODS, "the store does not answer")
    for row in ROWS:
        answered = row.answered(Evidence({}, unread))
        assert answered.answer is not YES
        for part in answered.parts:
            assert part.answer in (UNKNOWN, NO)
            if part.answer is NO:  # what Drover has nothing for, whatever a collector answers
                assert part in row.answered(best()).parts
    logs = next(row for row in ROWS if row.id == "TEL-DELIVERY").answered(Evidence({}, unread)).parts[1]
    assert logs.proof == "GetSystem was not answered: the store does not answer"


def test_a_row_is_yes_only_where_all_of_it_is() -> None:
    assert joined([YES, YES]) is YES
    assert joined([YES, UNKNOWN]) is UNKNOWN
    assert joined([NO, UNKNOWN]) is UNKNOWN
    assert joined([YES, NO, UNKNOWN]) is PARTLY
    assert joined([NO, NO]) is NO
    answers = {row.id: row.answered(best()).answer for row in ROWS}
    assert answers["TEL-DELIVERY"] is YES
    assert answers["TEL-SCOPE"] is UNKNOWN
    assert set(answers.values()) == {YES, PARTLY, UNKNOWN}


def test_the_command_asks_a_running_collector(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with served(store) as there:
            address = there.address
            assert await asyncio.to_thread(main, ["conform", "--collector", address, "-o", "json"]) == 1
            found = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
            assert set(found) == {row.id for row in ROWS}
            parts = {(name, part["what"]): part for name, row in found.items() for part in row["parts"]}
            assert parts["CAP01", "delivered"]["proof"].startswith("4 nodes, 8 GPUs")
            assert parts["CAP02", "health state"] == {
                "what": "health state", "answer": "partly", "proof": "3 of 4 nodes have a known health",
            }  # fmt: skip
            assert parts["BFX01", "cordon: no new jobs, running ones end"]["answer"] == "no"
            assert "only observes" in parts["BFX01", "cordon: no new jobs, running ones end"]["proof"]
            assert "kmsg 1" in parts["TEL-LOGS", "UFM event logs"]["proof"]
            assert found["TEL-DELIVERY"]["answer"] == "no"
            assert await asyncio.to_thread(main, ["conform", "cap03", "--collector", address]) == 1
            shown = capsys.readouterr().out
            assert "CAP03" in shown
            assert "CAP02" not in shown
            assert await asyncio.to_thread(main, ["conform", "BFX99", "--collector", address]) == 2
            sent = {kind: SendStatus(kind, 5, taken_ms=NOW - 20_000, latency_s=2.0) for kind in KINDS}
            there.facts.parts = replace(there.facts.parts, exports=lambda: sent)
            assert await asyncio.to_thread(main, ["conform", "tel-delivery", "--collector", address]) == 0
            assert "otlp_metrics: 5 taken, the newest 2.0 s after its time" in capsys.readouterr().out
            sent["otlp_logs"].waiting, sent["otlp_logs"].oldest_ms = 1, NOW - 130_000
            assert await asyncio.to_thread(main, ["conform", "tel-delivery", "--collector", address]) == 1
            assert "what is due is 130 s old" in capsys.readouterr().out

    asyncio.run(run())
