"""The console in a real browser against a live simulated fleet: from a red GPU to its node and on to its incident;
which GPU slows the job, one node or the switch, which rack runs hot.

One fleet for all: the tests that need faults which take a minute to be found come last. More, on 256 nodes:
tests/console.

Screenshots stay in test-artifacts/console/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drover_core.model.events import Incident, from_json
from drover_core.model.fleet import dump_toml
from drover_core.model.incident_title import incident_title
from drover_dashboard.client import FleetClient
from drover_dashboard.widgets import format as fmt
from drover_simulator.faults import Fault, dump_faults
from drover_simulator.fleet import build_fleet
from testbed import console_walks
from testbed.browsing import COMPONENTS, PHONE, SCREEN, Tab, at_rest, entries, lone_tab
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

NODES = 16
SLOW, HOT, FLAPPING = ("r01n02", 3), ("r02n01", 5), "r01n05"
FAULTS = [
    Fault("memory", "row_remap_failure", "r02n03", 2, 5.0, None, 1.0),
    Fault("straggler", "power_cap", *SLOW, 5.0, None, 0.3),
    Fault("thermal", "cooling", *HOT, 5.0, None, 1.8, 10.0),
    Fault("link", "ib_flap", FLAPPING, None, 5.0, None, 1.0),
]
FOUND_S = 400.0
STANDS = "window.__drover_fleet && !window.__drover_fleet.early"
BEGUN = (
    "window.__drover_early && performance.getEntriesByType('resource').some((e) => e.name.includes('/assets/fleet.js'))"
)
# Of each picture on the page its place, as if no notice stood above it, its size, and the colours of its cells.
PICTURES = """(() => {
  const above = document.querySelector(".st-key-above_fleet");
  const moved = above ? above.getBoundingClientRect().height - parseFloat(getComputedStyle(above).minHeight) : 0;
  return [...document.querySelectorAll("*")].filter((e) => e.shadowRoot?.querySelector(".fleet")).map((e) => {
    const canvas = e.shadowRoot.querySelector("canvas"), box = canvas.getBoundingClientRect();
    const [brush, cells] = [canvas.getContext("2d"), window.__drover_fleet.cells()];
    const colour = ({ x, y }) => [...brush.getImageData(x - box.x, y - box.y, 1, 1).data].join();
    const colours = cells.filter((c) => c.health === "healthy").slice(0, 3).map(colour);
    return [box.x, box.y - moved, box.width, box.height].map(Math.round).concat(colours);
  });
})()"""


@dataclass
class Console:
    url: str
    fleet: FleetClient
    log: Path


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A collector, a simulated fleet with faults, and the console, each a process of its own."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "faults.json").write_text(dump_faults(FAULTS))
    port = free_port()
    with (
        collector(folder, dump_toml(build_fleet(NODES, 7))) as served,
        closing(FleetClient(served.api)) as fleet,
        running(
            folder, "drover_agent.main", "fleet", "--collector", served.agents, "--fleet", str(folder / "fleet.toml"),
            "--spool-dir", str(folder / "spool"), "--faults", str(folder / "faults.json"), "--interval", "2",
        ),
        running(folder, "drover_dashboard.main", "--collector", served.api, "--port", str(port)) as log,
    ):  # fmt: skip
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
        yield Console(f"http://127.0.0.1:{port}", fleet, log)


@pytest.fixture
def tab(console: Console, browser: Any) -> Iterator[Tab]:
    """In the light; `shots` draws in the dark too. From the start in the dark: each page in test_console_operating."""
    with lone_tab(browser, "light") as made:
        yield made
    assert "Traceback" not in console.log.read_text()


def shots(tab: Tab, name: str) -> None:
    """The page in both themes. Neither may have an error in the browser's console."""
    for theme in ("dark", "light"):
        tab.theme(theme)
        tab.shot(f"{name}-{theme}")


def opened(fleet: FleetClient) -> list[Incident]:
    found = fleet.incidents("open").value
    return [from_json(Incident, text) for text in found.incidents_json] if found else []


def red_gpu(console: Console) -> Incident:
    """An open incident of one confirmed GPU."""

    def found() -> list[Incident]:
        return [
            i for i in opened(console.fleet)
            if i.gpu is not None and i.node and confirmed(console.fleet, i.node, i.gpu)
        ]  # fmt: skip

    wait_until(lambda: bool(found()), "a GPU with an open incident is confirmed", FOUND_S)
    return found()[0]


def confirmed(fleet: FleetClient, node: str, gpu: int) -> bool:
    detail = fleet.node(node).value
    return detail is not None and detail.gpus[gpu].health == "confirmed"


