"""One GPU out of service while its node works: taken out by UUID, probed alone, put back; over crashes and boots.

Kubernetes is in memory here; test_kubernetes.py has the same on a real API server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from drover_collector.actions.base import NotAloneError
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.kubernetes.gpu_taints import GROUP
from drover_collector.engine.node_state import NodeNow
from drover_collector.probes.scheduling.protection import GpuProtection
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    GpuRef,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    ProbeOrder,
    ProbeReason,
    ProbeVerdict,
    Withheld,
)
from testbed.desks import CONFIG, T0, Detected, action_of, decision, dispatcher_of, incident
from testbed.gpu_devices import GpuCluster, claim_of, uuid_of
from testbed.waiting import wait_until

SICK, SLOT = uuid_of(16 + 3), 3
RULE = f"drover-{SICK.lower()}"


def fault(**more: object) -> Incident:
    made = replace(incident(), kind=IncidentKind.MEMORY, cause="remap_failed", detectors=("memory",))
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def decided(id_: str = "d1", node: str = "n1", of: str = "inc1", gpu: GpuRef | None = None) -> Decision:
    return replace(decision(node=node, id_=id_, of=of), gpu=gpu or GpuRef(SLOT, SICK))


@dataclass
class Asked:
    """Stands for the service that orders probes."""

    gpus: list[tuple[int, ...]] = field(default_factory=list)
    refuses: str = ""

    def ask(
        self, node: str, why: ProbeReason, *, level: str = "quick", incident_id: str = "", by: str = "drover",
        gpus: Iterable[int] = (),
    ) -> str:  # fmt: skip
        assert (level, bool(incident_id), bool(why), bool(by)) == ("standard", True, True, True)
        if self.refuses:
            raise ValueError(self.refuses)
        self.gpus.append(tuple(gpus))
        return f"request-{node}"


@dataclass
class Scene:
    """What outlives a collector."""

    store: Store
    cluster: GpuCluster = field(default_factory=GpuCluster)
    incidents: dict[str, Incident] = field(default_factory=lambda: {"inc1": fault()})
    probes: Asked = field(default_factory=Asked)
    now_ms: int = T0
    boards: dict[int, str] = field(default_factory=lambda: {gpu: uuid_of(16 + gpu) for gpu in range(8)})
    silent: int | None = None  # a GPU that gives no values
    fleet: tuple[str, ...] = ()  # (): all nodes of the cluster

    def now(self, _: str) -> NodeNow:
        at_ms = self.now_ms + 1
        values = tuple(0 if gpu == self.silent else at_ms for gpu in range(8))
        return NodeNow(at_ms, values, boards=dict(self.boards))

    @contextmanager
    def desk(self, step: Callable[[str], None] = lambda _: None) -> Iterator[ActionDispatcher]:
        actuator = KubernetesActuator(self.cluster, ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
        made = dispatcher_of(
            self.store, CONFIG, [actuator], dict.fromkeys(self.fleet or self.cluster.devices, actuator).get,
            detection=Detected(lambda: self.incidents, self.now), nodes=self.fleet or tuple(self.cluster.devices),
            now_ms=lambda: self.now_ms, look_s=0.02, step=step, validator=self.probes,
        )  # fmt: skip
        made.start()
        try:
            yield made
        finally:
            made.stop()

    def decide(self, desk: ActionDispatcher, *made: Decision) -> None:
        found = made or (decided(),)
        self.store.decisions.write(found)
        desk.take(found)

    def outage(self, uuid: str = SICK) -> NodeOutage | None:
        return self.store.outages.gpus.current().get(uuid)

    def wait(self, stage: Health, uuid: str = SICK) -> NodeOutage:
        wait_until(lambda: (found := self.outage(uuid)) is not None and found.stage is stage, f"{uuid} is {stage}")
        found = self.outage(uuid)
        assert found is not None
        return found

    def outcome(self, act: Act) -> Action:
        def ended() -> Sequence[Action]:
            return [a for a in self.store.actions.newest() if a.action is act and a.state is not ActionState.INTENDED]

        wait_until(ended, f"{act} has an outcome")
        return ended()[-1]

    def verdict(self, passed: bool | None, gpu: int | None = SLOT) -> ProbeVerdict:
        return ProbeVerdict("request-n1", "n1", gpu, passed, "", f"{passed}", T0, ProbeReason.VALIDATE, "inc1")


@pytest.fixture
def scene(kept: Store) -> Scene:
    return Scene(kept)


def test_a_gpu_goes_by_its_uuid_waits_for_its_pod_is_probed_alone_and_comes_back(scene: Scene) -> None:
    scene.cluster.claims = {"train": claim_of("train", "n1", "gpu-3"), "other": claim_of("other", "n1", "gpu-4")}
    with scene.desk() as desk:
        scene.decide(desk)
        assert scene.wait(Health.DRAINING).gpu == GpuRef(SLOT, SICK)
        done = scene.outcome(Act.ISOLATE_GPU)
        assert "device gpu-3 of n1" in done.detail
        assert "default/train" in done.detail
        assert scene.cluster.isolated == [SICK]
        assert scene.store.outages.current() == {}, "its node stays"
        del scene.cluster.claims["train"]
        found = scene.wait(Health.VALIDATING)
        assert found.gpu is not None
        assert found.gpu.order == "request-n1"
        assert scene.probes.gpus[-1] == (SLOT,)
        desk.on_verdicts([replace(scene.verdict(True), request="another")])
        desk.on_verdicts([scene.verdict(True), scene.verdict(None, None)])  # its neighbours work: no figure of the node
        back = scene.wait(Health.HEALTHY)
    assert "GPU 3 passed its validation" in back.reason
    assert scene.cluster.isolated == []


class CrashError(SystemExit):
    """Ends a thread as kill -9 ends all of them."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_at_any_step_leaves_one_isolation_and_one_return(scene: Scene) -> None:
    for number, at in enumerate(("decided", "intended", "acted", "moved", "ended")):
        sick = uuid_of(16 + number)
        scene.incidents[at] = fault(id=at, gpu=number, members=(("n1", number),))
        stopped = threading.Event()

        def step(name: str, at: str = at, stopped: threading.Event = stopped) -> None:
            if name == at or stopped.is_set():
                stopped.set()
                raise CrashError

        made = decided(f"d-{at}", of=at, gpu=GpuRef(number, sick))
        with scene.desk(step) as desk:
            scene.decide(desk, made)
            assert stopped.wait(120)
        with scene.desk():
            wait_until(lambda: sick in scene.cluster.isolated, f"{at}: it is isolated")  # noqa: B023  # called within the turn
            scene.wait(Health.VALIDATING, sick)
        acts = [a for a in scene.store.actions.newest() if a.incident_id == at and a.action is Act.ISOLATE_GPU]
        assert [a.state for a in acts] == [ActionState.DONE], at
    assert len(scene.cluster.rules) == 5


