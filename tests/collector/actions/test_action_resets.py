"""A reset never meets jobs: none is done to a node that came back while it waited, and none comes back under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from drover_collector.actions.base import CheckLease, Result
from drover_collector.actions.command import OperatorCommands
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.store import Store
from drover_core.model.events import Act, Action, ActionState, Health
from testbed.desks import CONFIG, Scene, decision, scene_of, verdict
from testbed.waiting import wait_until


@dataclass
class Program:
    """Stands for the operator's: it runs until it is let go, and notes for which nodes."""

    running: threading.Event
    free: threading.Event
    nodes: list[str]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    made = Program(threading.Event(), threading.Event(), [])

    def do(_: OperatorCommands, action: Action, _lease: CheckLease) -> Result:  # as an actuator's
        made.nodes.append(action.node)
        made.running.set()
        assert made.free.wait(120)
        return Result("reset")

    monkeypatch.setattr(OperatorCommands, "do", do)
    monkeypatch.setattr(OperatorCommands, "knows", lambda _, act: act in (Act.RESET, Act.REBOOT))
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    yield made
    made.free.set()


@contextmanager
def validated(kept: Store) -> Iterator[tuple[Scene, ActionDispatcher]]:
    """n1 is out, and its probes run."""
    scene = scene_of(kept)
    with scene.desk(CONFIG) as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.now_ms += 1000
        yield scene, desk


@pytest.mark.parametrize("act", [Act.RESET, Act.REBOOT])
def test_one_that_waited_for_another_is_not_done_to_a_node_that_is_back_meanwhile(
    kept: Store, program: Program, act: Act
) -> None:
    with validated(kept) as (scene, desk):
        desk.drain("n2", act, "XID 119", "ann", forced=True)
        assert program.running.wait(120)
        asked = desk.drain("n1", act, "XID 119", "ann")
        scene.now_ms += 1000
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.DONE
        program.free.set()
        ended = desk.wait(asked, 20)
        assert (ended.state, ended.detail) == (
            ActionState.FAILED, "not done: n1 was put back since it was asked for, and jobs may run there",
        )  # fmt: skip
        assert scene.wait(act, "n2").state is ActionState.DONE, "which was not out: by force, as a person wants"
        scene.now_ms += 1000
        assert desk.wait(desk.drain("n1", act, "I know", "ann", forced=True), 20).state is ActionState.DONE, (
            "asked for again"
        )
    assert program.nodes == ["n2", "n1"]


def test_a_node_whose_reset_runs_comes_back_when_it_has_ended(kept: Store, program: Program) -> None:
    with validated(kept) as (scene, desk):
        asked = desk.drain("n1", Act.RESET, "XID 119", "ann")
        assert program.running.wait(120)
        desk.on_verdicts([verdict(True)])
        wait_until(
            lambda: [a for a in kept.actions.newest(node="n1") if a.detail.endswith("its reset runs")], "it waits"
        )
        assert "DRAIN" in scene.slurm.held["n1"].states
        program.free.set()
        assert desk.wait(asked, 20).state is ActionState.DONE
        assert scene.wait(Act.RESUME).state is ActionState.DONE
        assert "DRAIN" not in scene.slurm.held["n1"].states


LOOKS_S = 3600.0  # between looks: what is stored grows no younger


@pytest.mark.parametrize("act", [Act.RESET, Act.REBOOT])
@pytest.mark.parametrize("what", ["put back, and a job runs", "a job runs", "closed by a person"])
def test_the_scheduler_is_asked_right_before_a_reset(kept: Store, program: Program, act: Act, what: str) -> None:
    """What Drover has stored is as old as its last look."""
    scene = scene_of(kept)
    program.free.set()
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
    with scene.desk(look_s=LOOKS_S) as desk:
        wait_until(lambda: not desk._workers["slurm"]._reconciler.survey_first, "its looks at the start are over")
        if what == "put back, and a job runs":
            scene.slurm.resume_by_hand("n1")
        if "job" in what:
            scene.slurm.start("n1", "17")
        else:
            scene.slurm.drain_by("n1", "root", "new cables")
        assert scene.store.outages.current()["n1"].stage is Health.VALIDATING, "nothing of it is known here"
        ended = desk.wait(desk.drain("n1", act, "XID 119", "ann"), 20)
        assert ended.state is ActionState.FAILED
        said = "jobs run on n1: 17" if what == "a job runs" else "does not have n1 as drained by Drover"
        assert said in ended.detail
        assert program.nodes == []
        scene.now_ms += 1000
        assert desk.wait(desk.drain("n1", act, "I know", "ann", forced=True), 20).state is ActionState.DONE
    assert program.nodes == ["n1"]


def test_a_scheduler_that_does_not_answer_delays_a_reset(kept: Store, program: Program) -> None:
    program.free.set()
    with validated(kept) as (scene, desk):
        scene.slurm.away = True
        asked = desk.drain("n1", Act.REBOOT, "XID 79", "ann")
        wait_until(
            lambda: [a for a in kept.actions.newest(node="n1") if "Slurm does not answer" in a.detail], "it waits"
        )
        assert program.nodes == []
        scene.slurm.away = False
        assert desk.wait(asked, 20).state is ActionState.DONE
    assert program.nodes == ["n1"]
