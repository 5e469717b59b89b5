"""What receivers are told, and when: an outbox without threads, over a store in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover_collector.guard_breaker import Breaker
from drover_collector.notify import Delivery
from drover_collector.notify.courier import MOST_ASKED_S
from drover_collector.notify.outbox import DELAYS_S
from drover_collector.notify.routes import RouteConfig, Target
from drover_collector.notify.telling import AGAIN_MS, Told, transition
from drover_collector.store import StoreError
from drover_proto.events import Incident, Severity, Wanted
from drover_proto.times import iso
from testbed.deciding import OPEN, fleet, incident
from testbed.outboxes import HOUR_MS, T0, Listener, Scene, fault, silence

AWAY, REFUSED = Delivery(False, "answered 500"), Delivery(False, "answered 400: invalid", permanent=True)
TO = Target()


def test_what_is_told_and_what_is_not() -> None:
    told = Told(Severity.WARNING, Wanted.WATCH, False)
    assert transition(fault(), None, TO) == "incident.opened"
    assert transition(fault(), None, None) is None, "by the routes, or for a silence"
    assert transition(fault(version=2), told, TO) is None
    assert transition(fault(severity=Severity.CRITICAL), told, TO) == "incident.changed"
    assert transition(fault(action=Wanted.DRAIN), told, TO) == "incident.changed"
    assert transition(fault(action=Wanted.DRAIN), replace(told, unsent="grouped"), TO) == "incident.opened"
    assert transition(fault(severity=Severity.INFO, action=Wanted.NONE), told, TO) is None
    assert transition(fault(closed_ms=5), told, TO) == "incident.closed"
    assert transition(fault(closed_ms=5), told, None) == "incident.closed", "whoever heard of the opening"
    assert transition(fault(closed_ms=5), replace(told, closed=True), TO) is None
    assert transition(fault(closed_ms=5), None, TO) is None, "it was never told of: nothing to take back"
    assert transition(fault(version=3), replace(told, closed=True), TO) == "incident.opened"


@pytest.mark.parametrize(("at_ms", "kind"), [(HOUR_MS - 1, None), (HOUR_MS, "incident.repeated")])
def test_what_is_told_again(at_ms: int, kind: str | None) -> None:
    told = Told(Severity.WARNING, Wanted.WATCH, False)
    assert transition(fault(), told, Target(HOUR_MS), now_ms=at_ms) == kind
    assert transition(fault(), told, TO, now_ms=at_ms) is None
    assert transition(fault(), replace(told, unsent="grouped"), Target(HOUR_MS), now_ms=at_ms) is None


def test_an_invalid_request_is_given_up_at_once_and_its_end_is_not_told() -> None:
    ops, other = Listener("ops"), Listener("other")
    ops.answer = REFUSED
    scene = Scene(ops, other)
    scene.tell(fault())
    assert ops.tries == 1
    assert {r.notifier: (r.state, r.detail) for r in scene.store.rows.values()}["ops"] == (
        "failed", "given up: answered 400: invalid",
    )  # fmt: skip
    ops.answer = Delivery(True)
    scene.tell(fault(version=2, closed_ms=T0))
    assert (ops.heard(), other.heard()) == ([], ["opened", "closed"])


def test_an_end_that_waits_behind_an_opening_that_is_given_up_is_not_told() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = AWAY
    scene.tell(fault())
    scene.tell(fault(version=2, closed_ms=T0))
    ops.answer = REFUSED
    scene.wait(1)
    ops.answer = Delivery(True)
    scene.wait(60)
    assert ops.heard() == []
    assert scene.store.states() == [("opened", "failed"), ("closed", "grouped")]


def test_messages_of_one_moment_are_read_again_in_their_order() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.tell(fault())
    scene.tell(fault(version=10, severity=Severity.CRITICAL))  # its id sorts before the first one's
    scene.restart()
    assert ops.tries == 2


def test_an_end_is_tried_for_a_week_over_restarts_and_goes_at_once_when_the_receiver_is_back() -> None:
    listener = Listener()
    scene = Scene(listener)
    scene.tell(fault())
    listener.answer = Delivery(False, "answered 503")
    scene.tell(fault(version=2, closed_ms=T0 + 1))
    scene.open.clear()  # an hour later the engine has forgotten it
    scene.wait(5 * 60)
    assert scene.store.states() == [("opened", "delivered"), ("closed", "pending")]
    tries = listener.tries
    scene.restart()
    scene.wait(110)
    assert listener.tries <= tries + 1, "once in two hours"
    listener.answer = Delivery(True)
    scene.tell(fault("i2"))
    assert listener.heard() == ["opened", "opened", "closed"], "as soon as something else has arrived"
    listener.answer = Delivery(False, "answered 503")
    scene.tell(fault("i2", version=2, closed_ms=T0 + 1))
    scene.open.clear()
    scene.wait(8 * 24 * 60)
    assert scene.store.states()[-1] == ("closed", "failed"), "a week is enough"


def test_what_comes_back_does_not_wait_behind_an_end_that_nobody_takes() -> None:
    listener = Listener()
    scene = Scene(listener)
    scene.tell(fault())
    listener.answer = Delivery(False, "answered 503")
    scene.tell(fault(version=2, closed_ms=T0 + 1))
    scene.wait(4 * 60)
    listener.answer = Delivery(True)
    scene.tell(fault(version=3))
    assert listener.heard() == ["opened", "opened"]
    assert ("closed", "failed") in scene.store.states()


def killed_while_the_store_failed(path: Path, listener: Listener) -> Scene:
    """An incident was told from memory, and nothing else of it was kept."""
    scene = Scene(listener, unstored=path)
    scene.store.fails = True
    scene.outbox.enqueue_unstored([fault()])
    scene.run()
    assert listener.heard() == ["opened"]
    assert scene.outbox._unstored.wait(20)
    scene.store.fails = False
    return scene


def test_what_was_told_while_the_store_failed_and_is_found_under_another_id_is_ended(tmp_path: Path) -> None:
    listener = Listener()
    scene = killed_while_the_store_failed(tmp_path / "unstored", listener)
    scene.restart(known=[])
    scene.tell(fault("i2"))  # the same fault, as it is seen after the restart
    scene.wait(10)
    assert listener.heard("i1") == ["opened"], "it may be found again yet"
    scene.restart()
    scene.wait(20)
    assert listener.heard("i1") == ["opened", "closed"]
    assert listener.heard("i2") == ["opened"]
    (end,) = [body for body in listener.got.values() if body["type"] == "incident.closed"]
    assert end["data"]["closed"] == iso(T0 + 25 * 60_000)
    assert end["data"]["closed_because"].startswith("it was told while the store failed")
    assert scene.outbox._unstored.wait(20)
    assert not (tmp_path / "unstored").exists()
    scene.restart()
    scene.wait(60)
    assert listener.heard("i1") == ["opened", "closed"], "once"


def test_what_was_told_while_the_store_failed_and_is_known_again_goes_on(tmp_path: Path) -> None:
    listener = Listener()
    scene = killed_while_the_store_failed(tmp_path / "unstored", listener)
    scene.restart(known=[])
    scene.tell(fault(version=2))
    scene.wait(30)
    assert listener.heard() == ["opened"], "and it is not told again"
    scene.tell(fault(version=3, closed_ms=scene.now_ms))
    assert listener.heard() == ["opened", "closed"]


def test_a_file_of_what_was_told_that_is_not_ours_or_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text('{"id": 1}\nnonsense\n')
    scene = Scene(unstored=tmp_path / "broken")
    scene.tell(fault())
    nowhere = Scene(unstored=tmp_path / "no such folder" / "file")
    nowhere.store.fails = True
    nowhere.outbox.enqueue_unstored([fault()])
    nowhere.run()
    assert nowhere.outbox._unstored.wait(20)
    assert nowhere.listeners[0].heard() == ["opened"]


def test_what_was_given_up_is_told_hours_later_if_it_is_still_so() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = AWAY
    scene.tell(fault())
    scene.wait(sum(DELAYS_S) / 60 + 30)  # looked at every 5 minutes
    assert scene.store.states() == [("opened", "failed")]
    assert ops.tries == len(DELAYS_S) + 1
    ops.answer = Delivery(True)
    scene.restart()
    assert ops.heard() == []
    scene.wait(AGAIN_MS / 60_000)
    assert ops.heard() == ["opened"]
    scene.wait(600)
    assert ops.heard() == ["opened"]


@pytest.mark.parametrize(("asked_s", "waits_s"), [(40.0, 40.0), (1e9, MOST_ASKED_S), (1.0, 5.0), (float("nan"), 5.0)])
def test_a_receiver_may_ask_for_patience_within_bounds(asked_s: float, waits_s: float) -> None:
    scene = Scene()
    (ops,) = scene.listeners
    ops.answer = Delivery(False, "answered 429", retry_after_s=asked_s)
    scene.tell(fault())
    (row,) = scene.store.rows.values()
    assert row.next_ms - T0 == waits_s * 1000
    ops.answer = Delivery(True)
    scene.tell(fault("i2"))
    asked = asked_s > 0
    assert ops.heard("i2") == ([] if asked else ["opened"]), "it asked for nothing at all to be sent"
    scene.now_ms += round(waits_s * 1000)
    scene.run()
    assert sorted(ops.heard()) == ["opened", "opened"]


def test_an_open_incident_is_told_again_as_often_as_its_route_says() -> None:
    scene = Scene(routes=[RouteConfig(("ops",), repeat_h=4)])
    (ops,) = scene.listeners
    scene.tell(fault())
    scene.wait(3.9 * 60)
    assert ops.heard() == ["opened"]
    scene.wait(12)
    assert ops.heard() == ["opened", "repeated"]
    scene.restart()
    scene.wait(4 * 60)
    assert ops.heard() == ["opened", "repeated", "repeated"], "counted on from what is stored"
    scene.tell(fault(version=2, closed_ms=T0))
    scene.wait(600)
    assert ops.heard()[3:] == ["closed"]


def test_one_that_forgets_is_told_all_the_time_and_nothing_of_it_is_stored() -> None:
    manager = Listener("am", repeat_s=120)
    scene = Scene(manager)
    scene.tell(fault())
    scene.silences.take(silence(node=("n-i1",), minutes=10))
    scene.wait(30)
    assert manager.heard() == ["opened", *["repeated"] * 6], "or it would say that a silenced fault is over"
    manager.answer = AWAY
    scene.wait(30)
    manager.answer = Delivery(True)
    scene.restart()
    scene.wait(5)
    assert manager.heard()[7:] == ["repeated"]
    scene.tell(fault(version=2, closed_ms=T0))
    scene.wait(60)
    assert manager.heard()[8:] == ["closed"]
    assert scene.store.states() == [("opened", "delivered"), ("closed", "delivered")]


def test_news_goes_before_what_only_holds_still_and_one_that_is_away_is_asked_once() -> None:
    manager = Listener("am", repeat_s=120)
    scene = Scene(manager)
    scene.tell(*(fault(f"i{n}") for n in range(20)))
    scene.now_ms += 120_000
    scene.outbox.sweep(scene.open)
    scene.outbox.enqueue([fault("new")])
    assert scene.outbox.pending == {"am": 21}
    scene.outbox.step()
    assert manager.heard("new") == ["opened"]
    manager.answer = AWAY
    tries = manager.tries
    scene.run()
    assert (manager.tries - tries, scene.outbox.pending) == (1, {"am": 0})
    manager.answer = Delivery(True)
    scene.wait(5)
    assert manager.heard().count("repeated") == 20


def test_under_a_silence_nothing_is_told_and_afterwards_what_is_still_so() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.silences.take(silence(node=("n-i1", "n-i2")))
    scene.tell(fault("i1"), fault("i2"), fault("i3"))
    scene.tell(fault("i2", 2, closed_ms=T0))
    scene.wait(59)
    assert [ops.heard(name) for name in ("i1", "i2", "i3")] == [[], [], ["opened"]]
    scene.restart()
    scene.wait(10)
    assert [ops.heard(name) for name in ("i1", "i2", "i3")] == [["opened"], [], ["opened"]]


def test_a_silence_hides_news_and_no_end() -> None:
    scene = Scene()
    (ops,) = scene.listeners
    scene.tell(fault("i1"), fault("i2"))
    scene.silences.take(silence(node=("n-i1", "n-i2")))
    scene.tell(fault("i1", 2, Severity.CRITICAL), fault("i2", 2, Severity.CRITICAL))
    scene.tell(fault("i2", 3, Severity.CRITICAL, closed_ms=T0))
    assert (ops.heard("i1"), ops.heard("i2")) == (["opened"], ["opened", "closed"])
    scene.silences.take(replace(silence(node=("n-i1", "n-i2")), until_ms=scene.now_ms, ended_by="bo"))
    scene.wait(1)
    assert ops.heard("i1") == ["opened", "changed"]


def test_who_was_told_hears_the_end_though_its_route_has_lost_it() -> None:
    routes = [RouteConfig(("chat",), severity=("warning",)), RouteConfig(("page",), severity=("critical",))]
    chat, page = Listener("chat"), Listener("page")
    scene = Scene(chat, page, routes=routes)
    scene.tell(fault())
    scene.tell(fault(version=2, severity=Severity.CRITICAL))
    scene.tell(fault(version=3, severity=Severity.CRITICAL, closed_ms=T0))
    assert (chat.heard(), page.heard()) == (["opened", "closed"], ["opened", "closed"])


def test_the_store_is_asked_once_for_all() -> None:
    scene = Scene(Listener("a"), Listener("b"))
    scene.tell(*(fault(f"i{n}") for n in range(50)))
    assert [len(asked) for asked in scene.store.asked] == [50]
    scene.tell(*(fault(f"i{n}", 2, Severity.CRITICAL) for n in range(50)))
    assert len(scene.store.asked) == 1, "and then known"


def test_a_store_that_fails_is_logged_once_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level("INFO", "drover_collector.notify.clerk")
    scene.store.fails = True
    for number in range(5):
        scene.outbox.enqueue_unstored([fault(f"i{number}")])
        scene.run()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    scene.store.fails = False
    scene.run()
    scene.outbox.step()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert [state for _, state in scene.store.states()] == ["delivered"] * 5


WAITING = [RouteConfig(("ops",), group_wait_s=30)]


def test_what_is_part_of_something_wider_before_its_time_is_told_with_that_alone() -> None:
    """Eight nodes of a rack fall silent one after the other: the engine opens each, then takes them into the rack's."""
    scene = Scene(routes=WAITING)
    (ops,) = scene.listeners
    nodes = [fault(f"i{n}") for n in range(8)]
    for node in nodes:
        scene.tell(node)
        scene.now_ms += 2000
    scene.tell(*(replace(node, version=2, closed_ms=scene.now_ms) for node in nodes), fault("rack"))
    scene.restart()
    scene.now_ms += 30_000
    scene.run()
    assert ops.heard() == ["opened"]
    assert ops.heard("rack") == ["opened"]
    assert {state for _, state in scene.store.states()} == {"grouped", "delivered"}


