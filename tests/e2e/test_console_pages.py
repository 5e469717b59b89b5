"""Jobs, fabric and heat in a real browser: which GPU slows the job, one node or the switch, which rack runs hot.

Screenshots stay in test-artifacts/console/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from drover_agent.simulation.faults import Fault, dump_faults
from drover_agent.simulation.fleet import build_fleet
from drover_dashboard.client import FleetClient
from drover_proto.fleet import dump_toml
from e2e.test_console import Browser, Console, browser, opened
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

__all__ = ["browser"]  # a fixture
pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

NODES = 16
SLOW, HOT, FLAPPING = ("r01n02", 3), ("r02n01", 5), "r01n05"
FAULTS = [
    Fault("straggler", "power_cap", *SLOW, 5.0, None, 0.3),
    Fault("thermal", "cooling", *HOT, 5.0, None, 1.8, 10.0),
    Fault("link", "ib_flap", FLAPPING, None, 5.0, None, 1.0),
]
FOUND_S = 150.0
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A console on a live fleet in which all three faults are found."""
    folder = tmp_path_factory.mktemp("console_pages")
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
        wanted = {("straggler", SLOW[0]), ("thermal", HOT[0]), ("link", FLAPPING)}
        wait_until(lambda: {(i.kind, i.node) for i in opened(fleet)} >= wanted, "the faults are found", FOUND_S)
        yield Console(f"http://127.0.0.1:{port}", fleet, log)


def test_which_gpu_slows_the_job_and_why(console: Console, browser: Browser, request: pytest.FixtureRequest) -> None:
    page, theme = browser.page, request.node.callspec.params["browser"]
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
