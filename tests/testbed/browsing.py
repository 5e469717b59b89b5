"""Pages of the console in real Chromium: what of them refreshed, what went wrong, what axe-core finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.browser import CHROMIUM, FLAGS
from testbed.waiting import wait_until

SHOTS = Path(__file__).resolve().parents[2] / "test-artifacts" / "console"
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text("utf-8")
SCREEN, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
ZONE = "Europe/Berlin"
PAGE_MS, REFRESHED_S = 300_000, 300.0
BACKGROUND = "Number(getComputedStyle(document.querySelector('.stApp')).backgroundColor.match(/[0-9]+/)[0])"
# What refreshes by a timer refreshes every 5 s at the latest, and at once when it is asked to: some timers run 30 s.
# None begins while the page runs or has run within a second: where a run takes longer than 5 s, the page would never be
# at rest.
INTERVALS = """(() => {
  const runs = new Map(), every = window.setInterval.bind(window), end = window.clearInterval.bind(window);
  const rests = () => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning';
  let ran = performance.now();
  every(() => { if (!rests()) ran = performance.now(); }, 100);
  window.setInterval = (run, ms, ...more) => {
    if (!(ms >= 1000)) return every(run, ms, ...more);
    const period = Math.min(ms, 5000);
    let due = performance.now() + period;
    const made = every(() => {
      const now = performance.now();
      if (now < due || now < ran + 1000 || !rests()) return;
      due = now + period;
      run(...more);
    }, 200);
    runs.set(made, () => run(...more));
    return made;
  };
  window.clearInterval = (made) => { runs.delete(made); end(made); };
  window.__refresh = () => runs.forEach((run) => run());
})();"""
COMPONENTS = """[...document.querySelectorAll('*')].flatMap((e) => e.shadowRoot ?
  [...e.shadowRoot.querySelectorAll('.rows, .chart, .tiles, .dots, .bars, .spread, .matrix, .fleet')] : [])"""
MAIN = "document.querySelector('[data-testid=stMain]')"
SCROLLED_PX = 120


@dataclass
class Tab:
    """A page in the browser. `fragments`: its parts that refresh themselves; `ran`: those that did since it was
    emptied; `runs`: how often all of it ran; `problems`: errors in the browser's console."""

    page: Any
    problems: list[str] = field(default_factory=list)
    fragments: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    runs: int = 0
    _running: set[str] = field(default_factory=set)

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SHOTS / f"{name}.png"))

    def theme(self, name: str) -> None:
        """As the viewer's system changes it: without a reload."""
        self.page.emulate_media(color_scheme=name)
        self.page.wait_for_function(f"(dark) => ({BACKGROUND} < 128) === dark", arg=name == "dark")

    def barriers(self) -> list[str]:
        """What axe-core finds serious or critical; in the dark of its contrasts, as all else is the same in both
        themes. The light one stays."""
        self.theme("dark")
        dark = [f"dark: {one}" for one in barriers(self.page, CONTRAST)]
        self.theme("light")
        return dark + [f"light: {one}" for one in barriers(self.page)]

    def on_a_phone(self, name: str) -> None:
        """Nothing is cut off there; the screen is a desk's again afterwards."""
        self.page.set_viewport_size(PHONE)
        self.page.wait_for_function(f"innerWidth === {PHONE['width']}")
        assert self.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing is cut off"
        self.shot(f"{name}-phone")
        self.page.set_viewport_size(SCREEN)

    def refreshes_in_place(self) -> None:
        """What is refreshed keeps its elements, so nothing flickers, and the page does not jump back to its top. (A
        line more above moves it by its height: the browser keeps what is looked at in its place.)"""
        self.page.set_viewport_size({"width": SCREEN["width"], "height": 300})  # so that there is something to scroll
        self.page.wait_for_function("innerHeight === 300")
        self.refresh()  # what has changed since is drawn
        marked = self.page.evaluate(f"{COMPONENTS}.map((e) => {{ e.dataset.kept = 'yes'; }}).length")
        scrolled = self.page.evaluate(f"{MAIN}.scrollTop = {SCROLLED_PX}, {MAIN}.scrollTop")
        assert marked
        self.refresh()
        assert self.page.evaluate(f"{COMPONENTS}.filter((e) => e.dataset.kept).length") >= marked
        assert bool(self.page.evaluate(f"{MAIN}.scrollTop")) == bool(scrolled)
        self.page.set_viewport_size(SCREEN)

    def refresh(self) -> None:
        """All parts that refresh themselves do, now."""
        self.ran.clear()
        self.page.evaluate("window.__refresh()")
        until({"page": self}, missing, REFRESHED_S)

    def state(self) -> str:
        """What a failure is reported with."""
        app = "({...document.querySelector('[data-testid=stApp]').dataset})"
        return f"{self.page.evaluate(app)}, ran {len(self.ran)} of {len(self.fragments)}, {self.problems}"

    def goto(self, address: str) -> None:
        """And wait until all of the page has run."""
        self.page.goto("about:blank")  # so that nothing more comes of the page before
        before = self.runs
        self.page.goto(address)
        until({"page": self}, lambda tab: "" if tab.runs > before else "it has not run", REFRESHED_S)
        at_rest(self.page)

    def close(self) -> None:
        assert not self.problems
        self.page.close()

    def listen(self) -> None:
        page = self.page
        page.set_default_timeout(PAGE_MS)
        page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        page.on("console", self._line)
        page.on("requestfailed", self._failed)
        page.on("websocket", lambda socket: socket.on("framereceived", self._frame))

    def _line(self, line: Any) -> None:
        if line.type == "error":
            self.problems.append(f"{line.text} ({line.location.get('url', '')})")

    def _failed(self, failed: Any) -> None:
        if failed.failure != "net::ERR_ABORTED":  # the page went elsewhere: no failure of anybody
            self.problems.append(f"request failed: {failed.url}: {failed.failure}")

    def _frame(self, payload: Any) -> None:
        from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

        message = ForwardMsg.FromString(payload)
        ids = set(message.metadata.run.fragment_ids)
        if message.HasField("new_session"):
            if not ids:
                self.fragments.clear()  # a run of the whole page
            self._running = ids
        elif message.HasField("auto_rerun"):
            self.fragments.add(message.auto_rerun.fragment_id)
        elif message.HasField("script_finished"):
            self.ran |= self._running
            self.runs += not self._running
            self._running = set()


