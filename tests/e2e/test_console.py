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

from drover_agent.simulation.faults import Fault, dump_faults
from drover_agent.simulation.fleet import build_fleet
from drover_dashboard.client import FleetClient
from drover_proto.events import Incident, from_json
from drover_proto.fleet import dump_toml
from testbed.browser import CHROMIUM, FLAGS
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

NODES = 16
SCREEN = {"width": 1440, "height": 900}
SHOTS = Path(__file__).resolve().parents[2] / "test-artifacts" / "console"
PAGE_MS = 30_000
SLOW, HOT, FLAPPING = ("r01n02", 3), ("r02n01", 5), "r01n05"
FAULTS = [
    Fault("memory", "row_remap_failure", "r02n03", 2, 5.0, None, 1.0),
    Fault("straggler", "power_cap", *SLOW, 5.0, None, 0.3),
    Fault("thermal", "cooling", *HOT, 5.0, None, 1.8, 10.0),
    Fault("link", "ib_flap", FLAPPING, None, 5.0, None, 1.0),
]
FOUND_S = 150.0
PHONE = {"width": 390, "height": 844}
# Streamlit asks for its own endpoints below the page's path first, then at the root.
EXPECTED_404 = re.compile(r"/[a-z]+/_stcore/(health|host-config)$")


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
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens", 60)
        yield Console(f"http://127.0.0.1:{port}", fleet, log)


@dataclass
class Browser:
    page: Any
    problems: list[str]

    def shot(self, name: str) -> None:
        self.page.screenshot(path=str(SHOTS / f"{name}.png"))


@pytest.fixture(params=["dark", "light"])
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    SHOTS.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        context = chromium.new_context(viewport=SCREEN, color_scheme=request.param, timezone_id="Europe/Berlin")
        page = context.new_page()
        page.set_default_timeout(PAGE_MS)
        page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
        page.on("console", lambda line: note(problems, line))
        page.on("requestfailed", lambda failed: failed_request(problems, failed))
        yield Browser(page, problems)
        chromium.close()


def failed_request(problems: list[str], failed: Any) -> None:
    """A request that the browser gave up because the page went elsewhere is no failure of anybody."""
    if failed.failure != "net::ERR_ABORTED":
        problems.append(f"request failed: {failed.url}: {failed.failure}")


def note(problems: list[str], line: Any) -> None:
    if line.type == "error" and not EXPECTED_404.search(line.location.get("url", "")):
        problems.append(f"{line.text} ({line.location.get('url')})")


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


def test_from_a_red_gpu_to_its_node_and_its_incident(console: Console, browser: Browser, request: Any) -> None:
    page, theme = browser.page, request.node.callspec.params["browser"]
    wanted = red_gpu(console)
    node, gpu = wanted.node, wanted.gpu

    page.goto(console.url)
    page.wait_for_function(
        "([node, gpu]) => window.__drover_fleet && window.__drover_fleet.cells()"
        ".some((c) => c.node === node && c.gpu === gpu && c.health === 'confirmed')",
        arg=[node, gpu],
    )
    page.get_by_text(wanted.summary).first.wait_for()
    cells = page.evaluate("window.__drover_fleet.cells()")
    assert len(cells) == NODES * 8
    assert all(0 < c["y"] < SCREEN["height"] and 0 < c["x"] < SCREEN["width"] for c in cells), "all above the fold"
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") <= SCREEN["height"]
    browser.shot(f"fleet-{theme}")

    cell = next(c for c in cells if c["node"] == node and c["gpu"] == gpu)
    page.mouse.move(cell["x"], cell["y"])
    page.get_by_text(f"{node} GPU {gpu}", exact=True).first.wait_for()
    page.mouse.click(cell["x"], cell["y"])
    page.wait_for_url(re.compile(rf"/node\?.*node={node}"))
    assert f"gpu={gpu}" in page.url
    page.locator("canvas").nth(5).wait_for()  # six charts
    assert page.locator("tr.selected").get_by_text(f"GPU {gpu}", exact=True).count() == 1
    browser.shot(f"node-{theme}")

    page.locator("tr.opens").get_by_text(wanted.summary).first.click()
    page.wait_for_url(re.compile(rf"/incidents\?.*id={wanted.id}"))
    page.get_by_text("What to do: ").wait_for()
    heading = page.locator(".st-key-summary_what").inner_text()
    assert heading.startswith(wanted.summary.split(":")[0])
    advice = page.locator(".st-key-todo_advice").bounding_box()
    assert advice["y"] + advice["height"] < SCREEN["height"], "what to do is on the first screen"
    page.get_by_text("Evidence").first.wait_for()
    browser.shot(f"incident-{theme}")

    assert not browser.problems
    assert "Traceback" not in console.log.read_text()


COMPONENTS = """[...document.querySelectorAll('*')].flatMap((e) =>
  e.shadowRoot ? [...e.shadowRoot.querySelectorAll('.rows, .chart')] : [])"""


def test_pages_refresh_in_place(console: Console, browser: Browser) -> None:
    """What is refreshed keeps its elements, so nothing flickers, and the page stays where it was scrolled to."""
    page = browser.page
    page.goto(f"{console.url}/node?node={red_gpu(console).node}")
    page.locator("canvas").nth(5).wait_for()
    page.get_by_text("Inventory").first.wait_for()
    marked = page.evaluate(f"{COMPONENTS}.map((e) => {{ e.dataset.kept = 'yes'; }}).length")
    assert marked > 8
    page.wait_for_function("document.querySelector('[data-testid=stMain]').scrollHeight >= innerHeight + 300")
    page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop = 300")
    before = page.get_by_text("last heard").first.inner_text()
    text = f"{COMPONENTS}.map((e) => e.textContent).find((t) => t.includes('last heard'))"
    page.wait_for_function(f"(before) => !({text}).includes(before)", arg=before)
    assert page.evaluate(f"{COMPONENTS}.filter((e) => e.dataset.kept).length") == marked
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop") == 300
    assert not browser.problems


