"""The desk: what is decided is done once; and the life of a node that is out."""

from __future__ import annotations

import base64
import json
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from drover_collector.actions.base import ActError
from drover_collector.actions.command import OperatorCommands
from drover_collector.actions.node_outage import taken_out
from drover_collector.actions.settings import ActConfig, CommandConfig, TicketConfig, validate_act
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.engine.node_state import Survey
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Health,
    ProbeReason,
    RecommendedAction,
)
from drover_core.settings import SettingsError
from testbed.desks import CONFIG, T0, Detected, Scene, decision, dispatcher_of, incident, scene_of, verdict
from testbed.receivers import Reply, http_receiver
from testbed.waiting import wait_until

DAY_MS = 86_400_000


@pytest.fixture
def scene(kept: Store) -> Scene:
    return scene_of(kept)


def test_the_whole_life_of_an_incident(scene: Scene) -> None:
    scene.slurm.start("n1", "17")
    stages: list[Health] = []
    with scene.desk() as desk:
        desk.context.outages.subscribe(lambda outages: stages.append(outages["n1"].stage))
        desk.take([decision()])
        done = scene.wait(Act.DRAIN)
        assert (done.state, done.decision_id, done.incident_id, done.actuator) == (
            ActionState.DONE, "d1", "inc1", "slurm",
        )  # fmt: skip
        assert done.detail == "no new jobs; those that run may end"
        assert scene.slurm.effects == ["n1 state=drain reason=drover:inc1: xid/xid_79: GPU 3 fell off the bus"]
        assert scene.stage() is Health.DRAINING
        assert scene.probes.asked == []
        scene.slurm.finish("n1")
        scene.wait_stage(Health.VALIDATING)
        assert scene.probes.asked == [("n1", ProbeReason.VALIDATE, "drover")]
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.DONE
        duty = scene.wait_stage(Health.HEALTHY)
    assert (duty.by, duty.reason) == ("drover", "passed its validation: passed: True")
    assert scene.slurm.effects[1:] == ["n1 state=undrain"]
    assert stages == [Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.HEALTHY]