def missing(tab: Tab) -> str:
    """Parts of the page that did not refresh themselves yet."""
    return "" if tab.fragments and tab.ran >= tab.fragments else f"{len(tab.ran)} of {len(tab.fragments)} refreshed"


def until(tabs: dict[str, Tab], lacks: Callable[[Tab], str], limit_s: float) -> None:
    """Wait until each tab `lacks` nothing, once; the browser's events come in meanwhile. Fails with what it lacks."""
    lacking = dict.fromkeys(tabs, "")

    def settled() -> bool:
        for name in list(lacking):
            lacking[name] = lacks(tabs[name])
            if not lacking[name]:
                del lacking[name]
        next(iter(tabs.values())).page.wait_for_timeout(50)
        return not lacking

    try:
        wait_until(settled, limit_s=limit_s)
    except AssertionError:
        found = {name: (lacks, tabs[name].state()) for name, lacks in lacking.items()}
        raise AssertionError(f"after {limit_s:g} s: {found}") from None


def at_rest(page: Any) -> None:
    """No part of the page runs."""
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()


def entries(page: Any) -> list[tuple[str, str]]:
    """Address and title of each entry of the browser's history up to this one."""
    found = page.context.new_cdp_session(page).send("Page.getNavigationHistory")
    return [(entry["url"], entry["title"]) for entry in found["entries"][: found["currentIndex"] + 1]]


def addresses(page: Any) -> list[str]:
    return [url for url, _ in entries(page)]


class Browser:
    """Real Chromium. Tabs of the same person share what the browser keeps, as an operator's do."""

    def __init__(self, chromium: Any, url: str) -> None:
        self._chromium, self._url = chromium, url
        self._contexts: dict[str, Any] = {}

    def close(self) -> None:
        """Forget all that people kept."""
        for context in self._contexts.values():
            context.close()

    def open(self, path: str, who: str, theme: str = "light") -> Tab:
        """`who` "": nobody that the proxy knows."""
        tab = self.blank(who, theme)
        tab.page.goto(f"{self._url}/{path}")
        return tab

    def blank(self, who: str, theme: str) -> Tab:
        if who not in self._contexts:
            named = {"X-User": who} if who else {}
            made = self._chromium.new_context(viewport=SCREEN, timezone_id=ZONE, extra_http_headers=named)
            made.add_init_script(INTERVALS)
            self._contexts[who] = made
        tab = Tab(self._contexts[who].new_page())
        tab.page.emulate_media(color_scheme=theme)
        tab.listen()
        return tab


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield started
        started.close()


@contextmanager
def lone_tab(started: Any, theme: str) -> Iterator[Tab]:
    """A blank page in a profile of its own; when it ends it must have had no error."""
    with closing(Browser(started, "")) as browser:
        tab = browser.blank("", theme)
        yield tab
        assert not tab.problems


MOST_PX = 6000  # of a page's height, which the window is given
CONTRAST = ("color-contrast",)


def barriers(page: Any, rules: Sequence[str] = ()) -> list[str]:
    """What axe-core finds serious or critical on the page as it stands, shadow trees too; `rules`: these alone."""
    page.evaluate(f"() => {{ if (!window.axe) {{ {AXE} }} }}")
    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    size = page.viewport_size
    high = min(MOST_PX, max(size["height"], page.evaluate(f"{MAIN}?.scrollHeight ?? 0")))
    page.set_viewport_size({"width": size["width"], "height": high})  # axe passes over what an inner scroll area hides
    found = page.evaluate("(options) => axe.run(document, options)", options)
    page.set_viewport_size(size)
    assert found["passes"], "it looked"
    return [
        f"{rule['id']} ({rule['impact']}): {one['target']} {one['html'][:160]} {one.get('failureSummary', '')[:200]}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for one in rule["nodes"][:5]
    ]