def test_the_picture_by_a_metric(console: Console, browser: Browser, request: Any) -> None:
    page = browser.page
    page.goto(f"{console.url}/?color=gpu_temp_c")
    page.wait_for_function("window.__drover_fleet && window.__drover_fleet.colorBy === 'gpu_temp_c'")
    page.get_by_text("°C").first.wait_for()
    page.get_by_text("Held, idle").wait_for()  # the numbers above are there: nothing moves the picture any more
    cell = page.evaluate("window.__drover_fleet.cells().find((c) => c.health === 'healthy')")
    page.mouse.move(cell["x"], cell["y"])
    page.get_by_text(re.compile(r"Core temperature: .*°C")).wait_for()
    browser.shot(f"temperature-{request.node.callspec.params['browser']}")
    assert not browser.problems


def all_found(console: Console) -> None:
    wanted = {("straggler", SLOW[0]), ("thermal", HOT[0]), ("link", FLAPPING)}
    wait_until(lambda: {(i.kind, i.node) for i in opened(console.fleet)} >= wanted, "the faults are found", FOUND_S)


def test_which_gpu_slows_the_job_and_why(console: Console, browser: Browser, request: pytest.FixtureRequest) -> None:
    page, theme = browser.page, request.node.callspec.params["browser"]
    all_found(console)
    slow = next(i for i in opened(console.fleet) if (i.node, i.gpu) == SLOW and i.job)
    page.goto(f"{console.url}/job")
    first = page.locator("tbody tr").first
    first.get_by_text("HURT", exact=True).wait_for()
    browser.shot(f"jobs-{theme}")
    page.locator("tr.opens").get_by_text(slow.job, exact=True).first.click()
    page.wait_for_url(re.compile(rf"/job\?.*job={slow.job}"))
    clock = page.locator(".dots canvas").first
    clock.wait_for()
    assert f"{SLOW[0]} GPU {SLOW[1]}" in clock.get_attribute("aria-label")
    told = page.locator(".st-key-todo_slow").inner_text()
    assert told.startswith(f"GPU {SLOW[1]} of node {SLOW[0]}")
    assert "GPU-hours for it" in told
    page.locator("canvas").nth(10).wait_for()  # beside the dots, the slow GPU over time
    browser.shot(f"job-{theme}")

    page.set_viewport_size(PHONE)
    page.goto(f"{console.url}/job?job={slow.job}")
    page.locator(".dots canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    browser.shot(f"job-phone-{theme}")
    assert not browser.problems
    assert "Traceback" not in console.log.read_text()


def test_one_node_or_the_switch(console: Console, browser: Browser, request: pytest.FixtureRequest) -> None:
    page, theme = browser.page, request.node.callspec.params["browser"]
    all_found(console)
    page.goto(f"{console.url}/fabric")
    page.wait_for_url(re.compile(r"/fabric\?leaf=leaf01"))  # the worst one, without a click
    page.get_by_text(f"One of 16 nodes, not the switch: {FLAPPING}.").first.wait_for()
    cells = page.locator(".tile .cell")
    cells.first.wait_for()
    assert [cells.nth(at).get_attribute("class") for at in range(cells.count())].count("cell trouble") == 1
    page.locator("tbody tr").first.get_by_text(re.compile(rf"^{FLAPPING} mlx5_\d$")).wait_for()
    browser.shot(f"fabric-{theme}")
    page.goto(f"{console.url}/fabric?node={SLOW[0]}")
    page.get_by_text(f"NVLinks of {SLOW[0]}").wait_for()
    page.get_by_text("GPU 7", exact=True).first.wait_for()
    page.get_by_text("No bandwidth between its GPUs has been measured.").wait_for()
    browser.shot(f"fabric-node-{theme}")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert not browser.problems
    assert "Traceback" not in console.log.read_text()


def test_which_rack_runs_hot(console: Console, browser: Browser, request: pytest.FixtureRequest) -> None:
    page, theme = browser.page, request.node.callspec.params["browser"]
    all_found(console)
    page.goto(f"{console.url}/thermals?by=hottest")
    page.get_by_text("No rack gets hot air; poor cooling in r02.").wait_for()
    tiles = page.locator(".tile")
    tiles.nth(1).wait_for()
    assert [tiles.nth(at).locator(".name").inner_text() for at in range(tiles.count())] == ["r01", "r02"]
    tiles.nth(1).get_by_text(re.compile("poor")).wait_for()
    tiles.nth(1).click()
    page.wait_for_url(re.compile(r"/thermals\?by=hottest&rack=r02"))
    page.get_by_text("r02n08", exact=True).wait_for()
    browser.shot(f"thermals-{theme}")
    page.locator("tr.opens").get_by_text(f"{HOT[0]} GPU {HOT[1]}", exact=True).click()
    page.wait_for_url(re.compile(r"/incidents\?.*id="))
    page.get_by_text("What to do: ").wait_for()
    assert not browser.problems
    assert "Traceback" not in console.log.read_text()