def test_the_life_goes_on_after_a_restart(scene: Scene) -> None:
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.VALIDATING)
    with scene.desk() as desk:
        desk.on_verdicts([scene.verdict(False)])
        assert scene.wait(Health.REPAIR).reason == "False"
    with scene.desk() as desk:
        action, said = desk.resume_gpu("n1", SLOT, "board reseated", "anna", force=False)
        assert (action, said) == (None, "probes were asked for; it is put back when it passes them")
        assert scene.wait(Health.VALIDATING).asked_ms
        desk.on_verdicts([scene.verdict(True)])
        scene.wait(Health.HEALTHY)
    assert scene.cluster.isolated == []


def test_after_a_boot_the_rule_follows_its_board_and_frees_the_one_that_has_its_name(scene: Scene) -> None:
    """NVIDIA's driver calls devices by their minor number: a boot may give it to another board."""
    scene.probes.refuses = "no probes here"
    names = scene.cluster.devices["n1"]
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.DRAINED)
        names["gpu-3"], names["gpu-4"] = names["gpu-4"], names["gpu-3"]
        wait_until(lambda: scene.cluster.isolated == [SICK], "the rule has followed")
        assert scene.cluster.rules[RULE]["spec"]["deviceSelector"]["device"] == "gpu-4"
        held = dict(names)
        scene.now_ms += 1
        names.clear()  # the node boots: the driver lists nothing
        kept = scene.cluster.rules[RULE]["metadata"]["resourceVersion"]
        threading.Event().wait(0.2)
        assert scene.cluster.rules[RULE]["metadata"]["resourceVersion"] == kept
        names |= held | {"gpu-4": uuid_of(99)}  # the board was replaced
        wait_until(lambda: scene.cluster.isolated == [], "the new board is given out")
        wait_until(lambda: "is another board now" in scene.wait(Health.DRAINED).reason, "it says so")
        scene.now_ms += 1
        names["gpu-7"] = SICK  # and it was put into another slot
        wait_until(lambda: scene.cluster.isolated == [SICK], "the rule has found its board")
        cause = scene.store.outages.gpus.history(SICK)[0].reason
        wait_until(lambda: scene.wait(Health.DRAINED).reason == cause, "it says again what it went out for")
    moves = [line.detail for line in scene.store.audit.read(what="move isolation")]
    assert len(moves) == 3


