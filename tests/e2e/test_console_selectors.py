"""Every selector of every page of the console in a real browser: each choice is obeyed, stands in the address, and is
one step back.

The selectors are found on the pages themselves, so that a new one is tried too. They need no agents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from drover_core.model.fleet import dump_toml
from drover_dashboard.widgets.address import LATE_S
from drover_dashboard.widgets.view import ALL_PAGES
from drover_simulator.fleet import build_fleet
from testbed.browsing import REFRESHED_S, Tab, addresses, at_rest, lone_tab
from testbed.fleet_proxy import Between, between
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

PAGES = sorted(page.stem for page in ALL_PAGES)
WITHOUT = {"policy", "risk", "system"}  # they have none
LIST, BUTTONS = "combobox", "radiogroup"
# All that chooses, of any kind; what a popover holds is not on the page before it is opened.
# The chooser of a moment shows the moment, not the choice (ten minutes ago is soon twenty): see test_console_past.py.
MOMENT = "[aria-label^=Moment]"
FOUND = f"""[...document.querySelector('[data-testid=stMain]').querySelectorAll('input, textarea, select, [role]')]
  .filter((e) => !e.matches('{MOMENT}'))
  .map((e) => e.getAttribute('role') || e.tagName)
  .filter((r) => !['alert', 'group', 'img', 'progressbar', 'radio', 'region', 'status'].includes(r))"""
CHOICES = 3


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Between]]:
    """Its address, and what stands between it and its collector."""
    folder, port = tmp_path_factory.mktemp("selectors"), free_port()
    with (
        collector(folder, dump_toml(build_fleet(16, 7))) as served,
        between(served.api) as (api, proxy),
        running(folder, "drover_dashboard.main", "--collector", api, "--port", str(port)) as log,
    ):
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
        yield f"http://127.0.0.1:{port}", proxy
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def url(console: tuple[str, Between]) -> str:
    return console[0]


@pytest.fixture(scope="module")
def tab(url: str, browser: Any) -> Iterator[Tab]:
    with lone_tab(browser, "light") as made:
        yield made


class Selector:
    """One on the page, found again by its place among those of its kind: what it is made of may change."""

    def __init__(self, page: Any, kind: str, at: int) -> None:
        self._page, self._kind, self._at = page, kind, at

    def shown(self) -> str:
        if self._kind == LIST:
            return str(self._here().input_value())
        chosen = self._here().get_by_role("radio", checked=True)
        return str(chosen.inner_text()) if chosen.count() else ""

    def options(self) -> list[str]:
        """Some that are not chosen."""
        if self._kind == LIST:
            self._here().click()
            options = self._page.get_by_role("option")
            options.first.wait_for()
            texts = options.all_inner_texts()
            self._here().press("Tab")  # Escape would empty it where it may be empty
            options.first.wait_for(state="detached")
        else:
            texts = self._here().get_by_role("radio").all_inner_texts()
        return [text for text in texts if text != self.shown()][:CHOICES]

    def choose(self, option: str) -> None:
        """And wait until the address has changed, which it does for each choice that is obeyed."""
        before = self._page.url
        if self._kind == LIST:
            self._here().click()
            self._page.get_by_role("option", name=option, exact=True).click()
        else:
            self._here().get_by_role("radio", name=option, exact=True).click()
        self._page.wait_for_function("(before) => location.href !== before", arg=before)
        self.shows(option)

    def shows(self, option: str) -> None:
        """Once nothing runs any more."""
        at_rest(self._page)
        wait_until(lambda: self.shown() == option, f"{self._kind} {self._at} is {option!r}", REFRESHED_S)
        at_rest(self._page)
        assert self.shown() == option

    def _here(self) -> Any:
        # By its attribute: for a screen reader it is not there while the list of another one is open.
        return self._page.get_by_test_id("stMain").locator(f"[role={self._kind}]:not({MOMENT})").nth(self._at)


def selectors(page: Any) -> list[Selector]:
    kinds = page.evaluate(FOUND)
    assert set(kinds) <= {LIST, BUTTONS}, "of another kind: say here how one chooses with it"
    return [Selector(page, kind, at) for kind in (LIST, BUTTONS) for at in range(kinds.count(kind))]


def opened(tab: Tab, url: str, name: str) -> list[Selector]:
    tab.goto(f"{url}/{'' if name == 'fleet' else name}")
    there = "[class*=st-key-]" if name in WITHOUT else f"[role={LIST}], [role={BUTTONS}]"
    tab.page.get_by_test_id("stMain").locator(there).first.wait_for()
    return selectors(tab.page)


@pytest.mark.parametrize("name", PAGES)
def test_each_of_three_choices_in_a_row_is_obeyed_and_is_one_step_back(tab: Tab, url: str, name: str) -> None:
    page, found = tab.page, opened(tab, url, name)
    assert bool(found) != (name in WITHOUT)
    if name != "incidents" or "id=" not in page.url:  # an incident that is open has its own title
        assert page.title() == f"{'r01n01' if name == 'node' else name.capitalize()} · Drover"
    for selector in found:
        shown, options = [selector.shown()], selector.options()
        for step in range(CHOICES):
            wanted = ([*options, shown[0]] if len(options) < CHOICES else options)[step % (len(options) + 1)]
            before = addresses(page)
            selector.choose(wanted)
            assert addresses(page)[:-1] == before, "one entry more"
            shown.append(wanted)
        for earlier in reversed(shown[:-1]):
            page.go_back()
            selector.shows(earlier)
        selector.choose(options[0])  # after Back as before
        page.go_back()
        selector.shows(shown[0])
    for selector in found:
        selector.choose(selector.options()[0])
    kept = [selector.shown() for selector in found]
    page.reload()
    for selector, option in zip(found, kept, strict=True):
        selector.shows(option)  # so it can be sent
    assert not tab.problems


def test_the_tab_says_what_a_link_shows(tab: Tab, url: str) -> None:
    links = {"node?node=r01n05": "r01n05", "fabric?leaf=leaf01": "Fabric leaf01", "job?job=j1": "job j1"}
    for link, title in links.items():
        tab.page.goto(f"{url}/{link}")
        tab.page.wait_for_function("(title) => document.title === `${title} · Drover`", arg=title)


# As a person who clicks before the page has drawn: each click is another event of the browser.
QUICK = """async ([labels, gap]) => {
  for (const label of labels) {
    const shown = [...document.querySelectorAll('[data-testid=stMain] [role=radio]')];
    shown.find((e) => e.textContent.trim() === label).click();
    await new Promise((go) => setTimeout(go, gap));
  }
}"""


@pytest.mark.parametrize("gap_ms", [0, 100, 1000])
def test_of_three_quick_choices_while_the_page_still_waits_for_its_collector_the_last_holds(
    tab: Tab, console: tuple[str, Between], gap_ms: int
) -> None:
    """The ledger of a large fleet takes its collector seconds: longer than an address may be late."""
    page, (url, proxy) = tab.page, console
    tab.goto(f"{url}/capacity?show=ledger")
    page.get_by_test_id("stMain").get_by_role("radio", name="7 days").wait_for()
    (span,) = [each for each in selectors(page) if each.shown() == "7 days"]
    proxy.delay_s, proxy.late = LATE_S + 1, frozenset({"GetLedger"})
    try:
        page.evaluate(QUICK, [["1 day", "30 days", "90 days"], gap_ms])
        span.shows("90 days")
        page.wait_for_function("new URLSearchParams(location.search).get('span') === '90 days'")
        page.evaluate(QUICK, [["1 day", "30 days", "7 days"], gap_ms])
        span.shows("7 days")
        page.wait_for_function("!new URLSearchParams(location.search).has('span')")
    finally:
        proxy.delay_s = 0.0
    page.go_back()
    page.wait_for_function("new URLSearchParams(location.search).has('span')")
    earlier = page.evaluate("new URLSearchParams(location.search).get('span')")
    span.shows(earlier)  # which of them became steps depends on how quick they were
    page.go_forward()
    span.shows("7 days")
    assert "show=ledger" in page.url
