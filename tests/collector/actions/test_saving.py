"""Checkpoint, then move: a node's jobs are asked to save themselves before it goes, once, and have a time to answer."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drover_collector.actions.base import ActError, AwayError, LaterError
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm.save_signal import SaveSignal, of_comment, of_script
from drover_collector.actions.worker import Job, Worker
from drover_collector.policy.decider import Decider
from drover_collector.policy.policy import Rule
from drover_collector.store import Store
from drover_core.jobs.checkpoint import CheckpointReport, ReportError, from_message, to_message
from drover_core.model.events import Act, Action, ActionState, Event, EventKind, RecommendedAction
from testbed.deciding import decide, fleet, policy
from testbed.deciding import incident as found_incident
from testbed.desks import T0, Scene, decision, incident, scene_of
from testbed.waiting import wait_until

SAVE_S = 300.0
ISOLATE = replace(decision(RecommendedAction.ISOLATE), save_s=SAVE_S)
USR1 = SaveSignal("USR1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.SAVING_LOOK_S", 0.02)


@pytest.fixture
def scene(kept: Store) -> Scene:
    made = scene_of(kept)
    made.slurm.start("n1", "7", "8")
    made.slurm.save_signals = {"7": USR1}
    return made


def begin(scene: Scene, desk: ActionDispatcher) -> None:
    scene.store.decisions.write([ISOLATE])
    desk.take([ISOLATE])


def standing(scene: Scene) -> Action | None:
    found = scene.store.actions.newest(node="n1")
    return found[0] if found else None


def waits(scene: Scene) -> bool:
    action = standing(scene)
    return action is not None and action.detail.startswith("waits until ")


def checkpoint(scene: Scene, step: int, at_ms: int, job: str = "7") -> None:
    text = to_message(CheckpointReport(job, step))
    scene.store.events.write(
        [Event(f"n1/{at_ms}/{job}", at_ms, "n1", None, EventKind.RANK, "checkpoint", text, "steps", received_ms=at_ms)]
    )


def test_the_job_is_asked_and_its_node_goes_when_it_has_saved(scene: Scene) -> None:
    checkpoint(scene, 400, T0 - 60_000)
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        assert scene.slurm.effects == ["signal 7 USR1"], "nothing is closed yet"
        checkpoint(scene, 999, T0 + 5_000, job="8")  # another job's answer is not this one's
        scene.now_ms = T0 + 20_000
        checkpoint(scene, 460, T0 + 10_000)
        done = scene.wait(Act.ISOLATE)
    assert done.state is ActionState.DONE
    assert scene.slurm.effects[0] == "signal 7 USR1"
    assert [e.partition(" reason")[0] for e in scene.slurm.effects[1:]] == ["n1 state=drain", "requeue 7", "requeue 8"]
    assert "job 7 saved itself at step 460, 60 steps after its last checkpoint" in done.detail
    assert "job 8 was not asked to save itself: it names no signal" in done.detail
    assert done.saving is not None
    saved = done.saving.jobs[0]
    assert (saved.steps_kept, saved.kept_ms, saved.left) == (60, 70_000, False)


def test_the_node_goes_when_the_time_is_over(scene: Scene) -> None:
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        scene.now_ms = T0 + round(SAVE_S * 1000)
        done = scene.wait(Act.ISOLATE)
    assert done.state is ActionState.DONE
    assert "job 7 was asked to save itself (signal USR1) and did not answer in time" in done.detail
    assert done.saving is not None
    assert (done.saving.jobs[0].steps_kept, done.saving.jobs[0].kept_ms) == (None, None), "unknown is not zero"


def test_a_job_that_leaves_the_node_has_answered(scene: Scene) -> None:
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        scene.slurm.running["n1"].remove("7")
        done = scene.wait(Act.ISOLATE)
    assert "job 7 left the node after it was asked" in done.detail
    assert scene.slurm.effects.count("requeue 7") == 0


def test_an_incident_that_ends_meanwhile_leaves_the_node_in_service(scene: Scene) -> None:
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        scene.incidents["inc1"] = incident(closed_ms=T0 + 1)
        done = scene.wait(Act.ISOLATE)
    assert (done.state, "its incident ended" in done.detail) == (ActionState.FAILED, True)
    assert scene.slurm.effects == ["signal 7 USR1"]


def asked_by_ann(scene: Scene, desk: ActionDispatcher) -> None:
    desk.drain("n1", Act.DRAIN, "fan", "ann", save_s=SAVE_S)
    wait_until(lambda: waits(scene), "it waits")


def test_a_person_withdraws_what_waits_and_its_time_closes_nothing(scene: Scene) -> None:
    with scene.desk() as desk:
        asked_by_ann(scene, desk)
        assert [a.node for a in desk.withdrawals.waiting("n1")] == ["n1"]
        (ended,) = desk.withdrawals.withdraw("n1", "wrong node", "bob")
        assert (ended.state, ended.detail) == (ActionState.FAILED, "not done: bob has withdrawn it: wrong node")
        assert desk.withdrawals.waiting("n1") == desk.withdrawals.withdraw("n1", "once more", "bob") == []
        assert "n1" not in desk.context.outages.leaving
        scene.now_ms = T0 + round(SAVE_S * 1000) + 1
        time.sleep(0.3)  # some looks
    assert scene.slurm.effects == ["signal 7 USR1"]


def test_what_waits_is_withdrawn_after_a_restart_too_and_a_third_start_does_not_begin_it_again(scene: Scene) -> None:
    with scene.desk() as desk:
        asked_by_ann(scene, desk)
    with scene.desk() as desk:
        wait_until(lambda: bool(desk.withdrawals.waiting("n1")), "the next start goes on")
        (ended,) = desk.withdrawals.withdraw("n1", "wrong node", "bob")
        assert ended.state is ActionState.FAILED
    scene.now_ms = T0 + round(SAVE_S * 1000) + 1
    with scene.desk() as desk:
        assert desk.withdrawals.waiting("n1") == []
        time.sleep(0.3)  # some looks
    assert scene.slurm.effects == ["signal 7 USR1"]


def test_a_node_that_is_closed_already_is_resumed_and_not_withdrawn(scene: Scene) -> None:
    with scene.desk() as desk:
        asked_by_ann(scene, desk)
        scene.slurm.running["n1"].remove("7")
        scene.wait(Act.DRAIN)
        assert desk.withdrawals.withdraw("n1", "wrong node", "bob") == []
    assert any("state=drain" in effect for effect in scene.slurm.effects)


def test_what_is_withdrawn_while_its_next_look_is_due_is_not_looked_at_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the scheduler is slow: the look is due when the thread comes to the question."""
    next_of = Worker._next

    def due_with_each_question(worker: Worker, now: float) -> Job | None:
        if worker._questions:
            for job in worker._jobs.values():
                job.due = 0.0
        return next_of(worker, now)

    monkeypatch.setattr(Worker, "_next", due_with_each_question)
    with scene.desk() as desk:
        asked_by_ann(scene, desk)
        (ended,) = desk.withdrawals.withdraw("n1", "wrong node", "bob")
        assert ended.state is ActionState.FAILED
        scene.now_ms = T0 + round(SAVE_S * 1000) + 1
        time.sleep(0.3)  # some looks
        assert desk.under_way("n1") == []
    assert scene.slurm.effects == ["signal 7 USR1"]
    assert [a.detail for a in scene.store.actions.newest(node="n1")] == ["not done: bob has withdrawn it: wrong node"]