def test_an_opening_that_waits_goes_at_once_when_it_gets_worse_and_else_in_its_time() -> None:
    scene = Scene(routes=WAITING)
    (ops,) = scene.listeners
    scene.tell(fault("i1"), fault("i2"))
    scene.now_ms += 10_000
    assert (scene.outbox.pending, scene.outbox.oldest_s) == ({"ops": 2}, {"ops": 0}), "no receiver is late here"
    scene.tell(fault("i1", 2, Severity.CRITICAL))
    assert (ops.heard("i1"), ops.heard("i2")) == (["opened", "changed"], [])
    scene.now_ms += 20_000
    scene.run()
    scene.tell(fault("i2", 2, closed_ms=scene.now_ms))
    assert ops.heard("i2") == ["opened", "closed"]


def test_openings_that_wait_are_withdrawn_for_a_mass_event() -> None:
    scene = Scene(routes=WAITING)
    (ops,) = scene.listeners
    held = [replace(incident(node, at_ms=T0), id=node) for node in ("n000", "n001", "n002", "n003", "n004")]
    scene.tell(*held[:3])
    (event,) = Breaker(fleet(64)).note(held, T0 + 5000, replace(OPEN, mass_nodes=5))
    scene.tell(*held[3:], event)
    assert ops.heard(event.id) == ["opened"], "it waits for nothing itself"
    scene.now_ms += 60_000
    scene.run()
    assert [body["data"]["id"] for body in ops.got.values()] == [event.id]
    assert {state for kind, state in scene.store.states()} == {"grouped", "delivered"}
    over = [replace(one, version=2, closed_ms=scene.now_ms) for one in (*held, replace(event, version=1))]
    scene.tell(*over)
    assert ops.heard() == ["opened", "closed"]


