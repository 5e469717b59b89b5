"""A desk that ends between any two steps leaves what the next one takes up: done once, or told as not done.

Here every step of every act, in one process; test_action_killed.py ends real collectors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.actions.desk import ActionDesk
from drover_collector.store import Store
from drover_proto.events import Act, ActionState, Decision, Health, Wanted
from testbed.desks import CONFIG, T0, Scene, decision, incident, scene_of, verdict


@pytest.fixture
def scene(store: Store) -> Scene:
    return scene_of(store)


class CrashError(SystemExit):
    """Ends a thread as kill -9 ends all of them: nothing after it runs."""


STEPS = ("decided", "intended", "noted", "acted", "moved", "ended")


class Crash:
    """A step that ends every thread that comes to it, from `at` on."""

    def __init__(self, at: str) -> None:
        self.at, self.happened = at, threading.Event()

    def __call__(self, name: str) -> None:
        if name == self.at or self.happened.is_set():
            self.happened.set()
            raise CrashError


def crash(at: str, scene: Scene, work: Callable[[ActionDesk], object]) -> None:
    stop = Crash(at)
    with scene.desk(step=stop) as desk:
        try:
            work(desk)
        except CrashError:
            assert at in ("decided", "intended")
        assert stop.happened.wait(20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("act", [Wanted.DRAIN, Wanted.ISOLATE, Wanted.ADVISE])
def test_a_crash_at_any_step_leaves_it_done_once(scene: Scene, act: Wanted) -> None:
    for at in STEPS:
        if at == "noted" and act is not Wanted.ADVISE:  # only an advice notes what it found
            continue
        scene.slurm.add(at)
        scene.slurm.start(at, f"job-{at}")
        made = decision(act, at, f"d-{at}")

        def decide(desk: ActionDesk, made: Decision = made) -> None:
            scene.store.write_decisions([made])
            desk.take([made])

        crash(at, scene, decide)
        with scene.desk() as desk:
            done = scene.wait(Act(act.value), at)
            assert done.state is ActionState.DONE, at
            desk.take([made])  # and once more
        assert len(scene.store.actions(node=at)) == 1, at
        changes = [e for e in scene.slurm.effects if e.startswith(f"{at} ")]
        assert len(changes) == 1, at
        if act is Wanted.ISOLATE:
            assert scene.slurm.effects.count(f"requeue job-{at}") == 1
        if act is Wanted.ADVISE:
            assert done.before == "1", "what there was is known although the crash came after the effect"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_at_any_step_of_a_resume(scene: Scene) -> None:
    for at in STEPS:
        if at == "noted":
            continue
        scene.slurm.add(at)
        told = [replace(verdict(True, at), request=f"request-{at}")]
        with scene.desk() as desk:
            desk.take([decision(node=at, id_=f"d-{at}")])
            scene.wait_stage(Health.VALIDATING, at)
        crash(at, scene, lambda desk, told=told: desk.on_verdicts(told))  # type: ignore[misc]  # a lambda's default
        with scene.desk() as desk:
            desk.on_verdicts(told)  # as the desk of probes does after a crash
            scene.wait_stage(Health.HEALTHY, at)
            assert scene.wait(Act.RESUME, at).state is ActionState.DONE
        assert [e for e in scene.slurm.effects if e.startswith(f"{at} state=undrain")] == [f"{at} state=undrain"]
        assert scene.store.duties()[at].by == "drover"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_ran_when_all_stopped_is_reported_and_not_run_again(scene: Scene, tmp_path: Path) -> None:
    config = replace(CONFIG, reboot_command=("/bin/sh", "-c", f"echo ran >> {tmp_path}/ran"))
    stop = Crash("acted")
    with scene.desk(config, stop) as desk:
        desk.drain("n1", Act.REBOOT, "it hangs", "ann")
        assert stop.happened.wait(20)
    with scene.desk(config):
        done = scene.wait(Act.REBOOT)
    assert done.state is ActionState.FAILED
    assert "nobody knows whether it was done" in done.detail
    assert (tmp_path / "ran").read_text() == "ran\n"


def test_what_is_not_wanted_any_more_after_a_stop_is_reported_as_not_done(scene: Scene) -> None:
    made = decision()
    scene.store.write_decisions([made])
    scene.incidents["inc1"] = incident(closed_ms=T0 + 1)
    with scene.desk():
        done = scene.wait(Act.DRAIN)
    assert (done.state, done.detail) == (ActionState.FAILED, "not done: its incident ended before it could be")
    assert scene.slurm.effects == []
