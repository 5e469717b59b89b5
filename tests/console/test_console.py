"""The console in a real browser against a live simulated fleet of 256 nodes with faults.

One fleet, one collector and one browser for all. Every page is opened from a link, looked at in both themes, by
axe-core and on a phone, and watched while it refreshes itself; then a person goes from page to page, while faults that
take a minute are found; then four pages stay open while the collector is slow, hangs, is killed, comes back and is one
version older (all pages: tests/dashboard/test_trouble.py). Screenshots stay in test-artifacts/console/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drover_core.model.events import Audit, from_json
from drover_proto import fleet_pb2 as pb
from testbed import console_walks, probed
from testbed.browsing import COMPONENTS, Browser, Tab, chromium, missing, until
from testbed.console import (
    FLAPPING,
    HOT,
    LINK,
    MEMORY,
    OPERATOR,
    RED,
    SLOW,
    STRAGGLER,
    THERMAL,
    VIEWER,
    Console,
    console,
)
from testbed.console_pages import PAGES
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

SAID_S, BACK_S = 60.0, 90.0  # until every page has said, and has seen to be over, what is wrong with the collector


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console")) as started:
        yield started


@pytest.fixture(scope="module")
def browser(live: Console) -> Iterator[Browser]:
    with chromium() as started:
        yield Browser(started, live.url)


@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_in_both_themes_for_a_screen_reader_and_on_a_phone(live: Console, browser: Browser, name: str) -> None:
    """It shows what its link names, its filter keeps the address, axe-core finds nothing serious, nothing is cut off
    on a phone, it refreshes in place, and neither the browser's console nor the server's log has an error."""
    look = PAGES[name]
    if name == "incidents":
        live.incident(MEMORY)
    tab = browser.open(look.link, OPERATOR)
    page = tab.page
    for text in look.seen:
        page.get_by_text(text).first.wait_for()
    page.get_by_text(f"Signed in as {OPERATOR} (operator: may act)").wait_for()
    assert not tab.barriers()
    tab.shot(name)
    tab.on_a_phone(name)
    if look.change:
        look.change(page)
        page.wait_for_url(re.compile(look.in_address))
        page.get_by_text(look.after).first.wait_for()
    tab.refreshes_in_place()
    tab.close()
    assert "Traceback" not in live.log.read_text()


def test_a_viewer_has_no_button_and_nobody_gets_no_page(live: Console, browser: Browser) -> None:
    tab = browser.open(f"node?node={SLOW[0]}", VIEWER)
    tab.page.get_by_text("last report").first.wait_for()
    tab.page.get_by_text("(viewer: may look)").wait_for()
    assert tab.page.get_by_role("button", name="Drain").count() == 0
    tab.close()
    tab = browser.open("", who="")
    tab.page.get_by_text("This console is reached through its proxy only").wait_for()
    tab.page.close()


def test_from_a_red_gpu_to_its_node_and_its_incident(live: Console, browser: Browser) -> None:
    node, gpu = RED
    wanted = live.incident(MEMORY)
    wait_until(lambda: live.confirmed(node, gpu), "the GPU is confirmed")
    tab = browser.open("", OPERATOR, theme="dark")
    console_walks.red_gpu(tab, wanted, len(live.nodes) * 8, "fleet-health")
    drawn_open(tab.page)
    console_walks.its_incident(tab, wanted)
    tab.close()


def drawn_open(page: Any) -> None:
    """All charts take the time that was drawn open in one of them, with its finer data, and go back together."""
    plots, back = page.locator(".u-over"), page.get_by_text("double-click: the whole time again")
    plots.first.scroll_into_view_if_needed()
    box = plots.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40, steps=4)
    page.mouse.up()
    back.nth(5).wait_for()
    assert re.search(r"open=\d+-\d+", page.url), "and can be sent"
    plots.nth(1).dblclick()
    back.first.wait_for(state="detached")


def test_the_value_of_a_gpu_in_the_picture(live: Console, browser: Browser) -> None:
    tab = browser.open("?color=gpu_temp_c", OPERATOR)
    page = tab.page
    page.wait_for_function(
        "window.__drover_fleet && !window.__drover_fleet.early && window.__drover_fleet.colorBy === 'gpu_temp_c'"
    )
    page.get_by_text("Held, idle").wait_for()
    cell = page.evaluate("window.__drover_fleet.cells().find((c) => c.health === 'healthy')")
    page.mouse.move(cell["x"], cell["y"])
    page.get_by_text(re.compile(r"Core temperature: .*°C")).wait_for()
    picture = page.locator(".fleet canvas")
    picture.press("n")  # to the next GPU that is not well, without a mouse
    page.locator(".tip").get_by_text(re.compile("confirmed|suspect")).wait_for()
    picture.press("ArrowDown")
    picture.press("Enter")
    page.wait_for_url(re.compile(r"/node\?.*gpu="))
    tab.close()


def test_probes_from_the_slow_gpu_to_its_node(live: Console, browser: Browser) -> None:
    first, second, third, fourth, *_, never = live.probed
    tab = browser.open("probes", OPERATOR)
    page = tab.page
    page.get_by_text("gemm_bf16, TFLOP/s", exact=True).first.wait_for()
    mark = page.locator("g.mark")
    mark.first.wait_for()
    assert mark.count() == 1, "what failed, and nothing else"
    page.get_by_text("no result").first.wait_for()
    page.locator("tr.opens a").get_by_text(f"{first} GPU {probed.SLOW}", exact=True).first.press("Enter")
    page.wait_for_url(re.compile(rf"/probes\?.*node={first}.*gpu={probed.SLOW}"))
    page.get_by_text("Between its GPUs, GB/s").first.wait_for()
    assert page.locator("g.mark").count() == 8, "the node's own GPUs"
    assert page.locator("td.pass").count() == 56
    page.locator("tr.opens a").get_by_text("hbm_copy", exact=True).first.click()
    page.wait_for_url(re.compile(rf"figure=hbm_copy.*node={first}|node={first}.*figure=hbm_copy"))

    page.goto(f"{live.url}/probes?node={second}&figure=p2p")
    page.locator("td.fail").first.wait_for()
    assert sorted(page.locator("td.fail").all_inner_texts())[0].startswith("! 18")
    assert page.locator("td.fail").count() == 2, "both ways of one link"
    page.goto(f"{live.url}/probes?node={fourth}&gpu={probed.SLOW}&figure=hbm_copy")
    page.get_by_text("what it gave before").first.wait_for()
    page.goto(f"{live.url}/node?node={third}")
    page.get_by_text("WRONG").first.scroll_into_view_if_needed()
    page.get_by_text("absent", exact=True).first.wait_for()
    page.goto(f"{live.url}/probes?node={never}")
    page.get_by_text(f"{never} was never probed.").first.wait_for()
    tab.close()


def test_which_gpu_slows_the_job_and_why(live: Console, browser: Browser) -> None:
    slow = live.incident(STRAGGLER)
    assert slow.job
    tab = browser.open("job", OPERATOR)
    console_walks.slow_gpu(tab, slow)
    assert not tab.barriers()
    tab.shot("job-one")
    tab.on_a_phone("job-one")
    tab.close()


def test_which_rack_runs_hot(live: Console, browser: Browser) -> None:
    live.incident(THERMAL)
    tab = browser.open("thermals?by=hottest", OPERATOR)
    console_walks.hot_rack(tab, HOT)
    tab.page.get_by_text("Timeline").first.wait_for()
    assert not tab.barriers()
    tab.close()


def test_an_operator_approves_a_drain_drains_another_node_and_gives_it_back(live: Console, browser: Browser) -> None:
    wanted = live.incident(MEMORY)
    tab = browser.open(f"incidents?id={wanted.id}", OPERATOR)
    page = tab.page
    page.get_by_text("Waits for a person").first.wait_for()
    assert not tab.barriers()
    tab.shot("incident-approve")
    page.get_by_placeholder(f"as {OPERATOR}").first.fill("replace the board")
    page.get_by_role("button", name="Approve").click()
    page.get_by_text(f"Approved by {OPERATOR}: drain").wait_for()
    wait_until(lambda: live.stage(RED[0]) == "drained", "the node is drained")

    node = live.nodes[100]
    page.goto(f"{live.url}/node?node={node}")
    page.get_by_role("button", name="Drain ...").click()
    page.get_by_text("Jobs that run there").wait_for()
    assert not tab.barriers()
    tab.shot("node-drain")
    page.get_by_placeholder(f"as {OPERATOR}").fill("fan replaced")
    page.get_by_role("button", name=f"Drain {node}").click()
    page.get_by_text(f"Drain {node}: done").wait_for()
    wait_until(lambda: live.stage(node) == "drained", "the node is drained")
    page.get_by_text("drained", exact=True).first.wait_for()
    resume = page.get_by_role("button", name="Resume ...")
    wait_until(lambda: resume.count() == 1, "the page is drawn again: until then the buttons of before stand there too")
    resume.click()
    page.get_by_placeholder(f"as {OPERATOR}").fill("runs again")
    page.get_by_role("button", name=f"Resume {node}").click()
    page.get_by_text(f"Resume {node}: done").wait_for()
    wait_until(lambda: live.stage(node) == "healthy", "the node is back")

    audit = live.served.stub.ListAudit(pb.AuditRequest(subject=node), timeout=120).audit_json
    lines = [from_json(Audit, text) for text in audit]
    assert [(a.what, a.why, a.by) for a in lines] == [
        ("resume", "runs again", f"{OPERATOR} (a local user)"),
        ("drain", "fan replaced", f"{OPERATOR} (a local user)"),
    ]
    tab.close()


def test_one_node_or_the_switch(live: Console, browser: Browser) -> None:
    live.incident(LINK)
    tab = browser.open("fabric", OPERATOR)
    console_walks.one_node(tab, FLAPPING)
    console_walks.links_of(tab, live.url, SLOW[0])
    assert not tab.barriers()
    tab.shot("fabric-node")
    tab.close()


STAY = {"fleet": "", "node": f"node?node={SLOW[0]}", "job": "job", "system": "system"}


@pytest.fixture(scope="module")
def tabs(browser: Browser) -> dict[str, Tab]:
    """Pages that stay open, by name."""
    opened = {name: browser.open(link, OPERATOR) for name, link in STAY.items()}
    until(opened, missing, SAID_S)
    return opened


def trouble(tab: Tab) -> str:
    """What the page says of trouble."""
    return " | ".join(tab.page.locator('[class*="st-key-trouble_"]').all_inner_texts())


def says(what: str, stale: bool) -> Callable[[Tab], str]:
    """It says so and since when, and still shows what it showed."""

    def lacks(tab: Tab) -> str:
        line = trouble(tab)
        if not re.search(rf"{what} since \d\d:\d\d:\d\d", line):
            return line or "nothing is said"
        if stale and "Shown is the last answer, of" not in line:
            return f"not marked stale: {line}"
        return "" if tab.page.evaluate(f"{COMPONENTS}.length") else "nothing is shown any more"

    return lacks


def away(tab: Tab) -> str:
    line = trouble(tab)
    return line if re.search("has not answered|has answered slowly|has not known a question of this page", line) else ""


def unharmed(tabs: dict[str, Tab]) -> None:
    assert not [problem for tab in tabs.values() for problem in tab.problems]


def test_a_slow_collector_is_said_and_forgotten(live: Console, tabs: dict[str, Tab]) -> None:
    live.way.delay_s = 2.2
    until(tabs, says("has answered slowly", stale=False), SAID_S)
    live.way.delay_s = 0.0
    until(tabs, away, BACK_S)
    unharmed(tabs)


def test_a_collector_that_hangs_leaves_the_last_picture(live: Console, tabs: dict[str, Tab]) -> None:
    live.way.delay_s = 20.0
    until(tabs, says("has not answered", stale=True), SAID_S)
    live.way.delay_s = 0.0
    until(tabs, away, BACK_S)
    unharmed(tabs)


def test_a_collector_that_is_killed_and_comes_back(live: Console, tabs: dict[str, Tab]) -> None:
    live.served.kill()
    until(tabs, says("has not answered", stale=True), SAID_S)
    tabs["system"].shot("system-stale")
    live.served.start()
    until(tabs, away, BACK_S)
    unharmed(tabs)


NEWER = {"job", "system"}  # pages whose question one version ago nobody knew


def test_a_collector_one_version_older(live: Console, tabs: dict[str, Tab]) -> None:
    """Pages that it cannot answer say so; all others show what it knows."""
    live.way.old = True
    newer = {name: tab for name, tab in tabs.items() if name in NEWER}
    until(newer, says("has not known a question of this page", stale=True), SAID_S)
    for tab in tabs.values():
        tab.ran.clear()
    until(tabs, missing, SAID_S)
    broken = [name for name, tab in tabs.items() if tab.page.locator('[data-testid="stException"]').count()]
    assert not broken
    said = {name: away(tab) for name, tab in tabs.items() if name not in NEWER}
    assert not any("has not" in line for line in said.values()), said  # a busy machine may answer slowly
    live.way.old = False
    until(tabs, away, BACK_S)
    unharmed(tabs)
    assert "Traceback" not in live.log.read_text()
