"""No probe on a node in service under a scheduler, but in a job of its own: what is given, waited for and refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from drover_collector.actions.base import ActError, Actuator, AwayError, LaterError, NodeState, Service
from drover_collector.probes.context import NodeAccess, ProbeRuntime
from drover_collector.probes.scheduling.protection import Given, Protection
from drover_collector.probes.scheduling.slurm_holds import HoldJob
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import HoldConfig, ProbesConfig, validate_probes
from drover_collector.store import Store
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
    to_json,
)
from drover_core.settings import SettingsError
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, hello, index_of
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.waiting import until

NOW = 1_800_000_000_000
CONFIRM, IDLE, PERSON, VALIDATE = (
    ProbeReason.CONFIRM, ProbeReason.IDLE, ProbeReason.PERSON, ProbeReason.VALIDATE,
)  # fmt: skip


class Scheduler:
    """An actuator that only looks."""

    def __init__(self, service: Service | ActError) -> None:
        self.service, self.asked = service, 0

    def observe(self, node: str) -> NodeState:
        self.asked += 1
        if isinstance(self.service, ActError):
            raise self.service
        return NodeState(node, self.service)


class Holds:
    """Slurm's queue of jobs that hold nodes."""

    def __init__(self) -> None:
        self.jobs: dict[str, HoldJob] = {}
        self.submitted: list[tuple[str, str, int]] = []
        self.ended: list[str] = []
        self.trouble: ActError | None = None

    def look(self) -> dict[str, HoldJob]:
        if self.trouble:
            raise self.trouble
        return dict(self.jobs)

    def submit(self, order: str, node: str, minutes: int) -> None:
        if self.trouble:
            raise self.trouble
        self.submitted.append((order, node, minutes))
        self.jobs[order] = HoldJob(f"{800 + len(self.submitted)}", order, "PENDING", "Resources")

    def end(self, job: str) -> None:
        self.ended.append(job)
        self.jobs = {order: its for order, its in self.jobs.items() if its.id != job}

    def begin(self, order: str) -> None:
        self.jobs[order] = replace(self.jobs[order], state="RUNNING")


def order(why: ProbeReason = CONFIRM, node: str = "n0", id_: str = "p1", group: str = "") -> ProbeOrder:
    return ProbeOrder(id_, node, (), "quick", (), why, "asked", NOW, group=group)


def protection(service: Service | ActError | None, holds: Holds | None = None, observes: bool = False) -> Protection:
    """`service` None: no scheduler. `observes`: it is in the settings, and Drover may not ask it."""
    scheduler = None if service is None or observes else cast(Actuator, Scheduler(service))
    return Protection(lambda _: scheduler, lambda _: service is not None, holds, now_ms=lambda: NOW)


IN, DRAINED, DRAINING, DOWN = Service.IN, Service.DRAINED, Service.DRAINING, Service.DOWN
WITHOUT_JOBS = {
    "drained: any order": (DRAINED, IDLE, False, "drained", ""),
    "in service: none of Drover's": (IN, CONFIRM, False, "", "not sent: n0 is in service: drain it"),
    "in service, asked for by a person": (IN, PERSON, False, "hand", ""),
    "in service, a job runs, a person asks": (IN, PERSON, True, "hand", ""),
    "in service though it was to be validated": (IN, VALIDATE, False, "", "not sent: it is not drained any more"),
    "down: it may come back at any moment": (DOWN, IDLE, False, "", "not sent: n0 is in service"),
    "no scheduler": (None, IDLE, False, "none", ""),
    "no scheduler, validation": (None, VALIDATE, False, "none", ""),
    "Slurm does not know it, a person asks": (ActError("Slurm knows no node n0"), PERSON, False, "hand", ""),
    "Slurm is away, a person asks": (AwayError("Slurm does not answer: x"), PERSON, False, "hand", ""),
    "Slurm does not know it": (ActError("Slurm knows no node n0"), IDLE, False, "", "not sent: Slurm knows no node n0"),
}


@pytest.mark.parametrize("case", list(WITHOUT_JOBS))
def test_without_own_jobs_only_a_drained_node_is_probed(case: str) -> None:
    service, why, busy, word, never = WITHOUT_JOBS[case]
    given = protection(service).of(order(why), busy=busy)
    assert given.word == word
    assert given.never.startswith(never)
    assert bool(given.never) == bool(never)


