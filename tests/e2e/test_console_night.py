"""What an on-call person does, in a real browser: silence an incident, see that, end it; look at one GPU of a node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import TimeoutError as BrowserTimeoutError

from drover_core.model.events import Incident, from_json
from drover_core.model.fleet import dump_toml
from drover_dashboard.client import FleetClient
from drover_simulator.faults import Fault, dump_faults
from drover_simulator.fleet import build_fleet
from testbed.browsing import REFRESHED_S, Tab, at_rest, lone_tab
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

FAULT = Fault("memory", "row_remap_failure", "r01n03", 2, 5.0, None, 1.0)
FOUND_S = 400.0


class Console(NamedTuple):
    url: str
    fleet: FleetClient


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder, port = tmp_path_factory.mktemp("silence"), free_port()
    (folder / "faults.json").write_text(dump_faults([FAULT]))
    with (
        collector(folder, dump_toml(build_fleet(8, 7))) as served,
        closing(FleetClient(served.api)) as fleet,
        running(
            folder, "drover_agent.main", "fleet", "--collector", served.agents, "--fleet", str(folder / "fleet.toml"),
            "--spool-dir", str(folder / "spool"), "--faults", str(folder / "faults.json"), "--interval", "3",
        ),
        running(folder, "drover_dashboard.main", "--collector", served.api, "--port", str(port)) as log,
    ):  # fmt: skip
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
        wait_until(lambda: bool(opened(fleet)), "an incident is open", FOUND_S)
        yield Console(f"http://127.0.0.1:{port}", fleet)
        assert "Traceback" not in log.read_text()


@pytest.fixture
def tab(console: Console, browser: Any) -> Iterator[Tab]:
    with lone_tab(browser, "light") as made:
        yield made


def opened(fleet: FleetClient) -> list[Incident]:
    found = fleet.incidents("open").value
    return [from_json(Incident, text) for text in found.incidents_json] if found else []


def test_a_silence_is_made_seen_hidden_and_ended(console: Console, tab: Tab) -> None:
    page, (incident,) = tab.page, opened(console.fleet)
    tab.goto(f"{console.url}/incidents?id={incident.id}")
    page.get_by_role("button", name="Silence", exact=False).first.click()
    page.get_by_label("Your name").fill("alex")
    page.get_by_label("Why").fill("part on Monday")
    page.get_by_role("button", name="Silence it").click()
    page.get_by_text("Silenced for 4 h by alex.").wait_for()
    page.get_by_role("button", name="Silence it").wait_for(state="hidden")  # its form has closed
    page.locator("td .badge.muted").get_by_text("silenced until").wait_for()  # the header
    page.get_by_text("Nobody is notified: it is silenced until").wait_for()
    page.locator("tr.muted .mark").get_by_text("by alex").wait_for()  # the list
    for path in ("", f"node?node={incident.node}"):
        tab.goto(f"{console.url}/{path}")
        page.locator("tr.muted .mark").get_by_text("by alex").wait_for()
    tab.goto(f"{console.url}/incidents?silenced=no")
    page.get_by_text("No open incident that is not silenced.").wait_for()
    at_rest(page)
    assert "id=" not in page.url, "nothing that the list has not stands next to it"
    tab.goto(f"{console.url}/system")
    page.get_by_text("part on Monday").wait_for()
    page.get_by_role("button", name="End a silence").click()
    page.get_by_label("Your name").fill("bo")
    page.get_by_label("Why").fill("part came")
    page.get_by_role("button", name="End it").click()
    page.get_by_text("No silence and no maintenance window").wait_for()
    tab.goto(f"{console.url}/incidents?id={incident.id}")
    page.get_by_role("button", name="Silence", exact=False).first.wait_for()
    assert page.get_by_text("silenced until").count() == 0
    assert not tab.problems


def choose(page: Any, label: str, text: str) -> None:
    """Type it and press Enter. A click on a list that is still being placed can hit nothing, and leaves it open."""
    box, option = page.get_by_role("combobox", name=label), page.get_by_role("option").get_by_text(text).first
    for _ in range(6):  # the page's refresh may come between two keys on a busy machine
        at_rest(page)
        box.fill(text)
        with contextlib.suppress(BrowserTimeoutError):
            option.wait_for(timeout=5_000)
            break
    option.wait_for()
    box.press("Enter")


def test_a_gpu_of_the_table_is_chosen_and_any_metric_is_charted(console: Console, tab: Tab) -> None:
    page = tab.page
    tab.goto(f"{console.url}/node?node=r01n03")
    row = page.locator("tr").filter(has=page.get_by_role("link", name="GPU 5", exact=True))
    row.get_by_text("limit 700 W").wait_for()  # its first values
    said = row.inner_text()
    for text in ("HBM ", " GB"):
        assert text in said, said
    row.get_by_role("link").click()
    page.wait_for_url("**/node?node=r01n03&gpu=5")
    page.locator("tr.selected").get_by_role("link", name="GPU 5").wait_for()
    page.get_by_text("band: peers of GPU 5").first.wait_for()

    choose(page, "One more chart", "HBM temperature")
    page.wait_for_url("**metric=memory_temp_c*")
    page.get_by_text("HBM temperature, °C").first.wait_for()  # and is drawn
    page.go_back()
    page.get_by_text("HBM temperature, °C").wait_for(state="detached")
    page.go_back()
    page.locator("tr.selected").wait_for(state="detached")
    assert not tab.problems


def test_a_time_is_typed_goes_along_and_two_gpus_are_compared(console: Console, tab: Tab) -> None:
    page = tab.page
    tab.goto(f"{console.url}/node?node=r01n03&gpu=5")
    page.get_by_text("band: peers of GPU 5").first.wait_for()
    picker = page.get_by_role("combobox", name="Time of the charts")
    for typed, said in (("36 h", "span=36+h"), ("yesterday", "open=")):
        choose(page, "Time of the charts", typed)
        page.wait_for_url(f"**{said}*")
    page.get_by_text("Not now: these charts end ").wait_for()
    assert " to " in picker.input_value()
    page.go_back()
    page.get_by_text("Not now: these charts end ").wait_for(state="detached")
    wait_until(lambda: picker.input_value() == "36 h", "Back shows the time of before", REFRESHED_S)
    choose(page, "Compare with", "r01n04")
    page.get_by_text("thick GPU 5, thin r01n04 GPU 5").first.wait_for()
    first, second = page.locator(".chart .u-over").nth(0), page.locator(".chart .u-over").nth(1)
    first.scroll_into_view_if_needed()
    first.hover()
    crosshair = second.locator(".u-cursor-x")
    crosshair.wait_for(state="visible")
    assert first.bounding_box()["width"] // 2 == pytest.approx(_left(crosshair), abs=3), "at the same time"
    page.get_by_role("button", name="critical").first.wait_for()  # the incident, in the strip above the charts
    page.get_by_role("link", name="Job", exact=True).first.click()
    page.locator("tr.opens a").first.click()
    page.wait_for_url("**/job?*span=36+h*")
    assert not tab.problems


def _left(line: Any) -> float:
    return float(line.evaluate("(e) => new DOMMatrix(getComputedStyle(e).transform).m41"))
