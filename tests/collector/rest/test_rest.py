"""REST on a real store: each answer as the OpenAPI document says, pages, filters, conditions, acts, limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from drover_collector.api.snapshot import RefusalError
from drover_collector.auth.tls import ServerTls
from drover_collector.rest import openapi, shapes
from drover_collector.rest.answers import page_of
from drover_collector.rest.idempotency import Acts
from drover_collector.rest.problems import ProblemError
from drover_collector.rest.requests import Cursor
from drover_collector.rest.routes import ROOT, ROUTES, STREAM, Paging, Route
from drover_collector.rest.server import RestServer
from drover_proto import fleet_pb2 as pb
from testbed.certificates import Files, Fleet
from testbed.fleet_served import NOW, T0
from testbed.rest_served import Rest, rest_served

DOCUMENT = openapi.document()
READS = [route for route in ROUTES if not route.acts]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
FORMATS = FormatChecker(())
FORMATS.checks("date-time")(lambda value: not isinstance(value, str) or TIME.fullmatch(value) is not None)
FROM, TO = "2027-01-15T08:00:00Z", "2027-01-15T08:01:00Z"
VALUES = {"node": "n1", "act": "drain", "scope": "gpu", "metrics": "gpu_temp_c", "targets": "n2/0", "from": FROM,
          "to": TO, "figure": "soak"}  # fmt: skip


@pytest.fixture(scope="module")
def rest(store_root: Path) -> Iterator[Rest]:
    with rest_served(f"chdb://{store_root}?database=rest_{uuid.uuid4().hex}") as served:
        yield served


def path_of(rest: Rest, route: Route) -> str:
    values = {"node": "n1", "id": rest.parts.incident.id, "job": "train"}
    query = "&".join(f"{name}={VALUES[name]}" for name in openapi.REQUIRED.get(route.method.name, ()) if name in VALUES)
    if route.method.name == "ListProbes":
        query = "node=n1"
    return route.path.format(**values) + (f"?{query}" if query else "")


def errors(schema: dict[str, Any], value: Any) -> list[str]:
    validator = Draft202012Validator({**schema, "components": DOCUMENT["components"]}, format_checker=FORMATS)
    return [f"{list(error.path)}: {error.message[:200]}" for error in validator.iter_errors(value)]


@pytest.mark.parametrize("route", READS, ids=lambda route: route.operation)
def test_each_answer_is_as_the_document_says(rest: Rest, route: Route) -> None:
    answer = rest.get(path_of(rest, route))
    assert answer.status == 200, answer.body
    schema = DOCUMENT["paths"][ROOT + route.path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert errors(schema, answer.json) == []


def test_the_schema_refuses_what_is_not_so(rest: Rest) -> None:
    schema = {"$ref": "#/components/schemas/Status"}
    status = rest.get("/status").json
    assert errors(schema, status) == []
    assert errors(schema, {**status, "nodes_expected": "4"}) and errors(schema, {"fleet": "small"})
    assert errors(schema, {**status, "time": "2027-01-15 08:00"})


def test_a_time_that_is_not_known_is_null_and_no_silent_node_is_healthy(rest: Rest) -> None:
    nodes = {node["name"]: node for node in rest.get("/nodes").json["nodes"]}
    assert (nodes["n3"]["last_seen"], nodes["n3"]["health"]) == (None, "unknown")
    assert nodes["n0"]["last_seen"] == "2027-01-15T08:00:59.000Z"
    assert shapes.time_text(10**18) is None  # of a clock that no calendar has


def test_packed_values_are_lists_and_nan_is_null(rest: Rest) -> None:
    series = rest.get(
        f"/series?scope=gpu&targets=n0/1&metrics=memory_temp_c&metrics=gpu_temp_c&from={FROM}&to={TO}"
    ).json
    found = {each["metric"]: each["values"] for each in series["series"]}
    assert set(found.get("memory_temp_c", [None])) == {None} and 62.0 in found["gpu_temp_c"]
    assert len(series["time"]) == len(found["gpu_temp_c"])
    message = pb.SeriesReply(ts_ms=b"", step_ms=1, series=[pb.Series(values=b"\0\0\xc0\x7f\0\0\x80\x3f")])
    assert shapes.to_plain(message)["series"][0]["values"] == [None, 1.0]


def test_pages_give_each_node_once(rest: Rest) -> None:
    seen, cursor = [], ""
    while cursor is not None:
        page = rest.get(f"/nodes?order=name&limit=1&cursor={cursor}").json
        seen += [node["name"] for node in page["nodes"]]
        cursor = page["next_cursor"]
    assert seen == ["n0", "n1", "n2", "n3"]


def test_a_page_begins_behind_the_item_before_it_also_when_that_has_moved_or_left() -> None:
    paging = Paging("nodes", ("name",), 100)
    reply = {"nodes": [{"name": name} for name in "xabcd"]}  # x came in front
    assert page_of(paging, reply, Cursor(2, "b"), 2)["nodes"] == [{"name": "c"}, {"name": "d"}]
    assert page_of(paging, reply, Cursor(2, "gone"), 2)["nodes"] == [{"name": "b"}, {"name": "c"}]
    assert page_of(paging, reply, Cursor(2, "b"), 2)["next_cursor"] is None


def test_filters(rest: Rest) -> None:
    assert rest.get("/incidents?min_severity=critical").json["total"] == 1
    assert rest.get("/incidents?node=n0").json["incidents"] == []
    assert [node["name"] for node in rest.get("/nodes?health=unknown").json["nodes"]] == ["n3"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/nodes?colour=red", 400, "there are health, contains"),
        ("/nodes?limit=0", 400, "from 1 to 1000"),
        ("/nodes?cursor=x", 400, "next_cursor"),
        ("/nodes?order=name&order=name", 400, "once"),
        ("/incidents?since=2027-01-15", 400, "such as 2026-11-21T06:17:00.250Z"),
        ("/incidents?min_severity=bad", 400, "info, warning, critical"),
        ("/nodes/zz", 404, "no node 'zz'"),
        ("/nope", 404, "openapi.json"),
        ("/series?scope=gpu&targets=n0/x&metrics=power_w", 400, "NODE/SLOT"),
        ("/annotations?from=1", 400, "give a time"),
        ("/nodes/%ff", 400, "UTF-8"),
    ],
)  # fmt: skip
def test_an_error_is_a_problem_that_says_what_to_do(rest: Rest, path: str, status: int, says: str) -> None:
    answer = rest.get(path)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")
    assert says in answer.json["detail"] and answer.json["status"] == status
    assert errors(openapi.PROBLEM, answer.json) == []


def test_what_is_known_is_not_sent_again(rest: Rest) -> None:
    first = rest.get("/layout")
    again = rest.get("/layout", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert rest.get("/layout", if_none_match='"other"').status == 200
    packed = rest.get("/openapi.json", accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip" and len(packed.body) < 40_000
    assert rest.get("/openapi.json", if_none_match=packed.headers["etag"]).status == 304
    assert rest.ask("HEAD", "/api/v1/layout").headers["etag"] == first.headers["etag"]


def test_the_document_is_served(rest: Rest) -> None:
    assert rest.get("/openapi.json").json == json.loads(json.dumps(DOCUMENT))


# ---- acts


def test_an_act_meets_the_same_guard_as_by_grpc_and_is_in_the_audit(rest: Rest) -> None:
    answer = rest.post("/nodes/n1/actions", {"act": "drain", "why": "fan"})
    assert answer.status == 409 and "only observes" in answer.json["detail"]
    audit = rest.get("/audit?subject=n1").json["audit"]
    assert [line["what"] for line in audit] == ["drain (refused)"]


def test_an_act_needs_a_key_and_is_done_once(rest: Rest) -> None:
    body = {"node": ["n0"], "hours": 1, "why": "firmware"}
    first = rest.post("/silences", body, "once")
    again = rest.post("/silences", body, "once")
    assert first.status == again.status == 200 and first.json == again.json
    assert again.headers["idempotency-replayed"] == "true" and "idempotency-replayed" not in first.headers
    assert len([s for s in rest.get("/silences").json["silences"] if s["why"] == "firmware"]) == 1
    assert rest.post("/silences", {**body, "hours": 2}, "once").status == 422
    other = rest.post("/silences", body, "other")
    assert other.status == 200 and "idempotency-replayed" not in other.headers
    ended = rest.post(f"/silences/{other.json['silence']['id']}/end", {"why": "done"})
    assert ended.status == 200 and TIME.fullmatch(ended.json["silence"]["until"])
    plain = {"content-type": "application/json"}
    without = rest.ask("POST", "/api/v1/silences", plain, json.dumps(body).encode())
    assert without.status == 400 and "Idempotency-Key" in without.json["detail"]


def test_a_page_of_a_browser_can_do_nothing(rest: Rest) -> None:
    body = json.dumps({"node": ["n0"], "hours": 1, "why": "x"}).encode()
    form = {"content-type": "text/plain", "idempotency-key": "form"}
    assert rest.ask("POST", "/api/v1/silences", form, body).status == 415
    assert rest.ask("GET", "/api/v1/status", {"host": "evil.example:80"}).status == 403
    assert rest.ask("OPTIONS", "/api/v1/silences").status == 405


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "not an object"), (b"{", "not JSON"), (b'{"hours": "1"}', "hours: give a number"),
        (b'{"hours": 1e999, "why": "x"}', "too large"), (b'{"node": "n0"}', "give a list"),
        (b'{"when": 1}', "there are node"), (b'{"gpu": [-1]}', "from 0 to"), (b"[" * 60_000, "not JSON"),
        (b'{"why": "\\ud800"}', "no text"), (b'{"from": 1}', "give a time"),
        (b'{"hours": NaN, "why": "x"}', "too large"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused(rest: Rest, body: bytes, says: str) -> None:
    answer = rest.ask("POST", "/api/v1/silences", {"content-type": "application/json", "idempotency-key": "w"}, body)
    assert answer.status == 400 and says in answer.json["detail"]


def test_a_refused_act_may_be_sent_again_with_its_key_and_one_that_failed_may_not() -> None:
    acts, begun = Acts(), list[Future[Any]]()

    def start() -> Future[Any]:
        begun.append(Future())
        return begun[-1]

    first, again = acts.once("anna", "k", b"1", start)
    assert (acts.once("anna", "k", b"1", start), again) == ((first, True), False)  # under way
    first.set_exception(RefusalError(grpc.StatusCode.FAILED_PRECONDITION, "not now"))
    second, again = acts.once("anna", "k", b"1", start)
    assert not again and second is not first
    second.set_exception(RuntimeError("it may have been done"))
    assert acts.once("anna", "k", b"1", start) == (second, True)
    acts.once("bert", "k", b"2", start)  # each caller has keys of their own
    with pytest.raises(ProblemError, match="another request"):
        acts.once("anna", "k", b"2", start)
    assert len(begun) == 3


# ---- the stream


def lines_of(rest: Rest, headers: dict[str, str], query: str = "", until: bytes = b"data:") -> tuple[Any, list[str]]:
    connection = http.client.HTTPConnection("127.0.0.1", rest.server.port, timeout=120)
    connection.request("GET", STREAM + query, headers=headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ConnectionRefusedError(response.read())
    lines = []
    while not lines or not lines[-1].startswith(until):
        lines.append(response.readline())
        assert lines[-1], "the stream has ended"
    return response, [line.decode().strip() for line in lines]


def test_a_stream_begins_with_open_incidents_and_sends_changes(rest: Rest) -> None:
    response, lines = lines_of(rest, {}, "?min_severity=critical")
    incident = rest.parts.incident
    sent = json.loads(lines[-1].removeprefix("data: "))
    assert errors({"$ref": "#/components/schemas/Incident"}, sent) == [] and sent["id"] == incident.id
    changed = replace(incident, version=incident.version + 1, updated_ms=NOW, summary="changed")
    pipeline, before = rest.parts.pipeline, rest.parts.pipeline.incidents
    pipeline.incidents = {**before, incident.id: changed}
    try:
        line = b""
        while not line.startswith(b"data:"):
            line = response.readline()
        assert json.loads(line.removeprefix(b"data: "))["summary"] == "changed"
    finally:
        pipeline.incidents = before
        response.close()


def test_a_stream_goes_on_behind_its_last_event(rest: Rest) -> None:
    incident = rest.parts.incident
    _, lines = lines_of(rest, {"last-event-id": f"{incident.updated_ms}-{incident.id}-1"})
    assert any(line.startswith("id: ") for line in lines)
    _, lines = lines_of(rest, {"last-event-id": f"{T0 - 30 * 86_400_000}-x-1"})
    assert "event: gap" in lines
    assert rest.get("/incidents/stream", last_event_id="nonsense").status == 400


def opened(rest: Rest) -> Any:
    """Open a stream, once the readers of earlier ones are known to have left."""
    deadline_s = time.monotonic() + 300
    while True:
        try:
            return lines_of(rest, {}, until=b"retry")[0]
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def test_streams_are_bounded_and_a_reader_that_leaves_frees_its_place(rest: Rest) -> None:
    held = [opened(rest) for _ in range(4)]
    answer = rest.get("/incidents/stream")
    assert answer.status == 429 and "retry-after" in answer.headers
    assert rest.get("/status").status == 200
    for response in held:
        response.close()
    opened(rest).close()


# ---- certificates


def test_the_role_of_the_certificate_decides_and_a_person_is_named_by_it(rest: Rest, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    ca, cert, key = fleet.issue("collector", "c1").paths
    tls = ServerTls(ca, cert, key)
    server = RestServer(rest.api, rest.parts.facts, ("127.0.0.1", 0), tls.context)

    def ask(who: Files | None, verb: str, path: str) -> tuple[int, str]:
        context = ssl.create_default_context(cafile=str(ca))
        context.check_hostname = False
        if who is not None:
            context.load_cert_chain(who.paths[1], who.paths[2])
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=120, context=context)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "idempotency-key": "tls", "host": "collector1"}
            body = json.dumps({"act": "drain", "why": "dust", "force": True}) if verb == "POST" else None
            connection.request(verb, f"{ROOT}{path}", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    act = "POST", "/nodes/n2/actions"
    try:
        assert ask(fleet.issue("viewer", "vera"), "GET", "/status")[0] == 200
        status, text = ask(fleet.issue("viewer", "vera"), *act)
        assert status == 403 and "drover://viewer/vera" in text and "operator" in text
        assert ask(fleet.issue("agent", "n1"), "GET", "/status")[0] == 403
        assert ask(fleet.issue("agent", "n1"), "GET", "/incidents/stream")[0] == 403
        assert ask(fleet.issue("agent", "n1"), "GET", "/openapi.json")[0] == 403
        status, text = ask(fleet.issue("operator", "olga"), *act)
        assert status == 403 and "admin" in text  # force is an admin's
        assert ask(fleet.issue("admin", "ada"), *act)[0] == 409
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(None, "GET", "/status")
    finally:
        server.close()
    assert rest.get("/audit?subject=n2").json["audit"][0]["by"] == "ada"


# ---- the page of recipes


PAGE = (Path(__file__).parents[3] / "docs/how-to/rest.md").read_text("utf-8")
RECIPES = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SAYS = ['"fleet":"small"', '"xid_79"', '"decisions":', "event: incident", '"name":"n3"', '"gpu_temp_c"', '"code":"79"',
        '"hindrance":', '"why":"new firmware"', "this collector only observes"]  # fmt: skip


def test_the_recipes_lead_where_they_say(rest: Rest) -> None:
    assert len(RECIPES) == len(SAYS) == 10
    paths = {"DROVER": f"{rest.url}/api/v1", "INCIDENT": rest.parts.incident.id[:6], "PATH": os.environ["PATH"]}
    for recipe, says in zip(RECIPES, SAYS, strict=True):
        stream = "incidents/stream" in recipe
        options = {"CURL_OPTIONS": "--max-time 2" if stream else "--max-time 30"}
        done = subprocess.run(["bash", "-c", recipe], env={**paths, **options}, capture_output=True, text=True)
        assert done.returncode == (28 if stream else 0), recipe + done.stderr  # 28: it lasts until it is ended
        assert says in done.stdout, recipe + done.stdout[:500]


# ---- hostile


RAW = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda path: b"GET /api/v1/" + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", st.binary(max_size=60)),
    st.builds(
        lambda route, query: f"GET {ROOT}{route.path}?{query} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(),
        st.sampled_from(READS),
        st.lists(
            st.builds(
                lambda name, value: f"{name}={value}",
                st.sampled_from(["limit", "cursor", "from", "to", "since", "node", "gpu", "peer", "contains", "state"]),
                st.sampled_from(["", "-1", "0", "99999999999999999999", "n1", "%00", "%F0%9F%92%A9", "1e9", FROM]),
            ),
            max_size=4,
        ).map("&".join),
    ),
)  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True)
@given(RAW)
def test_no_request_is_answered_with_a_fault_of_the_collector(rest: Rest, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", rest.server.port), timeout=120) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := connection.recv(65_536):
                answer += piece
        except ConnectionResetError:
            pass
    if answer.startswith(b"{"):  # a request of HTTP/0.9 has neither headers nor an answer with them
        assert json.loads(answer)["status"] < 500
    elif answer:
        assert re.match(rb"HTTP/1\.1 [234]", answer), (raw, answer[:200])


def test_a_body_that_is_too_large_is_refused_unread(rest: Rest) -> None:
    headers = {"content-type": "application/json", "idempotency-key": "x", "content-length": "70000"}
    assert rest.ask("POST", "/api/v1/silences", headers).status == 413


def test_a_time_or_a_duration_without_a_place_is_refused() -> None:
    with pytest.raises(TypeError, match="TIMES or DURATIONS"):
        shapes.public_name("eaten_ms")