def test_in_observe_mode_nobody_is_asked_and_nothing_in_service_is_probed() -> None:
    given = protection(IN, observes=True).of(order(), busy=False)
    assert given.never.startswith("not sent: n0 is in service: ")


def test_a_node_that_drains_or_a_scheduler_that_is_away_is_waited_for() -> None:
    assert protection(DRAINING).of(order(), busy=False) == Given(wait="jobs still run there, it drains")
    assert protection(DRAINING).of(order(PERSON), busy=True) == Given("hand")
    given = protection(AwayError("Slurm does not answer: x")).of(order(), busy=False)
    assert given == Given(wait="Slurm does not answer: x", away=True)


def test_a_job_holds_the_node_before_anything_is_sent() -> None:
    holds = Holds()
    made = protection(IN, holds)
    made.look(["p1"])
    assert made.of(order(), busy=False) == Given(wait="its job is submitted")
    assert holds.submitted == [("p1", "n0", 15)]
    made.look(["p1"])
    assert made.of(order(), busy=False) == Given(wait="job 801 is pending")
    holds.begin("p1")
    made.look(["p1"])
    assert made.of(order(), busy=False) == Given("job", "801")
    assert len(holds.submitted) == 1
    made.look([])
    assert holds.ended == ["801"], "its order is over"


def test_the_queue_is_looked_at_while_something_waits_or_is_held() -> None:
    looks = []

    class Seen(Holds):
        def look(self) -> dict[str, HoldJob]:
            looks.append(1)
            return super().look()

    made = protection(IN, holds := Seen())
    made.look([], unsent=False)
    assert len(looks) == 1, "once after a start: a stop may have left a job"
    made.look(["drained"], unsent=False)
    assert len(looks) == 1
    made.look(["p1", "drained"])
    made.of(order(), busy=False)
    made.look(["p1", "drained"])
    made.look(["p1", "drained"], unsent=False)
    made.look(["drained"], unsent=False)
    assert (len(looks), holds.ended) == (5, ["801"])
    made.look(["drained"], unsent=False)  # it is gone
    made.look(["drained"], unsent=False)
    assert len(looks) == 6


def test_a_stop_forgets_no_job_and_makes_no_second_one() -> None:
    holds = Holds()
    first = protection(IN, holds)
    first.look(["p1", "p2"])
    first.of(order(), busy=False)
    first.of(order(id_="p2"), busy=False)
    again = protection(IN, holds)
    again.look(["p1"])
    assert holds.ended == ["802"]
    assert again.of(order(), busy=False).wait == "job 801 is pending"
    assert len(holds.submitted) == 2


def test_a_job_that_does_not_begin_or_ends_before_is_given_up() -> None:
    holds, now = Holds(), [NOW]
    made = Protection(
        lambda _: None, lambda _: True, holds, config=HoldConfig(partition="probes", wait_s=60), now_ms=lambda: now[0]
    )
    made.look(["p1"])
    made.of(order(), busy=False)
    now[0] += 60_000
    made.look(["p1"])
    assert made.of(order(), busy=False).never == "given up: job 801 had not begun within 60 s (Resources)"
    holds.jobs.clear()
    made.look(["p1"])
    assert made.of(order(), busy=False).never == "given up: its scheduler's job was ended before the probe began"


def test_where_a_job_runs_already_a_person_may_and_drover_waits() -> None:
    holds = Holds()
    made = protection(IN, holds)
    made.look(["p1", "p2"])
    assert made.of(order(PERSON), busy=True) == Given("hand")
    assert holds.submitted == []
    assert made.of(order(PERSON), busy=False).wait == "its job is submitted"
    assert made.of(order(PERSON, id_="p2", group="g"), busy=True).wait == "its job is submitted"


def test_while_the_queue_cannot_be_seen_no_second_job_is_submitted() -> None:
    holds = Holds()
    made = protection(IN, holds)
    made.look(["p1"])
    holds.trouble = AwayError("Slurm does not answer: x")
    with pytest.raises(AwayError):
        made.look(["p1"])
    holds.trouble = None
    assert made.of(order(), busy=False).away
    assert holds.submitted == []


