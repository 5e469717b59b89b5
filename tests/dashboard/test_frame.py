"""The frame of every page: what it gets, where search leads, and both in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest
import urllib3
from starlette.requests import Request

from drover_core.model.events import Audit, Incident, from_json
from drover_dashboard import clusters
from drover_dashboard.client import FleetClient
from drover_dashboard.clusters import Clusters
from drover_dashboard.pages import incident_rows
from drover_dashboard.server import auth_settings as people
from drover_dashboard.server import frame
from drover_dashboard.server.auth_settings import SignIn
from drover_proto import fleet_pb2 as pb
from testbed.browsing import barriers, chromium
from testbed.system_processes import free_port
from testbed.waiting import wait_until

MARKUP = '<img src=x onerror="window.owned=1"><b>b</b> :red[**x**]'


def asked(query: str = "") -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": query.encode()})


def answered(response: Any) -> Any:
    return json.loads(bytes(response.body))


def test_the_frame_has_cluster_mode_what_waits_and_what_is_open(shared: FleetClient, chosen) -> None:
    chosen.pending = 2
    found = answered(frame.frame(asked()))
    assert (found["cluster"], found["mode"], found["pending"]) == ("demo", "observe", 2)
    assert "Drover only watches" in found["mode_text"]
    assert found["health"] == {"healthy": 3, "confirmed": 1}
    assert [(one["id"], one["severity"], one["href"]) for one in found["opened"]] == [
        ("i1", "critical", "incidents?id=i1")
    ]
    assert "trouble" not in found
    assert found["judged"], "else an empty list does not mean that nothing is open"
    chosen.calls.clear()
    shared.status(), shared.incidents("open", limit=50)
    assert chosen.calls == [], "the Fleet page asks the same: one answer for both"


def test_what_a_colleague_acknowledged_is_listed_with_his_name_and_does_not_count(shared: FleetClient, chosen) -> None:
    (before,) = answered(frame.frame(asked()))["opened"]
    assert (before["handled"], before["calm"]) == ("", False)
    chosen.notes.append(Audit("a0", 1_800_000_000_000, "bo", "acknowledge", "i1", ""))
    shared._acted_ms = shared._now_ms()
    (after,) = answered(frame.frame(asked()))["opened"]
    assert (after["handled"], after["calm"]) == ("acknowledged by bo", True)


def test_what_opened_and_closed_unseen_is_in_the_frame(shared: FleetClient, chosen) -> None:
    now_ms = time.time_ns() // 1_000_000
    (known,) = incident_rows.parse(shared.incidents("open").value)
    over = replace(known, id="i0", opened_ms=now_ms - 600_000, closed_ms=now_ms - 60_000)
    chosen.over = [over, replace(over, id="old", opened_ms=now_ms - 30 * 86_400_000)]
    found = answered(frame.frame(asked()))
    assert [one["id"] for one in found["opened"]] == ["i1"]
    (one,) = found["over"]
    assert (one["id"], one["closed_ms"], one["href"]) == ("i0", now_ms - 60_000, "incidents?id=i0&state=all")
    asked_of = [request for request in chosen.asked_filters if request.state == "closed"]
    assert len(asked_of) == 1
    frame.frame(asked())
    assert [r for r in chosen.asked_filters if r.state == "closed"] == asked_of, "every 10 s, not with each look"


def test_a_collector_that_is_away_is_said_and_its_health_is_not(shared: FleetClient, chosen) -> None:
    frame.frame(asked())
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    shared._acted_ms = shared._now_ms()
    found = answered(frame.frame(asked()))
    assert "has not answered" in found["trouble_text"]
    assert (found["cluster"], found["health"]) == ("demo", {}), "old counts are no news"
    assert frame.search(asked("text=n2")).status_code == 503


def test_each_hit_leads_to_the_page_that_shows_it(shared: FleetClient) -> None:
    found = answered(frame.search(asked("text=N2")))
    led = {hit["kind"]: hit["href"] for hit in found["hits"]}
    assert led["node"] == "node?node=n2"
    assert led["gpu"] == "node?node=n2&gpu=1"
    assert led["incident"] == "incidents?id=i1&state=all"
    assert led["rack"] == "thermals?rack=r1"
    assert led["xid"] is led["a kind of a newer collector"] is None
    assert parse_qs(urlsplit(led["job"]).query)["job"][0].startswith("<script>"), "a name is quoted in an address"
    assert [hit["exact"] for hit in found["hits"]][:2] == [True, False]
    assert "lost for XID 79" in found["hits"][2]["name"]
    assert found["more"] is True


def test_the_page_of_all_clusters_finds_in_each_and_names_who_is_away(served: str, monkeypatch) -> None:
    several = Clusters([FleetClient(served, cluster="west"), FleetClient("127.0.0.1:9", cluster="east")])
    monkeypatch.setattr(clusters, "_shared", several)
    found = answered(frame.search(asked("text=n2")))
    assert "No answer from east" in found["trouble"]
    (node, *_) = found["hits"]
    assert node["href"] == "node?cluster=west&node=n2"
    assert node["detail"].startswith("cluster west: ")
    assert answered(frame.search(asked("text=wes")))["hits"][0]["href"] == "./?cluster=west"
    assert answered(frame.frame(asked())) == {"cluster": "all clusters", "pending": 0}
    assert frame.frame(asked("cluster=north")).status_code == 200, "as without one: the page asks which"


@pytest.mark.parametrize(("way", "asks"), [(SignIn(), True), (SignIn(header="X-User"), False)])
def test_a_name_is_asked_for_only_where_nobody_signs_in(
    way: SignIn, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people, "chosen", lambda: way)
    given = frame.given()
    assert given["asks_name"] is asks
    assert given["pages"][0] == {"path": "", "title": "Fleet"}


@pytest.fixture
def console(served: str, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The real console before a collector whose every text is MARKUP, and where two decisions wait."""
    monkeypatch.setattr(sys.modules[type(chosen).__module__], "HOSTILE", MARKUP)
    chosen.pending, port = 2, free_port()
    command = [sys.executable, "-m", "drover_dashboard.main", "--port", str(port), "--collector", served]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def up() -> bool:
        try:
            return (
                urllib3.request("GET", f"http://127.0.0.1:{port}/_stcore/health", timeout=10, retries=False).status
                == 200
            )
        except urllib3.exceptions.HTTPError:
            return False

    try:
        wait_until(up, "the console is up")
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(120)