def test_another_board_in_its_slot_is_not_probed_for_it(scene: Scene) -> None:
    scene.boards[SLOT] = uuid_of(99)
    with scene.desk() as desk:
        scene.decide(desk)
        wait_until(lambda: (o := scene.outage()) is not None and "another board" in o.reason, "it waits for a person")
        assert scene.probes.gpus == []
        desk.resume_gpu("n1", SLOT, "it is gone", "anna", force=True)
        scene.wait(Health.HEALTHY)
    assert scene.cluster.isolated == []


def test_a_finding_that_came_while_it_was_probed_withholds_its_return(scene: Scene) -> None:
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.VALIDATING)
        newer = fault(id="inc2", opened_ms=T0 + 5, since_ms=T0 + 5)
        scene.incidents |= {"inc2": newer, "inc3": replace(newer, id="inc3", gpu=6, members=(("n1", 6),))}
        scene.now_ms = T0 + 10
        desk.on_verdicts([scene.verdict(True)])
        found = scene.wait(Health.DRAINED)
        assert scene.outcome(Act.RETURN_GPU).state is ActionState.FAILED
    assert (found.withheld, found.incidents) == (Withheld.QUIET, ("inc2",))
    assert scene.cluster.isolated == [SICK]


def test_one_without_values_is_not_probed_and_its_silent_neighbour_holds_nothing(scene: Scene) -> None:
    scene.silent = SLOT
    with scene.desk() as desk:
        scene.decide(desk)
        wait_until(lambda: (o := scene.outage()) is not None and "gives no values" in o.reason, "it is held")
        scene.silent = 5
        scene.wait(Health.VALIDATING)


def test_what_others_do_to_the_rule_stands(scene: Scene) -> None:
    scene.cluster.claims = {"train": claim_of("train", "n1", "gpu-3")}
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.DRAINING)
        scene.cluster.rules.clear()
        assert "by somebody else" in scene.wait(Health.HEALTHY).reason
        assert scene.outcome(Act.ISOLATE_GPU).state is ActionState.UNDONE


def test_a_rule_that_the_store_does_not_know_waits_for_a_person(scene: Scene) -> None:
    actuator = KubernetesActuator(scene.cluster, ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
    actuator.do(replace(action_of(Act.ISOLATE_GPU), gpu=GpuRef(SLOT, SICK)), lambda: None)
    with scene.desk():
        found = scene.wait(Health.DRAINED)
        assert "found isolated by Drover" in found.reason
        assert scene.probes.gpus == []


def test_a_second_fault_of_an_isolated_gpu_is_no_failure(scene: Scene) -> None:
    scene.cluster.claims = {"train": claim_of("train", "n1", "gpu-3")}
    scene.incidents["inc2"] = fault(id="inc2")
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.DRAINING)
        scene.decide(desk, decided("d2", of="inc2"))
        wait_until(lambda: len([a for a in scene.store.actions.newest() if a.state is not ActionState.INTENDED]) == 2)
    (second,) = [a for a in scene.store.actions.newest() if a.incident_id == "inc2"]
    assert (second.state, second.detail) == (ActionState.DONE, "isolated already for another incident, inc1")
    (rule,) = scene.cluster.rules.values()
    assert rule["spec"]["taint"]["value"] == "inc1"


