"""Many messages at once, receivers that are full or hang, gaps that end: what is sent late, and that none is lost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drover_collector.notify import Delivery, delivery_pool, notification_states
from drover_collector.notify import delivery_worker as courier
from drover_collector.notify.delivery_recorder import STOP_S
from drover_collector.notify.delivery_worker import DeliveryWorker
from drover_collector.notify.message_queue import MessageQueue
from drover_collector.notify.routes import RouteConfig
from drover_collector.notify.state import AGAIN_MS
from drover_collector.notify.test_command import send_test
from drover_collector.policy.circuit_breaker import Breaker
from drover_collector.store import OutboxRow
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from testbed.deciding import OPEN, fleet, incident
from testbed.outboxes import T0, Listener, Scene, fault, silence

AWAY = Delivery(False, "answered 500")
LIMITS = replace(OPEN, mass_nodes=3, gap_ratio=0.01)
SILENT = ("n000", "n001", "n002", "n003")


def silent(node: str) -> Incident:
    """As the policy `cautious` has it: nothing is to be done, so no second mass event takes it over."""
    found = incident(node, "silent", T0, kind=IncidentKind.LIVENESS, wanted=RecommendedAction.WATCH)
    return replace(found, id=node, scope="node", gpu=None, members=((node, None),), severity=Severity.WARNING)


@pytest.mark.parametrize("wait_s", [0, 30])
def test_nodes_that_stay_silent_after_a_gap_are_sent_when_it_is_over(wait_s: int) -> None:
    scene = Scene(routes=[RouteConfig(("ops",), group_wait_s=wait_s)])
    (ops,) = scene.listeners
    breaker = Breaker(fleet(64))
    early = [silent(node) for node in SILENT[:2]] if wait_s else []  # they still wait, and are withdrawn
    scene.report(*early)
    (gap,) = breaker.note_silence(SILENT, T0, LIMITS)
    scene.report(gap, *(silent(node) for node in SILENT))
    scene.wait(4)
    assert [ops.received(name) for name in (gap.id, *SILENT)] == [["opened"], [], [], [], []]
    scene.now_ms = T0 + 301_000
    (over,) = breaker.end_gaps(scene.now_ms, LIMITS)
    scene.report(over, replace(silent("n000"), version=2, closed_ms=scene.now_ms))  # one reports again
    scene.wait(10)
    assert ops.received(gap.id) == ["opened", "closed"]
    assert [ops.received(name) for name in SILENT] == [[], ["opened"], ["opened"], ["opened"]], "else they burn unseen"
    scene.restart()
    scene.report(replace(silent("n001"), version=2, closed_ms=scene.now_ms))
    scene.wait(60)
    assert [ops.received(name) for name in SILENT[:3]] == [[], ["opened", "closed"], ["opened"]]


def test_a_gap_that_ended_while_the_collector_was_down_hides_nothing_either() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    breaker = Breaker(fleet(64))
    (gap,) = breaker.note_silence(SILENT, T0, LIMITS)
    scene.report(gap, silent("n000"))
    scene.now_ms += 301_000
    scene.open[gap.id] = breaker.end_gaps(scene.now_ms, LIMITS)[0]
    scene.restart()
    assert ops.received("n000") == ["opened"]


def test_what_is_still_wrong_when_nobody_had_to_answer_a_mass_event_is_sent() -> None:
    """A rack's nodes fail, it goes into maintenance, most of them are mended: the rest must not outlive it unseen."""
    scene = Scene()
    (ops,) = scene.listeners
    breaker = Breaker(fleet(64))
    held = [replace(incident(node, at_ms=T0), id=node) for node in SILENT]
    (event,) = breaker.note(held, T0, LIMITS)
    scene.report(event, *held)
    scene.silences.take(silence(node=SILENT, minutes=60, maintenance=True))
    scene.now_ms += 20_000
    scene.report(*breaker.end(set(), scene.now_ms))  # nothing is to be done to its nodes for a while
    scene.wait(55)
    scene.report(*(replace(one, version=2, closed_ms=scene.now_ms) for one in held[1:]))
    assert ops.received() == ["opened", "closed"]
    scene.wait(10)
    assert ops.received(SILENT[0]) == ["opened"]
    assert len(ops.got) == 3


def test_what_a_person_has_answered_for_all_is_not_sent_for_each() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    breaker = Breaker(fleet(64))
    held = [replace(incident(node, at_ms=T0), id=node) for node in SILENT]
    (event,) = breaker.note(held, T0, LIMITS)
    scene.report(event, *held)
    scene.report(breaker.answer(event.id, T0 + 1000, "closed: approved by anna: rollout"))
    scene.wait(600)
    scene.restart()
    assert ops.received() == ["opened", "closed"]


