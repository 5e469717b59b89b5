"""remote_write at REST's listener: who may send, in what form, and how much at a time."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.auth.tls import ServerTls
from drover_collector.rest import server as rest_server
from drover_collector.rest.server import RestServer
from drover_collector.scrape.remote_write import MAX_BODY
from testbed.certificates import Files, Fleet
from testbed.rest_served import Rest, rest_served
from testbed.waiting import wait_until

PATH = "/api/v1/write"
HEADERS = {"content-type": "application/x-protobuf", "content-encoding": "snappy"}


class Taker:
    def __init__(self) -> None:
        self.answer, self.bodies, self.go_on = (204, ""), list[bytes](), threading.Event()
        self.go_on.set()

    def __call__(self, body: bytes) -> tuple[int, str]:
        self.bodies.append(body)
        self.go_on.wait(120)
        return self.answer


@pytest.fixture(scope="module")
def rest(store_root: Path) -> Iterator[Rest]:
    with rest_served(f"chdb://{store_root}?database=rest_writes") as served:
        yield served


@pytest.fixture
def taker(rest: Rest) -> Iterator[Taker]:
    taker, facts = Taker(), rest.parts.facts
    before = facts.parts
    facts.parts = replace(before, take_write=taker)
    yield taker
    facts.parts = before


def test_it_is_off_unless_it_is_asked_for(rest: Rest) -> None:
    assert rest.ask("POST", PATH, HEADERS, b"x").status == 404


def test_a_request_is_handed_on_and_its_answer_is_that_of_the_process(rest: Rest, taker: Taker) -> None:
    answer = rest.ask("POST", PATH, HEADERS, b"packed")
    assert (answer.status, answer.body, taker.bodies) == (204, b"", [b"packed"])
    taker.answer = 400, "the request is cut off"  # its sender drops it
    answer = rest.ask("POST", PATH, HEADERS, b"packed")
    assert (answer.status, answer.json["detail"]) == (400, "the request is cut off")
    taker.answer = 503, "busy"  # its sender tries again
    answer = rest.ask("POST", PATH, HEADERS, b"packed")
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize(
    ("verb", "headers", "status"),
    [
        ("GET", HEADERS, 405),
        ("POST", {**HEADERS, "content-encoding": "gzip"}, 415),
        ("POST", {"content-type": HEADERS["content-type"]}, 415),
        ("POST", {**HEADERS, "content-type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}, 415),
        ("POST", {**HEADERS, "content-length": str(MAX_BODY + 1)}, 413),
        ("POST", {**HEADERS, "transfer-encoding": "chunked"}, 411),
        ("POST", {**HEADERS, "host": "evil.example.org"}, 403),
    ],
)
def test_another_form_is_refused_before_anything_is_read(
    rest: Rest, taker: Taker, verb: str, headers: dict[str, str], status: int
) -> None:
    assert rest.ask(verb, PATH, headers, b"").status == status
    assert not taker.bodies


def test_what_is_above_the_limit_of_requests_under_way_is_to_be_sent_again(rest: Rest, taker: Taker) -> None:
    taker.go_on.clear()
    most = rest_server.WRITES_EACH
    threads = [threading.Thread(target=rest.ask, args=("POST", PATH, HEADERS, b"x")) for _ in range(most)]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: len(taker.bodies) == most, "all are under way")
        answer = rest.ask("POST", PATH, HEADERS, b"x")
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")  # Prometheus drops at 429 by default
    finally:
        taker.go_on.set()
        for thread in threads:
            thread.join()


def test_a_certificate_of_the_role_writer_writes_and_does_nothing_else(
    rest: Rest, taker: Taker, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    ca, cert, key = fleet.issue("collector", "c1").paths
    server = RestServer(rest.api, rest.parts.facts, ("127.0.0.1", 0), ServerTls(ca, cert, key).context)

    def ask(who: Files, verb: str, path: str) -> int:
        context = ssl.create_default_context(cafile=str(ca))
        context.check_hostname = False
        context.load_cert_chain(who.paths[1], who.paths[2])
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=120, context=context)
        with contextlib.closing(connection):
            connection.request(verb, path, b"packed" if verb == "POST" else None, {**HEADERS, "host": "c1"})
            return connection.getresponse().status

    try:
        writer = fleet.issue("writer", "prometheus1")
        assert ask(writer, "POST", PATH) == 204
        assert ask(writer, "GET", "/api/v1/status") == 403
        for role, name in (("viewer", "v"), ("operator", "o"), ("admin", "a"), ("agent", "n1")):
            assert ask(fleet.issue(role, name), "POST", PATH) == 403
        assert taker.bodies == [b"packed"]
    finally:
        server.close()
