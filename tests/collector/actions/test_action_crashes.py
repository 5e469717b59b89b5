"""A desk that ends between any two steps leaves what the next one takes up: done once, or reported as not done.

Here every step of every act, in one process; test_action_killed.py ends real collectors, and
test_kubernetes_crashes.py ends it around each call of Kubernetes.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from drover_collector.actions.dispatcher import UNBEGUN_MS, ActionDispatcher
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.scheduling.orders import OrderBook
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Health,
    ProbeReason,
    RecommendedAction,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from testbed.desks import CONFIG, T0, Detected, Scene, decision, dispatcher_of, incident, scene_of, verdict
from testbed.waiting import wait_until


@pytest.fixture
def scene(kept: Store) -> Scene:
    return scene_of(kept)


class CrashError(SystemExit):
    """Ends a thread as kill -9 ends all of them: nothing after it runs."""


STEPS = ("decided", "intended", "noted", "acted", "moved", "ended")
UNKNOWN = "nobody knows whether it was done"
OUTCOMES = {"done": (ActionState.DONE, False), UNKNOWN: (ActionState.FAILED, True)}


class Crash:
    """A step that ends every thread that comes to it, from `at` on."""

    def __init__(self, at: str) -> None:
        self.at, self.happened = at, threading.Event()

    def __call__(self, name: str) -> None:
        if name == self.at or self.happened.is_set():
            self.happened.set()
            raise CrashError


def crash(at: str, scene: Scene, work: Callable[[ActionDispatcher], object]) -> None:
    stop = Crash(at)
    with scene.desk(step=stop) as desk:
        try:
            work(desk)
        except CrashError:
            assert at in ("decided", "intended")
        assert stop.happened.wait(120)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("act", [RecommendedAction.DRAIN, RecommendedAction.ISOLATE, RecommendedAction.ADVISE])
def test_a_crash_at_any_step_leaves_it_done_once(scene: Scene, act: RecommendedAction) -> None:
    for at in STEPS:
        if at == "noted" and act is not RecommendedAction.ADVISE:  # only an advice notes what it found
            continue
        scene.slurm.add(at)
        scene.slurm.start(at, f"job-{at}")
        made = decision(act, at, f"d-{at}")

        def decide(desk: ActionDispatcher, made: Decision = made) -> None:
            scene.store.decisions.write([made])
            desk.take([made])

        crash(at, scene, decide)
        with scene.desk() as desk:
            done = scene.wait(Act(act.value), at)
            assert done.state is ActionState.DONE, at
            desk.take([made])  # and once more
        assert len(scene.store.actions.newest(node=at)) == 1, at
        changes = [e for e in scene.slurm.effects if e.startswith(f"{at} ")]
        assert len(changes) == 1, at
        if act is RecommendedAction.ISOLATE:
            assert scene.slurm.effects.count(f"requeue job-{at}") == 1
        if act is RecommendedAction.ADVISE:
            assert done.before == "1", "what there was is known although the crash came after the effect"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_somebody_put_back_while_no_collector_ran_is_not_closed_again(scene: Scene) -> None:
    crash("moved", scene, lambda desk: desk.take([decision()]))
    scene.slurm.resume_by_hand("n1")
    with scene.desk():
        done = scene.wait(Act.DRAIN)
        assert (done.state, "somebody else has put the node back" in done.detail) == (ActionState.FAILED, True)
        assert scene.wait_stage(Health.HEALTHY).by == "somebody else"
    assert len([e for e in scene.slurm.effects if "state=drain" in e]) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_at_any_step_of_a_resume(scene: Scene) -> None:
    for at in STEPS:
        if at == "noted":
            continue
        scene.slurm.add(at)
        verdicts = [replace(verdict(True, at), request=f"request-{at}")]
        with scene.desk() as desk:
            desk.take([decision(node=at, id_=f"d-{at}")])
            scene.wait_stage(Health.VALIDATING, at)
        crash(at, scene, lambda desk, verdicts=verdicts: desk.on_verdicts(verdicts))  # type: ignore[misc]  # a lambda's default
        with scene.desk() as desk:
            desk.on_verdicts(verdicts)  # as the desk of probes does after a crash
            scene.wait_stage(Health.HEALTHY, at)
            assert scene.wait(Act.RESUME, at).state is ActionState.DONE
        assert [e for e in scene.slurm.effects if e.startswith(f"{at} state=undrain")] == [f"{at} state=undrain"]
        assert scene.store.outages.current()[at].by == "drover"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_at_any_step_of_an_advices_end_gives_the_weight_back_once(scene: Scene) -> None:
    for at in STEPS:
        scene.slurm.add(at)
        scene.slurm.held[at] = replace(scene.slurm.held[at], weight=7)
        scene.incidents[f"i-{at}"] = incident(f"i-{at}", node=at)
        with scene.desk() as desk:
            desk.take([decision(RecommendedAction.ADVISE, at, f"d-{at}", of=f"i-{at}")])
            scene.wait(Act.ADVISE, at)
        scene.incidents[f"i-{at}"] = incident(f"i-{at}", closed_ms=T0 + 1, node=at)
        crash(at, scene, lambda _: None)  # a look finds that it is over
        with scene.desk() as desk:
            assert scene.wait(Act.UNADVISE, at).state is ActionState.DONE
            wait_until(lambda desk=desk: not desk.context.advices.current, "none stands any more")  # type: ignore[misc]  # its default
        assert [e for e in scene.slurm.effects if e.startswith(f"{at} ")] == [f"{at} weight=10000", f"{at} weight=7"]
        assert [a.action for a in scene.store.actions.newest(node=at)] == [Act.ADVISE, Act.UNADVISE]


# Of a command: how often it ran, and what is reported of it, when all ended at this step. "": it was not even stored.
COMMANDS = {
    "decided": (0, ""), "intended": (1, "done"), "begun": (0, UNKNOWN), "acted": (1, UNKNOWN), "moved": (1, UNKNOWN),
    "ended": (1, "done"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("act", [Act.RESET, Act.REBOOT])
def test_a_command_that_a_person_asked_for_runs_once_or_is_reported_as_not_known(
    scene: Scene, tmp_path: Path, act: Act
) -> None:
    """One that was not stored was never promised: who asked has got an error."""
    config = counted(tmp_path, f"{act}_command")
    for at, (times, outcome) in COMMANDS.items():
        scene.slurm.add(at)
        stop = Crash(at)
        with scene.desk(config, stop) as desk:
            with contextlib.suppress(CrashError):
                desk.drain(at, act, "it hangs", "ann", forced=True)
            assert stop.happened.wait(120)
        with scene.desk(config):
            if outcome:
                done = scene.wait(act, at)
                assert done.by == "ann"
                assert (done.state, UNKNOWN in done.detail) == OUTCOMES[outcome], at
            else:
                assert scene.store.actions.newest(node=at) == []
        assert ran(tmp_path, at) == times, at


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_ticket_is_opened_once_or_reported_as_not_known(scene: Scene, tmp_path: Path) -> None:
    """The desk of probes gives its verdict again after a stop, so that one that was not stored is opened then."""
    config = counted(tmp_path, "repair_command")
    for at, (times, outcome) in COMMANDS.items():
        scene.slurm.add(at)
        verdicts = [replace(verdict(False, at), request=f"request-{at}")]
        with scene.desk(config) as desk:
            desk.take([decision(node=at, id_=f"d-{at}")])
            scene.wait_stage(Health.VALIDATING, at)
        stop = Crash(at)
        with scene.desk(config, stop) as desk:
            with contextlib.suppress(CrashError):
                desk.on_verdicts(verdicts)
            assert stop.happened.wait(120)
        with scene.desk(config) as desk:
            desk.on_verdicts(verdicts)
            scene.wait_stage(Health.REPAIR, at)
            done = scene.wait(Act.REPAIR, at)
            assert (done.state, UNKNOWN in done.detail) == OUTCOMES[outcome or "done"], at
            desk.on_verdicts(verdicts)
        assert len([a for a in scene.store.actions.newest(node=at) if a.action is Act.REPAIR]) == 1
        assert ran(tmp_path, at) == (times if outcome else 1), at
        assert "DRAIN" in scene.slurm.held[at].states


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_between_the_asking_for_a_validation_and_its_stage_asks_once(store: Store) -> None:
    """With real orders in the store. Before it is asked for there is nothing but a drained node, which is looked at."""
    scene = scene_of(store)
    index = FleetIndex(FleetSpec((NodeSpec("n1", gpus=8),)))

    def orders() -> OrderBook:  # a new process knows only the store
        return OrderBook(scene.store, index, lambda: scene.now_ms)

    stop = Crash("asked")
    with scene.desk(step=stop) as desk:
        desk.returns.validator = orders()
        desk.take([decision()])
        assert stop.happened.wait(120)
    assert scene.stage() is Health.DRAINED
    with scene.desk() as desk:
        desk.returns.validator = orders()
        scene.wait_stage(Health.VALIDATING)
        (asked,) = scene.store.probes.orders.newest("n1")
        assert (asked.why, asked.incident_id) == (ProbeReason.VALIDATE, "inc1")
        passed = replace(verdict(True), request=asked.id)
        desk.on_verdicts([passed])
        assert scene.wait(Act.RESUME).state is ActionState.DONE
    assert len(scene.store.probes.orders.newest("n1")) == 1
    assert [e for e in scene.slurm.effects if "undrain" in e] == ["n1 state=undrain"]


def counted(folder: Path, setting: str) -> ActConfig:
    """Its command notes what it gets."""
    return replace(CONFIG, **{setting: ("/bin/sh", "-c", f"cat >> {folder}/ran; echo >> {folder}/ran")})


def ran(folder: Path, node: str) -> int:
    file = folder / "ran"
    return sum(json.loads(line)["node"] == node for line in file.read_text().splitlines()) if file.exists() else 0


def test_what_is_not_wanted_any_more_after_a_stop_is_reported_as_not_done(scene: Scene) -> None:
    made = decision()
    scene.store.decisions.write([made])
    scene.incidents["inc1"] = incident(closed_ms=T0 + 1)
    with scene.desk():
        done = scene.wait(Act.DRAIN)
    assert (done.state, done.detail) == (ActionState.FAILED, "not done: its incident ended before it could be")
    assert scene.slurm.effects == []


def test_what_was_not_begun_for_too_long_is_reported_as_failed_at_each_start_and_stored_once(scene: Scene) -> None:
    """Only of incidents that are open, and nothing that another decision's action was done for."""
    scene.incidents |= {"inc2": incident("inc2", closed_ms=T0 + 1, node="n2"), "inc3": incident("inc3", node="n3")}
    with scene.desk() as desk:
        scene.store.decisions.write([decision(node="n3", id_="d3", of="inc3")])
        desk.take([decision(node="n3", id_="d3", of="inc3")])
        assert scene.wait(Act.DRAIN, "n3").state is ActionState.DONE
    merged = replace(decision(node="n3", id_="d4", of="inc3"), ts_ms=T0 - 1)  # its action was d3's
    scene.store.decisions.write([decision(), decision(node="n2", id_="d2", of="inc2"), merged])
    scene.now_ms = T0 + UNBEGUN_MS + 1
    failures: list[Action] = []
    actuator = SlurmActuator(scene.slurm, 10_000)
    desk = dispatcher_of(
        scene.store, CONFIG, [actuator], lambda _: actuator,
        detection=Detected(lambda: scene.incidents, failed=failures),
        now_ms=lambda: scene.now_ms, look_s=1e9,
    )  # fmt: skip
    for _ in range(2):
        desk.start()
        desk.stop()
        (failed,) = failures
        assert (failed.decision_id, failed.node, failed.state) == ("d1", "n1", ActionState.FAILED)
        assert failed.detail.startswith("not done: the collector was stopped before it was begun")
        assert scene.store.actions.newest(incident="inc1") == [failed]
        failures.clear()
    assert {a.incident_id for a in scene.store.actions.newest()} == {"inc1", "inc3"}


def test_a_drain_that_is_given_up_is_reported_to_who_decides(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.slurm.away = True
    failures: list[Action] = []
    with scene.desk() as desk:
        cast(Detected, desk.context.detection).failed = failures
        desk.take([decision()])
        wait_until(lambda: desk.context.troubles, "it is tried")
        scene.now_ms += CONFIG.give_up_s * 1000 + 1
        wait_until(lambda: failures, "it is given up")
    assert [(a.decision_id, a.state) for a in failures] == [("d1", ActionState.FAILED)]
