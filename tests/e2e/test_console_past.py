"""The past in a real browser: the map plays an incident by mouse and keyboard, the page follows, now leads back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drover_dashboard.widgets import moment
from testbed import past_fleet
from testbed.browsing import Tab, lone_tab
from testbed.system_processes import free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system


class Console(NamedTuple):
    url: str
    at: dict[str, int]


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder, api, port = tmp_path_factory.mktemp("past"), free_port(), free_port()
    at = past_fleet.moments(time.time_ns() // 1_000_000)
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    with (
        running(folder, "testbed.past_fleet", str(folder), str(api), env=os.environ | {"PYTHONPATH": path}),
        running(folder, "drover_dashboard.main", "--collector", f"127.0.0.1:{api}", "--port", str(port)) as log,
    ):
        wait_until(lambda: reachable("127.0.0.1", api) and reachable("127.0.0.1", port), "both listen")
        yield Console(f"http://127.0.0.1:{port}", at)
        assert "Traceback" not in log.read_text()


@pytest.fixture
def tab(console: Console, browser: Any) -> Iterator[Tab]:
    with lone_tab(browser, "light") as made:
        yield made


def health(tab: Tab) -> str:
    """Of the GPU that fell ill, as the map shows it."""
    find = f"(c) => c.node === '{past_fleet.SICK}' && c.gpu === {past_fleet.SLOT}"
    found: str = tab.page.evaluate(f"window.__drover_fleet.cells().find({find}).health")
    return found


def test_an_incident_is_played_on_the_map_and_now_leads_back(console: Console, tab: Tab) -> None:
    page = tab.page
    tab.goto(f"{console.url}/incidents?state=all&id={past_fleet.ID}")
    page.get_by_role("button", name="Play on the map").click()
    page.wait_for_url("**/?**play=**")
    page.wait_for_function("window.__drover_fleet?.past?.frames > 1")
    page.get_by_text("THE PAST:").wait_for()
    scrubber, play = page.get_by_role("slider"), page.get_by_role("button", name="Play", exact=True)
    scrubber.focus()
    page.keyboard.press("Home")
    page.wait_for_function("window.__drover_fleet.past.frame === 0")
    assert health(tab) == "healthy"
    play.press("Enter")
    page.wait_for_function("window.__drover_fleet.past.playing && window.__drover_fleet.past.frame > 1")
    page.get_by_role("button", name="Pause", exact=True).press("Enter")
    page.wait_for_function("!window.__drover_fleet.past.playing")
    scrubber.focus()
    page.keyboard.press("End")  # the page follows: the incident is over there
    page.get_by_text("No open incident then.").wait_for()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.get_by_text("Poor cooling").first.wait_for()
    assert health(tab) == "confirmed"
    assert not tab.barriers()
    page.get_by_role("button", name="Back to now").click()
    page.wait_for_function("!window.__drover_fleet.past")
    assert "at=" not in page.url
    assert health(tab) == "unknown", "nothing judges there now"


def test_a_moment_goes_along_and_the_node_shows_then(console: Console, tab: Tab) -> None:
    page = tab.page
    tab.goto(f"{console.url}/node?node={past_fleet.SICK}")
    page.get_by_text("THE PAST:").wait_for(state="detached")
    tab.goto(f"{console.url}/?at={moment.written(console.at['onset'] + 600_000)}")
    page.get_by_text("Poor cooling").first.click()
    page.wait_for_url("**/incidents?**at=**")
    page.get_by_role("button", name=f"Open {past_fleet.SICK}").click()
    page.wait_for_url("**/node?**at=**")
    page.get_by_text("88 °C").first.wait_for()
    assert not page.get_by_role("button", name="Drain").count()
