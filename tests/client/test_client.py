"""drover_client against REST on a real store; and what is made from the OpenAPI document is as it would be made now."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from drover_client import AsyncDrover, Drover, DroverError
from drover_client.stream import Parser
from drover_client.transport import pause_s, query
from drover_collector.rest.routes import ROUTES
from testbed.rest_served import Rest, rest_served

CLIENT = Path(__file__).parents[2] / "client"


@pytest.fixture(scope="module")
def rest(store_root: Path) -> Iterator[Rest]:
    with rest_served(f"chdb://{store_root}?database=client_{uuid.uuid4().hex}") as served:
        yield served


def test_what_is_generated_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CLIENT)
    import generate

    for name, text in generate.generate().items():
        kept = (CLIENT / "drover_client" / name).read_text("utf-8")
        assert ast.dump(ast.parse(kept)) == ast.dump(ast.parse(text)), "run python client/generate.py"
    del sys.modules["generate"]


def test_each_method_has_a_function_in_both_clients() -> None:
    for client, waits in ((Drover, False), (AsyncDrover, True)):
        for route in ROUTES:
            assert inspect.iscoroutinefunction(getattr(client, route.operation)) is waits


def test_the_client_needs_httpx_and_nothing_of_drover() -> None:
    text = "".join(path.read_text("utf-8") for path in (CLIENT / "drover_client").glob("*.py"))
    assert not [name for name in ("drover_core", "drover_proto", "drover_collector", "grpc") if f"import {name}" in text
                or f"from {name}" in text]  # fmt: skip


def test_it_reads_all_pages_and_acts_once(rest: Rest) -> None:
    with Drover(rest.url) as drover:
        assert drover.get_status()["fleet"] == "small"
        assert {node["name"] for node in drover.iterate_nodes()} == {"n0", "n1", "n2", "n3"}
        (incident,) = drover.iterate_incidents(min_severity="critical")
        assert drover.get_incident(incident["id"])["incident"] == incident
        until = datetime(2027, 1, 15, 8, 1, tzinfo=UTC)
        assert [event["code"] for event in drover.iterate_events(node="n1", to=until)] == ["79"]
        silence = drover.create_silence(hours=1, why="firmware", node=["n0"], idempotency_key="k")["silence"]
        assert drover.create_silence(hours=1, why="firmware", node=["n0"], idempotency_key="k")["silence"] == silence
        with pytest.raises(DroverError, match="no node 'zz'") as refused:
            drover.get_node("zz")
        assert (refused.value.status, refused.value.code) == (404, "not-found")
        event = next(drover.stream_incidents(min_severity="critical"))
        assert (event.kind, event.data["id"]) == ("incident", incident["id"])


def test_the_same_with_asyncio(rest: Rest) -> None:
    async def use() -> None:
        async with AsyncDrover(rest.url) as drover:
            assert len([node async for node in drover.iterate_nodes()]) == 4
            (incident,) = (await drover.list_incidents(min_severity="critical"))["incidents"]
            async for event in drover.stream_incidents(min_severity="critical"):
                assert event.data["id"] == incident["id"]
                break
            with pytest.raises(DroverError, match="only observes"):
                await drover.act_on_node("n1", act="drain", why="fan")

    asyncio.run(use())


def test_a_page_of_a_proxy_is_no_answer() -> None:
    drover = Drover("http://x")
    page = httpx.Response(200, text="<html>sign in</html>")
    drover._http = httpx.Client(base_url="http://x", transport=httpx.MockTransport(lambda _: page))
    with pytest.raises(DroverError, match="no answer of Drover: <html>"):
        drover.get_status()


@pytest.mark.parametrize(
    "broken", [httpx.ReadTimeout("silence"), httpx.ReadError("reset"), httpx.RemoteProtocolError("cut")]
)
def test_an_act_that_may_have_been_done_is_not_sent_again(
    broken: httpx.TransportError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that restarts forgets its keys, so it would act twice."""
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if len(keys) == 1:
            raise broken
        return httpx.Response(200, json={"state": "done"})

    monkeypatch.setattr("time.sleep", lambda _: None)
    drover = Drover("http://x")
    drover._http = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
    with pytest.raises(DroverError, match="it may have been done") as unknown:
        drover.act_on_node("n1", act="drain", why="fan")
    assert unknown.value.code == "outcome-unknown"
    assert len(keys) == 1 and keys[0] in unknown.value.detail


def test_an_act_that_was_put_off_or_never_sent_is_sent_again_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if len(keys) == 1:
            raise httpx.ConnectError("refused")
        if len(keys) == 2:
            return httpx.Response(503, json={"type": "urn:drover:unavailable", "detail": "not now"})
        return httpx.Response(200, json={"state": "done"})

    monkeypatch.setattr("time.sleep", lambda _: None)
    drover = Drover("http://x")
    drover._http = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
    assert drover.act_on_node("n1", act="drain", why="fan")["state"] == "done"
    assert len(keys) == 3 and len(set(keys)) == 1


def test_what_is_tried_again() -> None:
    assert pause_s(DroverError(503, "unavailable", "", 5.0), 0) == 5.0
    assert pause_s(DroverError(0, "no-answer", ""), 1) == 2.0
    assert pause_s(DroverError(504, "deadline-exceeded", ""), 0) is None
    assert pause_s(DroverError(503, "unavailable", ""), 3) is None


def test_parameters_and_events() -> None:
    assert query({"a": True, "b": None, "c": ["x", 1]}).multi_items() == [("a", "true"), ("c", "x"), ("c", "1")]
    with pytest.raises(ValueError, match="no zone"):
        query({"from": datetime(2027, 1, 1)})
    parser = Parser("")
    lines = [": beat", "id: 7-x-1", "event: incident", 'data: {"id":', 'data: "x"}', ""]
    found = [event for line in lines if (event := parser.line(line)) is not None]
    assert [(event.id, event.kind, event.data) for event in found] == [("7-x-1", "incident", {"id": "x"})]
