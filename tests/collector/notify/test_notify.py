"""Webhooks and their outbox, against a real HTTP server and a real store."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from drover_collector.notify import (
    Outbox,
    OutboxOptions,
    Webhook,
    describe,
)
from drover_collector.notify import (
    delivery_worker as courier,
)
from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.outbox import DELAYS_S
from drover_collector.policy.circuit_breaker import Breaker
from drover_collector.store import OutboxRow, Store, StoreError
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.times import iso
from testbed.deciding import OPEN, fleet
from testbed.deciding import incident as fault

KEY = bytes(range(32))

INCIDENT = Incident(
    id="i1", kind=IncidentKind.XID, cause="xid_79", scope="gpu", node="r01n01", gpu=3, members=(("r01n01", 3),),
    opened_ms=1_700_000_000_000, since_ms=1_700_000_000_000, closed_ms=None, severity=Severity.WARNING,
    confidence=1.0, action=RecommendedAction.WATCH, summary="a GPU fell off the bus", advice="drain the node",
)  # fmt: skip


def version(number: int, **changes: object) -> Incident:
    return dataclasses.replace(INCIDENT, version=number, **changes)  # type: ignore[arg-type]  # any field


class Receiver:
    """An HTTP server that keeps what it gets and answers as set."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[int] = []  # statuses to give first; then 204
        self.location = ""
        self.hold = threading.Event()
        self.hold.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                receiver.hold.wait(120)
                self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
                if receiver.location:
                    self.send_header("location", receiver.location)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def types(self) -> list[str]:
        return [json.loads(body)["type"] for _, _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def webhook(url: str, name: str = "ops", timeout_s: float = 10, least: Severity = Severity.WARNING) -> Webhook:
    return Webhook(ReceiverOptions(name, least, timeout_s), url, KEY)


@pytest.fixture
def outboxes(store: Store) -> Iterator[Callable[..., Outbox]]:
    made: list[Outbox] = []

    def make(*webhooks: Webhook, delays_s: tuple[float, ...] = (0.01,) * 7) -> Outbox:
        outbox = Outbox(store, webhooks, "http://console/", OutboxOptions(delays_s=delays_s))
        made.append(outbox)
        outbox.start()
        return outbox

    yield make
    for outbox in made:
        outbox.stop()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"not within 300 s: {what}"
        time.sleep(0.005)


def states(store: Store) -> list[tuple[str, int]]:
    return [(row.state, row.attempts) for row in store.outbox.of_incidents("i1")]


def test_a_message_carries_a_signature_that_the_receiver_can_verify(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    outboxes(webhook(receiver.url)).enqueue([INCIDENT])
    until(lambda: states(store) == [("delivered", 1)], "delivered")
    ((path, headers, body),) = receiver.got
    assert path == "/hook"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 600
    payload = json.loads(body)
    assert payload["type"] == "incident.opened"
    assert payload["data"]["id"] == "i1"
    assert payload["data"]["opened"] == iso(INCIDENT.opened_ms)
    assert payload["data"]["console"] == "http://console/incidents?id=i1"


def test_each_step_of_an_incident_is_sent_once_and_in_order(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    outbox = outboxes(webhook(receiver.url))
    for incident in (
        INCIDENT,
        version(2),
        version(3, severity=Severity.CRITICAL, action=RecommendedAction.DRAIN),
        version(4),
        version(5, closed_ms=1_700_000_100_000),
    ):
        outbox.enqueue([incident])
        outbox.enqueue([incident])
    until(lambda: states(store) == [("delivered", 1)] * 3, "three delivered")
    assert receiver.types == ["incident.opened", "incident.changed", "incident.closed"]


def test_a_clock_that_is_set_forward_makes_a_waiting_message_due(receiver: Receiver, store: Store) -> None:
    now_ms = int(time.time() * 1000)
    receiver.answers = [500]
    options = OutboxOptions(delays_s=(3600.0,))
    outbox = Outbox(store, [webhook(receiver.url)], "http://console/", options, now_ms=lambda: now_ms)
    outbox.start()
    outbox.enqueue([INCIDENT])
    until(lambda: states(store) == [("pending", 1)], "tried once")
    now_ms += 3_600_000
    until(lambda: states(store) == [("delivered", 2)], "tried again")
    outbox.stop()


def test_failures_are_tried_again_under_the_same_id(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    receiver.answers = [500, 503, 429]
    outbox = outboxes(webhook(receiver.url))
    outbox.enqueue([INCIDENT])
    until(lambda: states(store) == [("delivered", 4)], "delivered at the fourth try")
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1
    assert len({body for _, _, body in receiver.got}) == 1
    assert list(outbox.delivery.troubles.values()) == []


def test_a_receiver_that_never_takes_it_is_given_up(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    receiver.answers = [500] * 20
    outbox = outboxes(webhook(receiver.url))
    outbox.enqueue([INCIDENT])
    until(lambda: states(store) == [("failed", 8)], "given up after eight tries")
    (row,) = store.outbox.of_incidents("i1")
    assert describe(row) == "ops: incident.opened given up: answered 500"
    assert list(outbox.delivery.troubles.values()) == ["Webhook ops does not accept messages: answered 500."]
    assert outbox.delivery.pending == {"ops": 0}


def test_the_tries_span_about_an_hour() -> None:
    assert len(DELAYS_S) == 7
    assert 45 * 60 < sum(DELAYS_S) < 75 * 60
    assert list(DELAYS_S) == sorted(DELAYS_S)


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.answers = [302, 302]
    receiver.location = receiver.url + "/elsewhere"
    result = webhook(receiver.url).deliver("m1", b"{}", 0)
    assert not result.delivered
    assert "302, a redirect, which Drover does not follow" in result.detail
    assert [path for path, _, _ in receiver.got] == ["/hook"]


def test_a_receiver_that_hangs_is_left_after_its_timeout(receiver: Receiver) -> None:
    receiver.hold.clear()
    result = webhook(receiver.url, timeout_s=0.1).deliver("m1", b"{}", 0)
    assert (result.delivered, result.detail) == (False, "no answer within 0.1 s")


def test_nobody_listening_says_so_without_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = webhook(f"http://127.0.0.1:{port}/secret-path").deliver("m1", b"{}", 0)
    assert not result.delivered
    assert "cannot connect" in result.detail
    assert "secret-path" not in result.detail


def test_a_slow_receiver_delays_nobody_else(receiver: Receiver, outboxes: Callable[..., Outbox], store: Store) -> None:
    slow = Receiver()
    slow.hold.clear()
    try:
        outbox = outboxes(webhook(slow.url, "slow"), webhook(receiver.url, "quick"))
        outbox.enqueue([INCIDENT])
        until(lambda: bool(slow.got), "the slow one was asked")
        outbox.enqueue([version(2, severity=Severity.CRITICAL)])
        until(lambda: receiver.types == ["incident.opened", "incident.changed"], "the quick one has both")
        assert slow.types == ["incident.opened"]
    finally:
        slow.close()


def test_a_restart_delivers_what_waited_and_sends_nothing_twice(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    receiver.answers = [500]
    first = outboxes(webhook(receiver.url), delays_s=(0.5,) * 7)
    first.enqueue([INCIDENT])
    until(lambda: states(store) == [("pending", 1)], "one try failed")
    first.stop()
    second = outboxes(webhook(receiver.url))
    assert second.enqueue([INCIDENT]) == 0  # what a start reconciles: it knows from the outbox what was sent
    until(lambda: states(store) == [("delivered", 2)], "delivered after the restart")
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1
    assert second.enqueue([version(2, closed_ms=1_700_000_100_000)]) == 1


def test_a_message_that_was_never_written_is_written_at_the_next_start(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    store.incidents.write([INCIDENT])  # and then the collector was killed
    assert outboxes(webhook(receiver.url)).enqueue(store.incidents.newest("open")) == 1
    until(lambda: receiver.types == ["incident.opened"], "told")


def test_what_is_sent_from_memory_meanwhile_does_not_wait_again_in_the_store(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = outboxes(webhook(receiver.url))
    other, asked = dataclasses.replace(INCIDENT, id="i2"), store.outbox.of_incidents

    def hangs(*incidents: str) -> list[OutboxRow]:
        if "i2" in incidents:  # the store keeps us waiting, until judging has lost its patience
            outbox.enqueue_unstored([INCIDENT])
            until(lambda: [row.state for row in asked("i1")] == ["delivered"], "delivered, and noted")
        return asked(*incidents)

    with monkeypatch.context() as patched:
        patched.setattr(store.outbox, "of_incidents", hangs)
        assert outbox.enqueue([INCIDENT, other]) == 1
    until(lambda: len(receiver.got) == 2, "the other is sent")
    assert states(store) == [("delivered", 1)], "else it is sent again after a restart"


def test_a_moment_without_the_lease_only_delays_a_message(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "FENCED_S", 0.02)
    outbox = outboxes(webhook(receiver.url))
    lost = threading.Event()

    def fence() -> str:
        if threading.current_thread().name == "webhook-ops" and not lost.is_set():
            lost.set()
            raise StoreError("this collector is not the active one any more")
        return ""

    store.fence.use(fence)
    outbox.enqueue([INCIDENT])
    until(lost.is_set, "the lease is asked")
    until(lambda: states(store) == [("delivered", 1)], "delivered when it is back")


def test_a_second_start_leaves_one_courier(receiver: Receiver, outboxes: Callable[..., Outbox]) -> None:
    outboxes(webhook(receiver.url)).start()  # the rest of a start may fail, and is tried again
    assert [thread.name for thread in threading.enumerate()].count("webhook-ops") == 1


def test_messages_for_a_webhook_that_is_gone_are_given_up(outboxes: Callable[..., Outbox], store: Store) -> None:
    store.outbox.write(OutboxRow("m1", "i1", "old", '{"type": "incident.opened"}', 1, "pending", 0, 1, ""))
    outboxes()
    assert states(store) == [("failed", 0)]
    assert "receiver 'old' is no longer configured" in store.outbox.of_incidents("i1")[0].detail


def test_receivers_get_from_their_severity_on(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    outbox = outboxes(webhook(receiver.url, least=Severity.CRITICAL))
    assert outbox.enqueue([INCIDENT]) == 0
    assert outbox.enqueue([version(2, severity=Severity.CRITICAL)]) == 1
    until(lambda: receiver.types == ["incident.opened"], "sent when it became critical")


def mass(count: int, number: int = 1, closed_ms: int | None = None) -> Incident:
    """The guard's event of so many nodes with one cause, as the breaker makes it."""
    breaker = Breaker(fleet(600))
    nodes = [node.name for node in breaker.index.nodes[:count]]
    faults = [fault(node, "xid_79") for node in nodes]
    (event,) = breaker.note(faults, 1000, dataclasses.replace(OPEN, mass_nodes=5))
    return dataclasses.replace(event, id="mass", version=number, closed_ms=closed_ms)


def test_a_mass_event_is_one_page_for_all_that_it_holds(
    receiver: Receiver, outboxes: Callable[..., Outbox], store: Store
) -> None:
    """60 nodes: one page, also after a restart, and when they end; what else happens is sent as always."""
    held = [fault(f"n{n:03d}", "xid_79") for n in range(60)]
    other = fault("n599", "remap_failed")
    outbox = outboxes(webhook(receiver.url))
    outbox.enqueue([*held, other, mass(60)])
    until(lambda: len(receiver.got) == 2, "the event and the other")
    outbox.stop()
    again = outboxes(webhook(receiver.url))
    again.enqueue([mass(60), *(dataclasses.replace(i, version=2) for i in held)])
    over = [dataclasses.replace(i, version=3, closed_ms=5000) for i in held]
    again.enqueue([*over[:59], mass(60, 2, closed_ms=5000)])
    until(lambda: len(receiver.got) == 3, "the end of the event")
    payload = [json.loads(body) for _, _, body in receiver.got]
    assert [(t["type"], t["data"]["id"]) for t in payload if t["data"]["id"] != other.id] == [
        ("incident.opened", "mass"), ("incident.closed", "mass"),
    ]  # fmt: skip
    (line,) = [describe(row) for row in store.outbox.of_incidents(held[59].id)]
    assert line == "ops: incident.opened not sent: the message of mass event mass was sent instead"
    worse = dataclasses.replace(held[59], version=4, action=RecommendedAction.ISOLATE)
    assert again.enqueue([worse]) == 1, "the event is over: it stands for itself"
    until(lambda: len(receiver.got) == 4, "sent, for the first time")
    assert receiver.types[-1] == "incident.opened"


def test_a_mass_event_is_sent_again_when_it_has_doubled(receiver: Receiver, outboxes: Callable[..., Outbox]) -> None:
    outbox = outboxes(webhook(receiver.url))
    for number, count in enumerate((5, 9, 10, 19, 20), 1):
        outbox.enqueue([mass(count, number)])
    until(lambda: len(receiver.got) == 3, "5, 10 and 20")
    assert [len(json.loads(body)["data"]["members"]) for _, _, body in receiver.got] == [5, 10, 20]
    assert "20 of 600 nodes" in json.loads(receiver.got[-1][2])["data"]["summary"]