def test_a_queue_that_refuses_ends_the_order_and_one_that_is_away_is_asked_again() -> None:
    holds = Holds()
    made = protection(IN, holds)
    made.look(["p1", "p2"])
    holds.trouble = ActError("Slurm: invalid partition")
    assert made.of(order(id_="p2"), busy=False).never.endswith("Slurm: invalid partition")
    holds.trouble = AwayError("Slurm does not answer: x")
    assert made.of(order(), busy=False).away
    holds.trouble = None
    assert made.of(order(), busy=False).wait == "its job is submitted"


def test_a_job_that_is_refused_keeps_no_other_order_waiting_is_tried_seldom_and_given_up() -> None:
    tries: list[str] = []
    now = [NOW]

    class Refusing(Holds):
        def submit(self, order: str, node: str, minutes: int) -> None:
            tries.append(order)
            raise LaterError("Slurm: Requested nodes not in this partition")

    made = Protection(
        lambda _: None, lambda _: True, Refusing(), config=HoldConfig(partition="probes", wait_s=60),
        now_ms=lambda: now[0],
    )  # fmt: skip
    made.look(["p1"])
    given = made.of(order(), busy=False)
    assert given == Given(wait="its job cannot be submitted: Slurm: Requested nodes not in this partition")
    now[0] += 29_000
    assert made.of(order(), busy=False) == given
    assert len(tries) == 1
    now[0] += 31_000
    assert made.of(order(), busy=False) == Given(never=given.wait)


def test_a_job_in_a_state_of_its_own_is_given_up_and_ended() -> None:
    holds, now = Holds(), [NOW]
    made = Protection(
        lambda _: None, lambda _: True, holds, config=HoldConfig(partition="probes", wait_s=60), now_ms=lambda: now[0]
    )
    made.look(["p1"])
    made.of(order(), busy=False)
    holds.jobs["p1"] = replace(holds.jobs["p1"], state="SUSPENDED")
    now[0] += 60_000
    made.look(["p1"])
    assert made.of(order(), busy=False).never.startswith("given up: job 801 had not begun")
    made.look([])
    assert holds.ended == ["801"]
    holds.jobs["p1"] = HoldJob("802", "p1", "COMPLETING")
    made.look([])
    assert holds.ended == ["801"], "it ends by itself"


def test_what_was_drained_when_it_was_sent_is_sent_again_only_if_it_still_is() -> None:
    sent = replace(order(VALIDATE), protection="drained")
    assert protection(DRAINED).stands(sent)
    assert not protection(IN).stands(sent)
    assert not protection(AwayError("Slurm does not answer: x")).stands(sent)
    assert protection(None).stands(sent)
    assert protection(IN).stands(replace(sent, protection="job 801")), "the node knows of the job"


def test_a_validation_of_before_observe_mode_is_not_sent_where_nobody_asks_the_scheduler() -> None:
    given = protection(IN, observes=True).of(order(VALIDATE), busy=False)
    assert given.never == "not sent: in observe mode nobody asks if it is drained still"


