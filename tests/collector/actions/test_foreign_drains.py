"""Whatever is asked of an actuator, and whatever people do meanwhile: what somebody else has closed stays so, and
each refusal says why. Slurm in memory, which answers as the real one does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.actions.actuators import Actuators
from drover_collector.actions.base import ActError, Actuator, LaterError, NodeState, Service, mark_of
from drover_collector.actions.node_outage import (
    adopted,
    is_out,
    seen,
    taken_out,
)
from drover_collector.actions.reconciler import BATCH, SchedulerReconciler
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.engine.node_state import Survey
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    ActionState,
    Health,
    NodeOutage,
)
from testbed.desks import action_of, decision, scene_of
from testbed.slurm_stand_in import SlurmStandIn

NODES = ("n1", "n2")
MARKS = ("inc1", "inc2", "hand")
PEOPLE = ("ann drains", "ann resumes", "a job starts", "jobs end", "slurm goes", "slurm comes")
ours = st.tuples(st.sampled_from([Act.DRAIN, Act.ISOLATE, Act.RESUME]), st.sampled_from(NODES), st.sampled_from(MARKS))
theirs = st.tuples(st.sampled_from(PEOPLE), st.sampled_from(NODES), st.just(""))


def foreign(slurm: SlurmStandIn) -> dict[str, str]:
    """Nodes that somebody else has closed, with the reason."""
    return {
        name: node.reason
        for name, node in slurm.held.items()
        if "DRAIN" in node.states and mark_of(node.reason) is None
    }


def people(slurm: SlurmStandIn, what: str, node: str) -> None:
    match what:
        case "ann drains":  # also over Drover's drain, which is hers from then on
            slurm.drain_by(node, "ann", "cables")
        case "ann resumes":
            slurm.resume_by_hand(node)
        case "a job starts":
            slurm.start(node, f"job{len(slurm.effects)}")
        case "jobs end":
            slurm.finish(node)
        case _:
            slurm.away = what == "slurm goes"


@given(st.lists(st.one_of(ours, theirs), min_size=4, max_size=40))
def test_no_foreign_drain_is_undone_or_overwritten_and_every_refusal_says_why(plan: list[tuple[str, str, str]]) -> None:
    slurm = SlurmStandIn(*NODES)
    actuator = SlurmActuator(slurm, 10_000)
    for number, (what, node, mark) in enumerate(plan):
        if what in PEOPLE:
            people(slurm, what, node)
            continue
        before, there = foreign(slurm), slurm.held[node]
        try:
            actuator.do(action_of(Act(what), node, mark, id_=f"a{number}", why="why"), lambda: None)
        except ActError as error:
            assert str(error)
            assert isinstance(error, LaterError) or "DRAIN" in there.states, "it is not refused for nothing"
        assert foreign(slurm) == before
        if what is Act.RESUME and "DRAIN" in there.states and mark_of(there.reason) != mark:
            assert slurm.held[node] == there, "not even Drover's drain, for another incident"


@given(st.lists(st.one_of(ours, theirs), min_size=4, max_size=40))
def test_what_is_seen_never_makes_a_foreign_drain_drovers_and_forgets_none_of_drovers(
    plan: list[tuple[str, str, str]],
) -> None:
    """The fold of looks at the scheduler, as the worker does it after each act."""
    slurm = SlurmStandIn(*NODES)
    actuator = SlurmActuator(slurm, 10_000)
    duties: dict[str, NodeOutage] = {}
    for now_ms, (what, node, mark) in enumerate(plan):
        if what in PEOPLE:
            people(slurm, what, node)
        else:
            try:
                actuator.do(action_of(Act(what), node, mark, id_=f"a{now_ms}", why="why"), lambda: None)
            except ActError:
                pass
            else:
                found = mark_of(slurm.held[node].reason) or mark
                if what is not Act.RESUME and not is_out(duties.get(node)):
                    duties[node] = taken_out(action_of(Act.DRAIN, node, found, why="why"), duties.get(node), now_ms, 14)
        if slurm.away:
            continue
        for name, state in actuator.observe_all(NODES).items():
            duty = duties.get(name)
            if duty is not None and is_out(duty):
                duties[name] = seen(duty, state, now_ms) or duty
            elif (taken_up := adopted(state, now_ms)) is not None:
                duties[name] = taken_up
        held = {name for name, duty in duties.items() if is_out(duty)}
        mine = {n for n, s in slurm.held.items() if "DRAIN" in s.states and mark_of(s.reason) is not None}
        assert held == mine, "no other, and none that it has closed is forgotten"


def test_a_drain_does_not_wait_for_looks_at_hundreds_of_nodes_that_others_closed() -> None:
    names = [f"n{k:03d}" for k in range(5 * BATCH)]
    asked: list[str] = []
    taken: list[str] = []

    def observe_all(some: Sequence[str]) -> dict[str, NodeState]:
        asked.extend(some)
        ours = {names[-1]: "drover:inc1: it fell off"}
        return {name: NodeState(name, Service.DRAINED, ours.get(name, "memory swap"), "root") for name in some}

    actuator = SimpleNamespace(
        name="it", surveys=True, acts=frozenset(), survey=lambda _: Survey(set(names)), observe_all=observe_all
    )
    context = SimpleNamespace(
        actuators=Actuators((cast(Actuator, actuator),), lambda _: cast(Actuator, actuator), tuple(names)),
        outages=SimpleNamespace(current={}, write=lambda outage: taken.append(outage.node)),
        surveys=SimpleNamespace(set=lambda *_: None), troubles={}, now_ms=lambda: 1, store=None, gpus=None, look_s=1.0,
    )  # fmt: skip

    def nothing(*_: object) -> None:
        pass

    one = SchedulerReconciler(context, actuator, nothing, nothing, nothing)  # type: ignore[arg-type]  # what a look asks of them
    assert not one.reconcile(set(), lambda: None, lambda: True)
    assert len(asked) == BATCH
    assert one.reconcile(set(), lambda: None, lambda: False), "it goes on when nothing is due"
    assert (sorted(asked), taken) == (names, names[-1:]), "and looks at each once"


@pytest.mark.parametrize("mark", ["hand", "other"])
def test_a_drain_that_the_store_has_forgotten_does_not_become_drovers_own(store: Store, mark: str) -> None:
    """A fault of that node is decided before the first look at all nodes finds its drain."""
    scene = scene_of(store)
    scene.slurm.drain_by("n1", "root", f"drover:{mark}: alice: I work on its fans until Friday")
    with scene.desk() as desk:
        desk.take([decision()])
        assert scene.wait(Act.DRAIN).state is ActionState.DONE
        duty = scene.wait_stage(Health.DRAINED)
        assert duty.reason.startswith("not validated: it was found closed by Drover")
        desk.take([decision(node="n2", id_="d2")])
        scene.wait_stage(Health.VALIDATING, "n2")
        assert [node for node, _, _ in scene.probes.asked] == ["n2"], "nobody asks for probes of it"
    assert scene.stage() is Health.DRAINED
    assert not [effect for effect in scene.slurm.effects if effect.startswith("n1 ")]
