"""Screenshots of every page of the console for somebody who did not build it: light and dark, a phone's, a laptop's and
a large screen's width, at 256 GPUs; and the Fleet page at 100,000. The whole page, not only what the window shows.

What a machine can see is printed: a page without exactly one h1, a level of headings that is left out, a page wider
than its window, and what axe-core finds serious in either theme, below the window too.

    python benchmarks/console_shots.py --out FOLDER [--only PAGE ...] [--url URL --api HOST:PORT --job NAME] [--large]

With --url a console and its collector that run already (`console/live_fleet.py`), without the 100,000; with --large the
100,000 alone.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import grpc
from console.live_fleet import Live, live
from console.replayed import serve
from console_pictures import pages
from playwright.sync_api import sync_playwright

from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.browser import CHROMIUM, FLAGS
from testbed.browsing import at_rest, barriers
from testbed.system_processes import free_port, reachable, running
from testbed.waiting import wait_until

WIDTHS, HEIGHT = (390, 1440, 2560), 900
MOST_PX = 6000  # of a page's height
SETTLE_MS = 1500.0  # charts come after the words
LARGE_NODES = 12_500
HEADINGS = """(() => { const found = [], walk = (root) => { for (const one of root.querySelectorAll('*')) {
  const name = one.tagName.toLowerCase();
  if (/^h[1-6]$/.test(name) && one.checkVisibility()) found.push([Number(name[1]), one.textContent.trim()]);
  if (one.shadowRoot) walk(one.shadowRoot); } }; walk(document); return found; })()"""


def shoot(page: Any, name: str, theme: str, folder: Path) -> list[str]:
    """Screenshots of an open page at each width; what is wrong with it as far as a machine sees."""
    wrong = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        page.wait_for_timeout(SETTLE_MS)
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            wrong.append(f"{name} {theme} {width}: {wide} px wide")
        main = "document.querySelector('[data-testid=stMain]')?.scrollHeight ?? 0"
        page.set_viewport_size({"width": width, "height": min(MOST_PX, max(HEIGHT, page.evaluate(main)))})
        page.wait_for_timeout(SETTLE_MS / 2)
        page.screenshot(path=str(folder / f"{name}-{theme}-{width}.png"))
        if width == 1440:  # the window has all of the page now
            wrong += [f"{name} {theme}: {one}" for one in barriers(page)]
    return wrong


def headings(page: Any, name: str) -> list[str]:
    """A page has one h1, and no level is left out."""
    found = page.evaluate(HEADINGS)
    levels = sorted({level for level, _ in found})
    wrong = [] if [level for level, _ in found].count(1) == 1 else [f"{name}: not one h1: {found}"]
    return wrong + ([] if levels == list(range(1, len(levels) + 1)) else [f"{name}: levels {levels}: {found}"])


def looked_at(browser: Any, url: str, paths: dict[str, str], folder: Path) -> list[str]:
    wrong = []
    for theme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 1440, "height": HEIGHT}, color_scheme=theme, timezone_id="UTC")
        for name, path in paths.items():
            page = context.new_page()
            page.goto(url + path)
            page.wait_for_function("document.title.endsWith(' · Drover')")
            at_rest(page)
            wrong += shoot(page, name, theme, folder)
            if theme == "light":
                wrong += headings(page, name)
            page.close()
            print(f"{name}, {theme}", file=sys.stderr, flush=True)
        context.close()
    return wrong


@contextmanager
def large(folder: Path) -> Iterator[str]:
    """A console before 100,000 GPUs, whose answers were made once."""
    server, address = serve(1, LARGE_NODES, None)
    port = free_port()
    try:
        with running(folder, "drover_dashboard.main", "--collector", address, "--port", str(port)):
            wait_until(lambda: reachable("127.0.0.1", port), "the console of the large fleet listens", 60)
            yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="PAGE", help="these alone")
    parser.add_argument("--large", action="store_true", help="only the Fleet page at 100,000 GPUs")
    parser.add_argument("--url", default="", help="of a console that runs already")
    parser.add_argument("--api", default="", help="of its collector")
    parser.add_argument("--job", default="", help="one that is hurt there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    given.out.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="drover-shots-") as name, sync_playwright() as play:
        browser, folder = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS), Path(name)
        if given.url:
            fleet = Live(
                given.url.rstrip("/"), given.api, FleetStub(grpc.insecure_channel(given.api)), folder, given.job
            )
            wrong += looked_at(browser, fleet.url, _paths(fleet, given.only), given.out)
        else:
            if not given.large:
                with live(folder) as fleet:
                    wrong += looked_at(browser, fleet.url, _paths(fleet, given.only), given.out)
            (folder / "large").mkdir()
            with large(folder / "large") as url:
                wrong += looked_at(browser, url, {"fleet-100000": "/"}, given.out)
        browser.close()
    print("\n".join(wrong) or "nothing that a machine sees")


def _paths(fleet: Live, only: list[str]) -> dict[str, str]:
    return {name: path for name, (path, _, _) in pages(fleet).items() if not only or name in only}


if __name__ == "__main__":
    main()