def test_from_a_red_gpu_to_its_node_and_its_incident(console: Console, tab: Tab) -> None:
    wanted = red_gpu(console)
    tab.page.goto(console.url)
    console_walks.red_gpu(tab, wanted, NODES * 8, "fleet-light")
    shots(tab, "node")
    console_walks.its_incident(tab, wanted)
    shots(tab, "incident")
    tab.page.goto(console.url)
    tab.page.wait_for_function(STANDS)
    shots(tab, "fleet")


def test_each_step_is_one_entry_of_the_history_and_says_what_it_shows(console: Console, browser: Any) -> None:
    """A GPU, a row, a tab, a button: one press of Back undoes it."""
    wanted = red_gpu(console)
    with lone_tab(browser, "light") as tab:
        page = tab.page
        tab.goto(console.url)
        steps = [(f"{console.url}/", "Fleet · Drover")]
        before = entries(page)[:-1]  # the blank page

        def at(address: str, title: str) -> None:
            page.wait_for_url(re.compile(address))
            page.wait_for_function("(title) => document.title === title", arg=title)
            at_rest(page)
            steps.append((page.url, title))
            assert entries(page) == [*before, *steps]

        page.wait_for_function(
            f"([node, gpu]) => {STANDS} && window.__drover_fleet.cells().some((c) => c.node === node && c.gpu === gpu)",
            arg=[wanted.node, wanted.gpu],
        )
        page.get_by_text("Held, idle").wait_for()  # the numbers above are there: nothing moves the picture any more
        cell = next(
            c
            for c in page.evaluate("window.__drover_fleet.cells()")
            if (c["node"], c["gpu"]) == (wanted.node, wanted.gpu)
        )
        page.mouse.click(cell["x"], cell["y"])
        at(rf"/node\?node={wanted.node}&gpu={wanted.gpu}$", f"{wanted.node} · Drover")
        page.locator("tr.opens a").get_by_text(incident_title(wanted)).first.click()
        at(r"/incidents\?id=\w+$", named(wanted))
        page.get_by_role("button", name=f"Open {wanted.node}").click()
        at(rf"/node\?node={wanted.node}", f"{wanted.node} · Drover")
        page.get_by_role("link", name="Incidents", exact=True).click()  # the worst one is shown without a click
        at(r"/incidents\?id=\w+$", named(opened(console.fleet)[0]))
        for address, title in reversed(steps[:-1]):
            page.go_back()
            page.wait_for_function("(title) => document.title === title", arg=title)
            at_rest(page)
            assert page.url == address
        assert page.locator("canvas").first.is_visible()
        page.go_forward()
        page.wait_for_function("(title) => document.title === title", arg=steps[1][1])
        assert page.url == steps[1][0]

        def worst_is_shown() -> bool:
            """Another incident may be the worst one by now, and an open page keeps its own."""
            tab.goto(f"{console.url}/incidents")
            at_rest(page)
            return bool(page.title() == named(opened(console.fleet)[0]))

        wait_until(worst_is_shown, "the worst one is shown", pause_s=1)
        assert [address.partition("?")[0] for address, _ in entries(page)][-2:] == [
            "about:blank",
            f"{console.url}/incidents",
        ]


def named(incident: Incident) -> str:
    """The title of its page, where it is of one node."""
    return f"{fmt.capital(fmt.cause(incident.cause))} {incident.node} · Drover"


def held_back(page: Any) -> list[Any]:
    """Streamlit begins when these are let go."""
    held: list[Any] = []
    page.route(re.compile(r"/static/js/index\.[^/]*\.js$"), lambda route: held.append(route))  # it marks what it calls
    return held


def let_go(held: list[Any]) -> None:
    for route in held:
        route.continue_()
    held.clear()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_picture_is_there_before_streamlit_and_is_taken_over(console: Console, browser: Any, theme: str) -> None:
    """Where the component will stand, to the pixel, and with what it will show."""
    with lone_tab(browser, theme) as tab:
        taken_over(console, tab, theme)


def taken_over(console: Console, tab: Tab, theme: str) -> None:
    page, held = tab.page, held_back(tab.page)
    page.goto(console.url, wait_until="commit")
    page.wait_for_function("window.__drover_fleet && window.__drover_fleet.early")
    early = page.evaluate(PICTURES)
    tab.shot(f"fleet-early-{theme}")
    assert held, "Streamlit's own script is asked for, and waited for"
    let_go(held)
    page.wait_for_function(STANDS)
    assert page.evaluate(PICTURES) == early
    assert len(early) == 1


