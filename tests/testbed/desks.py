"""A dispatcher of actions over a Slurm in memory: what outlives a collector, and what is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from drover_collector.actions.actuators import Actuators
from drover_collector.actions.base import HAND, Actuator
from drover_collector.actions.context import ActionContext, Detection
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.outage_store import OutageStore
from drover_collector.actions.return_to_service import Validator
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.engine.node_state import NodeNow, Survey
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
    RecommendedAction,
    Severity,
)
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import wait_until

T0 = 1_800_000_000_000
CONFIG = ActConfig(mode="enforce", give_up_s=600)


def incident(id_: str = "inc1", closed_ms: int | None = None, node: str = "n1") -> Incident:
    return Incident(
        id_, IncidentKind.XID, "xid_79", "gpu", node, 3, ((node, 3),), T0, T0, closed_ms, Severity.CRITICAL, 0.99,
        RecommendedAction.DRAIN, "GPU 3 fell off the bus", "Drain the node.",
    )  # fmt: skip


def decision(
    wanted: RecommendedAction = RecommendedAction.DRAIN,
    node: str = "n1",
    id_: str = "d1",
    outcome: str = "act",
    of: str = "inc1",
) -> Decision:
    return Decision(id_, of, T0, node, wanted, "enforce", outcome, "xid", "the rule says so")


def action_of(
    act: Act, node: str = "n1", mark: str = "inc1", *, id_: str = "a1", before: str = "",
    why: str = "xid/xid_79: GPU has fallen off the bus",
) -> Action:  # fmt: skip
    """Return an action of Drover's that waits. `mark`: an incident's id, or `hand`."""
    incident = "" if mark == HAND else mark
    return Action(id_, "d1", incident, node, act, "", ActionState.INTENDED, T0, by="drover", why=why, before=before)


@dataclass
class Detected:
    """Detection that knows these incidents and nodes, wants every action, and whose guard holds none."""

    known: Callable[[], Mapping[str, Incident]] = dict
    now_of: Callable[[str], NodeNow | None] = lambda _: None
    surveys: list[Survey] = field(default_factory=list)
    failed: list[Action] = field(default_factory=list)

    @property
    def incidents(self) -> Mapping[str, Incident]:
        return self.known()

    def node_now(self, node: str) -> NodeNow | None:
        return self.now_of(node)

    def why_unwanted(self, _: Action) -> str:
        return ""

    def why_held(self, _: Action, _later: Set[str]) -> str:
        return ""

    def take_survey(self, survey: Survey) -> None:
        self.surveys.append(survey)

    def take_failed(self, actions: Sequence[Action]) -> None:
        self.failed += actions


def dispatcher_of(
    store: Store,
    config: ActConfig,
    actuators: Sequence[Actuator],
    actuator_of: Callable[[str], Actuator | None],
    *,
    detection: Detection | None = None,
    nodes: Sequence[str] = (),
    now_ms: Callable[[], int] | None = None,
    look_s: float = 5.0,
    step: Callable[[str], None] = lambda _: None,
    validator: Validator | None = None,
) -> ActionDispatcher:
    """Return a dispatcher with an outage store of its own."""
    of = Actuators(tuple(actuators), actuator_of, tuple(nodes))
    context = ActionContext(
        store, config, of, OutageStore(store), detection or Detected(), look_s=look_s, crash_test_hook=step
    )
    if now_ms is not None:
        context.now_ms = now_ms
    return ActionDispatcher(context, validator)


@dataclass
class Probes:
    """Stands for the service that orders probes: notes what is asked for."""

    asked: list[tuple[str, ProbeReason, str]] = field(default_factory=list)
    refuses: str = ""
    gpus: list[tuple[int, ...]] = field(default_factory=list)  # of each call

    def ask(
        self, node: str, why: ProbeReason, *, level: str = "quick", incident_id: str = "", by: str = "drover",
        gpus: Iterable[int] = (),
    ) -> str:  # fmt: skip
        self.gpus.append(tuple(gpus))
        assert (level, incident_id) == ("standard", "inc1")
        if self.refuses:
            raise ValueError(self.refuses)
        if (node, why, by) not in self.asked:
            self.asked.append((node, why, by))
        return f"request-{node}"


@dataclass
class Scene:
    """What outlives a collector: the store, Slurm, the incidents; and the clock."""

    store: Store
    slurm: SlurmStandIn
    incidents: dict[str, Incident]
    probes: Probes
    now_ms: int = T0
    telemetry: NodeNow | None = None  # what the engine knows of each node; None: all its GPUs give values now

    @property
    def now(self) -> NodeNow:
        if self.telemetry is not None:
            return self.telemetry
        at_ms = self.now_ms + 1  # in tests time often stands still
        return NodeNow(at_ms, (at_ms,) * 8)

    @contextmanager
    def desk(
        self,
        config: ActConfig = CONFIG,
        step: Callable[[str], None] = lambda _: None,
        *,
        look_s: float = 0.02,
        mode: str = "enforce",
    ) -> Iterator[ActionDispatcher]:
        actuator = SlurmActuator(self.slurm, 10_000)
        made = dispatcher_of(
            self.store, config, [actuator], self.has(dict.fromkeys(self.slurm.held, actuator)),
            detection=Detected(lambda: self.incidents, lambda _: self.now), now_ms=lambda: self.now_ms,
            look_s=look_s, step=step, validator=self.probes,
        )  # fmt: skip
        made.start(mode)
        try:
            yield made
        finally:
            made.stop()

    @staticmethod
    def has(nodes: Mapping[str, Actuator]) -> Callable[[str], Actuator | None]:
        return nodes.get

    def outcome(self, act: Act, node: str = "n1") -> Action | None:
        found = [
            a for a in self.store.actions.newest(node=node) if a.action is act and a.state is not ActionState.INTENDED
        ]
        return found[-1] if found else None

    def wait(self, act: Act, node: str = "n1") -> Action:
        wait_until(lambda: self.outcome(act, node), f"{act} of {node} has an outcome")
        found = self.outcome(act, node)
        assert found is not None
        return found

    def stage(self, node: str = "n1") -> Health | None:
        duty = self.store.outages.current().get(node)
        return None if duty is None else duty.stage

    def wait_stage(self, stage: Health, node: str = "n1") -> NodeOutage:
        wait_until(lambda: self.stage(node) is stage, f"{node} is {stage}")
        return self.store.outages.current()[node]


def scene_of(store: Store) -> Scene:
    return Scene(store, SlurmStandIn("n1", "n2", "n3"), {"inc1": incident()}, Probes())


def verdict(passed: bool | None, node: str = "n1", gpu: int | None = None) -> ProbeVerdict:
    return ProbeVerdict("request-n1", node, gpu, passed, "", f"passed: {passed}", T0, ProbeReason.VALIDATE, "inc1")
