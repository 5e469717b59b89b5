"""What is sent to receivers: openings that wait, mass events, and a property test of any history."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from drover_collector.notify import Delivery
from drover_collector.notify.routes import RouteConfig
from drover_collector.notify.state import AGAIN_MS
from drover_collector.policy.circuit_breaker import Breaker
from drover_collector.store import StoreError
from drover_core.model.events import Incident, Severity
from testbed.deciding import OPEN, fleet, incident
from testbed.outboxes import T0, Listener, Scene, fault, silence

AWAY, REFUSED = Delivery(False, "answered 500"), Delivery(False, "answered 400: invalid", permanent=True)


WAITING = [RouteConfig(("ops",), group_wait_s=30)]


def test_what_is_part_of_something_wider_before_its_time_is_sent_with_that_alone() -> None:
    """Eight nodes of a rack fall silent one after the other: the engine opens each, then takes them into the rack's."""
    scene = Scene(routes=WAITING)
    (ops,) = scene.listeners
    nodes = [fault(f"i{n}") for n in range(8)]
    for node in nodes:
        scene.report(node)
        scene.now_ms += 2000
    scene.report(*(replace(node, version=2, closed_ms=scene.now_ms) for node in nodes), fault("rack"))
    scene.restart()
    scene.now_ms += 30_000
    scene.run()
    assert ops.received() == ["opened"]
    assert ops.received("rack") == ["opened"]
    assert {state for _, state in scene.store.states()} == {"grouped", "delivered"}


def test_an_opening_that_waits_goes_at_once_when_it_gets_worse_and_else_in_its_time() -> None:
    scene = Scene(routes=WAITING)
    (ops,) = scene.listeners
    scene.report(fault("i1"), fault("i2"))
    scene.now_ms += 10_000
    assert (scene.outbox.delivery.pending, scene.outbox.delivery.oldest_s) == ({"ops": 2}, {"ops": 0}), (
        "no receiver is late here"
    )
    scene.report(fault("i1", 2, Severity.CRITICAL))
    assert (ops.received("i1"), ops.received("i2")) == (["opened", "changed"], [])
    scene.now_ms += 20_000
    scene.run()
    scene.report(fault("i2", 2, closed_ms=scene.now_ms))
    assert ops.received("i2") == ["opened", "closed"]


def test_openings_that_wait_are_withdrawn_for_a_mass_event() -> None:
    scene = Scene(routes=WAITING)
    (ops,) = scene.listeners
    held = [replace(incident(node, at_ms=T0), id=node) for node in ("n000", "n001", "n002", "n003", "n004")]
    scene.report(*held[:3])
    (event,) = Breaker(fleet(64)).note(held, T0 + 5000, replace(OPEN, mass_nodes=5))
    scene.report(*held[3:], event)
    assert ops.received(event.id) == ["opened"], "it waits for nothing itself"
    scene.now_ms += 60_000
    scene.run()
    assert [body["data"]["id"] for body in ops.got.values()] == [event.id]
    assert {state for kind, state in scene.store.states()} == {"grouped", "delivered"}
    over = [replace(one, version=2, closed_ms=scene.now_ms) for one in (*held, replace(event, version=1))]
    scene.report(*over)
    assert ops.received() == ["opened", "closed"]


def test_a_route_may_want_each_incident_of_a_mass_event() -> None:
    scene = Scene(routes=[RouteConfig(("ops",), group=False)])
    held = [replace(incident(node, at_ms=T0), id=node) for node in ("n000", "n001", "n002")]
    (event,) = Breaker(fleet(64)).note(held, T0, replace(OPEN, mass_nodes=3))
    scene.report(*held, event)
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


@example([DOWN, OPENS, CLOSES, UP], 0)
@example([DOWN, OPENS, CLOSES, ("wait", None, 100), UP], 0)  # given up, and its end waits behind it
@example([DOWN, OPENS, ("answer", 0, REFUSED), ("wait", None, 1), UP, CLOSES], 0)
@example([DOWN, OPENS, WORSE, KILL, UP, CLOSES], 0)
@example([FULL, OPENS, WORSE, ROOM, KILL, CLOSES], 0)
@example([OPENS, ("silence", "a", 30), WORSE, KILL, ("wait", None, 100), CLOSES], 0)
@example([("answer", 0, REFUSED), OPENS, KILL, UP, CLOSES], 0)
@example([OPENS, FULL, ("change", "b", Severity.INFO), OPENS, CLOSES], 0)  # its older versions are stored after its end
@given(steps=st.lists(STEPS, max_size=25), wait_s=st.sampled_from([0, 0, 400]))
def test_each_receiver_gets_each_transition_once_in_order_and_nothing_is_lost(
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
            received = listener.received(known.id)
            said = [b["data"]["severity"] for b in listener.got.values() if b["data"]["id"] == known.id]
            assert received.count("opened") <= 1
            assert received.count("closed") <= 1
            assert received[:1] in ([], ["opened"]), "an opening comes first"
            assert "closed" not in received[:-1], "and an end last"
            ranks = [SEVERITIES.index(Severity(word)) for word in said if word]
            news = ranks[:-1] if "closed" in received else ranks
            assert news == sorted(set(news)), "each news once, and each is worse than the one before"
            rank, least = SEVERITIES.index(known.severity), SEVERITIES.index(listener.min_severity)
            if known.closed_ms is None:
                assert rank < least or (news and news[-1] >= rank), "how it stands is known in the end"
            elif received:
                assert received[-1] == "closed" or (known.id, listener.name) in ends_lost
