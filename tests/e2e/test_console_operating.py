"""System, Capacity and Risk in a real browser, and a drain and a resume by a person whom a proxy's header names.

Screenshots stay in test-artifacts/console/.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from drover_core.model.events import Audit, from_json
from drover_core.model.fleet import dump_toml
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from drover_simulator.fleet import build_fleet
from testbed.browsing import PAGE_MS, PHONE, SCREEN, SHOTS, Tab
from testbed.header_proxy import header_proxy
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

NODES = 8
OPERATOR, VIEWER = "alex@example.com", "kim@example.com"
SETTINGS = """[cost]
currency = "EUR"
gpu_hour = 2.5
[act]
mode = "approve"
validate = false
[act.command]
program = ["{python}", "{scheduler}", "{folder}"]
"""


class Console(NamedTuple):
    url: str
    stub: FleetStub
    node: str
    log: Path


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A fleet without faults whose collector acts through a command, and a console that believes a local proxy."""
    folder = tmp_path_factory.mktemp("operating")
    (folder / "scheduler").mkdir()
    scheduler = Path(__file__).resolve().parents[1] / "testbed" / "command_scheduler.py"
    settings = SETTINGS.format(python=sys.executable, scheduler=scheduler, folder=folder / "scheduler")
    spec, port = build_fleet(NODES, 7), free_port()
    with ExitStack() as stack:
        served = stack.enter_context(collector(folder, dump_toml(spec), settings))
        stack.enter_context(
            running(
                folder, "drover_agent.main", "fleet", "--collector", served.agents, "--faults", "none",
                "--fleet", str(folder / "fleet.toml"), "--spool-dir", str(folder / "spool"),
            )
        )  # fmt: skip
        log = stack.enter_context(
            running(
                folder, "drover_dashboard.main", "--collector", served.api, "--port", str(port),
                "--user-header", "X-User", "--trusted-proxy", "127.0.0.1", "--operator", OPERATOR,
            )
        )  # fmt: skip
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
        wait_until(lambda: bool(served.stub.GetStatus(pb.StatusRequest()).newest_tick_ms), "a bucket is judged")
        yield Console(f"http://127.0.0.1:{port}", served.stub, spec.nodes[0].name, log)


Open = Callable[..., Any]


