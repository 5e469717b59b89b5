"""A person takes one GPU out of service and puts it back: by slot or UUID, within the guard, next to what Drover does.

Real engine, dispatcher and API; Kubernetes in memory, and the store too but in the first test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from drover_collector.actions import replaced_boards
from drover_collector.actions.base import Actuator
from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.api import actions as api_actions
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.engine.node_state import NodeNow
from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.decider import hold_gpu
from drover_collector.policy.guard import GuardLimits
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    GpuRef,
    Health,
    NodeOutage,
    ProbeReason,
    RecommendedAction,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_proto import fleet_pb2 as pb
from testbed.deciding import OPEN, policy
from testbed.desks import T0, Probes, dispatcher_of
from testbed.gpu_devices import GpuCluster, claim_of, uuid_of
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import wait_until

NODES = ("n1", "n2")
INDEX = FleetIndex(FleetSpec(tuple(NodeSpec(name, "r1", "l1", "p1", "sku", 8) for name in NODES)))
NEW = uuid_of(99)


def uuid(slot: int, node: int = 1) -> str:
    return uuid_of(16 * node + slot)


@dataclass
class Asked(Probes):
    def ask(self, node: str, why: ProbeReason, *, gpus: Iterable[int] = (), **_: object) -> str:
        assert why is ProbeReason.VALIDATE
        self.gpus.append(tuple(gpus))
        return f"request-{node}-{len(self.gpus)}"


@dataclass
class Site:
    """What outlives a collector."""

    store: Store
    cluster: GpuCluster = field(default_factory=GpuCluster)
    probes: Asked = field(default_factory=Asked)
    guard: GuardLimits = OPEN
    now_ms: int = T0
    boards: dict[str, dict[int, str]] = field(
        default_factory=lambda: {f"n{n}": {slot: uuid(slot, n) for slot in range(8)} for n in (1, 2)}
    )
    silent: bool = False
    actuator: Actuator | None = None
    mode: str = "enforce"
    pipeline: Pipeline = field(init=False)

    @contextmanager
    def collector(self) -> Iterator[Pipeline]:
        outbox = Outbox(self.store, [], "http://console", now_ms=lambda: self.now_ms)
        options = PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms, ceiling="enforce")
        made = self.pipeline = Pipeline(INDEX, self.store, policy("enforce", self.guard), outbox, options)
        actuator = self.actuator or KubernetesActuator(self.cluster, ("nvidia.com/",))  # type: ignore[arg-type]  # no evictions here
        review = ActionReview(made)
        review.node_now = self.now  # type: ignore[method-assign]  # telemetry of a node that works
        dispatcher = dispatcher_of(
            self.store, ActConfig(mode=self.mode), [actuator], lambda _: actuator, nodes=NODES, detection=review,
            now_ms=lambda: self.now_ms, look_s=0.02, validator=self.probes,
        )  # fmt: skip
        made.act_by(dispatcher)
        made.leading = True
        self.report()
        dispatcher.start()
        wait_until(lambda: self.mode == "observe" or made.engine.decider.away is not None, "the scheduler has answered")
        try:
            yield made
        finally:
            dispatcher.stop()

    def report(self) -> None:
        """The agents connect again and say which boards they have."""
        for node, boards in self.boards.items():
            facts = {f"gpu{slot}.uuid": name for slot, name in boards.items()}
            self.pipeline.of_engine(lambda engine: engine.on_inventory(node, facts, self.now_ms))  # noqa: B023  # called at once

    def now(self, node: str) -> NodeNow:
        at_ms = 0 if self.silent else self.now_ms + 1
        found = self.pipeline.engine.now_of(node)
        assert found is not None
        return replace(found, values_ms=at_ms, gpus_ms=(at_ms,) * 8)

    def ask(
        self, gpu: int | str | None = 3, act: str = "drain", by: str = "ann", node: str = "n1", **more: object
    ) -> pb.ActReply:
        return api_actions.act_on_node(self.facts, self.request(gpu, act, node, **more), by)

    def preview(self, gpu: int | str | None = 3, act: str = "drain", node: str = "n1") -> pb.ActPreview:
        return api_actions.preview_act(self.facts, self.request(gpu, act, node), True)

    @staticmethod
    def request(gpu: int | str | None, act: str, node: str, **more: object) -> pb.ActRequest:
        named = {"gpu": gpu} if isinstance(gpu, int) else {"gpu_uuid": gpu} if gpu else {}
        return pb.ActRequest(**{"node": node, "act": act, "why": "it rattles", **named, **more})  # type: ignore[arg-type]  # fields by name

    @property
    def facts(self) -> ApiSnapshot:
        return ApiSnapshot(self.pipeline, IngestStats(), CollectorConfig())

    def outage(self, of: str) -> NodeOutage | None:
        return self.store.outages.gpus.current().get(of)

    def wait(self, stage: Health, of: str) -> NodeOutage:
        wait_until(lambda: (o := self.outage(of)) is not None and o.stage is stage, f"{of} is {stage}")
        found = self.outage(of)
        assert found is not None
        return found

    def in_engine(self, of: str, stage: Health) -> None:
        known = self.pipeline.engine.decider.gpus
        wait_until(lambda: (o := known.outages.get(of)) is not None and o.stage is stage, f"the guard knows {of}")

    def acts(self, act: Act) -> list[Action]:
        return [a for a in self.store.actions.newest() if a.action is act]

    def decide(self, slot: int = 3) -> None:
        """A rule takes it out, for incident inc1."""
        gpu = GpuRef(slot, uuid(slot))
        made = Decision(
            "d1", "inc1", self.now_ms, "n1", RecommendedAction.DRAIN, "enforce", "act", "r", "sick", gpu=gpu
        )
        self.store.decisions.write([made])
        assert self.pipeline.dispatcher is not None
        self.pipeline.dispatcher.take([made])


@pytest.fixture
def site(kept: Store, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    return Site(kept)


def test_it_goes_by_slot_or_uuid_and_only_a_person_brings_it_back(store: Store) -> None:
    """With a real store."""
    site = Site(store)
    site.cluster.claims = {"train": claim_of("train", "n1", "gpu-3")}
    with site.collector():
        look = site.preview()
        assert (look.hindrance, look.guard, look.may_act) == ("", "", True)
        assert "No new pod gets GPU 3 of n1" in look.grounds[0]
        assert site.cluster.rules == {}, "a look changes nothing"
        reply = site.ask()
        assert (reply.state, "default/train" in reply.detail) == ("done", True)
        assert site.ask(uuid(5).upper(), by="bob").state == "done"
        assert sorted(site.cluster.isolated) == [uuid(3), uuid(5)]
        del site.cluster.claims["train"]
        out = site.wait(Health.DRAINED, uuid(3))
        assert (out.by, out.incident_id, out.reason) == ("ann", "", "it rattles")
        threading.Event().wait(0.15)
        assert site.probes.gpus == [], "a person took it out: Drover does not bring it back"
        lines = {(line.by, line.subject) for line in site.store.audit.read(subject="n1")}
        assert lines == {("ann", "n1 GPU 3"), ("bob", "n1 GPU 5")}
        back = site.preview(act="resume")
        assert (back.stage, back.validates) == ("drained", "standard")
        assert any(text.startswith("Out since") and "by ann: it rattles" in text for text in back.grounds)
        assert "probes were asked for" in site.ask(act="resume").detail
        assert site.probes.gpus == [(3,)]
        site.wait(Health.VALIDATING, uuid(3))
        assert site.ask(uuid(5), act="resume", force=True).state == "done"
        assert site.outage(uuid(5)) is not None
        assert site.cluster.isolated == [uuid(3)]


REFUSED: dict[str, tuple[int | str, dict[str, Any], str]] = {
    "no such slot": (8, {}, "n1 has no GPU 8"),
    "no such board": (uuid(3, 2), {}, f"n1 reports no GPU {uuid(3, 2)}; it has 0: {uuid(0)}"),
    "swapped since": (3, {"gpu_uuid": uuid(4)}, f"GPU 3 of n1 is {uuid(3)}, not {uuid(4)}: look again"),
    "for more than it can": (3, {"act": "isolate"}, "drover drain NODE --gpu takes out one GPU"),
    "without a reason": (3, {"why": " "}, "say why"),
}


def test_what_is_not_clear_is_refused_and_in_the_audit(site: Site) -> None:
    with site.collector():
        for case, (gpu, more, says) in REFUSED.items():
            site.now_ms += 1
            with pytest.raises(RefusalError) as refused:
                site.ask(gpu, **more)
            assert says in str(refused.value), case
    assert site.cluster.rules == {}
    lines = site.store.audit.read()
    assert [(line.by, line.what.endswith("(refused)")) for line in lines] == [("ann", True)] * len(REFUSED)


def test_a_scheduler_that_cannot_says_why_and_offers_the_node(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_actions, "_jobs_on", lambda _facts, _n, slot: [pb.JobThere(job=f"of GPU {slot}")])
    offer = "drover drain n1 --why TEXT takes the whole node"
    site.cluster.allocatable["nvidia.com/gpu"] = "8"
    with site.collector():
        look = site.preview()
        assert "a device plugin hands out the GPUs of n1" in look.hindrance
        assert look.hindrance.endswith(offer)
        assert [job.job for job in look.jobs] == ["of GPU 3"], "who works there is said all the same"
        reply = site.ask()
        assert (reply.state, reply.detail.endswith(offer)) == ("failed", True)
    site.actuator = SlurmActuator(SlurmStandIn(*NODES), 10_000)
    with site.collector():
        assert site.preview().hindrance == f"its scheduler cannot take one GPU of a node out of service; {offer}"
        with pytest.raises(RefusalError, match="cannot take one GPU"):
            site.ask()
    site.actuator, site.mode = None, "observe"
    with site.collector():
        assert "only observes" in site.preview().hindrance
        with pytest.raises(RefusalError, match="only observes"):
            site.ask()
    assert site.cluster.rules == {}


def test_three_at_once_while_the_scheduler_is_away_pass_the_guard_one_by_one(site: Site) -> None:
    """One of two nodes may be out: as shares, eight GPUs. Half of a node's GPUs may go without force."""
    site.guard = replace(OPEN, fleet_nodes=1)
    with site.collector() as pipeline, ThreadPoolExecutor(3) as pool:
        site.cluster.away = True
        api_wait, api_actions.WAIT_S = api_actions.WAIT_S, 0.0
        try:
            assert [r.state for r in pool.map(site.ask, (0, 1, 2))] == ["intended"] * 3
            assert len({a.id for a in site.acts(Act.ISOLATE_GPU)}) == 3
            assert len(pipeline.engine.decider.isolating()) == 3
            assert site.ask(1).action_id in {a.id for a in site.acts(Act.ISOLATE_GPU)}, "the one that waits already"
            assert site.ask(3).state == "intended"
            with pytest.raises(RefusalError, match="4 of its 8 GPUs are isolated already"):
                site.ask(4)
            with pytest.raises(RefusalError, match=r"1.5 of 2 nodes of the fleet would be out"):
                site.ask(None, node="n2")
            for slot in range(4):
                assert site.ask(slot, node="n2").state == "intended"
            held = pipeline.of_engine(lambda engine: hold_gpu(engine.decider, "n2", uuid(5, 2), engine.census(), {}))
            assert held.startswith("1.125 of 2 nodes of the fleet would be out")
        finally:
            api_actions.WAIT_S = api_wait
        site.cluster.away = False
        wait_until(lambda: len(site.cluster.isolated) == 8, "all eight are isolated, and none waits for another")
        for slot in range(4):
            site.wait(Health.DRAINED, uuid(slot))
            site.wait(Health.DRAINED, uuid(slot, 2))
        assert site.ask(4, force=True).state == "done"
    assert {a.state for a in site.acts(Act.ISOLATE_GPU)} == {ActionState.DONE}


