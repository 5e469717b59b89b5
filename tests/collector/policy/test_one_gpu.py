"""One GPU instead of its node: when it goes alone, why else the node, and what it counts for the guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drover_collector.engine.engine import Engine
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents import health
from drover_collector.policy.decider import Decider, LiveFleet
from drover_collector.policy.gate import gate_verdicts
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.one_gpu import Board
from drover_collector.policy.policy import Policy, Rule
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Approval,
    Decision,
    GpuRef,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    RecommendedAction,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.settings import SettingsError
from testbed.deciding import OPEN, decide, folded, incident, policy

NODES = ("n1", "n2", "n3", "n4")
INDEX = FleetIndex(FleetSpec(tuple(NodeSpec(name, "r1", "l1", "p1", "sku", 8) for name in NODES)))
RULES = (Rule("drain", "memory alone", take_out="gpu"),)


def uuid(node: str, slot: int) -> str:
    return f"GPU-{node}-{slot}"


def fault(node: str = "n1", slot: int = 3, cause: str = "remap_failed", at_ms: int = 500, **more: object) -> Incident:
    made = replace(
        incident(node, cause, at_ms, slot, kind=IncidentKind.MEMORY), gpu=slot, members=((node, slot),)
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def decider(
    mode: str = "enforce", boards: Mapping[tuple[str, int], Board] | None = None, hindrance: str = "", **more: object
) -> Decider:
    known = boards or {}

    def board(node: str, slot: int) -> Board | None:
        return known.get((node, slot), Board(uuid(node, slot)))

    live = LiveFleet(hindrance=lambda _: hindrance, board=board)
    return Decider(INDEX, policy(mode, rules=RULES, **more), "enforce", live)  # type: ignore[arg-type]  # as `policy` takes them


def only(subject: Decider, *incidents: Incident, at_ms: int = 1000) -> Decision:
    (made,) = decide(subject, list(incidents), at_ms)[0]
    return made


def outage(slot: int = 3, stage: Health = Health.DRAINED, ts_ms: int = 2000, node: str = "n1") -> NodeOutage:
    return NodeOutage(node, stage, ts_ms, f"{node}-remap_failed-{slot}", "it", gpu=GpuRef(slot, uuid(node, slot)))


@pytest.mark.parametrize(
    ("mode", "outcome", "says"),
    [("observe", "would_act", "would isolate"), ("approve", "pending_approval", "asks to"), ("enforce", "act", "")],
)
def test_the_gpu_goes_by_its_uuid_in_each_mode(mode: str, outcome: str, says: str) -> None:
    made = only(decider(mode), fault())
    assert (made.outcome, made.node, made.wanted) == (outcome, "n1", RecommendedAction.DRAIN)
    assert made.gpu == GpuRef(3, uuid("n1", 3))
    assert made.reason.startswith(says)
    assert "isolate GPU 3 of n1 (GPU-n1-3) for memory/remap_failed" in made.reason
    assert made.what == "isolate GPU 3 of n1"


def test_without_the_key_the_node_goes() -> None:
    subject = Decider(INDEX, policy("enforce", rules=(Rule("drain"),)), "enforce", LiveFleet())
    assert only(subject, fault()).gpu is None


CASES: dict[str, tuple[Decider, Incident, str]] = {
    "of a link": (decider(), fault(kind=IncidentKind.LINK), "a link, which its neighbours use too"),
    "mended by a boot alone": (
        decider(), fault(kind=IncidentKind.XID, cause="xid_79"), "XID 79 needs a reboot of the node",
    ),
    "of the node": (decider(), fault(scope="node"), "not of one GPU alone"),
    "of two GPUs": (decider(), fault(members=(("n1", 3), ("n1", 4))), "not of one GPU alone"),
    "a scheduler that cannot": (decider(hindrance="Slurm cannot"), fault(), "Slurm cannot"),
    "a board that is not known": (
        decider(boards={("n1", 3): Board("")}), fault(), "has not reported the UUID of GPU 3",
    ),
    "another board since": (
        decider(boards={("n1", 3): Board("GPU-new", since_ms=501)}), fault(), "another board now than when",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_else_the_node_goes_and_it_says_why(case: str) -> None:
    subject, found, why = CASES[case]
    made = only(subject, found)
    assert (made.gpu, made.outcome) == (None, "act")
    assert made.rule.startswith("memory alone, the node: ")
    assert why in made.rule


def test_a_board_that_was_there_when_the_fault_came_is_the_one_that_goes() -> None:
    made = only(decider(boards={("n1", 3): Board("GPU-new", since_ms=499)}), fault())
    assert made.gpu == GpuRef(3, "GPU-new")


def test_after_a_boot_that_swapped_boards_an_open_question_is_not_about_the_new_one() -> None:
    boards = {("n1", 3): Board("GPU-old")}
    subject = decider("approve", boards)
    assert only(subject, fault()).gpu == GpuRef(3, "GPU-old")
    boards[("n1", 3)] = Board("GPU-new")  # a collector that started since knows of no change
    assert "another board" in only(subject, fault(), at_ms=2000).rule


def test_a_scheduler_that_refuses_the_gpu_gets_the_node_and_a_yes_to_the_gpu_is_none_to_it() -> None:
    subject = decider("approve")
    asked = only(subject, fault())
    given = Approval(asked.id, 1100, "anna", True, "seen")
    made, _ = subject.answer(given, {fault().id: fault()}, folded(INDEX, [fault()]), lambda _: {}, 1100)
    assert [d.outcome for d in made] == ["approved", "act"]
    ref = GpuRef(3, uuid("n1", 3), refused=True)
    subject.take_failed([
        Action("a1", made[-1].id, fault().id, "n1", Act.ISOLATE_GPU, "kubernetes", ActionState.FAILED, 1200,
               "a device plugin hands out the GPUs", gpu=ref)
    ])  # fmt: skip
    after = only(subject, fault(), at_ms=1300)
    assert (after.gpu, after.outcome) == (None, "pending_approval")
    assert "GPU 3 cannot go alone: a device plugin hands out the GPUs" in after.rule


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_person_put_back_is_not_taken_out_again_as_a_part_or_as_the_whole(alone: bool) -> None:
    """A node that a person put back, whose GPU would go; and a GPU whose node would go."""
    back = replace(outage(stage=Health.HEALTHY), by="anna", gpu=None if alone else outage().gpu)
    subject = decider(hindrance="" if alone else "Slurm cannot")
    subject.pace.note_outage(back)
    made = only(subject, fault(at_ms=3000), at_ms=3000)
    assert (made.gpu is not None, made.outcome) == (alone, "pending_approval")


def test_a_gpu_of_a_node_that_has_just_come_back_is_left_alone_too() -> None:
    subject = decider(guard=GuardLimits(cooldown_s=600, mass_nodes=0, min_healthy_ratio=0.0))
    subject.pace.note_outage(replace(outage(stage=Health.HEALTHY), gpu=None, by="drover"))
    made = only(subject, fault(at_ms=3000), at_ms=3000)
    assert (made.outcome, "n1 came back 0 min ago" in made.reason) == ("held", True)


def test_a_drain_of_the_node_that_waits_is_dropped_when_the_gpu_can_go_alone() -> None:
    boards = {("n1", 3): Board("")}
    subject = decider(boards=boards)
    made = only(subject, fault())
    waits = Action("a1", made.id, fault().id, "n1", Act.DRAIN, "kubernetes", ActionState.INTENDED, 1000)
    assert subject.why_less(waits) == ""
    boards["n1", 3] = Board(uuid("n1", 3))  # the node has reported it
    assert only(subject, fault(), at_ms=2000).gpu is not None
    assert "out alone now, not the node" in subject.why_less(waits)


def test_a_gpu_that_failed_otherwise_is_tried_again_later_as_a_gpu() -> None:
    subject = decider()
    made = only(subject, fault())
    failed = Action("a1", made.id, fault().id, "n1", Act.ISOLATE_GPU, "k", ActionState.FAILED, 1200, gpu=made.gpu)
    subject.take_failed([failed])
    assert decide(subject, [fault()], 1300)[0] == []
    assert only(subject, fault(), at_ms=1200 + 3_600_000).gpu == made.gpu


def test_an_isolated_gpu_counts_as_its_share_of_a_node() -> None:
    """Of four nodes half of one may be out: four GPUs of eight, on two nodes."""
    limits = replace(OPEN, fleet_nodes=1)
    subject = decider(guard=limits)
    faults = [fault(node, slot) for node in ("n1", "n2") for slot in (0, 1, 2, 3)]
    made, _ = decide(subject, faults, 1000)
    assert [d.outcome for d in made] == ["act"] * 8, "eight GPUs are one node"
    held = only(subject, *faults, fault("n3", 0), at_ms=2000)
    assert held.outcome == "held"
    assert held.reason.startswith("1.125 of 4 nodes of the fleet would be out (at most 1 may be")


def test_the_node_of_an_isolated_gpu_costs_the_rest_of_it() -> None:
    subject = decider(guard=replace(OPEN, fleet_nodes=1))
    first = only(subject, fault())
    subject.gpus.take_outages({first.gpu.uuid if first.gpu else "": outage()})
    both = [fault(), fault("n1", 5, "xid_79", kind=IncidentKind.XID)]
    made = only(subject, *both, at_ms=3000)
    assert (made.gpu, made.outcome) == (None, "act"), "7 GPUs more, and the limit is one node"
    other = only(subject, *both, fault("n2", 1), at_ms=4000)
    assert other.outcome == "held"


def test_beyond_half_of_its_gpus_the_node_goes() -> None:
    subject = decider()
    subject.gpus.take_outages({uuid("n1", slot): outage(slot) for slot in (0, 1, 2, 4)})
    made = only(subject, fault())
    assert made.gpu is None
    assert "4 of its 8 GPUs are isolated already" in made.rule


def test_what_is_isolated_stays_so_when_its_slot_or_its_node_changes() -> None:
    """A board that was replaced, or a node that somebody drains, makes of it no drain of the node."""
    boards = {("n1", 3): Board(uuid("n1", 3))}
    subject = decider(boards=boards)
    only(subject, fault())
    subject.gpus.take_outages({uuid("n1", 3): outage()})
    boards[("n1", 3)] = Board("GPU-new", since_ms=5000)
    subject.away = {"n1"}
    assert decide(subject, [fault()], 6000)[0] == []


def test_its_node_takes_jobs_and_counts_as_in_service() -> None:
    subject = decider()
    only(subject, fault())
    assert gate_verdicts(subject) == {}
    assert subject.out() == set()


def test_health_says_which_gpu_is_isolated_and_how_many_serve() -> None:
    reports = np.ones(INDEX.node_count, bool), np.ones(INDEX.gpu_count, bool)
    found = health.fold(INDEX, [fault()], *reports, None, [outage()])
    assert health.reason_of(found, 0, 3)[:2] == (Health.DRAINED, "it")
    assert health.reason_of(found, 0, None)[:2] == (
        Health.SUSPECT, "GPU 3 isolated (drained), 7 in service: it",
    )  # fmt: skip
    assert health.reason_of(found, 0, 2)[0] is Health.HEALTHY
    worse = health.fold(INDEX, [fault(), fault(slot=5)], *reports, None, [outage()])
    assert health.reason_of(worse, 0, None)[0] is Health.CONFIRMED


@pytest.mark.parametrize(
    ("rule", "says"),
    [('action = "isolate"', 'needs action = "drain"'), ('action = "drain"\nsave_s = 60', "leave save_s out")],
)
def test_a_rule_that_would_stop_the_job_on_the_gpu_is_refused(tmp_path: Path, rule: str, says: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f'[[rules]]\ntake_out = "gpu"\n{rule}\n')
    with pytest.raises(SettingsError, match=says):
        Policy.load(path)


def test_a_gpu_that_is_back_ends_what_it_went_out_for_and_nothing_else_of_its_node() -> None:
    engine = Engine(INDEX, policy("enforce", rules=RULES), 0, ceiling="enforce", live=LiveFleet())
    engine.on_inventory("n1", {"gpu3.uuid": uuid("n1", 3), "gpu5.uuid": uuid("n1", 5)}, 400)
    both = [fault(), fault(slot=5)]
    made = [only(decider(), one) for one in both]
    engine.restore(both, (), (), made)
    assert engine.decider.judge(both[0], RecommendedAction.DRAIN).gpu == GpuRef(3, uuid("n1", 3))
    now = engine.now_of("n1")
    assert now is not None
    assert now.boards == {3: uuid("n1", 3), 5: uuid("n1", 5)}
    out = {uuid("n1", slot): outage(slot) for slot in (3, 5)}
    assert engine.on_duties({}, 2000, out).incidents == ()
    assert engine.health_of("n1", 3)[0] is Health.DRAINED
    back = out | {uuid("n1", 3): outage(3, Health.HEALTHY, 3000)}
    ended = engine.on_duties({}, 3000, back).incidents
    assert [(i.id, i.closed_ms) for i in ended] == [(both[0].id, 3000)]
    assert "GPU 3 of n1 is back in service" in ended[0].timeline[-1].text
    assert engine.health_of("n1")[1].startswith("GPU 5 isolated (drained), 7 in service")


def test_the_board_of_a_slot_is_another_one_only_when_its_uuid_has_changed() -> None:
    engine = Engine(INDEX, policy("enforce", rules=RULES), 0, ceiling="enforce", live=LiveFleet())
    for at_ms, board in ((400, "GPU-a"), (500, ""), (600, "GPU-a"), (700, "GPU-b")):
        engine.on_inventory("n1", {"gpu3.uuid": board}, at_ms)
    board = engine.decider.gpus.choose(fault(at_ms=650), None, node_out=False)
    assert board[0] is None
    assert engine.decider.gpus.choose(fault(at_ms=701), None, node_out=False)[0] == GpuRef(3, "GPU-b")