def test_what_fails_its_validation_goes_to_repair_with_a_ticket_and_back(scene: Scene, tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"
    ticket.write_text(f"#!/bin/sh\ncat >> {tmp_path}/tickets\necho >> {tmp_path}/tickets\necho ticket 4711\n")
    ticket.chmod(ticket.stat().st_mode | stat.S_IXUSR)
    config = replace(CONFIG, repair_command=(str(ticket),))
    with scene.desk(config) as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        for _ in range(2):  # given again after a crash of the desk of probes
            desk.on_verdicts([verdict(True), verdict(False, gpu=3)])
        duty = scene.wait_stage(Health.REPAIR)
        assert duty.reason == "passed: False"
        assert scene.wait(Act.REPAIR).detail == "ticket 4711"
        (line,) = [json.loads(line) for line in (tmp_path / "tickets").read_text().splitlines()]
        assert (line["act"], line["node"], line["mark"], line["why"]) == ("repair", "n1", "inc1", "passed: False")
        assert scene.slurm.held["n1"].states == {"IDLE", "DRAIN"}, "it stays out"
        action, said = desk.resume("n1", "board replaced", "ann", False)
        assert action is None
        assert "when it passes" in said
        assert scene.probes.asked[1:] == [("n1", ProbeReason.REPAIRED, "ann")]
        desk.on_verdicts([replace(verdict(True), request="again", why=ProbeReason.REPAIRED)])
        scene.wait_stage(Health.HEALTHY)
        scene.now_ms += 2 * DAY_MS
        desk.take([decision(id_="d2")])
        duty = scene.wait_stage(Health.VALIDATING)
        assert duty.returns == 1, "it failed again soon"
        assert duty.reason == "out again 2.0 days after it came back: xid/xid_79: GPU 3 fell off the bus"


def test_a_ticket_by_webhook_is_signed_and_taken_once_though_its_answer_was_lost(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    secret = "whsec_" + base64.b64encode(b"k" * 32).decode()
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "secret").chmod(0o600)
    with http_receiver() as desk_of_tickets:
        ticket = TicketConfig(url=desk_of_tickets.url, secret_file=str(tmp_path / "secret"))
        desk_of_tickets.replies = [Reply(how="close"), Reply(500)]
        with scene.desk(replace(CONFIG, repair_webhook=ticket)) as desk:
            desk.take([decision()])
            scene.wait_stage(Health.VALIDATING)
            desk.on_verdicts([verdict(False, gpu=3)])
            done = scene.wait(Act.REPAIR)
            assert (done.state, done.detail, done.actuator) == (
                ActionState.DONE, "the ticket's webhook took it", "ticket",
            )  # fmt: skip
            scene.wait_stage(Health.REPAIR)
            desk.on_verdicts([verdict(False, gpu=3)])  # given again after a stop
        assert len(desk_of_tickets.got) == 3
        assert {request.headers["webhook-id"] for request in desk_of_tickets.got} == {f"ticket_{done.id}"}
        for request in desk_of_tickets.got:
            event = Webhook(secret).verify(request.body, dict(request.headers))
            assert (event["type"], event["data"]["act"], event["data"]["node"]) == ("node.repair", "repair", "n1")
            assert event["data"]["mark"] == "inc1"


def test_a_ticket_is_opened_in_one_way_and_its_settings_are_checked(kept: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("no secret")
    (tmp_path / "secret").chmod(0o600)
    both = ActConfig(
        mode="enforce", command=CommandConfig(program=("/bin/true",)), repair_command=("/bin/true",),
        repair_webhook=TicketConfig(url="https://tickets.example"),
    )  # fmt: skip
    with pytest.raises(SettingsError, match="opens the ticket already"):
        validate_act(both)
    with pytest.raises(SettingsError, match="secret_file: give either"):
        validate_act(replace(both, repair_command=()))
    bad = replace(both.repair_webhook, secret_file=str(tmp_path / "secret"))
    with pytest.raises(SettingsError, match="does not hold whsec_"):
        validate_act(replace(both, repair_command=(), repair_webhook=bad))
    observed = replace(both, mode="observe")
    validate_act(observed)
    dispatcher_of(kept, observed, [], lambda _: None).stop()  # it opens none, and stops nobody's start


def test_a_node_that_keeps_coming_back_is_marked_until_it_has_held_for_long() -> None:
    drain = Action("a1", "d1", "inc1", "n1", Act.DRAIN, "slurm", ActionState.DONE, T0, why="it fell off")
    out = partial(taken_out, drain, return_days=14)
    first = out(before=None, now_ms=T0)
    assert (first.returns, first.reason) == (0, "it fell off")
    back = replace(first, stage=Health.HEALTHY, ts_ms=T0 + DAY_MS)
    second = out(before=back, now_ms=T0 + 2 * DAY_MS)
    assert (second.returns, second.reason) == (1, "out again 1.0 days after it came back: it fell off")
    again = replace(second, stage=Health.HEALTHY, ts_ms=T0 + 3 * DAY_MS)
    third = out(before=again, now_ms=T0 + 10 * DAY_MS)
    assert (third.returns, third.reason) == (2, "out again 7.0 days after it came back, for the 2. time: it fell off")
    held = out(before=again, now_ms=T0 + 17 * DAY_MS)
    assert (held.returns, held.reason) == (0, "it fell off")


@pytest.mark.parametrize("act", [Act.RESET, Act.REBOOT])
def test_resets_reboots_and_tickets_are_off_by_default(scene: Scene, act: Act) -> None:
    assert OperatorCommands(ActConfig()).acts == frozenset()
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        with pytest.raises(ActError, match=f"no command for it: set act.{act}_command"):
            desk.drain("n1", act, "it hangs", "ann")
        desk.on_verdicts([verdict(False)])
        scene.wait_stage(Health.REPAIR)
    assert {action.action for action in scene.store.actions.newest()} == {Act.DRAIN}, (
        "nothing was run, no ticket opened"
    )


def test_probes_of_another_incident_put_nothing_back(scene: Scene) -> None:
    """It was put back by hand while they ran, and drained again."""
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        desk.on_verdicts([replace(verdict(True), incident_id="inc0")])
        assert (scene.outcome(Act.RESUME), scene.stage()) == (None, Health.VALIDATING)
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.DONE


def test_what_probes_cannot_decide_stays_out_and_is_not_asked_again(scene: Scene) -> None:
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        desk.on_verdicts([verdict(None)])
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.reason == "not validated: passed: None"
        desk.take([decision(node="n2", id_="d2")])  # and looks go on
        scene.wait_stage(Health.VALIDATING, "n2")
        assert [node for node, _, _ in scene.probes.asked] == ["n1", "n2"]
        scene.probes.refuses = "no probes here"
        desk.take([decision(node="n3", id_="d3")])
        wait_until(
            lambda: (
                scene.store.outages.current().get("n3") and scene.store.outages.current()["n3"].reason.startswith("not")
            )
        )
        assert scene.store.outages.current()["n3"].reason == "not validated: no probes here"
        action, _ = desk.resume("n1", "I looked", "ann", True)
        assert action is not None
        assert desk.wait(action, 20).state is ActionState.DONE
        assert scene.store.outages.current()["n1"].by == "ann"


def test_isolate_closes_first_and_says_which_jobs_stay(scene: Scene) -> None:
    scene.slurm.start("n1", "1", "2")
    scene.slurm.kept.add("2")
    with scene.desk() as desk:
        desk.take([decision(RecommendedAction.ISOLATE)])
        done = scene.wait(Act.ISOLATE)
    assert done.detail == "closed; requeued: 1; Slurm does not let be requeued, and run on to their end: 2"
    assert [effect.split()[0] for effect in scene.slurm.effects] == ["n1", "requeue"]


def test_a_drain_of_somebody_else_stays(scene: Scene) -> None:
    scene.slurm.drain_by("n1", "ann", "new cables")
    with scene.desk() as desk:
        desk.take([decision(), decision(RecommendedAction.ISOLATE, id_="d2")])
        for act in (Act.DRAIN, Act.ISOLATE):
            done = scene.wait(act)
            assert done.state is ActionState.FAILED
            assert done.detail == "it is drained by ann (new cables): left unchanged"
            assert done.foreign
        with pytest.raises(ActError, match="was not taken out by Drover"):
            desk.resume("n1", "why not", "bob", True)
    assert scene.slurm.effects == []
    assert scene.stage() is None


def test_a_drain_that_somebody_has_taken_over_is_not_undone(scene: Scene) -> None:
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.slurm.drain_by("n1", "ann", "mine now")
        duty = scene.wait_stage(Health.HEALTHY)
        assert duty.reason == "taken over by ann, who keeps it out: mine now"
        desk.on_verdicts([verdict(True)])
        with pytest.raises(ActError, match="not taken out by Drover"):
            desk.resume("n1", "", "bob", True)
    assert scene.slurm.held["n1"].reason == "mine now"
    (drain,) = scene.store.actions.newest(node="n1")
    assert drain.state is ActionState.UNDONE


def test_the_reason_is_looked_at_again_right_before_a_resume(scene: Scene) -> None:
    """Taken over between two looks: the resume finds it."""
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
    scene.slurm.drain_by("n1", "ann", "mine now")
    with scene.desk(look_s=1e9) as desk:
        desk.intend("n1", Act.RESUME, "seed", "inc1", "passed", "drover")
        done = scene.wait(Act.RESUME)
    assert (done.state, done.detail) == (ActionState.FAILED, "it is drained by ann (mine now): left unchanged")
    assert "DRAIN" in scene.slurm.held["n1"].states


def test_a_node_that_somebody_put_back_is_left_alone(scene: Scene) -> None:
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.slurm.resume_by_hand("n1")
        duty = scene.wait_stage(Health.HEALTHY)
        assert duty.by == "somebody else"
        desk.take([decision()])  # the same decision again, as after a restart
    assert len(scene.slurm.effects) == 1


def test_advice_is_taken_back_with_the_weight_that_was(scene: Scene) -> None:
    scene.slurm.held["n1"] = replace(scene.slurm.held["n1"], weight=7)
    with scene.desk() as desk:
        desk.take([decision(RecommendedAction.ADVISE)])
        done = scene.wait(Act.ADVISE)
        assert (done.before, scene.slurm.held["n1"].weight) == ("7", 10_000)
    scene.incidents["inc1"] = incident(closed_ms=T0 + 1)
    with scene.desk():  # also after a restart
        assert scene.wait(Act.UNADVISE).detail == "weight 7 again"
    assert scene.slurm.effects == ["n1 weight=10000", "n1 weight=7"]
    assert scene.stage() is None, "it was never out"


def test_an_advice_of_two_incidents_ends_with_the_last_and_gives_back_the_weight_that_was(scene: Scene) -> None:
    scene.slurm.held["n1"] = replace(scene.slurm.held["n1"], weight=7)
    scene.incidents["inc2"] = incident("inc2")
    second = replace(decision(RecommendedAction.ADVISE, id_="d2"), incident_id="inc2")
    with scene.desk() as desk:
        desk.take([decision(RecommendedAction.ADVISE)])
        scene.wait(Act.ADVISE)
        desk.take([second])
        wait_until(lambda: len(desk.context.advices.current) == 2)
    scene.incidents["inc2"] = incident("inc2", closed_ms=T0 + 1)
    with scene.desk() as desk:
        wait_until(lambda: len(desk.context.advices.current) == 2)
        desk._workers["slurm"]._reconciler._end_advices()
        assert not [a for a in scene.store.actions.newest(node="n1") if a.action is Act.UNADVISE], (
            "the first is still open"
        )
        scene.incidents["inc1"] = incident(closed_ms=T0 + 2)
        done = scene.wait(Act.UNADVISE)
        assert (done.state, done.detail) == (ActionState.DONE, "weight 7 again")
    assert scene.slurm.held["n1"].weight == 7


def test_nodes_that_others_took_out_are_reported(scene: Scene) -> None:
    surveys: list[Survey] = []
    actuator = SlurmActuator(scene.slurm, 10_000)
    scene.slurm.drain_by("n2", "root", "memory swap")
    desk = dispatcher_of(
        scene.store, CONFIG, [actuator], {"n1": actuator, "n2": actuator}.get, nodes=["n1", "n2", "n9"], look_s=0.02,
        detection=Detected(surveys=surveys),
    )  # fmt: skip
    for _ in range(2):  # a second start gives it to a new engine again
        desk.start()
        wait_until(lambda: surveys)
        desk.stop()
        assert surveys.pop().closed == {"n2"}
        assert not surveys
