"""The desk: what is decided is done once; and the life of a node that is out."""

from __future__ import annotations

import base64
import json
import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from drover_collector.actions.base import ActError
from drover_collector.actions.commands import Commands
from drover_collector.actions.desk import ActionDesk
from drover_collector.actions.duties import taken_out
from drover_collector.actions.settings import ActConfig, CommandConfig, TicketConfig, validate_act
from drover_collector.actions.slurm import SlurmActuator
from drover_collector.store import Store, StoreError
from drover_proto.events import Act, ActionState, Duty, Health, ProbeReason, Wanted
from drover_proto.settings import SettingsError
from testbed.desks import CONFIG, T0, Scene, decision, incident, scene_of, verdict
from testbed.receivers import Reply, http_receiver
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import wait_until

DAY_MS = 86_400_000


@pytest.fixture
def scene(store: Store) -> Scene:
    return scene_of(store)


def test_the_whole_life_of_an_incident(scene: Scene) -> None:
    scene.slurm.start("n1", "17")
    told: list[Health] = []
    with scene.desk() as desk:
        desk.on_duties.append(lambda duties: told.append(duties["n1"].stage))
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
    assert told == [Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.HEALTHY]


def test_what_fails_its_validation_goes_to_repair_with_a_ticket_and_back(scene: Scene, tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"
    ticket.write_text(f"#!/bin/sh\ncat >> {tmp_path}/tickets\necho >> {tmp_path}/tickets\necho ticket 4711\n")
    ticket.chmod(ticket.stat().st_mode | stat.S_IXUSR)
    config = replace(CONFIG, repair_command=(str(ticket),))
    with scene.desk(config) as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        for _ in range(2):  # told again after a crash of the desk of probes
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
            desk.on_verdicts([verdict(False, gpu=3)])  # told again after a stop
        assert len(desk_of_tickets.got) == 3
        assert {request.headers["webhook-id"] for request in desk_of_tickets.got} == {f"ticket_{done.id}"}
        for request in desk_of_tickets.got:
            told = Webhook(secret).verify(request.body, dict(request.headers))
            assert (told["type"], told["data"]["act"], told["data"]["node"]) == ("node.repair", "repair", "n1")
            assert told["data"]["mark"] == "inc1"


def test_a_ticket_is_opened_in_one_way_and_its_settings_are_checked(store: Store, tmp_path: Path) -> None:
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
    only_told = replace(both, mode="observe")
    validate_act(only_told)
    ActionDesk(store, only_told, [], lambda _: None).stop()  # it opens none, and stops nobody's start


def test_a_node_that_keeps_coming_back_is_told_apart_until_it_has_held_for_long() -> None:
    out = partial(taken_out, "n1", "inc1", "it fell off", "drover", return_days=14)
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
    assert Commands(ActConfig()).acts == frozenset()
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        with pytest.raises(ActError, match=f"no command for it: set act.{act}_command"):
            desk.drain("n1", act, "it hangs", "ann")
        desk.on_verdicts([verdict(False)])
        scene.wait_stage(Health.REPAIR)
    assert {action.action for action in scene.store.actions()} == {Act.DRAIN}, "nothing was run, no ticket opened"


def test_probes_of_another_incident_put_nothing_back(scene: Scene) -> None:
    """It was put back by hand while they ran, and drained anew."""
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        desk.on_verdicts([replace(verdict(True), incident_id="inc0")])
        assert (scene.outcome(Act.RESUME), scene.stage()) == (None, Health.VALIDATING)
        desk.on_verdicts([verdict(True)])
        assert scene.wait(Act.RESUME).state is ActionState.DONE


def test_what_probes_cannot_tell_stays_out_and_is_not_asked_again(scene: Scene) -> None:
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
        wait_until(lambda: scene.store.duties().get("n3") and scene.store.duties()["n3"].reason.startswith("not"))
        assert scene.store.duties()["n3"].reason == "not validated: no probes here"
        action, _ = desk.resume("n1", "I looked", "ann", True)
        assert action is not None
        assert desk.wait(action, 20).state is ActionState.DONE
        assert scene.store.duties()["n1"].by == "ann"


def test_isolate_closes_first_and_says_which_jobs_stay(scene: Scene) -> None:
    scene.slurm.start("n1", "1", "2")
    scene.slurm.kept.add("2")
    with scene.desk() as desk:
        desk.take([decision(Wanted.ISOLATE)])
        done = scene.wait(Act.ISOLATE)
    assert done.detail == "closed; requeued: 1; Slurm does not let be requeued, and run on to their end: 2"
    assert [effect.split()[0] for effect in scene.slurm.effects] == ["n1", "requeue"]


def test_a_drain_of_somebody_else_stays(scene: Scene) -> None:
    scene.slurm.drain_by("n1", "ann", "new cables")
    with scene.desk() as desk:
        desk.take([decision(), decision(Wanted.ISOLATE, id_="d2")])
        for act in (Act.DRAIN, Act.ISOLATE):
            done = scene.wait(act)
            assert done.state is ActionState.FAILED
            assert done.detail == "it is drained by ann (new cables): left as it is"
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
    (drain,) = scene.store.actions(node="n1")
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
    assert (done.state, done.detail) == (ActionState.FAILED, "it is drained by ann (mine now): left as it is")
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
        desk.take([decision(Wanted.ADVISE)])
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
    second = replace(decision(Wanted.ADVISE, id_="d2"), incident_id="inc2")
    with scene.desk() as desk:
        desk.take([decision(Wanted.ADVISE)])
        scene.wait(Act.ADVISE)
        desk.take([second])
        wait_until(lambda: len(desk.advices) == 2)
    scene.incidents["inc2"] = incident("inc2", closed_ms=T0 + 1)
    with scene.desk() as desk:
        wait_until(lambda: len(desk.advices) == 2)
        desk._workers["slurm"]._looks._look_at_advices()
        assert not [a for a in scene.store.actions(node="n1") if a.action is Act.UNADVISE], "the first is still open"
        scene.incidents["inc1"] = incident(closed_ms=T0 + 2)
        done = scene.wait(Act.UNADVISE)
        assert (done.state, done.detail) == (ActionState.DONE, "weight 7 again")
    assert scene.slurm.held["n1"].weight == 7


def test_nodes_that_others_took_out_are_told(scene: Scene) -> None:
    told: list[frozenset[str]] = []
    actuator = SlurmActuator(scene.slurm, 10_000)
    scene.slurm.drain_by("n2", "root", "memory swap")
    desk = ActionDesk(
        scene.store, CONFIG, [actuator], {"n1": actuator, "n2": actuator}.get, nodes=["n1", "n2", "n9"], look_s=0.02
    )
    desk.on_away.append(lambda nodes: told.append(frozenset(nodes)))
    for _ in range(2):  # a second start tells it to a new engine again
        desk.start()
        wait_until(lambda: told)
        desk.stop()
        assert told.pop() == {"n2"}
        assert not told


def test_a_scheduler_that_is_away_gets_it_when_it_is_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.slurm.away = True
    with scene.desk() as desk:
        desk.take([decision(), decision(node="n2", id_="d2")])
        wait_until(lambda: "2 actions wait" in desk.troubles.get("slurm", ""))
        assert "does not answer" in desk.troubles["slurm"]
        wait_until(lambda: any("tried again" in a.detail for a in scene.store.intended_actions()))
        scene.slurm.away = False
        assert {scene.wait(Act.DRAIN, node).state for node in ("n1", "n2")} == {ActionState.DONE}
        wait_until(lambda: not desk.troubles)
    assert len(scene.slurm.effects) == 2


def test_what_an_isolation_closed_before_it_failed_is_out_also_when_that_cannot_be_seen_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.slurm.start("n1", "17")
    scene.slurm.requeues = False
    jobs = scene.slurm.jobs
    lost = threading.Event()

    def jobs_and_away(node: str) -> tuple[str, ...]:
        found = jobs(node)
        if not lost.is_set():
            scene.slurm.away = True
            lost.set()
        return found

    monkeypatch.setattr(scene.slurm, "jobs", jobs_and_away)
    with scene.desk() as desk:
        desk.take([decision(Wanted.ISOLATE)])
        wait_until(lambda: any("tried again" in a.detail for a in scene.store.intended_actions()))
        scene.slurm.away = False
        done = scene.wait(Act.ISOLATE)
        assert (done.state, scene.stage()) == (ActionState.FAILED, Health.DRAINING), "Drover knows that it is out"
    assert scene.slurm.effects == ["n1 state=drain reason=drover:inc1: xid/xid_79: GPU 3 fell off the bus"]


def test_a_drain_of_two_incidents_is_done_for_the_second_when_the_first_ends_before(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.incidents["inc2"] = incident("inc2")
    scene.slurm.away = True
    with scene.desk(replace(CONFIG, validate=False)) as desk:
        desk.take([decision(), decision(id_="d2", of="inc2")])
        wait_until(lambda: len(scene.store.intended_actions()) == 2)
        scene.incidents["inc1"] = incident(closed_ms=T0 + 1)
        scene.slurm.away = False
        wait_until(lambda: not scene.store.intended_actions())
        told = {a.incident_id: a.state for a in scene.store.actions(node="n1")}
    assert told == {"inc1": ActionState.FAILED, "inc2": ActionState.DONE}
    assert scene.slurm.effects == ["n1 state=drain reason=drover:inc2: xid/xid_79: GPU 3 fell off the bus"]


def test_what_cannot_be_done_for_long_has_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.slurm.away = True
    with scene.desk() as desk:
        desk.take([decision()])
        wait_until(lambda: desk.troubles)
        scene.now_ms += 601_000
        done = scene.wait(Act.DRAIN)
    assert done.state is ActionState.FAILED
    assert done.detail.startswith("given up after")
    assert scene.slurm.effects == []


def test_a_drain_that_is_given_up_while_the_scheduler_is_away_leaves_no_closed_node_that_nobody_knows_of(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm took the drain and went away before it could say so."""
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    update = scene.slurm.update

    def update_and_away(node: str, **fields: str) -> None:
        update(node, **fields)
        scene.slurm.away = True

    monkeypatch.setattr(scene.slurm, "update", update_and_away)
    with scene.desk(replace(CONFIG, validate=False)) as desk:
        desk.take([decision()])
        wait_until(lambda: desk.troubles)
        scene.now_ms += 601_000
        wait_until(lambda: any("looked at until it is" in a.detail for a in scene.store.intended_actions()))
        assert desk.leaving == {"n1"}, "it counts for the guard's caps"
        scene.slurm.away = False
        done = scene.wait(Act.DRAIN)
        assert done.state is ActionState.FAILED
        assert scene.stage() in (Health.DRAINING, Health.DRAINED)
        assert done.detail.startswith("given up after")
        assert done.detail.endswith("; its node is closed")
    assert len(scene.slurm.effects) == 1


def test_a_node_that_carries_our_mark_and_that_the_store_does_not_know_waits_for_a_person(scene: Scene) -> None:
    """The store was lost, or set back to a backup of before the drain."""
    scene.slurm.drain_by("n1", "root", "drover:inc1: xid/xid_79: it fell off")
    scene.slurm.drain_by("n2", "root", "memory swap")
    actuator = SlurmActuator(scene.slurm, 10_000)
    desk = ActionDesk(
        scene.store, CONFIG, [actuator], {"n1": actuator, "n2": actuator}.get, nodes=["n1", "n2"], look_s=0.02,
        now_ms=lambda: T0,
    )  # fmt: skip
    desk.validator = scene.probes
    desk.start()
    try:
        duty = scene.wait_stage(Health.DRAINED)
        assert (duty.incident_id, duty.by) == ("inc1", "drover")
        assert "found closed by Drover (drover:inc1: xid/xid_79: it fell off)" in duty.reason
        assert scene.probes.asked == [], "why it went out is not known"
        assert scene.stage("n2") is None
        desk.resume("n1", "I know it", "ann", False)
        assert scene.probes.asked == [("n1", ProbeReason.VALIDATE, "ann")]
    finally:
        desk.stop()
    assert scene.slurm.effects == []


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_only_decisions_to_act_are_taken_and_nothing_in_observe_mode(scene: Scene, mode: str) -> None:
    outcomes = ["would_act", "held", "pending_approval", "approved", "rejected", "expired"]
    with scene.desk(replace(CONFIG, mode=mode)) as desk:
        desk.take([decision(id_=outcome, outcome=outcome) for outcome in outcomes])
        desk.take([decision(Wanted.PROBE), decision(Wanted.WATCH)])
        if mode == "observe":
            desk.take([decision()])
            with pytest.raises(ActError, match="only observes"):
                desk.drain("n1", Act.DRAIN, "why", "ann")
        assert scene.store.actions() == []


def test_a_node_that_no_actuator_has(scene: Scene) -> None:
    with scene.desk() as desk:
        desk.take([decision(node="n9")])
        assert scene.wait(Act.DRAIN, "n9").detail == "no actuator has this node's pool"
        with pytest.raises(ActError, match="no actuator has n9"):
            desk.drain("n9", Act.DRAIN, "why", "ann")


def test_one_that_is_not_active_never_acts(scene: Scene) -> None:
    """It took the work up while it was active; it lost the lease before it acted."""
    holds = threading.Event()
    holds.set()

    def fence() -> str:
        if not holds.is_set():
            raise StoreError("this collector is not the active one any more")
        return ""

    scene.store.fence = fence
    asked = threading.Event()

    def lose(step: str) -> None:
        if step == "intended":
            holds.clear()
        asked.set()

    with scene.desk(step=lose) as desk:
        desk.take([decision()])
        assert asked.wait(20)
        wait_until(lambda: not holds.is_set())
        desk.take([decision(node="n2", id_="d2")])
        wait_until(lambda: "drain n2 first: this collector is not" in desk.troubles.get("intents", ""))
        with pytest.raises(StoreError):
            desk.drain("n3", Act.DRAIN, "why", "ann")
        worker = desk._workers["slurm"]
        wait_until(lambda: any(job.due for job in worker._jobs.values()), "it was tried, and waits")
        assert scene.slurm.effects == []
    holds.set()
    assert [a.state for a in scene.store.actions()] == [ActionState.INTENDED]


@pytest.mark.parametrize("mode", ["observe", "approve"])
def test_a_decision_that_nothing_was_begun_of_ends_with_its_mode(scene: Scene, mode: str) -> None:
    """The operator stopped the collector, lowered the policy's mode and started it again."""
    scene.store.write_decisions([decision()])
    with scene.desk(mode=mode) as desk:
        desk.take([decision(id_="later", node="n2")])
        scene.wait(Act.DRAIN, "n2")
    assert scene.store.actions(node="n1") == []


def test_what_is_to_be_done_does_not_wait_for_a_look_at_all_that_is_out(scene: Scene) -> None:
    """While one node after the other is given to its probes, another one is to be drained."""
    order: list[str] = []
    for node in ("n1", "n2"):
        scene.slurm.drain_by(node, "root", "drover:inc1: xid")
        scene.store.write_duties([Duty(node, Health.DRAINING, T0, "inc1", "xid")])
    ask = scene.probes.ask

    begun = threading.Event()

    def asked(node: str, why: ProbeReason, **more: str) -> str:
        assert begun.wait(20)
        order.append(node)
        if len(order) == 1:
            desk.intend("n3", Act.DRAIN, "seed", "inc1", "why", "drover")
        elif len(order) == 2:
            order.extend(effect.split()[0] for effect in scene.slurm.effects)
        return ask(node, why, **more)

    scene.probes.ask = asked  # type: ignore[method-assign,assignment]  # the order in which it is asked
    with scene.desk() as desk:
        begun.set()
        scene.wait_stage(Health.VALIDATING)
        scene.wait_stage(Health.VALIDATING, "n2")
    assert sorted(order[:2]) == ["n1", "n2"]
    assert order[2] == "n3", "the drain of n3 came before the second was asked for"


def test_a_slow_scheduler_delays_no_other(scene: Scene) -> None:
    free = threading.Event()

    class Slow(SlurmStandIn):
        def update(self, node: str, **fields: str) -> None:
            assert free.wait(20)
            super().update(node, **fields)

    slow, quick = SlurmActuator(Slow("n1"), 1), SlurmActuator(scene.slurm, 1)
    slow.name = "slow"
    desk = ActionDesk(
        scene.store, CONFIG, [slow, quick], scene.has({"n1": slow, "n2": quick}), incidents=lambda: scene.incidents,
        now_ms=lambda: T0,
    )  # fmt: skip
    desk.start()
    try:
        desk.take([decision(), decision(node="n2", id_="d2")])
        assert scene.wait(Act.DRAIN, "n2").state is ActionState.DONE
        assert scene.outcome(Act.DRAIN, "n1") is None
        free.set()
        scene.wait(Act.DRAIN, "n1")
    finally:
        free.set()
        desk.stop()
