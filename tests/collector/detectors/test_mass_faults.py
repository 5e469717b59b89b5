"""Faults of hundreds of nodes at once, all the way: real engine, store, desk of actions and outbox, and one webhook's
receiver on a real socket. The breaker opens, one page is sent, and the fleet stays in service; a restart adds nothing.

The guard alone, with any sequence of faults: test_guard_properties.py.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.engine.engine import Outcome
from drover_collector.notify import Outbox, OutboxOptions
from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers.webhook import Webhook
from drover_collector.notify.routes import RouteConfig, Routes
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import STORM_MS, Pipeline, PipelineOptions
from drover_collector.policy.circuit_breaker import MASS, of_guard
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import (
    Approval,
    Audit,
    Event,
    EventKind,
    RecommendedAction,
    Severity,
)
from testbed.desks import dispatcher_of
from testbed.loop import in_loop
from testbed.receivers import HttpReceiver, http_receiver
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import until

INDEX = small_fleet(200, 1, 8)
NODES = [node.name for node in INDEX.nodes]
LAG_MS = 7000
HOURS = 3  # longer than the breaker's quiet time


@dataclass
class Site:
    """One collector in enforce mode, and what outlives it: the store, Slurm, the receiver, the clock."""

    store: Store
    slurm: SlurmStandIn
    receiver: HttpReceiver
    policy: Policy
    wait_s: float = 0.0
    now_ms: int = START_MS

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pipeline]:
        webhook = Webhook(ReceiverOptions("ops", Severity.WARNING, 10.0), self.receiver.url, b"k" * 32)
        routes = Routes([webhook], [RouteConfig(("ops",), group_wait_s=self.wait_s)])
        outbox = Outbox(
            self.store, [webhook], "http://console", OutboxOptions(routes=routes), now_ms=lambda: self.now_ms
        )
        made = Pipeline(
            INDEX,
            self.store,
            self.policy,
            outbox,
            PipelineOptions(lag_ms=LAG_MS, now_ms=lambda: self.now_ms, ceiling="enforce"),
        )
        actuator = SlurmActuator(self.slurm, 10_000)
        desk = dispatcher_of(
            self.store, ActConfig(mode="enforce"), [actuator], lambda _: actuator,
            detection=ActionReview(made), nodes=NODES, now_ms=lambda: self.now_ms, look_s=0.05,
        )  # fmt: skip
        made.act_by(desk)
        await made.start()
        await made.buckets.take_up_past(made)
        try:
            yield made
        finally:
            await made.stop()

    async def tick(self, pipeline: Pipeline, number: int) -> None:
        """All nodes report, and train as before."""
        bucket = training_bucket(INDEX, number)
        self.now_ms = bucket.end_ms + LAG_MS
        await asyncio.to_thread(lambda: pipeline._judge.submit(pipeline.judge_bucket, bucket).result(120))

    async def fall(self, pipeline: Pipeline, nodes: Sequence[str]) -> None:
        """XID 79 on a GPU of each of these, reported at once."""
        events = [
            Event(f"{node}/79", self.now_ms, node, 0, EventKind.XID, "79", "fell off the bus", received_ms=self.now_ms)
            for node in nodes
        ]
        self.store.events.write(events)
        pipeline.take_events(events)
        await asyncio.to_thread(lambda: pipeline._judge.submit(pipeline.judge_events).result(120))

    async def storm(self, pipeline: Pipeline, nodes: Sequence[str]) -> list[int]:
        """The same, each received a millisecond after the one before. Returns how many were judged in each call."""
        events = [
            Event(f"{node}/79", at_ms, node, 0, EventKind.XID, "79", "fell off the bus", received_ms=at_ms)
            for at_ms, node in enumerate(nodes, self.now_ms)
        ]
        self.now_ms += len(nodes)
        self.store.events.write(events)
        sizes: list[int] = []
        judge = pipeline.engine.on_events

        def counted(findings: Sequence[Event], now_ms: int) -> Outcome:
            sizes.append(len(findings))
            assert all(now_ms - STORM_MS <= (event.received_ms or 0) <= now_ms for event in findings)
            return judge(findings, now_ms)

        pipeline.engine.on_events = counted  # type: ignore[method-assign]
        pipeline.take_events(events)
        await asyncio.to_thread(lambda: pipeline._judge.submit(pipeline.judge_events).result(120))
        return sizes

    async def settled(self, pipeline: Pipeline) -> None:
        """Nothing waits to be stored, done or notified, except what a route holds back for a while."""
        await until(lambda: not pipeline.waiting_outcomes, "all is stored")
        await until(lambda: not self.store.actions.intended(), "all is done that was decided")
        await until(
            lambda: not [row for row in self.store.outbox.pending() if row.next_ms <= self.now_ms],
            "all notifications are sent",
        )

    def drained(self) -> int:
        return sum("DRAIN" in node.states for node in self.slurm.held.values())

    def findings(self) -> Counter[tuple[str, str]]:
        """(step, cause) of each message that the receiver has got."""
        bodies = [json.loads(request.body) for request in self.receiver.got]
        return Counter((body["type"].removeprefix("incident."), body["data"]["cause"]) for body in bodies)


@pytest.mark.parametrize("preset", ["nvidia", "strict"])
@in_loop
async def test_200_nodes_at_once_are_one_page_and_no_drain_also_after_hours_and_a_restart(
    store: Store, preset: str
) -> None:
    with http_receiver() as receiver:
        policy = replace(Policy.named(preset), mode="enforce")
        site = Site(store, SlurmStandIn(*NODES), receiver, policy)
        async with site.running() as pipeline:
            await site.tick(pipeline, 0)
            await site.fall(pipeline, NODES)
            await site.settled(pipeline)
            (event,) = [i for i in pipeline.incidents.values() if of_guard(i)]
            assert (event.cause, len(event.members), event.closed_ms) == (MASS, 200, None)
            assert [d.outcome for d in pipeline.engine.decider.standing.values() if d.incident_id == event.id] == [
                "pending_approval"
            ]
            held = [
                d for d in store.decisions.newest() if d.wanted in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)
            ]
            assert {d.outcome for d in held} == {"held"}
            assert len({d.node for d in held}) == 200
            assert all(event.id in d.reason for d in held), "each says what holds it back"
            assert site.findings() == {("opened", MASS): 1}
            await site.tick(pipeline, HOURS * 360)
            await site.settled(pipeline)
        async with site.running() as pipeline:
            await site.tick(pipeline, HOURS * 360 + 1)
            await site.settled(pipeline)
            assert [i.id for i in pipeline.incidents.values() if of_guard(i) and i.closed_ms is None] == [event.id]
        assert site.findings() == {("opened", MASS): 1}, "exactly one page"
        assert (site.drained(), site.slurm.effects, store.actions.newest()) == (0, [], [])


@in_loop
async def test_200_nodes_one_after_the_other_are_one_page_where_a_route_waits_and_a_handful_of_drains(
    store: Store,
) -> None:
    """As agents report it: the first few look like separate faults, until they are too many."""
    with http_receiver() as receiver:
        policy = replace(Policy.named("nvidia"), mode="enforce")
        site = Site(store, SlurmStandIn(*NODES), receiver, policy, wait_s=30.0)
        async with site.running() as pipeline:
            await site.tick(pipeline, 0)
            for number, size in ((0, 1), (1, 1), (2, 2), (4, 6), (10, 40), (50, 150)):
                site.now_ms += 500
                await site.fall(pipeline, NODES[number : number + size])
            await site.settled(pipeline)
            for number in range(4, 10):
                await site.tick(pipeline, number)
                await site.settled(pipeline)
            (event,) = [i for i in pipeline.incidents.values() if of_guard(i)]
            assert len(event.members) == 200
        findings = site.findings()
        assert {key: count for key, count in findings.items() if key[0] == "opened"} == {("opened", MASS): 1}
        assert findings["changed", MASS] <= 1, "its growth, in one message of the same page"
        assert 0 < site.drained() < policy.guard.mass_nodes


@in_loop
async def test_200_nodes_within_half_a_second_are_judged_in_few_calls(store: Store) -> None:
    """Each call reads every open incident and is stored alone: one call for each event is too slow in a storm."""
    with http_receiver() as receiver:
        site = Site(store, SlurmStandIn(*NODES), receiver, replace(Policy.named("nvidia"), mode="enforce"))
        async with site.running() as pipeline:
            await site.tick(pipeline, 0)
            sizes = await site.storm(pipeline, NODES)
            assert sum(sizes) == 200
            assert len(sizes) <= 3
            await site.settled(pipeline)
            (event,) = [i for i in pipeline.incidents.values() if of_guard(i)]
            assert len(event.members) >= 100
            held = [
                d for d in store.decisions.newest() if d.wanted in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)
            ]
            assert {d.outcome for d in held} == {"held"}
            assert len({d.node for d in held}) == 200
        assert site.findings() == {("opened", MASS): 1}
        assert site.drained() == 0


@in_loop
async def test_drains_that_wait_for_slurm_do_not_go_on_behind_the_breaker(store: Store) -> None:
    """Decided for the first few, before they were many: slurmctld answers when the breaker has opened."""
    with http_receiver() as receiver:
        policy = replace(Policy.named("nvidia"), mode="enforce")
        site = Site(store, SlurmStandIn(*NODES), receiver, policy, wait_s=30.0)
        async with site.running() as pipeline:
            await site.tick(pipeline, 0)
            site.slurm.away = True
            await site.fall(pipeline, NODES[:3])
            decided = pipeline.engine.decider.standing
            assert [d.outcome for d in decided.values()] == ["act"] * 3
            site.now_ms += 500
            await site.fall(pipeline, NODES[3:60])
            (event,) = [i for i in pipeline.incidents.values() if of_guard(i)]
            assert {d.outcome for d in decided.values() if d.incident_id != event.id} == {"held"}
            site.slurm.away = False
            await site.settled(pipeline)
            assert (site.drained(), site.slurm.effects) == (0, [])
            question = next(d for d in decided.values() if d.incident_id == event.id)
            site.now_ms += 1_000
            approval = Approval(question.id, site.now_ms, "ann", True, "each was looked at")
            line = Audit("a1", site.now_ms, "ann", "approve", event.id, approval.why, "")
            await asyncio.to_thread(pipeline.answer, approval, line)
            await site.tick(pipeline, 1)
            await until(lambda: site.drained() > 0, "what a person let go, goes")
            await site.settled(pipeline)
        assert site.drained() <= policy.guard.per_hour