def test_a_route_may_want_each_incident_of_a_mass_event() -> None:
    scene = Scene(routes=[RouteConfig(("ops",), group=False)])
    held = [replace(incident(node, at_ms=T0), id=node) for node in ("n000", "n001", "n002")]
    (event,) = Breaker(fleet(64)).note(held, T0, replace(OPEN, mass_nodes=3))
    scene.tell(*held, event)
    assert len(scene.listeners[0].got) == 4


NAMES = ("a", "b")
SEVERITIES = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
OK, PATIENCE = Delivery(True), Delivery(False, "answered 429", retry_after_s=120.0)
ON = st.sampled_from("aaab")  # most of what can go wrong goes wrong with one
STEPS = st.one_of(
    st.tuples(st.just("change"), ON, st.sampled_from((*SEVERITIES, *SEVERITIES[1:]))),
    st.tuples(st.just("close"), ON, st.none()),
    st.tuples(st.just("answer"), st.sampled_from((0, 0, 1)), st.sampled_from((OK, AWAY, AWAY, REFUSED, PATIENCE))),
    st.tuples(st.just("wait"), st.none(), st.sampled_from((1, 10, 100))),
    st.tuples(st.just("silence"), ON, st.sampled_from((3, 30, 300))),
    st.tuples(st.just("kill"), st.none(), st.none()),
    st.tuples(st.just("store"), st.none(), st.booleans()),
)
DOWN, UP = ("answer", 0, AWAY), ("answer", 0, OK)
OPENS, WORSE, CLOSES = ("change", "a", Severity.WARNING), ("change", "a", Severity.CRITICAL), ("close", "a", None)
KILL, FULL, ROOM = ("kill", None, None), ("store", None, True), ("store", None, False)