def test_the_early_picture_is_of_use_where_there_is_one(console: Console, browser: Any) -> None:
    """A click opens a node. On a phone, where the list comes first, and in a frame of somebody else's there is none."""
    with lone_tab(browser, "light") as tab:
        page, held = tab.page, held_back(tab.page)
        page.goto(console.url, wait_until="commit")
        page.wait_for_function("window.__drover_fleet && window.__drover_fleet.early")
        cell = page.evaluate("window.__drover_fleet.cells()[9]")
        page.mouse.click(cell["x"], cell["y"])
        page.wait_for_url(re.compile(rf"/node\?node={cell['node']}&gpu={cell['gpu']}$"), wait_until="commit")
        for size, address in ((PHONE, console.url), (SCREEN, f"{console.url}/?embed=true")):
            held.clear()
            page.set_viewport_size(size)
            page.goto(address, wait_until="commit")
            page.wait_for_function(BEGUN)
            assert page.evaluate(PICTURES) == []
            let_go(held)
            page.wait_for_function(STANDS)


def test_pages_refresh_in_place(console: Console, tab: Tab) -> None:
    """What is refreshed keeps its elements, so nothing flickers, and the page stays where it was scrolled to."""
    page = tab.page
    page.goto(f"{console.url}/node?node={red_gpu(console).node}")
    page.locator("canvas").nth(5).wait_for()
    page.get_by_text("Inventory").first.wait_for()
    marked = page.evaluate(f"{COMPONENTS}.map((e) => {{ e.dataset.kept = 'yes'; }}).length")
    assert marked > 8
    page.wait_for_function("document.querySelector('[data-testid=stMain]').scrollHeight >= innerHeight + 300")
    page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop = 300")
    # The place of what is read, not the page's: a line that comes above, such as an incident, moves the latter alone.
    place = "window.__read.getBoundingClientRect().top"
    at_px = page.evaluate(f"window.__read = {COMPONENTS}.find((e) => e.getBoundingClientRect().top >= 0), {place}")
    before = page.get_by_text("last report").first.inner_text()
    text = f"{COMPONENTS}.map((e) => e.textContent).find((t) => t.includes('last report'))"
    page.wait_for_function(f"(before) => !({text}).includes(before)", arg=before)
    assert page.evaluate(f"{COMPONENTS}.filter((e) => e.dataset.kept).length") == marked
    assert page.evaluate(place) == pytest.approx(at_px, abs=1)


def test_the_picture_by_a_metric(console: Console, tab: Tab) -> None:
    page = tab.page
    page.goto(f"{console.url}/?color=gpu_temp_c")
    page.wait_for_function(f"{STANDS} && window.__drover_fleet.colorBy === 'gpu_temp_c'")
    page.get_by_text("°C").first.wait_for()
    page.get_by_text("Held, idle").wait_for()  # the numbers above are there: nothing moves the picture any more
    cell = page.evaluate("window.__drover_fleet.cells().find((c) => c.health === 'healthy')")
    page.mouse.move(cell["x"], cell["y"])
    page.get_by_text(re.compile(r"Core temperature: .*°C")).wait_for()
    shots(tab, "temperature")


def all_found(console: Console) -> None:
    wanted = {("straggler", SLOW[0]), ("thermal", HOT[0]), ("link", FLAPPING)}
    wait_until(lambda: {(i.kind, i.node) for i in opened(console.fleet)} >= wanted, "the faults are found", FOUND_S)


def test_which_gpu_slows_the_job_and_why(console: Console, tab: Tab) -> None:
    all_found(console)
    slow = next(i for i in opened(console.fleet) if (i.node, i.gpu) == SLOW and i.job)
    tab.page.goto(f"{console.url}/job")
    console_walks.slow_gpu(tab, slow)
    shots(tab, "job")
    tab.on_a_phone("job-light")


def test_one_node_or_the_switch(console: Console, tab: Tab) -> None:
    all_found(console)
    tab.page.goto(f"{console.url}/fabric")
    console_walks.one_node(tab, FLAPPING)
    shots(tab, "fabric")
    console_walks.links_of(tab, console.url, SLOW[0])
    shots(tab, "fabric-node")
    tab.on_a_phone("fabric-node-light")


def test_which_rack_runs_hot(console: Console, tab: Tab) -> None:
    all_found(console)
    page = tab.page
    page.goto(f"{console.url}/thermals?by=hottest")
    tiles = page.locator(".tile")
    tiles.nth(1).wait_for()
    assert [tiles.nth(at).locator(".name").inner_text() for at in range(tiles.count())] == ["r01", "r02"]
    shots(tab, "thermals")
    console_walks.hot_rack(tab, HOT)


def test_the_last_days_decided_again_by_each_preset(console: Console, tab: Tab) -> None:
    all_found(console)
    console_walks.decided_again(tab, console.url, "policy-backtest-light")
    shots(tab, "policy-backtest")