def test_twice_by_hand_and_after_a_rule_it_is_one_isolation_that_a_person_ends(site: Site) -> None:
    with site.collector():
        site.decide()
        site.wait(Health.VALIDATING, uuid(3))
        assert site.ask().detail == "isolated already for another incident, inc1"
        kept = site.wait(Health.DRAINED, uuid(3))
        assert (kept.by, kept.incident_id, kept.gpu) == ("ann", "inc1", GpuRef(3, uuid(3)))
        assert kept.reason.startswith("it rattles; out before that: ")
        assert site.ask(by="bob").state == "done"
        assert site.outage(uuid(3)) == kept
        assert len(site.cluster.rules) == 1
    with site.collector():
        threading.Event().wait(0.15)
        assert site.outage(uuid(3)) == kept, "over a restart too"
        assert site.ask(act="resume", force=True).state == "done"
    assert site.cluster.rules == {}


def test_a_rule_that_wants_what_a_person_isolated_adds_nothing(site: Site) -> None:
    with site.collector():
        site.ask()
        site.wait(Health.DRAINED, uuid(3))
        site.decide()
        wait_until(lambda: "isolated already by hand" in [act.detail for act in site.acts(Act.ISOLATE_GPU)])
        assert [act.state for act in site.acts(Act.ISOLATE_GPU)] == [ActionState.DONE] * 2
        found = site.outage(uuid(3))
        assert (found is not None and found.by, len(site.cluster.rules)) == ("ann", 1)