def test_a_question_that_was_given_up_withdraws_nothing_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its asker read that it did not happen, and so does the audit."""
    busy, free = threading.Event(), threading.Event()
    with scene.desk() as desk:
        asked_by_ann(scene, desk)

        def hold(_: object) -> None:
            busy.set()
            free.wait(10)

        slow = threading.Thread(target=desk.ask, args=("n1", hold))
        slow.start()
        assert busy.wait(10)
        monkeypatch.setattr("drover_collector.actions.worker.ASK_S", 0.05)
        with pytest.raises(LaterError, match="was busy"):
            desk.withdrawals.withdraw("n1", "wrong node", "bob")
        free.set()
        slow.join()
        time.sleep(0.3)  # some looks
        assert [a.node for a in desk.withdrawals.waiting("n1")] == ["n1"]


def test_what_the_policy_asked_for_is_not_withdrawn(scene: Scene) -> None:
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        assert desk.withdrawals.waiting("n1") == []
        with pytest.raises(ActError, match="isolate is the policy's, for incident inc1: it stays"):
            desk.withdrawals.withdraw("n1", "wrong node", "bob")
        assert waits(scene)


class CrashError(SystemExit):
    """Ends the worker's thread as kill -9 would."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("at", "asked"), [("intended", 1), ("saving", 0), ("asked", 1), ("acted", 1), ("moved", 1)])