def test_nodes_that_may_never_be_probed_in_service_are_reported() -> None:
    assert protection(IN).refused("n0").startswith("n0 is in service: drain it, or let a preemptible job hold it")
    assert protection(IN, Holds()).refused("n0") == ""
    assert protection(None).refused("n0") == ""
    other = Protection(lambda _: None, lambda _: True, Holds(), held_by_us=lambda node: node == "n1")
    assert other.refused("n0") != other.refused("n1") == ""


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (HoldConfig(account="gpu"), "probes.slurm.account: name a partition or a qos too"),
        (HoldConfig(partition="probes", conf="/nowhere/slurm.conf"), "probes.slurm.conf: /nowhere/slurm.conf: no such"),
        (HoldConfig(partition="probes", agent="agent; rm -rf"), "probes.slurm.agent: 'agent; rm -rf': must be a path"),
    ],
)
def test_settings_that_do_not_go_together(config: HoldConfig, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        validate_probes(ProbesConfig(slurm=config))


class Bench:
    """A collector with a desk whose nodes are in service."""

    def __init__(self, collector: Collector, holds: Holds) -> None:
        self.store, self.holds, self.verdicts = collector.store, holds, list[ProbeVerdict]()
        self.desk = ProbeOrderService(
            self.store,
            index_of(),
            ProbesConfig(),
            NodeAccess(stream=collector.ingest.stream, address=lambda _: "192.0.2.1"),
            ProbeRuntime(leading=lambda: True, now_ms=lambda: collector.now_ms, poll_s=0.02),
            protection(IN, holds),
        )
        collector.on_probes = self.desk.orders.take_results
        self.desk.on_verdicts.append(self.verdicts.extend)

    def newest(self, id_: str) -> ProbeOrder:
        return self.store.probes.orders.versions(id_)[-1]


@contextlib.asynccontextmanager
async def bench(store: Store) -> AsyncIterator[tuple[Collector, Bench]]:
    async with Collector(store) as collector:
        made = Bench(collector, Holds())
        running = asyncio.create_task(made.desk.run())
        try:
            yield collector, made
        finally:
            running.cancel()
            await asyncio.wait([running])


@in_loop
async def test_an_order_waits_for_its_job_is_sent_in_it_and_the_job_ends_with_it(store: Store) -> None:
    async with bench(store) as (collector, at), collector.agent(hello(node="n0")) as agent:
        id_ = await asyncio.to_thread(at.desk.orders.ask, "n0", CONFIRM)
        await until(lambda: at.newest(id_).detail == "job 801 is pending", "why it waits is shown")
        assert at.newest(id_).state == "asked"
        at.holds.begin(id_)
        request = (await agent.read("probe_request")).probe_request
        assert (request.id, request.protection) == (id_, "job")
        assert (at.newest(id_).state, at.newest(id_).protection, at.newest(id_).job) == ("sent", "job", "801")
        given = ProbeResult(f"{id_}/end", "n0", None, "", T0, None, None, "", "gave way", id_, end="stopped")
        body = pb.ProbeResult(request_id=id_, json=to_json(given))
        await agent.send(record=pb.Record(seq=1, probe_result=body))
        await until(lambda: at.newest(id_).state == "failed", "its end")
        await until(lambda: at.holds.ended == ["801"], "its job's end")
    assert [v.passed for v in at.verdicts] == [None], "a probe that gave way is no word on the hardware"


@in_loop
async def test_a_node_that_was_put_back_while_it_had_no_stream_is_not_sent_its_order_again(store: Store) -> None:
    async with bench(store) as (collector, at):
        scheduler = Scheduler(DRAINED)
        at.desk.protection._actuator_of = lambda _: cast(Actuator, scheduler)
        async with collector.agent(hello(node="n0")) as agent:
            id_ = await asyncio.to_thread(at.desk.orders.ask, "n0", VALIDATE)
            assert (await agent.read("probe_request")).probe_request.protection == "drained"
        scheduler.service = IN
        asked = scheduler.asked
        async with collector.agent(hello(node="n0")) as agent:
            await until(lambda: scheduler.asked > asked + 1, "the scheduler is asked again")
            assert id_ not in at.desk.sender.sent_on or at.desk.sender.sent_on[id_] is not collector.ingest.stream("n0")
            scheduler.service = DRAINED
            assert (await agent.read("probe_request")).probe_request.id == id_


@in_loop
async def test_a_group_is_sent_when_all_its_nodes_are_held(store: Store) -> None:
    async with bench(store) as (collector, at), collector.agent(hello(node="n0")) as one, collector.agent(
        hello(node="n1")
    ) as other:  # fmt: skip
        first, second = await asyncio.to_thread(at.desk.orders.ask_group, ["n0", "n1"], PERSON)
        await until(lambda: len(at.holds.submitted) == 2, "a job for each")
        at.holds.begin(first)
        await until(lambda: at.newest(second).detail == "job 802 is pending", "the other one's is shown")
        assert at.newest(first).state == "asked"
        at.holds.begin(second)
        asked = [(await agent.read("probe_request")).probe_request for agent in (one, other)]
        assert [(a.id, a.protection) for a in asked] == [(first, "job"), (second, "job")]


@in_loop
async def test_jobs_that_cannot_be_seen_are_a_trouble_and_nothing_is_sent(store: Store) -> None:
    async with bench(store) as (collector, at), collector.agent(hello(node="n0")):
        at.holds.trouble = AwayError("Slurm does not answer: x")
        id_ = await asyncio.to_thread(at.desk.orders.ask, "n0", IDLE)
        await until(lambda: "probe_jobs" in at.desk.troubles, "the trouble")
        assert at.newest(id_).state == "asked"
        at.holds.trouble = None
        await until(lambda: at.newest(id_).detail == "job 801 is pending", "it goes on")
        assert "probe_jobs" not in at.desk.troubles