def test_the_node_goes_and_comes_back_and_its_isolated_gpu_stays(site: Site) -> None:
    with site.collector() as pipeline:
        site.ask()
        site.in_engine(uuid(3), Health.DRAINED)
        census = pipeline.of_engine(lambda engine: engine.census())
        assert census.isolated({"n1"}, set()) == 1 / 8
        held = site.cluster
        assert site.preview(None).guard == ""
        assert held.isolated == [uuid(3)]
        # The node is out as a whole: one more of its GPUs takes nothing more away, and stays out when it is back.
        pipeline.of_engine(
            lambda engine: engine.on_duties({"n1": NodeOutage("n1", Health.DRAINED, T0, "", "fan", "ann")}, T0)
        )
        assert site.preview(4).guard == ""
        assert site.ask(4).state == "done"
        pipeline.of_engine(
            lambda engine: engine.on_duties({"n1": NodeOutage("n1", Health.HEALTHY, T0 + 1, "", "fan", "ann")}, T0 + 1)
        )
        site.in_engine(uuid(4), Health.DRAINED)
        assert sorted(held.isolated) == [uuid(3), uuid(4)]
        assert "GPUs 3, 4 isolated" in pipeline.engine.health_of("n1")[1]


def test_who_resumes_while_an_isolation_waits_is_not_overruled_by_it(site: Site) -> None:
    with site.collector():
        site.decide()
        site.wait(Health.VALIDATING, uuid(3))
        site.cluster.away = True
        api_wait, api_actions.WAIT_S = api_actions.WAIT_S, 0.0
        try:
            site.ask()
            site.now_ms += 1
            site.ask(act="resume", force=True, by="bob")
        finally:
            api_actions.WAIT_S = api_wait
        site.cluster.away = False
        wait_until(lambda: not site.store.actions.intended(), "all is done")
        wait_until(lambda: site.cluster.rules == {}, "it is back")
        threading.Event().wait(0.1)
        assert site.cluster.rules == {}