class History:
    """A scene that is led through steps as the pipeline would, and what became of each incident."""

    def __init__(self, routes: list[RouteConfig]) -> None:
        self.scene = Scene(Listener("all"), Listener("worst", Severity.CRITICAL), routes=routes)
        self.unsaved: list[Incident] = []
        self.lives = dict.fromkeys(NAMES, 0)

    def step(self, what: str, on: str | int | None, value: object) -> None:
        scene = self.scene
        if what == "change":
            assert isinstance(on, str) and isinstance(value, Severity)
            self._change(on, value)
        elif what == "close":
            last = scene.open.get(f"{on}{self.lives[str(on)]}")
            if last is not None and last.closed_ms is None:
                self._put(replace(last, version=last.version + 1, closed_ms=scene.now_ms))
                self.lives[str(on)] += 1
        elif what == "silence":
            assert isinstance(value, int)
            nodes = tuple(f"n-{on}{n}" for n in range(30))
            scene.silences.take(silence(f"s{scene.now_ms}", value, scene.now_ms, node=nodes))
        elif what == "wait":
            assert isinstance(value, int)
            self._wait(value)
        elif what == "kill" and not scene.store.fails:
            self.save()
            scene.restart()
        elif what == "answer":
            assert isinstance(on, int) and isinstance(value, Delivery)
            scene.listeners[on].answer = value
        elif what == "store":
            scene.store.fails = bool(value)
        self.save()
        scene.run()

    def _change(self, name: str, severity: Severity) -> None:
        id_ = f"{name}{self.lives[name]}"
        last = self.scene.open.get(id_)
        version = 1 if last is None else last.version + 1
        self._put(fault(id_, version, severity))

    def _put(self, incident: Incident) -> None:
        self.scene.open[incident.id] = incident
        self.unsaved.append(incident)
        if self.scene.store.fails:
            self.scene.outbox.enqueue_unstored([incident])

    def _wait(self, minutes: int) -> None:
        if self.scene.store.fails:
            self.scene.now_ms += minutes * 60_000
        else:
            self.save()
            self.scene.wait(minutes)

    def save(self) -> None:
        """What the pipeline does with what waits for the store: in order, until it fails."""
        while self.unsaved:
            try:
                self.scene.outbox.enqueue(self.unsaved[:1])
            except StoreError:
                return
            self.unsaved.pop(0)

    def end(self) -> None:
        """All is well again, for long enough."""
        self.scene.store.fails = False
        for listener in self.scene.listeners:
            listener.answer = Delivery(True)
        self.save()
        self.scene.run()
        self._wait(AGAIN_MS // 60_000 + 400)


@settings(max_examples=150)
@example([DOWN, OPENS, CLOSES, UP], 0)
@example([DOWN, OPENS, CLOSES, ("wait", None, 100), UP], 0)  # given up, and its end waits behind it
@example([DOWN, OPENS, ("answer", 0, REFUSED), ("wait", None, 1), UP, CLOSES], 0)
@example([DOWN, OPENS, WORSE, KILL, UP, CLOSES], 0)
@example([FULL, OPENS, WORSE, ROOM, KILL, CLOSES], 0)
@example([OPENS, ("silence", "a", 30), WORSE, KILL, ("wait", None, 100), CLOSES], 0)
@example([("answer", 0, REFUSED), OPENS, KILL, UP, CLOSES], 0)
@given(steps=st.lists(STEPS, max_size=25), wait_s=st.sampled_from([0, 0, 400]))
def test_each_receiver_hears_each_transition_once_in_order_and_nothing_is_lost(
    steps: list[tuple[str, str | int | None, object]], wait_s: int
) -> None:
    history = History([RouteConfig(("all", "worst"), group_wait_s=wait_s)])
    for step in steps:
        history.step(*step)
    history.end()
    ends_lost = {
        (r.incident_id, r.notifier) for r in history.scene.store.rows.values()
        if r.state == "failed" and '"incident.closed"' in r.payload_json
    }  # fmt: skip
    for known in history.scene.open.values():
        for listener in history.scene.listeners:
            heard = listener.heard(known.id)
            said = [b["data"]["severity"] for b in listener.got.values() if b["data"]["id"] == known.id]
            assert heard.count("opened") <= 1
            assert heard.count("closed") <= 1
            assert heard[:1] in ([], ["opened"]), "an opening comes first"
            assert "closed" not in heard[:-1], "and an end last"
            ranks = [SEVERITIES.index(Severity(word)) for word in said if word]
            news = ranks[:-1] if "closed" in heard else ranks
            assert news == sorted(set(news)), "each news once, and each is worse than the one before"
            rank, least = SEVERITIES.index(known.severity), SEVERITIES.index(listener.min_severity)
            if known.closed_ms is None:
                assert rank < least or (news and news[-1] >= rank), "how it stands is known in the end"
            elif heard:
                assert heard[-1] == "closed" or (known.id, listener.name) in ends_lost