def _opened_and_closed(chosen: Any) -> None:
    """After the last look."""
    known = from_json(Incident, chosen.ListIncidents(pb.ListIncidentsRequest(), None).incidents_json[0])
    now_ms = max(time.time_ns() // 1_000_000, known.opened_ms) + 1000
    chosen.over = [replace(known, id="i0", opened_ms=now_ms, closed_ms=now_ms + 1)]


@pytest.mark.system
def test_search_bell_and_preferences_by_keyboard(console: str, chosen: Any) -> None:
    with chromium() as browser:
        page = browser.new_context(timezone_id="Europe/Berlin", color_scheme="light").new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if request.url.endswith("/x") else None)
        page.goto(f"{console}/risk")
        page.get_by_role("heading", level=1, name="Risk").wait_for()
        page.locator(".waits", has_text="2 decisions wait").wait_for()
        assert page.locator(".cluster").inner_text() == "demo"
        assert page.locator(".mode").inner_text().lower() == "observe"
        page.wait_for_function("document.title === 'Risk · Drover'")

        page.keyboard.press("/")
        page.keyboard.type("N2")
        page.locator(".hit", has_text="n2 GPU 1").wait_for()
        assert "<img src=x" in page.locator("#hits").inner_text(), "markup is text"
        assert barriers(page) == []
        page.keyboard.press("ArrowDown")
        assert page.locator(".hit[aria-selected=true]").inner_text().startswith("n2 GPU 1")
        page.keyboard.press("Enter")
        page.wait_for_function("document.title === 'n2 · Drover'")
        assert page.url.endswith("/node?node=n2&gpu=1")
        page.get_by_role("heading", level=1, name="n2", exact=True).wait_for()
        page.go_back()
        page.wait_for_function("document.title === 'Risk · Drover'")

        page.keyboard.press("Control+k")
        page.keyboard.type("nothing")
        page.get_by_text('Nothing in the fleet is called "nothing"').wait_for()
        page.keyboard.press("Escape")
        assert page.locator(".count").inner_text() == "1"
        page.locator(".bell").press("Enter")
        page.locator("#news .news", has_text="n2 GPU 1 is lost").wait_for()
        page.keyboard.press("Escape")
        page.locator(".count").wait_for(state="hidden")

        page.locator(".gear").press("Enter")
        page.locator("#preferences [name=theme]").select_option("Dark")
        dark = "document.querySelector('.stApp') && getComputedStyle(document.querySelector('.stApp')).backgroundColor"
        page.wait_for_function(f"{dark} === 'rgb(16, 19, 23)'")
        page.goto(f"{console}/system")
        page.wait_for_function(f"{dark} === 'rgb(16, 19, 23)'")
        page.get_by_role("heading", level=1, name="System").wait_for()
        assert page.locator(".count").is_hidden(), "it was looked at"
        _opened_and_closed(chosen)
        page.locator(".count", has_text="1").wait_for(timeout=20_000)
        page.locator(".bell").press("Enter")
        page.locator("#news .news", has_text=re.compile("opened .*, over ")).wait_for()
        assert (page.evaluate("window.owned"), wrong) == (None, [])