# ---- a replaced board


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_boards, "SETTLED_S", 0.0)


def replaced(site: Site, slot: int = 3, new: str = NEW) -> None:
    site.boards["n1"][slot] = new
    site.cluster.devices["n1"][f"gpu-{slot}"] = new
    site.report()


def test_a_replaced_board_ends_its_outage_and_is_isolated_again_if_it_comes_back(site: Site, settled: None) -> None:
    with site.collector():
        site.ask()
        site.wait(Health.DRAINED, uuid(3))
        replaced(site)
        over = site.wait(Health.HEALTHY, uuid(3))
        assert f"another board is GPU 3 of n1 now, {NEW}" in over.reason
        assert (over.by, over.gpu and over.gpu.replaced_by) == ("drover", NEW)
        assert site.cluster.isolated == [], "the new board is given out"
        said = [line for line in site.store.audit.read(subject="n1") if line.what == "board replaced"]
        assert [line.subject for line in said] == ["n1 GPU 3"]
        site.in_engine(uuid(3), Health.HEALTHY)
        assert site.pipeline.engine.health_of("n1", 3)[0] is not Health.DRAINED
    with site.collector():  # what came in between is known from the store
        threading.Event().wait(0.15)
        assert site.wait(Health.HEALTHY, uuid(3)) == over
        replaced(site, 6, uuid(3))  # the old board, in another slot
        back = site.wait(Health.DRAINED, uuid(3))
        assert (back.gpu and back.gpu.slot, "it rattles" in back.reason) == (6, True)
        wait_until(lambda: site.cluster.isolated == [uuid(3)], "and it is isolated")
        threading.Event().wait(0.15)
        assert site.probes.gpus == [], "a person decides on it"


def test_its_rule_is_deleted_when_a_person_says_so(site: Site, settled: None) -> None:
    with site.collector():
        site.ask()
        replaced(site)
        site.wait(Health.HEALTHY, uuid(3))
        with pytest.raises(RefusalError, match="has not taken out GPU 3"):
            site.ask(act="resume", force=True)
        assert "A resume deletes its rule" in site.preview(uuid(3), act="resume").grounds[0]
        assert site.ask(uuid(3).upper(), act="resume").state == "done"
        assert site.cluster.rules == {}
        replaced(site, 3, uuid(3))
        threading.Event().wait(0.15)
        assert site.cluster.isolated == [], "it was given back for good"


def vanished(site: Site) -> None:
    """Another board is in its slot by the scheduler; the node's agent lists fewer GPUs, the others moved up."""
    found = [uuid(slot) for slot in range(8) if slot != 3]
    site.boards["n1"] = dict(enumerate(found))
    site.cluster.devices["n1"] = {f"gpu-{slot}": name for slot, name in enumerate(found)}
    site.report()


def agent_says_nothing(site: Site) -> None:
    site.cluster.devices["n1"]["gpu-3"] = NEW
    site.boards["n1"] = {}
    site.report()


