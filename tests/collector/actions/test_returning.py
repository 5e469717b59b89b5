"""A return that its probes have earned, and what came to be known while they ran: it is withheld, and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drover_collector.actions.node_outage import drained_too, kept_by
from drover_collector.actions.return_conditions import new_evidence
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    ActionState,
    Event,
    EventKind,
    Finding,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    ProbeOrder,
    ProbeReason,
    RecommendedAction,
    Severity,
)
from testbed.desks import T0, Scene, decision, incident, scene_of, verdict
from testbed.waiting import wait_until

ASKED = T0 + 60_000


@pytest.fixture
def scene(kept: Store) -> Scene:
    return scene_of(kept)


def later(id_: str = "inc2", at_ms: int = ASKED + 1, **more: object) -> Incident:
    made = replace(incident(id_), gpu=5, members=(("n1", 5),), opened_ms=at_ms, since_ms=at_ms, detectors=("xid",))
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def xid(at_ms: int, gpu: int = 5, code: str = "79", **more: object) -> Event:
    made = Event(f"e{at_ms}", at_ms, "n1", gpu, EventKind.XID, code, f"Xid {code}", received_ms=at_ms)
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def finding(at_ms: int, **more: object) -> Finding:
    made = Finding(
        "memory", IncidentKind.MEMORY, "remap_failed", "gpu", "n1", 5, (("n1", 5),), at_ms, T0, Severity.CRITICAL, 0.99,
        RecommendedAction.DRAIN, "a remap failed", "Drain.",
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


REMAP = {"kind": IncidentKind.MEMORY, "cause": "remap_failed", "detectors": ("memory",), "at_ms": T0}
FOUND = "xid/xid_79 of GPU 5 (incident inc2) was found"
AGAIN = "xid/xid_79 of GPU 5 (incident inc2) was reported again"
REPORTED_AGAIN = "memory/remap_failed of GPU 5 (incident inc2) was reported again"
NEWER = {
    "opened since": (later(), [], [], FOUND),
    "opened since, and over already": (later(closed_ms=ASKED + 9), [], [], FOUND),
    "opened before": (later(at_ms=ASKED), [], [], ""),
    "of another node": (later(node="n2"), [], [], ""),
    "nothing that wants a drain": (later(action=RecommendedAction.PROBE), [], [], ""),
    "an XID of it since": (later(at_ms=T0), [xid(ASKED + 1)], [], AGAIN),
    "an XID of it before": (later(at_ms=T0), [xid(ASKED)], [], ""),
    "an XID of another GPU": (later(at_ms=T0), [xid(ASKED + 1, gpu=2)], [], ""),
    "an XID that is the program's": (later(at_ms=T0), [xid(ASKED + 1, code="31")], [], ""),
    "an XID of the log of before": (later(at_ms=T0), [xid(ASKED + 1, backlog=True)], [], ""),
    "an XID with the wrong clock": (
        later(at_ms=T0),
        [xid(ASKED - 7_200_000, clock_suspect=True, received_ms=ASKED + 1)],
        [],
        AGAIN,
    ),
    "a condition reported since": (later(**REMAP), [], [finding(ASKED + 1)], REPORTED_AGAIN),
    "a condition reported before": (later(**REMAP), [], [finding(ASKED)], ""),
    "a condition that is over": (later(**REMAP), [], [finding(ASKED + 1, cleared=True)], ""),
    "a note": (later(**REMAP), [], [finding(ASKED + 1, severity=Severity.INFO)], ""),
    "of another detector": (later(**REMAP), [], [finding(ASKED + 1, detector="thermal")], ""),
    "something milder": (
        later(**REMAP),
        [],
        [finding(ASKED + 1, cause="ecc_storm", action=RecommendedAction.PROBE)],
        "",
    ),
}


@pytest.mark.parametrize("case", list(NEWER))
def test_what_a_pass_does_not_speak_for(case: str) -> None:
    known, events, findings, reason = NEWER[case]
    found = new_evidence("n1", ASKED, [known], events, findings)
    assert (found.text if found is not None else "") == reason
    assert found is None or found.incidents == ("inc2",)


def validating(scene: Scene) -> None:
    """n1 is out for inc1, and its probes were asked for at ASKED."""
    scene.now_ms = ASKED
    scene.wait_stage(Health.VALIDATING)
    assert scene.store.outages.current()["n1"].asked_ms == ASKED


@pytest.mark.parametrize("restarted", [False, True], ids=["same desk", "desk restarted"])
def test_a_fault_that_opens_while_its_probes_run_withholds_the_return_once_and_then_waits_for_a_person(
    scene: Scene, restarted: bool
) -> None:
    scene.slurm.start("n1", "17")
    verdicts = [verdict(True)]
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait(Act.DRAIN)
        scene.now_ms = ASKED
        scene.slurm.finish("n1")
        validating(scene)
        if not restarted:
            scene.incidents["inc2"] = later()
            desk.on_verdicts(verdicts)
            scene.wait(Act.RESUME)
    scene.incidents["inc2"] = later()
    with scene.desk() as desk:
        desk.on_verdicts(verdicts)  # once more, as after a stop
        done = scene.wait(Act.RESUME)
        duty = scene.wait_stage(Health.DRAINED)
        why = (
            "resume withheld: it passed its validation: passed: True; but since its probes were asked for"
            f" {FOUND}. It is probed again when nothing more comes"
        )
        assert (done.state, done.detail, duty.reason) == (ActionState.FAILED, why, why)
        assert scene.slurm.held["n1"].states == {"IDLE", "DRAIN"}, "it stays out"
        desk.take([decision(node="n2", id_="d2")])  # looks go on
        scene.wait_stage(Health.VALIDATING, "n2")
        assert scene.stage() is Health.DRAINED, "news may go on"
        scene.now_ms = ASKED + 60_001
        scene.wait_stage(Health.VALIDATING)
        assert scene.store.outages.current()["n1"].asked_ms == ASKED + 60_001, "a validation of its own"
        desk.on_verdicts(verdicts)  # of the probes before
        scene.store.findings.write([])
        scene.incidents["inc3"] = later("inc3", ASKED + 70_000)
        desk.on_verdicts([replace(verdict(True), request="second")])
        wait_until(
            lambda: scene.store.outages.current()["n1"].reason.startswith("not validated: it passed"), "it waits"
        )
        scene.now_ms += 600_000
        action, _ = desk.resume("n1", "I looked", "ann", True)
        assert action is not None
        assert desk.wait(action, 20).state is ActionState.DONE, "a person may"
    assert scene.store.outages.current()["n1"].asked_ms == 0
    assert [e for e in scene.slurm.effects if e.startswith("n1 state=undrain")] == ["n1 state=undrain"]


def test_after_a_pass_that_speaks_for_all_it_comes_back(scene: Scene) -> None:
    """Withheld once, then well; and what a person has rejected does not count."""
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        validating(scene)
        scene.incidents["inc2"] = later()
        desk.on_verdicts([verdict(True)])
        scene.wait_stage(Health.DRAINED)
        scene.now_ms = ASKED + 60_001
        scene.wait_stage(Health.VALIDATING)
        scene.incidents["inc3"] = later("inc3", ASKED + 70_000)
        scene.store.decisions.write([decision(id_="d3", of="inc3", outcome="rejected")])
        desk.on_verdicts([replace(verdict(True), request="second")])
        duty = scene.wait_stage(Health.HEALTHY)
    assert (duty.asked_ms, duty.reason) == (ASKED + 60_001, "passed its validation: passed: True")


def test_stored_events_and_findings_speak_against_it_right_before_its_effect(scene: Scene) -> None:
    """It waited for a scheduler that was away."""
    scene.incidents["inc1"] = replace(incident(), detectors=("xid",))
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        validating(scene)
        scene.slurm.away = True
        desk.on_verdicts([verdict(True)])
        wait_until(lambda: "slurm" in desk.context.troubles, "it waits")
        scene.now_ms += 5_000
        scene.store.events.write([xid(ASKED + 5_000, gpu=3, code="171")])  # which needs no reset
        scene.slurm.away = False
        done = scene.wait(Act.RESUME)
    assert (done.state, "xid/xid_79 of GPU 3 (incident inc1) was reported again" in done.detail) == (
        ActionState.FAILED, True,
    )  # fmt: skip
    assert not [e for e in scene.slurm.effects if "undrain" in e]


def test_probes_that_were_asked_for_earlier_count_from_then(scene: Scene) -> None:
    """Those of a node that is drained again may be open still."""
    order = ProbeOrder("request-n1", "n1", (), "standard", (), ProbeReason.VALIDATE, "asked", T0 + 1, "inc1")
    scene.store.probes.orders.write([order, replace(order, state="sent", ts_ms=T0 + 2)])
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        assert scene.store.outages.current()["n1"].asked_ms == T0 + 1


def test_what_a_person_has_drained_only_a_person_puts_back(scene: Scene) -> None:
    with scene.desk() as desk:
        asked = desk.drain("n2", Act.DRAIN, "fan at noon", "ann")
        assert desk.wait(asked, 20).state is ActionState.DONE
        scene.wait_stage(Health.DRAINED, "n2")
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        assert [node for node, _, _ in scene.probes.asked] == ["n1"], "looks went on, and asked for no probes of n2"

        asked = desk.drain("n1", Act.DRAIN, "fan at noon", "ann")  # out already, and its probes run
        assert desk.wait(asked, 20).state is ActionState.DONE
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.by == "ann"
        assert duty.reason == "fan at noon; out before that: xid/xid_79: GPU 3 fell off the bus"
        desk.on_verdicts([verdict(True)])
        assert "ann drains it by hand" in scene.wait(Act.RESUME).detail
        assert scene.store.outages.current()["n1"] == duty, "and says so still"
        _, said = desk.resume("n1", "fan is new", "bob", False)
        assert "when it passes" in said
        desk.on_verdicts([replace(verdict(True), request="asked for by bob")])
        scene.wait_stage(Health.HEALTHY)


def test_a_drain_by_hand_that_waits_behind_a_return_withholds_it(scene: Scene) -> None:
    with scene.desk() as desk:
        desk.take([decision()])
        scene.wait_stage(Health.VALIDATING)
        scene.slurm.away = True
        desk.on_verdicts([verdict(True)])
        wait_until(lambda: "slurm" in desk.context.troubles, "it waits")
        asked = desk.drain("n1", Act.DRAIN, "fan at noon", "ann")
        scene.slurm.away = False
        assert desk.wait(asked, 20).state is ActionState.DONE
        assert scene.wait(Act.RESUME).state is ActionState.FAILED
        wait_until(lambda: scene.store.outages.current()["n1"].by == "ann", "she keeps it out")
    assert not [e for e in scene.slurm.effects if "undrain" in e]


def test_a_return_that_a_person_forces_is_not_drovers_own_that_waits(scene: Scene) -> None:
    with scene.desk() as desk:
        scene.now_ms = ASKED
        desk.take([decision()])
        validating(scene)
        scene.slurm.away = True
        desk.on_verdicts([verdict(True)])
        wait_until(lambda: "slurm" in desk.context.troubles, "it waits")
        scene.incidents["inc2"] = later()
        forced, _ = desk.resume("n1", "I know", "ann", True)
        assert forced is not None
        scene.slurm.away = False
        assert desk.wait(forced, 20).state is ActionState.DONE
    assert [e for e in scene.slurm.effects if "undrain" in e] == ["n1 state=undrain"]
    assert scene.store.outages.current()["n1"].by == "ann"


def test_one_in_repair_or_with_a_person_already_stays_unchanged() -> None:
    duty = NodeOutage("n1", Health.DRAINING, T0, "inc1", "it fell off")
    kept = drained_too(duty, "ann", "fan", T0 + 1)
    assert kept is not None
    assert (kept.stage, kept_by(kept)) == (Health.DRAINING, "ann")
    assert drained_too(kept, "bob", "disk", T0 + 2) is None
    assert drained_too(replace(duty, stage=Health.REPAIR), "ann", "fan", T0 + 1) is None
