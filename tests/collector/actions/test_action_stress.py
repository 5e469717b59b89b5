"""Many decisions at once on a Slurm that fails in every way it can, a store that hangs, a stop in between."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drover_collector.actions.base import ActError, AwayError, LaterError
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.engine.node_state import NodeNow
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Health,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
)
from testbed import desks
from testbed.desks import T0, Detected, dispatcher_of
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import wait_until

CONFIG = replace(desks.CONFIG, validate=False)
NODES = tuple(f"n{number:03d}" for number in range(80))
# What becomes of each node, by its number modulo 5.
DONE, TIMES_OUT, REFUSES, UNKNOWN, TAKEN = range(5)


def decision(node: str) -> Decision:
    return desks.decision(node=node, id_=f"d-{node}", of=f"i-{node}")


INCIDENTS = {f"i-{node}": desks.incident(f"i-{node}", node=node) for node in NODES}


def kind(node: str) -> int:
    return int(node[1:]) % 5


class Bad(SlurmStandIn):
    """Drains some at once, some at the third try; the second one it does without saying so. Refuses some."""

    def __init__(self) -> None:
        super().__init__(*(node for node in NODES if kind(node) != UNKNOWN))
        self.tries: Counter[str] = Counter()
        for node in NODES:
            if kind(node) == TAKEN:
                self.drain_by(node, "ann", "new cables")

    def update(self, node: str, **fields: str) -> None:
        self.tries[node] += 1
        if kind(node) == REFUSES:
            raise LaterError("Slurm: Access/permission denied")
        if kind(node) == TIMES_OUT and self.tries[node] == 1:
            raise AwayError("scontrol did not end within 10 s")
        super().update(node, **fields)
        if kind(node) == TIMES_OUT:
            raise AwayError("scontrol did not end within 10 s")


def test_of_80_decisions_at_once_each_is_done_or_has_failed_for_a_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    slurm, now_ms = Bad(), [T0]
    actuator = SlurmActuator(slurm, 10_000)
    desk = dispatcher_of(
        store,
        CONFIG,
        [actuator],
        lambda _: actuator,
        detection=Detected(lambda: INCIDENTS),
        now_ms=lambda: now_ms[0],
        look_s=1e9,
    )
    desk.start()
    try:
        desk.take([decision(node) for node in NODES])

        def left() -> set[str]:
            return {action.node for action in store.actions.intended()}

        refused = {node for node in NODES if kind(node) == REFUSES}
        wait_until(lambda: len(slurm.tries) == 48 and left() == refused, "all others have ended", 90)
        now_ms[0] += 601_000
        wait_until(lambda: not left(), "those that Slurm refuses are given up")
    finally:
        desk.stop()
    found = {action.node: action for action in store.actions.newest()}
    assert set(found) == set(NODES)
    for node, action in found.items():
        drained = kind(node) in (DONE, TIMES_OUT)
        assert action.state is (ActionState.DONE if drained else ActionState.FAILED), action
        assert action.detail.startswith(REASONS[kind(node)]), action
        assert sum(effect.startswith(node) for effect in slurm.effects) == drained, "done once, or never"
    assert {node for node, duty in store.outages.current().items() if duty.stage is Health.DRAINING} == {
        node for node in NODES if kind(node) in (DONE, TIMES_OUT)
    }
    assert desk.context.outages.leaving == set()


REASONS = {
    DONE: "no new jobs",
    TIMES_OUT: "drained already, with reason",
    REFUSES: "given up after",
    UNKNOWN: "Slurm knows no node",
    TAKEN: "it is drained by ann (new cables): left unchanged",
}


class Kept:
    """What the desk asks of a store, in memory; it hangs while `free` is not set, and fails while `fails`."""

    def __init__(self) -> None:
        self.free, self.fails = threading.Event(), False
        self.free.set()
        self.kept: dict[str, Action] = {}
        self.actions = SimpleNamespace(
            write=self._write, history=lambda id_: [self.kept[id_]] if id_ in self.kept else [],
            newest=lambda **_: [], intended=list,
        )  # fmt: skip
        self.decisions = SimpleNamespace(without_action=lambda _: [])
        gpus = SimpleNamespace(current=dict)  # no GPU is out alone
        self.outages = SimpleNamespace(current=dict, write=lambda _: self._wait(), gpus=gpus)

    def fence(self) -> str:
        return ""

    def _wait(self) -> None:
        assert self.free.wait(120)

    def _write(self, actions: list[Action]) -> None:
        self._wait()
        if self.fails:
            raise StoreError("no space left")
        self.kept.update({action.id: action for action in actions})


def in_memory(kept: Kept, slurm: SlurmStandIn) -> ActionDispatcher:
    actuator = SlurmActuator(slurm, 10_000)
    made = dispatcher_of(kept, CONFIG, [actuator], lambda _: actuator, now_ms=lambda: T0, look_s=1e9)  # type: ignore[arg-type]  # what it asks for
    made.start()
    return made


def test_a_store_that_hangs_does_not_hold_up_who_decides_and_nothing_is_done_before_it_is_stored() -> None:
    kept, slurm = Kept(), SlurmStandIn("n000")
    kept.free.clear()
    desk = in_memory(kept, slurm)
    try:
        taker = threading.Thread(target=desk.take, args=([decision("n000")],), daemon=True)
        taker.start()
        taker.join(5)
        assert not taker.is_alive()
        assert slurm.effects == []
        kept.free.set()
        wait_until(lambda: slurm.effects, "the drain")
    finally:
        kept.free.set()
        desk.stop()


def test_a_store_that_fails_is_reported_and_the_decision_is_begun_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.STORE_WAIT_S", 0.01)
    kept, slurm = Kept(), SlurmStandIn("n000", "n005")
    kept.fails = True
    desk = in_memory(kept, slurm)
    try:
        desk.take([decision("n000"), decision("n005")])
        wait_until(lambda: "drain n000 first: no space left" in desk.context.troubles.get("slurm intents", ""))
        assert slurm.effects == []
        kept.fails = False
        wait_until(lambda: len(slurm.effects) == 2, "both drains")
        wait_until(lambda: "slurm intents" not in desk.context.troubles, "the trouble is over")
    finally:
        desk.stop()


def test_what_comes_after_a_stop_is_not_stored_as_something_that_cannot_be_done() -> None:
    kept = Kept()
    desk = in_memory(kept, SlurmStandIn("n000"))
    desk.stop()
    with pytest.raises(StoreError, match="does not act any more"):
        desk.intend("n000", Act.DRAIN, "seed", "i", "why", "drover")
    assert kept.kept == {}


def test_what_is_done_is_never_given_up_though_slurm_goes_away_right_after(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be out with nobody to put it back."""
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    slurm, now_ms = SlurmStandIn("n000"), [T0]
    actuator = SlurmActuator(slurm, 10_000)

    def step(name: str) -> None:
        slurm.away = slurm.away or name == "acted"

    desk = dispatcher_of(store, CONFIG, [actuator], lambda _: actuator, now_ms=lambda: now_ms[0], look_s=1e9, step=step)
    desk.start()
    try:
        desk.take([decision("n000")])
        wait_until(lambda: slurm.away and desk.context.troubles, "it is done, and Slurm is away")
        now_ms[0] += 601_000
        wait_until(lambda: any(job.tries > 2 for job in desk._workers["slurm"]._jobs.values()), "tried again")
        slurm.away = False
        desk.context.crash_test_hook = lambda _: None
        wait_until(lambda: [a.state for a in store.actions.newest()] == [ActionState.DONE], "it is shown as done")
    finally:
        desk.stop()
    assert store.outages.current()["n000"].stage is Health.DRAINING