def test_the_rule_of_a_node_that_left_the_fleet_is_named_until_it_is_gone(scene: Scene) -> None:
    scene.probes.refuses = "no probes here"
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.DRAINED)
    scene.fleet = ("n2",)
    stages = len(scene.store.outages.gpus.history(SICK))
    with scene.desk() as desk:
        troubles = desk.context.troubles
        wait_until(lambda: f"kubectl delete devicetaintrule {RULE} " in troubles.get(f"GPU {SICK}", ""), "it is named")
        threading.Event().wait(0.3)
        assert len(scene.store.outages.gpus.history(SICK)) == stages, "it is not found again at each look"
        assert scene.cluster.isolated == [SICK]
        scene.cluster.rules.clear()
        scene.wait(Health.HEALTHY)
        wait_until(lambda: f"GPU {SICK}" not in troubles, "and no longer")


def test_a_rule_stays_where_it_is_when_two_nodes_claim_its_uuid(scene: Scene) -> None:
    scene.probes.refuses = "no probes here"
    scene.cluster.devices = {"n0": {}, **scene.cluster.devices}
    with scene.desk() as desk:
        scene.decide(desk)
        scene.wait(Health.DRAINED)
        kept = dict(scene.cluster.rules[RULE]["spec"]["deviceSelector"])
        scene.cluster.devices["n0"]["gpu-0"] = SICK
        threading.Event().wait(0.3)
        assert scene.cluster.rules[RULE]["spec"]["deviceSelector"] == kept


