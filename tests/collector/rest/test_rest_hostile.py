"""REST and peers that are hostile, broken or slow: what is sent byte by byte, and acts that fail."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drover_collector.observability.metrics_server import HEAD_BYTES
from drover_collector.rest.answers import page_of
from drover_collector.rest.requests import Cursor
from drover_collector.rest.routes import Paging
from drover_collector.store import StoreError
from testbed.fleet_served import NOW
from testbed.rest_served import Rest, rest_served

HEAD = " HTTP/1.1\r\nhost: localhost\r\n"
ACT = f"POST /api/v1/silences{HEAD}content-type: application/json\r\nidempotency-key: raw\r\n"
BODY = '{"node": ["n0"], "hours": 1, "why": "raw"}'


@pytest.fixture(scope="module")
def rest(store_root: Path) -> Iterator[Rest]:
    with rest_served(f"chdb://{store_root}?database=rest_{uuid.uuid4().hex}") as served:
        yield served


def sent(rest: Rest, text: str) -> tuple[int, str]:
    """Send bytes, then end the sending. Return status and body of the answer."""
    with socket.create_connection(("127.0.0.1", rest.server.port), timeout=120) as connection:
        connection.sendall(text.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        (f"GET http://[x/api/v1/status{HEAD}\r\n", 400, "the address is none"),
        (f"{ACT}content-length: {len(BODY)}\r\ncontent-length: 2\r\n\r\n{BODY}", 400, "content-length came twice"),
        (f"GET /api/v1/status{HEAD}host: evil.example\r\n\r\n", 400, "host came twice"),
        (f"{ACT}content-length: {len(BODY) + 9}\r\n\r\n{BODY}", 400, "the body ended after"),
        (f"{ACT}idempotency-key: b\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}", 400, "idempotency-key came twice"),
    ],
)  # fmt: skip
def test_what_two_readers_may_read_differently_is_refused(rest: Rest, text: str, status: int, says: str) -> None:
    found, answer = sent(rest, text)
    assert found == status and says in answer
    assert rest.get("/silences").json["silences"] == []


def test_a_key_of_the_body_that_is_there_twice_is_refused(rest: Rest) -> None:
    body = b'{"act": "drain", "why": "x", "force": false, "force": true}'
    headers = {"content-type": "application/json", "idempotency-key": "twice"}
    answer = rest.ask("POST", "/api/v1/nodes/n1/actions", headers, body)
    assert answer.status == 400 and "'force' is there twice" in answer.json["detail"]


def test_headers_are_bounded_together(rest: Rest) -> None:
    line = "x" * 15_000
    few = "".join(f"a{n}: {line}\r\n" for n in range(3))
    assert sent(rest, f"GET /api/v1/status{HEAD}{few}\r\n")[0] == 200
    many = "".join(f"a{n}: {line}\r\n" for n in range(HEAD_BYTES // len(line) + 1))[:HEAD_BYTES]
    assert sent(rest, f"GET /api/v1/status{HEAD}{many}")[0] == 431


class Failing:
    """Instead of the API: each call ends with an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def submit(self, *_: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(self.error)
        return future


@pytest.mark.parametrize(
    ("error", "status"), [(TimeoutError(), 504), (ConnectionResetError("the store's"), 500), (StoreError("gone"), 503)]
)
def test_a_method_that_fails_is_answered_also_with_an_error_like_that_of_a_connection(
    rest: Rest, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    monkeypatch.setattr(rest.server._site, "api", Failing(error))
    assert rest.get("/status").status == status


def test_an_act_that_failed_is_not_to_be_repeated_with_its_key(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest.server._site, "api", Failing(StoreError("gone")))
    first = rest.post("/silences", json.loads(BODY), "failed")
    assert first.status == 503 and "retry-after" in first.headers
    again = rest.post("/silences", json.loads(BODY), "failed")
    assert again.status == 503 and "retry-after" not in again.headers
    assert "new Idempotency-Key" in again.json["detail"] and again.json["type"].endswith(":act-failed")


def test_pages_end_also_where_two_items_have_one_key() -> None:
    paging, seen, begin = Paging("jobs", ("job",), 100), [], None
    for _ in range(4):
        page = page_of(paging, {"jobs": [{"job": name} for name in "aab"]}, begin, 1)
        seen += [job["job"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        begin = Cursor.parse(page["next_cursor"], paging.most)
    assert seen == ["a", "a", "b"]


def test_a_stream_behind_an_id_of_the_future_begins_with_the_open_incidents(rest: Rest) -> None:
    head = f"GET /api/v1/incidents/stream{HEAD}last-event-id: {NOW + 10**9}-x-1\r\n\r\n"
    status, text = sent(rest, head)
    assert status == 200 and rest.parts.incident.id in text


def test_an_annotation_has_no_markup_of_the_fleet(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    incident, pipeline = rest.parts.incident, rest.parts.pipeline
    hostile = replace(incident, version=incident.version + 1, advice="<img src=x onerror=alert(1)>")
    monkeypatch.setattr(pipeline, "incidents", {incident.id: hostile})
    texts = [each["text"] for each in rest.get("/annotations?min_severity=critical").json]
    assert texts and all("<img" not in text and '<a href="' in text for text in texts)