def test_a_restart_at_any_step_asks_at_most_once_and_drains_once(scene: Scene, at: str, asked: int) -> None:
    """Between `saving` and `asked` nobody knows whether the signal went out: it is not sent again."""
    happened = False

    def step(name: str) -> None:
        nonlocal happened
        if name == "asked" and at in ("acted", "moved"):
            scene.slurm.running["n1"].remove("7")  # it answers
        if name == at or happened:
            happened = True
            raise CrashError

    with scene.desk(step=step) as desk:
        try:
            begin(scene, desk)
        except CrashError:
            assert at == "intended"
        wait_until(lambda: happened, "it has crashed")
    with scene.desk() as desk:
        if at in ("intended", "saving", "asked"):
            wait_until(lambda: waits(scene), "the next start waits for what is left of the time")
            assert not [e for e in scene.slurm.effects if "drain" in e]
            scene.now_ms = T0 + round(SAVE_S * 1000)
        done = scene.wait(Act.ISOLATE)
        desk.take([ISOLATE])  # and once more
    assert done.state is ActionState.DONE
    assert scene.slurm.effects.count("signal 7 USR1") == asked
    assert len([e for e in scene.slurm.effects if "state=drain" in e]) == 1
    assert len(scene.store.actions.newest(node="n1")) == 1


def test_a_node_that_does_not_answer_is_not_waited_for(scene: Scene) -> None:
    held = scene.slurm.held["n1"]
    scene.slurm.held["n1"] = replace(held, states=held.states | {"NOT_RESPONDING"})
    with scene.desk() as desk:
        begin(scene, desk)
        done = scene.wait(Act.ISOLATE)
    assert "signal 7 USR1" not in scene.slurm.effects
    assert "its node does not answer Slurm" in done.detail


def test_an_old_checkpoint_that_arrives_late_is_no_answer(scene: Scene) -> None:
    """The node was cut off, and its agent sends what it had spooled."""
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        text = to_message(CheckpointReport("7", 300))
        late = Event("late", T0 - 600_000, "n1", None, EventKind.RANK, "checkpoint", text, "steps", received_ms=T0 + 1)
        scene.store.events.write([late])
        scene.now_ms = T0 + round(SAVE_S * 1000) - 1
        time.sleep(0.3)  # some looks
        assert waits(scene)
        scene.now_ms += 1
        done = scene.wait(Act.ISOLATE)
    assert "did not answer in time" in done.detail


def test_a_job_on_two_nodes_that_go_at_once_is_asked_once_and_its_answer_counts_for_both(scene: Scene) -> None:
    scene.slurm.start("n2", "7")
    scene.incidents["inc2"] = incident("inc2", node="n2")
    second = replace(decision(RecommendedAction.ISOLATE, "n2", "d2", of="inc2"), save_s=SAVE_S)
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "the first waits")
        scene.now_ms = T0 + 10_000
        scene.store.decisions.write([second])
        desk.take([second])
        wait_until(
            lambda: any(a.detail.startswith("waits") for a in scene.store.actions.newest(node="n2")), "both wait"
        )
        assert scene.slurm.effects == ["signal 7 USR1"]
        checkpoint(scene, 460, T0 + 5_000)
        scene.wait(Act.ISOLATE)
        wait_until(lambda: scene.store.actions.newest(node="n2")[0].state is ActionState.DONE, "the other too")
    assert scene.slurm.effects.count("signal 7 USR1") == 1
    assert len([e for e in scene.slurm.effects if "state=drain" in e]) == 2


def test_a_report_from_a_node_without_the_job_is_no_answer(scene: Scene) -> None:
    """Any process can name any job: the first rank's node is the job's own, another user's is not."""
    scene.slurm.start("n2", "9")
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits")
        text = to_message(CheckpointReport("7", 300))
        for node in ("n2", "unknown"):
            at_ms = T0 + 1
            scene.store.events.write(
                [Event(f"f {node}", at_ms, node, None, EventKind.RANK, "checkpoint", text, "steps", received_ms=at_ms)]
            )
        scene.now_ms = T0 + 10_000
        time.sleep(0.3)  # some looks
        assert waits(scene)
        scene.slurm.start("n2", "7")
        done = scene.wait(Act.ISOLATE)
    assert "job 7 saved itself at step 300" in done.detail


