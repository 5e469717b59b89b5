"""What people get of an open incident between its opening and its end: that Drover asks and nobody answered, that
an action failed, that a node goes to repair. Each once, to those who know of the incident."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.notify import Delivery, Outbox
from drover_collector.notify.incident_updates import (
    IncidentUpdate,
    of_actions,
    of_decisions,
    of_outages,
)
from drover_collector.notify.receivers.pagerduty import event
from drover_collector.notify.receivers.slack import payload
from drover_collector.notify.receivers.webhook import message
from drover_collector.notify.routes import RouteConfig
from drover_collector.notify.state import (
    ACTION_FAILED,
    ASKS,
    CLOSED,
    OPENED,
    REPAIR,
    UNANSWERED,
)
from drover_collector.notify.wording import read_message
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Approval,
    Decision,
    DecisionCause,
    Event,
    EventKind,
    Health,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
    RecommendedAction,
    Severity,
)
from testbed.deciding import fleet, policy
from testbed.desks import dispatcher_of
from testbed.loop import in_loop
from testbed.outboxes import T0, Listener, Scene, fault, silence
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import until

ASKED = IncidentUpdate(ASKS, "i1", "d1", T0, "Drover asks to drain n-i1")
PENDING = Decision(
    "d1", "i1", T0, "n1", RecommendedAction.DRAIN, "approve", "pending_approval", "xid", "asks to drain n1"
)


def test_what_is_news_and_what_is_not() -> None:
    late = replace(PENDING, outcome="expired", reason="nobody answered within 60 min", cause=DecisionCause.UNANSWERED)
    assert [n.kind for n in of_decisions([PENDING, late])] == [ASKS, UNANSWERED]
    assert "drover approve d1 --why TEXT or drover reject d1" in of_decisions([PENDING])[0].text
    others = ("would_act", "held", "approved", "rejected", "act")
    assert of_decisions(replace(PENDING, outcome=outcome) for outcome in others) == []
    assert of_decisions([replace(PENDING, outcome="expired", reason="over: nothing is wanted any more")]) == []
    assert of_decisions([replace(PENDING, node="")]) == [], "a mass event's own opening asks"
    failed = Action("a1", "d1", "i1", "n1", Act.DRAIN, "slurm", ActionState.FAILED, T0, "no such node")
    assert [(n.kind, n.text) for n in of_actions([failed])] == [(ACTION_FAILED, "drain n1 failed: no such node")]
    assert of_actions([replace(failed, state=ActionState.DONE), replace(failed, incident_id="")]) == []
    repair = NodeOutage("n1", Health.REPAIR, T0, "i1", "HBM 9 % slow")
    (message,) = of_outages([repair])
    assert message.kind == REPAIR
    assert "for repair: HBM 9 % slow. After the repair run: drover resume n1" in message.text
    assert of_outages([replace(repair, stage=Health.DRAINED)]) == []


def send_updates(scene: Scene, *news: IncidentUpdate) -> int:
    made = scene.outbox.send_updates(news, scene.open)
    scene.run()
    return made


def test_each_update_is_sent_once_after_a_restart_too_and_changes_nothing_of_the_rest() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.report(fault())
    assert (send_updates(scene, ASKED), send_updates(scene, ASKED)) == (1, 0)
    assert ops.received() == ["opened", "asks"]
    scene.restart()
    assert send_updates(scene, ASKED) == 0
    assert send_updates(scene, replace(ASKED, key="d2")) == 1, "asked again hours later"
    scene.report(fault(version=2, severity=Severity.CRITICAL))
    scene.report(fault(version=3, closed_ms=T0 + 1))
    assert ops.received() == ["opened", "asks", "asks", "changed", "closed"]
    assert send_updates(scene, replace(ASKED, key="d3")) == 0, "it is over"


def test_only_who_knows_of_the_incident_is_notified_and_nobody_of_a_silenced_one() -> None:
    chat, pager = Listener("chat"), Listener("pager", Severity.CRITICAL)
    scene = Scene(chat, pager)
    scene.report(fault())
    send_updates(scene, ASKED)
    assert (chat.received(), pager.received()) == (["opened", "asks"], [])
    scene.silences.take(silence(node=("n-i1",)))
    assert send_updates(scene, replace(ASKED, key="d2")) == 0
    assert send_updates(scene, replace(ASKED, incident_id="nobody knows")) == 0


def test_news_wait_behind_an_opening_that_waits_and_are_not_sent_without_it() -> None:
    scene = Scene(routes=[RouteConfig(("ops",), group_wait_s=30)])
    (ops,) = scene.listeners
    scene.report(fault())
    send_updates(scene, ASKED)
    assert ops.received() == []
    scene.wait(1)
    assert ops.received() == ["opened", "asks"]
    scene.report(fault("i2"))
    send_updates(scene, replace(ASKED, incident_id="i2"))
    scene.report(fault("i2", 2, closed_ms=scene.now_ms))
    scene.wait(5)
    assert ops.received("i2") == [], "it was over before anybody was notified"


def test_what_a_receiver_does_not_take_is_tried_again_and_given_up_without_more() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.report(fault())
    ops.answer = Delivery(False, "answered 500")
    send_updates(scene, ASKED)
    scene.wait(600)
    assert scene.store.states() == [("opened", "delivered"), ("asks", "failed")]
    ops.answer = Delivery(True)
    scene.wait(600)
    assert ops.received() == ["opened"], "nothing else sends old news"


def test_sent_from_memory_while_the_store_fails_it_is_not_sent_again() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.report(fault())
    assert scene.outbox.send_updates([ASKED], scene.open, from_memory=True) == 1
    scene.run()
    assert send_updates(scene, ASKED) == 0
    assert ops.received() == ["opened", "asks"]


def test_its_words_are_the_first_line_and_an_alert_stays_the_same_alert() -> None:
    body = message(ASKS, fault(), T0, "http://console", ASKED.text).encode()
    notification = read_message(body, {})
    assert notification.headline == "WARNING (needs your approval): Drover asks to drain n-i1"
    assert notification.text(T0).startswith("Drover asks to drain n-i1\n\n")
    assert payload(notification, T0)["text"] == notification.headline
    sent = event(notification, "key", T0)
    assert (sent["dedup_key"], sent["event_action"], sent["payload"]["summary"]) == (
        "i1",
        "trigger",
        notification.headline,
    )


INDEX = fleet(4)


class Site:
    """A collector that asks before it acts, and what outlives it."""

    def __init__(self, store: Store) -> None:
        self.store, self.slurm, self.ops, self.now_ms = store, SlurmStandIn("n000", "n001"), Listener(), T0

    async def begin(self) -> None:
        self.outbox = Outbox(self.store, [self.ops], "http://console", now_ms=lambda: self.now_ms)
        self.pipeline = Pipeline(
            INDEX,
            self.store,
            policy("approve"),
            self.outbox,
            PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms, ceiling="enforce"),
        )
        actuator = SlurmActuator(self.slurm, 10_000)
        self.desk = dispatcher_of(
            self.store, ActConfig(mode="approve"), [actuator], lambda _: actuator,
            detection=ActionReview(self.pipeline), now_ms=lambda: self.now_ms, look_s=0.02,
        )  # fmt: skip
        self.desk.returns.validator = self
        self.pipeline.act_by(self.desk)
        await self.pipeline.start()

    def ask(self, node: str, *_: object, **__: object) -> str:
        """Stands for the desk of probes."""
        return f"request-{node}"

    async def xid(self, node: str) -> Decision:
        made = Event(
            f"{node}/1", self.now_ms, node, 0, EventKind.XID, "171", "its memory is bad", received_ms=self.now_ms
        )
        self.store.events.write([made])
        self.pipeline.take_events([made])
        await asyncio.to_thread(lambda: self.pipeline._judge.submit(self.pipeline.judge_events).result(120))
        (waiting,) = [d for d in self.pipeline.engine.decider.standing.values() if d.node == node]
        return waiting

    async def wait_until_received(self, node: str, *kinds: str) -> None:
        def said() -> list[str]:
            return [body["type"] for body in self.ops.got.values() if body["data"]["node"] == node]

        await until(lambda: said() == list(kinds), f"{node}: {kinds}")


@in_loop
async def test_from_a_fault_to_repair_people_are_notified_of_each_thing_they_have_to_know(store: Store) -> None:
    site = Site(store)
    await site.begin()
    try:
        asked = await site.xid("n000")
        await site.wait_until_received("n000", OPENED, ASKS)
        await site.pipeline.stop()
        await site.begin()
        site.slurm.drain_by("n001", "ann", "cables")
        second = await site.xid("n001")
        await site.wait_until_received("n001", OPENED, ASKS)
        answer(site, second)
        await site.wait_until_received("n001", OPENED, ASKS, ACTION_FAILED)
        answer(site, asked)
        await until(lambda: "DRAIN" in site.slurm.held["n000"].states, "it is drained")
        await until(lambda: "n000" in store.outages.current(), "Drover knows")
        await until(lambda: stage_of(site, "n000") is Health.VALIDATING, "it is validated")
        failed = ProbeVerdict(
            "request-n000", "n000", 0, False, "hbm_copy", "HBM 9 % slow", T0, ProbeReason.VALIDATE, asked.incident_id
        )
        await asyncio.to_thread(site.desk.on_verdicts, [failed])
        await site.wait_until_received("n000", OPENED, ASKS, REPAIR)
        await site.pipeline.stop()
        await site.begin()
        await site.xid("n002")
        await site.wait_until_received("n002", OPENED, ASKS)
        await site.wait_until_received("n000", OPENED, ASKS, REPAIR)
        await site.wait_until_received("n001", OPENED, ASKS, ACTION_FAILED)
    finally:
        await site.pipeline.stop()
    assert CLOSED not in {body["type"] for body in site.ops.got.values()}
    words: dict[str, Any] = {
        body["type"]: body["data"]["news"] for body in site.ops.got.values() if "news" in body["data"]
    }
    assert words[ACTION_FAILED] == "drain n001 failed: it is drained by ann (cables): left unchanged"
    assert json.dumps(words).count("--why TEXT") >= 2


def stage_of(site: Site, node: str) -> Health | None:
    outage = site.desk.context.outages.current.get(node)
    return None if outage is None else outage.stage


def answer(site: Site, decision: Decision) -> None:
    given = Approval(decision.id, site.now_ms, "ann", True, "seen")
    site.pipeline._judge.submit(site.pipeline._answer, given).result(120)
