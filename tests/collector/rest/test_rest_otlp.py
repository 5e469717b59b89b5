"""OTLP/HTTP at REST's listener: who may send, and that each answer has the form of its request."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from drover_collector.auth.tls import ServerTls
from drover_collector.rest import server as rest_server
from drover_collector.rest.server import RestServer
from drover_collector.scrape.otlp_in import Answer, Form
from drover_collector.scrape.remote_write import MAX_BODY
from testbed.certificates import Files, Fleet
from testbed.rest_served import Rest, rest_served
from testbed.waiting import wait_until

PATH = "/v1/metrics"
HEADERS = {"content-type": "application/x-protobuf"}
JSON_HEADERS = {"content-type": "application/json"}


def message(status: bytes) -> str:
    """Return `message`, the field 2 of a google.rpc.Status (google/rpc/status.proto)."""
    if not status:
        return ""
    assert status[0] == 0x12
    size, at = (status[1], 2) if status[1] < 0x80 else (status[1] & 0x7F | status[2] << 7, 3)
    assert len(status) == at + size
    return status[at:].decode()


class Taker:
    def __init__(self) -> None:
        self.answer, self.got, self.go_on = Answer(200), list[tuple[Form, bytes]](), threading.Event()
        self.go_on.set()

    def __call__(self, form: Form, body: bytes) -> Answer:
        self.got.append((form, body))
        self.go_on.wait(120)
        return self.answer


@pytest.fixture(scope="module")
def rest(store_root: Path) -> Iterator[Rest]:
    with rest_served(f"chdb://{store_root}?database=rest_otlp") as served:
        yield served


@pytest.fixture
def taker(rest: Rest) -> Iterator[Taker]:
    taker, facts = Taker(), rest.parts.facts
    before = facts.parts
    facts.parts = replace(before, take_otlp=taker)
    yield taker
    facts.parts = before


def test_it_is_off_unless_it_is_asked_for(rest: Rest) -> None:
    assert rest.ask("POST", PATH, HEADERS, b"x").status == 404


def test_an_answer_has_the_form_of_its_request(rest: Rest, taker: Taker) -> None:
    taker.answer = Answer(200, "7 points too old", 300)
    plain = rest.ask("POST", PATH, HEADERS, b"p")
    partial = ExportMetricsServiceResponse.FromString(plain.body).partial_success
    assert (plain.status, plain.headers["content-type"]) == (200, HEADERS["content-type"])
    assert (partial.rejected_data_points, partial.error_message) == (300, "7 points too old")
    answer = rest.ask(
        "POST", PATH, {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "gzip"}, b"j"
    )
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == {"partialSuccess": {"rejectedDataPoints": "300", "errorMessage": "7 points too old"}}
    taker.answer = Answer(200, "none is used")  # a warning: nothing was rejected
    partial = ExportMetricsServiceResponse.FromString(rest.ask("POST", PATH, HEADERS, b"p").body).partial_success
    assert (partial.rejected_data_points, partial.error_message) == (0, "none is used")
    assert taker.got[:2] == [(Form(), b"p"), (Form(True, True), b"j")]


def test_a_success_leaves_partial_success_unset(rest: Rest, taker: Taker) -> None:
    assert rest.ask("POST", PATH, HEADERS, b"p").body == b""
    assert rest.ask("POST", PATH, JSON_HEADERS, b"j").json == {}


def test_a_failure_is_a_status_that_says_what_to_do(rest: Rest, taker: Taker) -> None:
    taker.answer = Answer(400, "the request is cut off")  # its sender drops it
    answer = rest.ask("POST", PATH, HEADERS, b"p")
    assert (answer.status, message(answer.body)) == (400, "the request is cut off")
    assert "retry-after" not in answer.headers
    taker.answer = Answer(503, "busy")  # its sender tries again
    answer = rest.ask("POST", PATH, JSON_HEADERS, b"j")
    assert (answer.status, answer.headers["retry-after"], answer.json) == (503, "5", {"message": "busy"})


@pytest.mark.parametrize(
    ("verb", "headers", "status"),
    [
        ("GET", HEADERS, 405),
        ("POST", {**HEADERS, "content-encoding": "zstd"}, 415),
        ("POST", {"content-type": "text/plain"}, 415),
        ("POST", {}, 415),
        ("POST", {**HEADERS, "content-length": str(MAX_BODY + 1)}, 413),
        ("POST", {**HEADERS, "transfer-encoding": "chunked"}, 411),
        ("POST", {**HEADERS, "host": "evil.example.org"}, 403),
    ],
)
def test_another_form_is_refused_before_anything_is_read(
    rest: Rest, taker: Taker, verb: str, headers: dict[str, str], status: int
) -> None:
    assert rest.ask(verb, PATH, headers, b"").status == status
    assert not taker.got


def test_what_is_above_the_limit_of_requests_under_way_is_to_be_sent_again(rest: Rest, taker: Taker) -> None:
    taker.go_on.clear()
    most = rest_server.WRITES_EACH
    threads = [threading.Thread(target=rest.ask, args=("POST", PATH, HEADERS, b"x")) for _ in range(most)]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: len(taker.got) == most, "all are under way")
        answer = rest.ask("POST", PATH, JSON_HEADERS, b"x")
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
        assert "under way" in json.loads(answer.body)["message"]
    finally:
        taker.go_on.set()
        for thread in threads:
            thread.join()


def test_a_certificate_of_the_role_writer_sends_and_no_other(rest: Rest, taker: Taker, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    ca, cert, key = fleet.issue("collector", "c1").paths
    server = RestServer(rest.api, rest.parts.facts, ("127.0.0.1", 0), ServerTls(ca, cert, key).context)

    def ask(who: Files) -> tuple[int, str]:
        context = ssl.create_default_context(cafile=str(ca))
        context.check_hostname = False
        context.load_cert_chain(who.paths[1], who.paths[2])
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=120, context=context)
        with contextlib.closing(connection):
            connection.request("POST", PATH, b"p", {**HEADERS, "host": "c1"})
            response = connection.getresponse()
            return response.status, message(response.read())

    try:
        assert ask(fleet.issue("writer", "otelcol1")) == (200, "")
        for role, name in (("viewer", "v"), ("admin", "a"), ("agent", "n1")):
            status, why = ask(fleet.issue(role, name))
            assert (status, "writer" in why) == (403, True)
        assert len(taker.got) == 1
    finally:
        server.close()
