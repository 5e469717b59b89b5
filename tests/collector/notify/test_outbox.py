"""What receivers get, and when: an outbox without threads, over a store in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.notify import Delivery
from drover_collector.notify.delivery_worker import MAX_WAIT_S
from drover_collector.notify.outbox import DELAYS_S
from drover_collector.notify.routes import RouteConfig, Target
from drover_collector.notify.state import AGAIN_MS, NotificationState, transition
from drover_core.model.events import RecommendedAction, Severity
from drover_core.times import iso
from testbed.outboxes import HOUR_MS, T0, Listener, Scene, fault, silence

AWAY, REFUSED = Delivery(False, "answered 500"), Delivery(False, "answered 400: invalid", permanent=True)
TO = Target()


def test_what_is_sent_and_what_is_not() -> None:
    state = NotificationState(Severity.WARNING, RecommendedAction.WATCH, False)
    assert transition(fault(), None, TO) == "incident.opened"
    assert transition(fault(), None, None) is None, "by the routes, or for a silence"
    assert transition(fault(version=2), state, TO) is None
    assert transition(fault(severity=Severity.CRITICAL), state, TO) == "incident.changed"
    assert transition(fault(action=RecommendedAction.DRAIN), state, TO) == "incident.changed"
    assert transition(fault(action=RecommendedAction.DRAIN), replace(state, unsent="grouped"), TO) == "incident.opened"
    assert transition(fault(severity=Severity.INFO, action=RecommendedAction.NONE), state, TO) is None
    assert transition(fault(closed_ms=5), state, TO) == "incident.closed"
    assert transition(fault(closed_ms=5), state, None) == "incident.closed", "who was notified of the opening"
    assert transition(fault(closed_ms=5), replace(state, closed=True), TO) is None
    assert transition(fault(closed_ms=5), None, TO) is None, "it was never sent: nothing to take back"
    assert transition(fault(version=3), replace(state, closed=True), TO) == "incident.opened"


@pytest.mark.parametrize(("at_ms", "kind"), [(HOUR_MS - 1, None), (HOUR_MS, "incident.repeated")])
def test_what_is_sent_again(at_ms: int, kind: str | None) -> None:
    state = NotificationState(Severity.WARNING, RecommendedAction.WATCH, False)
    assert transition(fault(), state, Target(HOUR_MS), now_ms=at_ms) == kind
    assert transition(fault(), state, TO, now_ms=at_ms) is None
    assert transition(fault(), replace(state, unsent="grouped"), Target(HOUR_MS), now_ms=at_ms) is None


def test_an_invalid_request_is_given_up_at_once_and_its_end_is_not_sent() -> None:
    ops, other = Listener("ops"), Listener("other")
    ops.answer = REFUSED
    scene = Scene(ops, other)
    scene.report(fault())
    assert ops.tries == 1
    assert {r.notifier: (r.state, r.detail) for r in scene.store.rows.values()}["ops"] == (
        "failed", "given up: answered 400: invalid",
    )  # fmt: skip
    ops.answer = Delivery(True)
    scene.report(fault(version=2, closed_ms=T0))
    assert (ops.received(), other.received()) == ([], ["opened", "closed"])


def test_an_end_that_waits_behind_an_opening_that_is_given_up_is_not_sent() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = AWAY
    scene.report(fault())
    scene.report(fault(version=2, closed_ms=T0))
    ops.answer = REFUSED
    scene.wait(1)
    ops.answer = Delivery(True)
    scene.wait(60)
    assert ops.received() == []
    assert scene.store.states() == [("opened", "failed"), ("closed", "grouped")]


def test_messages_of_one_moment_are_read_again_in_their_order() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.report(fault())
    scene.report(fault(version=10, severity=Severity.CRITICAL))  # its id sorts before the first one's
    scene.restart()
    assert ops.tries == 2


def test_an_end_is_tried_for_a_week_over_restarts_and_goes_at_once_when_the_receiver_is_back() -> None:
    listener = Listener()
    scene = Scene(listener)
    scene.report(fault())
    listener.answer = Delivery(False, "answered 503")
    scene.report(fault(version=2, closed_ms=T0 + 1))
    scene.open.clear()  # an hour later the engine has forgotten it
    scene.wait(5 * 60)
    assert scene.store.states() == [("opened", "delivered"), ("closed", "pending")]
    tries = listener.tries
    scene.restart()
    scene.wait(110)
    assert listener.tries <= tries + 1, "once in two hours"
    listener.answer = Delivery(True)
    scene.report(fault("i2"))
    assert listener.received() == ["opened", "opened", "closed"], "as soon as something else has arrived"
    listener.answer = Delivery(False, "answered 503")
    scene.report(fault("i2", version=2, closed_ms=T0 + 1))
    scene.open.clear()
    scene.wait(8 * 24 * 60)
    assert scene.store.states()[-1] == ("closed", "failed"), "a week is enough"


def test_what_comes_back_does_not_wait_behind_an_end_that_nobody_takes() -> None:
    listener = Listener()
    scene = Scene(listener)
    scene.report(fault())
    listener.answer = Delivery(False, "answered 503")
    scene.report(fault(version=2, closed_ms=T0 + 1))
    scene.wait(4 * 60)
    listener.answer = Delivery(True)
    scene.report(fault(version=3))
    assert listener.received() == ["opened", "opened"]
    assert ("closed", "failed") in scene.store.states()


def killed_while_the_store_failed(path: Path, listener: Listener) -> Scene:
    """An incident was sent from memory, and nothing else of it was kept."""
    scene = Scene(listener, unstored=path)
    scene.store.fails = True
    scene.outbox.enqueue_unstored([fault()])
    scene.run()
    assert listener.received() == ["opened"]
    assert scene.outbox.delivery.fallback.wait(20)
    scene.store.fails = False
    return scene


def test_what_was_sent_while_the_store_failed_and_is_found_under_another_id_is_ended(tmp_path: Path) -> None:
    listener = Listener()
    scene = killed_while_the_store_failed(tmp_path / "unstored", listener)
    scene.restart(known=[])
    scene.report(fault("i2"))  # the same fault, as it is seen after the restart
    scene.wait(10)
    assert listener.received("i1") == ["opened"], "it may be found again yet"
    scene.restart()
    scene.wait(20)
    assert listener.received("i1") == ["opened", "closed"]
    assert listener.received("i2") == ["opened"]
    (end,) = [body for body in listener.got.values() if body["type"] == "incident.closed"]
    assert end["data"]["closed"] == iso(T0 + 25 * 60_000)
    assert end["data"]["closed_because"].startswith("it was reported while the store failed")
    assert scene.outbox.delivery.fallback.wait(20)
    assert not (tmp_path / "unstored").exists()
    scene.restart()
    scene.wait(60)
    assert listener.received("i1") == ["opened", "closed"], "once"


def test_what_was_sent_while_the_store_failed_and_is_known_again_goes_on(tmp_path: Path) -> None:
    listener = Listener()
    scene = killed_while_the_store_failed(tmp_path / "unstored", listener)
    scene.restart(known=[])
    scene.report(fault(version=2))
    scene.wait(30)
    assert listener.received() == ["opened"], "and it is not sent again"
    scene.report(fault(version=3, closed_ms=scene.now_ms))
    assert listener.received() == ["opened", "closed"]


def test_a_file_of_sent_messages_that_is_not_drovers_or_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text('{"id": 1}\nnonsense\n')
    scene = Scene(unstored=tmp_path / "broken")
    scene.report(fault())
    nowhere = Scene(unstored=tmp_path / "no such folder" / "file")
    nowhere.store.fails = True
    nowhere.outbox.enqueue_unstored([fault()])
    nowhere.run()
    assert nowhere.outbox.delivery.fallback.wait(20)
    assert nowhere.listeners[0].received() == ["opened"]


def test_what_was_given_up_is_sent_hours_later_if_it_is_still_so() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = AWAY
    scene.report(fault())
    scene.wait(sum(DELAYS_S) / 60 + 30)  # looked at every 5 minutes
    assert scene.store.states() == [("opened", "failed")]
    assert ops.tries == len(DELAYS_S) + 1
    ops.answer = Delivery(True)
    scene.restart()
    assert ops.received() == []
    scene.wait(AGAIN_MS / 60_000)
    assert ops.received() == ["opened"]
    scene.wait(600)
    assert ops.received() == ["opened"]


@pytest.mark.parametrize(("asked_s", "waits_s"), [(40.0, 40.0), (1e9, MAX_WAIT_S), (1.0, 5.0), (float("nan"), 5.0)])
def test_a_receiver_may_ask_for_patience_within_bounds(asked_s: float, waits_s: float) -> None:
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = Delivery(False, "answered 429", retry_after_s=asked_s)
    scene.report(fault())
    (row,) = scene.store.rows.values()
    assert row.next_ms - T0 == waits_s * 1000
    ops.answer = Delivery(True)
    scene.report(fault("i2"))
    asked = asked_s > 0
    assert ops.received("i2") == ([] if asked else ["opened"]), "it asked for nothing to be sent"
    scene.now_ms += round(waits_s * 1000)
    scene.run()
    assert sorted(ops.received()) == ["opened", "opened"]


def test_an_open_incident_is_sent_again_as_often_as_its_route_says() -> None:
    scene = Scene(routes=[RouteConfig(("ops",), repeat_h=4)])
    (ops,) = scene.listeners
    scene.report(fault())
    scene.wait(3.9 * 60)
    assert ops.received() == ["opened"]
    scene.wait(12)
    assert ops.received() == ["opened", "repeated"]
    scene.restart()
    scene.wait(4 * 60)
    assert ops.received() == ["opened", "repeated", "repeated"], "counted on from what is stored"
    scene.report(fault(version=2, closed_ms=T0))
    scene.wait(600)
    assert ops.received()[3:] == ["closed"]


def test_one_that_forgets_is_notified_all_the_time_and_nothing_of_it_is_stored() -> None:
    manager = Listener("am", repeat_s=120)
    scene = Scene(manager)
    scene.report(fault())
    scene.silences.take(silence(node=("n-i1",), minutes=10))
    scene.wait(30)
    assert manager.received() == ["opened", *["repeated"] * 6], "or it would say that a silenced fault is over"
    manager.answer = AWAY
    scene.wait(30)
    manager.answer = Delivery(True)
    scene.restart()
    scene.wait(5)
    assert manager.received()[7:] == ["repeated"]
    scene.report(fault(version=2, closed_ms=T0))
    scene.wait(60)
    assert manager.received()[8:] == ["closed"]
    assert scene.store.states() == [("opened", "delivered"), ("closed", "delivered")]


def test_news_goes_before_what_only_holds_still_and_one_that_is_away_is_asked_once() -> None:
    manager = Listener("am", repeat_s=120)
    scene = Scene(manager)
    scene.report(*(fault(f"i{n}") for n in range(20)))
    scene.now_ms += 120_000
    scene.outbox.sweep(scene.open)
    scene.outbox.enqueue([fault("new")])
    assert scene.outbox.delivery.pending == {"am": 21}
    scene.outbox.delivery.step()
    assert manager.received("new") == ["opened"]
    manager.answer = AWAY
    tries = manager.tries
    scene.run()
    assert (manager.tries - tries, scene.outbox.delivery.pending) == (1, {"am": 0})
    manager.answer = Delivery(True)
    scene.wait(5)
    assert manager.received().count("repeated") == 20


def test_under_a_silence_nothing_is_sent_and_afterwards_what_is_still_so() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.silences.take(silence(node=("n-i1", "n-i2")))
    scene.report(fault("i1"), fault("i2"), fault("i3"))
    scene.report(fault("i2", 2, closed_ms=T0))
    scene.wait(59)
    assert [ops.received(name) for name in ("i1", "i2", "i3")] == [[], [], ["opened"]]
    scene.restart()
    scene.wait(10)
    assert [ops.received(name) for name in ("i1", "i2", "i3")] == [["opened"], [], ["opened"]]


def test_a_silence_hides_news_and_no_end() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.report(fault("i1"), fault("i2"))
    scene.silences.take(silence(node=("n-i1", "n-i2")))
    scene.report(fault("i1", 2, Severity.CRITICAL), fault("i2", 2, Severity.CRITICAL))
    scene.report(fault("i2", 3, Severity.CRITICAL, closed_ms=T0))
    assert (ops.received("i1"), ops.received("i2")) == (["opened"], ["opened", "closed"])
    scene.silences.take(replace(silence(node=("n-i1", "n-i2")), until_ms=scene.now_ms, ended_by="bo"))
    scene.wait(1)
    assert ops.received("i1") == ["opened", "changed"]


def test_who_got_the_opening_gets_the_end_though_its_route_has_lost_it() -> None:
    routes = [RouteConfig(("chat",), severity=("warning",)), RouteConfig(("page",), severity=("critical",))]
    chat, page = Listener("chat"), Listener("page")
    scene = Scene(chat, page, routes=routes)
    scene.report(fault())
    scene.report(fault(version=2, severity=Severity.CRITICAL))
    scene.report(fault(version=3, severity=Severity.CRITICAL, closed_ms=T0))
    assert (chat.received(), page.received()) == (["opened", "closed"], ["opened", "closed"])


def test_the_store_is_asked_once_for_all() -> None:
    scene = Scene(Listener("a"), Listener("b"))
    scene.report(*(fault(f"i{n}") for n in range(50)))
    assert [len(asked) for asked in scene.store.asked] == [50]
    scene.report(*(fault(f"i{n}", 2, Severity.CRITICAL) for n in range(50)))
    assert len(scene.store.asked) == 1, "and then known"


def test_a_store_that_fails_is_logged_once_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level("INFO", "drover_collector.notify.delivery_recorder")
    scene.store.fails = True
    for number in range(5):
        scene.outbox.enqueue_unstored([fault(f"i{number}")])
        scene.run()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    scene.store.fails = False
    scene.run()
    scene.outbox.delivery.step()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert [state for _, state in scene.store.states()] == ["delivered"] * 5