def test_a_question_that_slurm_did_not_answer_may_have_reached_the_job(scene: Scene) -> None:
    signal = scene.slurm.signal

    def timed_out(job: str, which: SaveSignal) -> None:
        signal(job, which)
        raise AwayError("scontrol did not answer")

    scene.slurm.signal = timed_out  # type: ignore[method-assign]  # a signal that times out
    with scene.desk() as desk:
        begin(scene, desk)
        wait_until(lambda: waits(scene), "it waits all the same")
        scene.now_ms = T0 + round(SAVE_S * 1000)
        scene.wait(Act.ISOLATE)
    assert scene.slurm.effects.count("signal 7 USR1") == 1


@pytest.mark.parametrize("error", [LaterError("Slurm: Access/permission denied"), ActError("squeue cannot be started")])
def test_a_question_about_jobs_that_fails_holds_no_node_past_the_time(scene: Scene, error: ActError) -> None:
    """squeue may fail where scontrol works: a user's rights, a program that is missing."""

    def refused(node: str) -> tuple[str, ...]:
        raise error

    with scene.desk() as desk:
        desk.drain("n1", Act.DRAIN, "fan", "ann", False, SAVE_S)
        wait_until(lambda: waits(scene), "it waits")
        scene.slurm.jobs = refused  # type: ignore[method-assign]  # a squeue that fails
        time.sleep(0.1)  # some looks
        assert waits(scene), "its jobs have their time"
        scene.now_ms = T0 + round(SAVE_S * 1000)
        found = scene.wait(Act.DRAIN)
    assert found.state is ActionState.DONE
    assert "job 7 was asked to save itself (signal USR1) and did not answer in time" in found.detail


@pytest.mark.parametrize("error", [LaterError("Slurm: Access/permission denied"), ActError("squeue cannot be started")])
def test_a_sick_node_whose_jobs_cannot_be_listed_goes_without_asking_them(scene: Scene, error: ActError) -> None:
    drain = replace(decision(RecommendedAction.DRAIN), save_s=SAVE_S)

    def refused(node: str) -> tuple[str, ...]:
        raise error

    scene.slurm.jobs = refused  # type: ignore[method-assign]  # a squeue that fails
    with scene.desk() as desk:
        scene.store.decisions.write([drain])
        desk.take([drain])
        if isinstance(error, LaterError):
            wait_until(lambda: "not yet, tried again" in getattr(standing(scene), "detail", ""), "it is tried again")
            scene.now_ms = T0 + round(SAVE_S * 1000)
        found = scene.wait(Act.DRAIN)
    assert found.state is ActionState.DONE
    assert f"its jobs were not asked to save themselves: which jobs run there is not known: {error}" in found.detail
    assert [effect.partition(" reason")[0] for effect in scene.slurm.effects] == ["n1 state=drain"]


def test_a_person_who_wants_the_jobs_saved_gets_the_error_if_they_cannot_be_asked(scene: Scene) -> None:
    def refused(node: str) -> tuple[str, ...]:
        raise ActError("squeue cannot be started")

    scene.slurm.jobs = refused  # type: ignore[method-assign]  # a squeue that fails
    with scene.desk() as desk:
        desk.drain("n1", Act.DRAIN, "fan", "ann", False, SAVE_S)
        found = scene.wait(Act.DRAIN)
    assert (found.state, "squeue cannot be started" in found.detail) == (ActionState.FAILED, True)
    assert scene.slurm.effects == []


def test_a_person_may_let_the_jobs_save_themselves_first(scene: Scene) -> None:
    checkpoint(scene, 400, T0 - 60_000)
    with scene.desk() as desk:
        made = desk.drain("n1", Act.DRAIN, "fan", "ann", True, SAVE_S)  # by force too: past the guard, not the jobs
        wait_until(lambda: waits(scene), "it waits")
        assert made.saving is not None and made.saving.wait_s == SAVE_S
        assert desk.drain("n1", Act.DRAIN, "fan", "ann", True, SAVE_S).id == made.id, "it is not asked twice"
        scene.now_ms = T0 + 20_000
        checkpoint(scene, 460, T0 + 10_000)
        done = scene.wait(Act.DRAIN)
    assert done.state is ActionState.DONE
    assert [effect.partition(" reason")[0] for effect in scene.slurm.effects] == ["signal 7 USR1", "n1 state=drain"]
    assert done.saving is not None and done.saving.jobs[0].steps_kept == 60, "as with a rule: the ledger counts it"