def test_one_that_passed_and_cannot_be_put_back_is_shown_as_such(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    slurm, now_ms = SlurmStandIn("n000"), [T0]
    slurm.drain_by("n000", "root", "drover:i1: xid")
    store.outages.write([NodeOutage("n000", Health.VALIDATING, T0, "i1", "xid", "drover", 0)])
    actuator = SlurmActuator(slurm, 10_000)
    desk = dispatcher_of(
        store,
        CONFIG,
        [actuator],
        lambda _: actuator,
        now_ms=lambda: now_ms[0],
        look_s=1e9,
        detection=Detected(now_of=lambda _: NodeNow(now_ms[0] + 1, (now_ms[0] + 1,))),
    )
    desk.start()
    try:
        slurm.away = True
        desk.on_verdicts([ProbeVerdict("r1", "n000", None, True, "", "all good", T0, ProbeReason.VALIDATE, "i1")])
        wait_until(lambda: desk.context.troubles, "Slurm is away")
        now_ms[0] += 601_000
        wait_until(lambda: store.outages.current()["n000"].stage is Health.DRAINED, "it is given up")
    finally:
        desk.stop()
    assert "it could not be put back: given up after" in store.outages.current()["n000"].reason
    assert slurm.held["n000"].states == {"IDLE", "DRAIN"}


def test_a_ticket_whose_command_hangs_is_not_opened_twice(tmp_path_factory: pytest.TempPathFactory) -> None:
    ran = tmp_path_factory.mktemp("ticket") / "ran"
    words = ("/bin/sh", "-c", f"echo ran >> {ran}; exec sleep 60")
    kept, slurm = Kept(), SlurmStandIn("n000")
    actuator = SlurmActuator(slurm, 10_000)
    config = replace(CONFIG, reboot_command=words, command_timeout_s=0.3)
    desk = dispatcher_of(kept, config, [actuator], lambda _: actuator, now_ms=lambda: T0, look_s=1e9)  # type: ignore[arg-type]  # what it asks for
    desk.start()
    try:
        made = desk.wait(desk.drain("n000", Act.REBOOT, "it hangs", "ann", forced=True), 20)
    finally:
        desk.stop()
    assert made.state is ActionState.FAILED
    assert made.detail.endswith("it was killed: nobody knows whether it was done")
    assert ran.read_text() == "ran\n"


def test_who_waits_to_leave_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that by hand only as many leave as the guard allows while a scheduler is away."""
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (60.0,))
    slurm = SlurmStandIn("n000", "n001")
    slurm.away = True
    desk = in_memory(Kept(), slurm)
    try:
        desk.drain("n000", Act.DRAIN, "why", "ann")
        desk.drain("n001", Act.ISOLATE, "why", "ann")
        assert desk.context.outages.leaving == {"n000", "n001"}
    finally:
        desk.stop()
    with pytest.raises(ActError, match="not the active one"):
        desk.drain("n000", Act.DRAIN, "why", "ann")