REFUSED: dict[str, tuple[Callable[[GpuCluster], object], str]] = {
    "old cluster": (lambda c: setattr(c, "versions", {}), "serves no DeviceTaintRule"),
    "without rights": (lambda c: setattr(c, "refuses", frozenset({"devicetaintrules"})), "rbac.yaml"),
    "device plugin": (lambda c: c.allocatable.update({"nvidia.com/gpu": "8"}), "a device plugin hands out"),
    "not listed": (lambda c: c.devices["n1"].pop("gpu-3"), "no ResourceSlice of gpu.nvidia.com has a device"),
    "no driver": (lambda c: [d.clear() for d in c.devices.values()], "no ResourceSlice"),
    "two claim it": (lambda c: c.devices["n2"].update({"gpu-9": SICK}), "2 times: n1/gpu-3, n2/gpu-9"),
    "another node": (lambda c: c.devices["n2"].update({"gpu-9": c.devices["n1"].pop("gpu-3")}), "on n2"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_gpu_that_cannot_go_alone_fails_so_and_touches_nothing(scene: Scene, case: str) -> None:
    change, says = REFUSED[case]
    change(scene.cluster)
    with scene.desk() as desk:
        scene.decide(desk)
        done = scene.outcome(Act.ISOLATE_GPU)
    assert done.state is ActionState.FAILED
    assert says in done.detail
    assert done.gpu == GpuRef(SLOT, SICK, refused=True)
    assert scene.cluster.rules == {}


def test_a_driver_that_starts_again_is_waited_for(scene: Scene) -> None:
    held = dict(scene.cluster.devices["n1"])
    scene.cluster.devices["n1"].clear()
    with scene.desk() as desk:
        scene.decide(desk)
        wait_until(lambda: any("not yet" in a.detail for a in scene.store.actions.newest()), "it waits")
        scene.cluster.devices["n1"] |= held
        assert scene.outcome(Act.ISOLATE_GPU).state is ActionState.DONE


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1alpha3"])
def test_the_rule_is_what_each_version_of_the_api_takes(version: str) -> None:
    """By the models of the official client, which refuse unknown fields' types and missing ones."""
    from kubernetes import client

    cluster = GpuCluster()
    cluster.versions["devicetaintrules"] = (version,)
    actuator = KubernetesActuator(cluster, ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
    actuator.do(replace(action_of(Act.ISOLATE_GPU), gpu=GpuRef(SLOT, SICK)), lambda: None)
    (rule,) = cluster.rules.values()
    assert rule["apiVersion"] == f"resource.k8s.io/{version}"
    spec = getattr(client, f"V{version[1:]}DeviceTaintRule").from_dict(rule).spec
    assert (spec.device_selector.driver, spec.device_selector.pool) == ("gpu.nvidia.com", "n1")
    assert spec.device_selector.device == "gpu-3"
    assert (spec.taint.key, spec.taint.value, spec.taint.effect) == ("drover.dev/isolated", "inc1", "NoSchedule")
    assert rule["spec"] == {
        "deviceSelector": {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-3"},
        "taint": {"key": "drover.dev/isolated", "value": "inc1", "effect": "NoSchedule"},
    }  # fmt: skip


def test_what_is_isolated_already_is_so_only_where_the_rule_is_about_its_board() -> None:
    """An isolation that a stop left and a boot followed, or a board that was replaced and is back."""
    cluster = GpuCluster()
    actuator = KubernetesActuator(cluster, ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
    order = replace(action_of(Act.ISOLATE_GPU), gpu=GpuRef(SLOT, SICK))
    actuator.do(order, lambda: None)
    devices = cluster.devices["n1"]
    devices["gpu-2"], devices["gpu-3"] = devices["gpu-3"], devices["gpu-2"]
    assert cluster.isolated != [SICK]
    said = actuator.do(order, lambda: None).detail
    assert cluster.isolated == [SICK]
    assert said.startswith("isolated already") and "it is device gpu-2 now" in said


def test_mig_devices_of_the_gpu_are_named(scene: Scene) -> None:
    actuator = KubernetesActuator(scene.cluster, ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
    split = {"name": "gpu-3-mig-9-0-4", "attributes": {"type": {"string": "mig"}, "parentUUID": {"string": SICK}}}
    plain = scene.cluster.request

    def request(method: str, path: str, *more: object) -> tuple[int, dict[str, object]]:
        status, body = plain(method, path, *more)  # type: ignore[arg-type]  # as they came
        if path == f"{GROUP}/v1/resourceslices":
            devices = body["items"][0]["spec"]["devices"]
            body["items"][0]["spec"]["devices"] = [d for d in devices if d["name"] != "gpu-3"] + [split]
        return status, body

    scene.cluster.request = request  # type: ignore[method-assign,assignment]  # another server
    with pytest.raises(NotAloneError, match="split into MIG devices"):
        actuator.do(replace(action_of(Act.ISOLATE_GPU), gpu=GpuRef(SLOT, SICK)), lambda: None)


def test_probes_of_an_isolated_gpu_need_no_drained_node() -> None:
    order = ProbeOrder("p1", "n1", (SLOT,), "standard", (), ProbeReason.VALIDATE, "asked", T0)
    actuator = KubernetesActuator(GpuCluster(), ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
    one = NodeOutage("n1", Health.DRAINED, T0, "inc1", "it", gpu=GpuRef(SLOT, SICK))
    boards = {SLOT: SICK}
    subject = GpuProtection(
        lambda _, gpu: one if gpu == SLOT else None, lambda _, gpu: boards.get(gpu, ""), lambda _: actuator,
        lambda _: True,
    )  # fmt: skip
    assert subject.of(order, busy=True).word == "drained"
    assert "not drained" in subject.of(replace(order, gpus=(4,)), busy=True).never
    assert "not drained" in subject.of(replace(order, gpus=()), busy=True).never
    given = replace(order, protection="drained")
    assert subject.stands(given)
    boards[SLOT] = uuid_of(99)  # the node has booted, and another board, with a job, is in this slot
    assert not subject.stands(given)
    assert "not drained" in subject.of(order, busy=True).never
