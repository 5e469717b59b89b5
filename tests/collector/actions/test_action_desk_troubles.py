"""The desk that acts: schedulers that are away or slow, drains of several incidents, marks that nobody knows, modes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from drover_collector.actions.base import ActError
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.engine.node_state import Survey
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Act,
    ActionState,
    Health,
    NodeOutage,
    ProbeReason,
    RecommendedAction,
)
from testbed.desks import CONFIG, T0, Detected, Scene, decision, dispatcher_of, incident, scene_of
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import wait_until


@pytest.fixture
def scene(store: Store) -> Scene:
    return scene_of(store)


def test_a_scheduler_that_is_away_gets_it_when_it_is_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.slurm.away = True
    with scene.desk() as desk:
        desk.take([decision(), decision(node="n2", id_="d2")])
        wait_until(lambda: "2 actions wait" in desk.context.troubles.get("slurm", ""))
        assert "does not answer" in desk.context.troubles["slurm"]
        wait_until(lambda: any("tried again" in a.detail for a in scene.store.actions.intended()))
        scene.slurm.away = False
        assert {scene.wait(Act.DRAIN, node).state for node in ("n1", "n2")} == {ActionState.DONE}
        wait_until(lambda: not desk.context.troubles)
    assert len(scene.slurm.effects) == 2


def test_a_defect_in_the_first_look_at_all_nodes_is_not_all_that_the_thread_does(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried again at once, with a line in the log each time."""
    monkeypatch.setattr("drover_collector.actions.worker.STORE_WAIT_S", 3600.0)
    tries: list[int] = []

    def broken(_: object, nodes: object) -> Survey:
        tries.append(1)
        raise KeyError(nodes)

    monkeypatch.setattr(SlurmActuator, "survey", broken)
    with scene.desk() as desk:
        wait_until(lambda: "KeyError" in desk.context.troubles.get("slurm", ""), "it is shown")
        for _ in range(3):
            assert desk.observe("n1").node == "n1", "the thread has gone round"
        assert len(tries) == 1


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
        desk.take([decision(RecommendedAction.ISOLATE)])
        wait_until(lambda: any("tried again" in a.detail for a in scene.store.actions.intended()))
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
        wait_until(lambda: len(scene.store.actions.intended()) == 2)
        scene.incidents["inc1"] = incident(closed_ms=T0 + 1)
        scene.slurm.away = False
        wait_until(lambda: not scene.store.actions.intended())
        states = {a.incident_id: a.state for a in scene.store.actions.newest(node="n1")}
    assert states == {"inc1": ActionState.FAILED, "inc2": ActionState.DONE}
    assert scene.slurm.effects == ["n1 state=drain reason=drover:inc2: xid/xid_79: GPU 3 fell off the bus"]


def test_what_cannot_be_done_for_long_has_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    scene.slurm.away = True
    with scene.desk() as desk:
        desk.take([decision()])
        wait_until(lambda: desk.context.troubles)
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
        wait_until(lambda: desk.context.troubles)
        scene.now_ms += 601_000
        wait_until(lambda: any("looked at until it is" in a.detail for a in scene.store.actions.intended()))
        assert desk.context.outages.leaving == {"n1"}, "it counts for the guard's caps"
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
    desk = dispatcher_of(
        scene.store, CONFIG, [actuator], {"n1": actuator, "n2": actuator}.get, nodes=["n1", "n2"], look_s=0.02,
        now_ms=lambda: T0,
    )  # fmt: skip
    desk.returns.validator = scene.probes
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
        desk.take([decision(RecommendedAction.PROBE), decision(RecommendedAction.WATCH)])
        if mode == "observe":
            desk.take([decision()])
            with pytest.raises(ActError, match="only observes"):
                desk.drain("n1", Act.DRAIN, "why", "ann")
        assert scene.store.actions.newest() == []


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

    scene.store.fence.use(fence)
    asked = threading.Event()

    def lose(step: str) -> None:
        if step == "intended":
            holds.clear()
        asked.set()

    with scene.desk(step=lose) as desk:
        desk.take([decision()])
        assert asked.wait(120)
        wait_until(lambda: not holds.is_set())
        desk.take([decision(node="n2", id_="d2")])
        wait_until(lambda: "drain n2 first: this collector is not" in desk.context.troubles.get("slurm intents", ""))
        with pytest.raises(StoreError):
            desk.drain("n3", Act.DRAIN, "why", "ann")
        worker = desk._workers["slurm"]
        wait_until(lambda: any(job.due for job in worker._jobs.values()), "it was tried, and waits")
        assert scene.slurm.effects == []
    holds.set()
    assert [a.state for a in scene.store.actions.newest()] == [ActionState.INTENDED]


@pytest.mark.parametrize("mode", ["observe", "approve"])
def test_a_decision_that_nothing_was_begun_of_ends_with_its_mode(scene: Scene, mode: str) -> None:
    """The operator stopped the collector, lowered the policy's mode and started it again."""
    scene.store.decisions.write([decision()])
    with scene.desk(mode=mode) as desk:
        desk.take([decision(id_="later", node="n2")])
        scene.wait(Act.DRAIN, "n2")
    assert scene.store.actions.newest(node="n1") == []


def test_what_is_to_be_done_does_not_wait_for_a_look_at_everything_that_is_out(scene: Scene) -> None:
    """While one node after the other is given to its probes, another one is to be drained."""
    order: list[str] = []
    for node in ("n1", "n2"):
        scene.slurm.drain_by(node, "root", "drover:inc1: xid")
        scene.store.outages.write([NodeOutage(node, Health.DRAINING, T0, "inc1", "xid")])
    ask = scene.probes.ask

    begun = threading.Event()

    def asked(node: str, why: ProbeReason, **more: str) -> str:
        assert begun.wait(120)
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
            assert free.wait(120)
            super().update(node, **fields)

    slow, quick = SlurmActuator(Slow("n1"), 1), SlurmActuator(scene.slurm, 1)
    slow.name = "slow"
    desk = dispatcher_of(
        scene.store, CONFIG, [slow, quick], scene.has({"n1": slow, "n2": quick}),
        detection=Detected(lambda: scene.incidents),
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