@pytest.fixture
def browse(browser: Any) -> Iterator[Open]:
    """Opens pages as a person, in a theme and size; when the test ends none may have had an error."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []

    def note(line: Any) -> None:
        if line.type == "error":
            problems.append(f"{line.text} ({line.location.get('url', '')})")

    with contextlib.ExitStack() as stack:

        def opened(url: str, who: str, theme: str = "light", size: dict[str, int] = SCREEN) -> Any:
            parts = urlsplit(url)
            origin = f"http://{parts.netloc}"
            if who:
                origin = stack.enter_context(header_proxy(int(parts.port or 80), "X-User", who))
            context = browser.new_context(viewport=size, color_scheme=theme, timezone_id="Europe/Berlin")
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(PAGE_MS)
            if who:
                page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
                page.on("console", note)
            page.goto(origin + url.removeprefix(f"http://{parts.netloc}"))
            return page

        yield opened
    assert not problems


# What stands on each page once it is drawn.
DRAWN = {
    "": ("Fleet MFU",), "incidents": ("closed",), "node?node={node}": ("Hatched: absent",), "job": ("jobs hold",),
    "fabric": ("No leaf has trouble",), "thermals": ("Warmest inlet",), "probes": ("Ask for one",),
    "risk": ("A ranking, not a prophecy", "this ranking", "no ranking"),
    "capacity": ("GPUs of each pool, now", "2.5 EUR a GPU-hour", "Free GPUs under each leaf"),
    "capacity?show=ledger": ("held",), "silences": ("Maintenance windows",),
    "audit?by=Drover+too": ("in force from this start on",),
    "policy": ("Had it enforced",), "system": ("Connected now", "Detector", "Samples per second"),
}  # fmt: skip


def test_axe_finds_nothing_serious_on_any_page_and_a_phone_shows_all_of_it(console: Console, browse: Open) -> None:
    """Each page is drawn in the dark, where axe looks at contrasts alone, and turns light: all else is the same.

    (On 256 nodes with faults: tests/console.)
    """
    found = {}
    page = browse(console.url, OPERATOR, "dark")
    tab, origin = Tab(page), page.evaluate("location.origin")
    for address, drawn in DRAWN.items():
        page.emulate_media(color_scheme="dark")
        page.goto(f"{origin}/{address.format(node=console.node)}")
        for text in drawn:
            page.get_by_test_id("stMain").get_by_text(text).first.wait_for()
        page.get_by_text(f"Signed in as {OPERATOR}").wait_for()
        if wrong := tab.barriers():
            found[address] = wrong
        page.set_viewport_size(PHONE)
        page.wait_for_function(f"innerWidth === {PHONE['width']}")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], f"{address} is cut off"
        page.set_viewport_size(SCREEN)
    assert not found
    assert "Traceback" not in console.log.read_text()


def test_the_span_of_costs_is_in_the_address(console: Console, browse: Open) -> None:
    page = browse(f"{console.url}/capacity?span=30+days", VIEWER)
    page.get_by_text("GPU-hours that faults cost in the last 30 days").wait_for()
    page.get_by_text("1 day", exact=True).click()
    page.get_by_text("GPU-hours that faults cost in the last 1 day, by cause").wait_for()
    assert "span=1+day" in page.url


def test_a_viewer_has_no_button_and_nobody_gets_no_page(console: Console, browse: Open) -> None:
    page = browse(f"{console.url}/node?node={console.node}", VIEWER)
    page.get_by_text("last report").first.wait_for()
    page.get_by_text("(viewer: may look)").wait_for()
    assert page.get_by_role("button", name="Drain").count() == 0
    page = browse(console.url, "")
    page.get_by_text("This console is reached through its proxy only").wait_for()


def stage(console: Console) -> str:
    duties = console.stub.ListActions(pb.ActionsRequest(node=console.node), timeout=120).duties
    return duties[0].stage if duties else ""


def test_an_operator_drains_and_resumes_a_node_and_the_record_says_who(console: Console, browse: Open) -> None:
    page = browse(f"{console.url}/node?node={console.node}", OPERATOR)
    page.get_by_role("button", name="Drain ...").click()
    page.get_by_text("Jobs that run there").wait_for()
    page.get_by_placeholder(f"as {OPERATOR}").fill("fan replaced")
    page.screenshot(path=str(SHOTS / "node-drain-light.png"))
    page.get_by_role("button", name=f"Drain {console.node}").click()
    page.get_by_text(f"Drain {console.node}: done").wait_for()
    wait_until(lambda: stage(console) == "drained", "the node is drained")
    page.get_by_text("drained", exact=True).first.wait_for()

    resume = page.get_by_role("button", name="Resume ...")
    wait_until(lambda: resume.count() == 1, "the page is drawn again: until then the buttons of before stand there too")
    resume.click()
    page.get_by_placeholder(f"as {OPERATOR}").fill("runs again")
    page.get_by_role("button", name=f"Resume {console.node}").click()
    page.get_by_text(f"Resume {console.node}: done").wait_for()
    wait_until(lambda: stage(console) == "healthy", "the node is back")

    audit = console.stub.ListAudit(pb.AuditRequest(subject=console.node), timeout=120).audit_json
    lines = [from_json(Audit, text) for text in audit]
    assert [(a.what, a.why, a.by) for a in lines] == [
        ("resume", "runs again", f"{OPERATOR} (a local user)"),
        ("drain", "fan replaced", f"{OPERATOR} (a local user)"),
    ]
