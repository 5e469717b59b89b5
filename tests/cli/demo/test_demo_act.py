"""What `drover demo --act` prints to type next, by how far each node is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drover_cli.demo.act import (
    NO_BOOT,
    SCHEDULER,
    Guide,
    policy,
)
from drover_core.model.events import (
    Decision,
    Health,
    NodeOutage,
    RecommendedAction,
    WaitsFor,
    Withheld,
    to_json,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

SPEC = FleetSpec(tuple(NodeSpec(name=f"r0{r}n0{n}", rack=f"r0{r}", gpus=8) for r in (1, 2) for n in (1, 2)), (), "f")
LOST = [{"node": "r01n01", "kind": "xid", "cause": "fallen_off_bus"}]
FAILED_REMAP = [{"node": "r01n01", "kind": "memory", "cause": "row_remap_failure"}]


class Stub(FleetStandIn):
    """Answers GetPolicy with what is set."""

    def __init__(self) -> None:
        self.state = pb.PolicyState()

    def GetPolicy(self, _request: pb.PolicyRequest) -> pb.PolicyState:
        return self.state


def said(
    duties: Sequence[Sequence[NodeOutage]], labels: list[dict[str, Any]], api: str = "127.0.0.1:7302"
) -> list[str]:
    """What the guide says of duties that follow each other."""
    lines: list[str] = []
    guide, stub = Guide(lines.append, SPEC, api), Stub()
    for now in duties:
        stub.state = pb.PolicyState(duties_json=[to_json(duty) for duty in now])
        for _ in range(2):  # what is known already is not said again
            guide.look(stub, labels, {})  # type: ignore[arg-type]  # one method of the stub
    return lines


def duty(stage: Health, reason: str = "", waits: WaitsFor = WaitsFor.NOTHING, by: str = "drover") -> NodeOutage:
    return NodeOutage("r01n01", stage, 1, "i1", reason, by, waits_for=waits)


def test_a_node_that_needs_a_boot() -> None:
    lines = said(
        [
            [duty(Health.DRAINING, "XID 79")],
            [duty(Health.DRAINED, "held for a reboot: XID 79", WaitsFor.REBOOT)],
            [duty(Health.DRAINED, "held for telemetry: GPU 0", WaitsFor.TELEMETRY)],
            [duty(Health.VALIDATING, "probed")],
            [],
        ],
        LOST,
    )
    assert [line.strip() for line in lines] == [
        "r01n01 gets no new jobs. Those that run there leave it within 20 s.",
        "r01n01 stays out: held for a reboot: XID 79",
        'type: drover reboot r01n01 --why "a boot ends this fault"',
        "It is up after 20 s, and probed by itself when all its GPUs report.",
        "r01n01 stays out: held for telemetry: GPU 0",
        "Nothing to type: it goes on when all its GPUs report.",
        "r01n01 is empty. Its GPUs are probed.",
        "r01n01 is back in service.",
        "You can also take out a healthy node by hand, for work on it:",
        'type: drover drain r02n01 --why "a fan is replaced"',
    ]


def test_a_fault_that_no_boot_ends_is_left_out() -> None:
    lines = said([[duty(Health.REPAIR, "memory_pattern gave a wrong answer")]], FAILED_REMAP)
    assert NO_BOOT in lines[-1] and not [line for line in lines if "type:" in line]


def test_a_fault_that_asks_for_a_reset_gets_it_also_where_it_does_not_help() -> None:
    lines = said(
        [[duty(Health.DRAINED, "held for a GPU reset", WaitsFor.RESET)], [duty(Health.REPAIR, "failed")]], FAILED_REMAP
    )
    assert "drover reset r01n01" in lines[1] and NO_BOOT in lines[-1]


def test_what_a_person_drained_waits_for_that_person() -> None:
    lines = said([[duty(Health.DRAINED, "a fan", by="alice")]], [], "127.0.0.1:4711")
    assert lines[-1].strip() == 'type: drover resume r01n01 --why "the work is done" --collector 127.0.0.1:4711'


def test_a_reset_and_a_look_are_asked_for_where_they_help() -> None:
    assert "drover reset r01n01" in said([[duty(Health.DRAINED, "held", WaitsFor.RESET)]], LOST)[-2]
    unjudged = NodeOutage("r01n01", Health.DRAINED, 1, "i1", "not validated: no verdict came", withheld=Withheld.REVIEW)
    assert "drover resume r01n01" in said([[unjudged]], [])[-1]


def test_a_decision_is_asked_once_with_what_is_wrong() -> None:
    lines: list[str] = []
    guide, stub = Guide(lines.append, SPEC, "127.0.0.1:7302"), Stub()
    asked = Decision(
        "d1", "i1", 1, "r01n01", RecommendedAction.DRAIN, "approve", "pending_approval", "rule", "asks to drain"
    )
    stub.state = pb.PolicyState(pending_json=[to_json(asked)])
    guide.look(stub, [], {})  # type: ignore[arg-type]  # one method of the stub
    assert not lines, "its incident is not known yet"
    for _ in range(2):
        guide.look(stub, [], {"i1": "XID 79 on GPU 0"})  # type: ignore[arg-type]  # the same
    assert lines == ["Drover asks: drain r01n01? XID 79 on GPU 0", '    type: drover approve d1 --why "I looked at it"']


def test_what_the_guard_holds_back_is_said_once_with_what_a_person_may_do() -> None:
    lines: list[str] = []
    guide, stub = Guide(lines.append, SPEC, "127.0.0.1:7302"), Stub()
    held = Decision(
        "d2", "i1", 1, "r01n01", RecommendedAction.DRAIN, "approve", "held", "rule", "2 of 8 nodes would be out"
    )
    back = Decision(
        "d3", "i2", 1, "r01n02", RecommendedAction.NONE, "approve", "held", "rule", "resume withheld: XID 79"
    )
    stub.state = pb.PolicyState(held_json=[to_json(held), to_json(back)])
    for _ in range(2):
        guide.look(stub, [], {"i1": "XID 79 on GPU 0"})  # type: ignore[arg-type]  # one method of the stub
    assert lines[0] == "The guard holds back: drain r01n01. 2 of 8 nodes would be out"
    assert lines[-1] == '    type: drover drain r01n01 --force --why "I looked at it"'
    assert len(lines) == 3


def test_a_faulty_node_that_a_person_drained_is_rebooted_before_it_is_resumed() -> None:
    by_hand = [[duty(Health.DRAINED, "the guard held it back", by="alice")]]
    typed = [line.strip() for line in said(by_hand, LOST) if "type:" in line]
    assert typed == [
        'type: drover reboot r01n01 --why "a boot ends this fault"',
        'type: drover resume r01n01 --why "the work is done"',
    ]
    assert NO_BOOT in said(by_hand, FAILED_REMAP)[-1]


def test_after_the_boot_a_finding_that_still_holds_asks_for_no_second_boot() -> None:
    boot, finding = duty(Health.DRAINED, "r", WaitsFor.REBOOT), duty(Health.DRAINED, "f", WaitsFor.FINDING)
    lines = said([[boot], [finding]], LOST)
    assert len([line for line in lines if "type: drover" in line]) == 1
    assert "Nothing to type" in lines[-1]


def test_the_policy_asks_a_person_and_says_what_it_acts_through() -> None:
    assert 'mode = "approve"' in policy() and SCHEDULER in policy() and "no real nodes" in SCHEDULER