def test_a_person_who_wants_it_now_does_not_wait_for_the_jobs(scene: Scene) -> None:
    with scene.desk() as desk:
        slow = desk.drain("n1", Act.DRAIN, "fan", "ann", False, SAVE_S)
        wait_until(lambda: waits(scene), "it waits")
        scene.now_ms += 1
        now = desk.drain("n1", Act.DRAIN, "fan", "ann", False)
        assert now.id != slow.id
        wait_until(lambda: "n1 state=drain" in " ".join(scene.slurm.effects), "it is drained")
    assert scene.slurm.effects[0] == "signal 7 USR1"


def test_an_actuator_that_cannot_ask_refuses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.desk() as desk:
        monkeypatch.setattr("drover_collector.actions.dispatcher.Saver", SimpleNamespace)  # which Slurm's is not
        with pytest.raises(ActError, match="slurm cannot ask jobs to save themselves"):
            desk.drain("n1", Act.DRAIN, "fan", "ann", False, SAVE_S)
    assert scene.slurm.effects == []


def test_without_a_rule_nobody_is_asked(scene: Scene) -> None:
    with scene.desk() as desk:
        made = decision(RecommendedAction.ISOLATE)
        desk.take([made])
        done = scene.wait(Act.ISOLATE)
    assert done.saving is None
    assert "signal 7 USR1" not in scene.slurm.effects


@pytest.mark.parametrize(
    ("cause", "action", "save_s"),
    [("xid_94", "isolate", 60.0), ("driver_hung", "isolate", 0.0), ("silent", "drain", 0.0), ("xid_94", "advise", 0.0)],
)
def test_the_rule_says_how_long_and_a_dead_node_cannot_wait(cause: str, action: str, save_s: float) -> None:
    decider = Decider(fleet(8), policy(rules=(Rule(action, save_s=60.0),)), "enforce")
    (made,), _ = decide(decider, [found_incident("n000", cause)], T0)
    assert (made.wanted.value, made.outcome, made.save_s) == (action, "act", save_s)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#!/bin/sh\n#SBATCH --signal=B:USR1@120\n", SaveSignal("USR1", to_script=True)),
        ("#!/bin/sh\n\n#SBATCH -N 2 --signal SIGTERM@60 -t 10\n", SaveSignal("TERM")),
        ("#!/bin/sh\n#SBATCH --signal=12\n", SaveSignal("USR2")),
        ("#!/bin/sh\n#SBATCH --signal=RB:HUP@300\n", SaveSignal("HUP", to_script=True)),
        ("#!/bin/sh\n#SBATCH --signal=R:USR1@300\n", USR1),
        ("#!/bin/sh\n#SBATCH --signal=KILL@10\n", None),
        ("#!/bin/sh\n#SBATCH --signal=64000\n", None),
        ("#!/bin/sh\necho 1\n#SBATCH --signal=USR1\n", None),  # sbatch does not read it either
        ("#!/bin/sh\n# sbatch --signal=USR1\n", None),
    ],
)
def test_the_signal_of_a_batch_script(text: str, found: SaveSignal | None) -> None:
    assert of_script(text) == found


def test_the_signal_of_a_comment() -> None:
    line = "JobId=12 JobName=drover:signal=TERM Partition=all Comment=a b drover:signal=B:USR2 StdErr=/x"
    assert of_comment(line) == SaveSignal("USR2", to_script=True)
    assert of_comment("JobId=12 JobName=drover:signal=TERM Partition=all") is None
    assert SlurmConfig().scontrol == "scontrol"


@pytest.mark.parametrize("text", ["", "[]", '{"v":1}', '{"v":1,"job":"a b","step":1}', '{"v":1,"job":"7","step":true}'])
def test_a_report_that_is_none(text: str) -> None:
    with pytest.raises(ReportError):
        from_message(text)