def silent(site: Site) -> None:
    replaced(site)  # and no values


def driver_away(site: Site) -> None:
    replaced(site)
    site.cluster.devices["n1"].clear()


def slices_are_not_all_there(site: Site) -> None:
    site.cluster.slices_missing = True
    replaced(site)


def on_another_node(site: Site) -> None:
    site.cluster.devices["n2"]["gpu-9"] = uuid(3)
    replaced(site)


DOUBTFUL: dict[str, Callable[[Site], None]] = {
    each.__name__: each
    for each in (vanished, agent_says_nothing, silent, driver_away, slices_are_not_all_there, on_another_node)
}


def test_a_board_that_may_only_have_vanished_stays_isolated(site: Site, settled: None) -> None:
    with site.collector():
        site.ask()
        kept = site.wait(Health.DRAINED, uuid(3))
        for name, case in DOUBTFUL.items():
            site.silent = True  # until all of the case is there
            case(site)
            site.silent = case is silent
            threading.Event().wait(0.15)  # looks at it come every 0.06 s
            assert site.wait(Health.DRAINED, uuid(3)).by == "ann", name
            site.silent = True
            site.boards["n1"], site.cluster.slices_missing = {slot: uuid(slot) for slot in range(8)}, False
            site.cluster.devices["n2"].pop("gpu-9", None)
            site.cluster.devices["n1"] = {f"gpu-{slot}": board for slot, board in site.boards["n1"].items()}
            site.report()
            wait_until(lambda: site.cluster.isolated == [uuid(3)], f"after {name} it is back, and isolated as before")
        wait_until(
            lambda: site.wait(Health.DRAINED, uuid(3)).reason == kept.reason, "its reason is stored after its rule"
        )
        site.silent = False
        replaced(site)
        site.wait(Health.HEALTHY, uuid(3))


def test_a_swap_must_hold_for_a_while(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_boards, "SETTLED_S", 0.3)
    with site.collector():
        site.ask()
        site.wait(Health.DRAINED, uuid(3))
        replaced(site)
        threading.Event().wait(0.15)
        replaced(site, 3, uuid(3))  # it was only tried
        threading.Event().wait(0.15)
        replaced(site)
        threading.Event().wait(0.15)
        assert site.wait(Health.DRAINED, uuid(3))
        site.wait(Health.HEALTHY, uuid(3))


def test_a_pod_that_gets_it_all_the_same_is_not_probed_over(site: Site) -> None:
    """One that tolerates every taint, or that came while the rule stood at another board's name."""
    with site.collector():
        site.ask()
        site.wait(Health.DRAINED, uuid(3))
        site.cluster.claims = {"train": claim_of("train", "n1", "gpu-3")}
        held = site.wait(Health.DRAINING, uuid(3))
        assert (held.by, held.reason) == ("ann", "it rattles")
        assert "a pod still holds it" in site.ask(act="resume").detail
        assert site.probes.gpus == []
        site.cluster.claims.clear()
        site.wait(Health.DRAINED, uuid(3))
        site.ask(act="resume", by="bob")
        site.wait(Health.VALIDATING, uuid(3))
        site.cluster.claims = {"train": claim_of("train", "n1", "gpu-3")}
        again = site.wait(Health.DRAINING, uuid(3))
        assert (again.gpu, again.asked_ms) == (GpuRef(3, uuid(3)), 0), "those probes say nothing of it"


def test_a_replaced_board_that_is_back_is_not_forgotten_without_probes(site: Site, settled: None) -> None:
    with site.collector():
        site.ask()
        replaced(site)
        site.wait(Health.HEALTHY, uuid(3))
        site.boards["n1"][6] = uuid(3)  # its driver lists it soon
        site.report()
        says = f"{uuid(3)} is back, as GPU 6 of n1"
        assert says in site.preview(uuid(3), act="resume").hindrance
        with pytest.raises(RefusalError, match=says):
            site.ask(uuid(3), act="resume")
        assert len(site.cluster.rules) == 1
        replaced(site, 6, uuid(3))
        site.wait(Health.DRAINED, uuid(3))
        assert site.cluster.isolated == [uuid(3)]
        assert "probes were asked for" in site.ask(uuid(3), act="resume").detail


def test_a_forced_resume_forgets_a_replaced_board_that_is_back(site: Site, settled: None) -> None:
    with site.collector():
        site.ask()
        replaced(site)
        site.wait(Health.HEALTHY, uuid(3))
        site.boards["n1"][6] = uuid(3)
        site.report()
        assert site.ask(uuid(3), act="resume", force=True).state == "done"
    assert site.cluster.rules == {}