def test_what_found_the_queue_full_is_sent_hours_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "MAX_PENDING", 2)
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = AWAY
    for name in ("i1", "i2", "i3"):
        scene.report(fault(name))
    assert scene.store.states()[-1] == ("opened", "failed")
    ops.answer = Delivery(True)
    scene.wait(60)
    assert [ops.received(name) for name in ("i1", "i2", "i3")] == [["opened"], ["opened"], []]
    scene.wait(AGAIN_MS / 60_000)
    assert ops.received("i3") == ["opened"]


def test_one_that_forgets_is_reminded_of_what_is_open_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification_states, "MAX_KNOWN", 3)
    manager = Listener("am", repeat_s=120)
    scene = Scene(manager)
    scene.report(fault("old"))
    for number in range(6):  # others come and go
        scene.report(fault(f"i{number}"))
        scene.report(fault(f"i{number}", 2, closed_ms=scene.now_ms))
        scene.wait(5)
    assert manager.received("old") == ["opened", *["repeated"] * 6]


def test_a_critical_fault_goes_before_a_storm_of_warnings() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.outbox.enqueue([fault(f"i{n}") for n in range(20)])
    scene.now_ms += 1000
    scene.outbox.enqueue([fault("worst", severity=Severity.CRITICAL), fault("i0", 2, Severity.CRITICAL)])
    scene.outbox.delivery.step()
    assert (ops.received(), ops.received("worst")) == (["opened"], ["opened"])
    scene.run()
    assert ops.received("i0") == ["opened", "changed"], "those of one incident stay in their order"
    assert len(ops.got) == 22


def test_a_storm_is_not_searched_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    valid = MessageQueue._valid

    def counted(self: MessageQueue, id_: str, next_ms: int) -> OutboxRow | None:
        looks.append(id_)
        return valid(self, id_, next_ms)

    monkeypatch.setattr(MessageQueue, "_valid", counted)
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = AWAY
    scene.report(*(fault(f"i{n}") for n in range(1000)))
    ops.answer = Delivery(True)
    scene.wait(5)
    assert (ops.tries, len(ops.got)) == (2000, 1000)
    assert len(looks) < 5 * ops.tries


def test_messages_of_a_receiver_that_is_gone_are_given_up_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.listeners[0].answer = AWAY
    scene.report(*(fault(f"i{n}") for n in range(50)))
    writes: list[Any] = []
    write = scene.store.outbox.write
    monkeypatch.setattr(scene.store.outbox, "write", lambda rows: (writes.append(rows), write(rows)))
    scene.listeners = (Listener("new"),)
    scene.routes = type(scene.routes)(scene.listeners)
    scene.restart()
    assert {state for _, state in scene.store.states()} == {"failed", "delivered"}
    assert scene.listeners[0].received() == ["opened"] * 50, "the one in its place gets all that is open"
    assert len(writes) < 60, "a write each for the first, one for all that was given up"


def test_a_stop_waits_once_for_all_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(*(Listener(f"l{n}") for n in range(5)))
    clock_s, waits_s = [100.0], []

    def join(_self: DeliveryWorker, timeout: float) -> None:
        waits_s.append(timeout)
        clock_s[0] += timeout

    monkeypatch.setattr(DeliveryWorker, "is_alive", lambda _: True)
    monkeypatch.setattr(DeliveryWorker, "join", join)
    for module in (delivery_pool, courier):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    scene.outbox.stop()
    assert len(waits_s) == 5
    assert sum(waits_s) == STOP_S


class Broken(Listener):
    words = "Invalid header value b'Bearer hunter2' for https://hooks.example/T0/hunter2"

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        if not self.answer.delivered:
            raise ValueError(self.words)
        return super().deliver(message_id, body, now_ms)


def test_a_defect_of_a_receiver_names_no_secret_and_loses_nothing(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, well = Broken("broken"), Listener("well")
    scene = Scene(broken, well)
    broken.answer = AWAY
    scene.report(fault())
    assert not send_test([broken, well], Severity.WARNING, "http://console")
    said = caplog.text + "".join(capsys.readouterr()) + " ".join(scene.outbox.delivery.troubles.values())
    assert "ValueError" in said
    assert "hunter2" not in said
    assert well.received() == ["opened", "opened"], "the trial's too"
    broken.answer = Delivery(True)
    scene.wait(5)
    assert broken.received() == ["opened"]
