"""Takes the pictures of the console in README.md and docs/how-to/console.md, of a live simulated fleet with faults.

Real collector, agents, console and Chromium (`benchmarks/console/live_fleet.py`); some seven minutes. Writes
docs/images/PAGE.png.

    python benchmarks/console_pictures.py [--only PAGE ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from console.live_fleet import EMPTY, EXPECTED, SLOW, Live, live
from PIL import Image
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError
from playwright.sync_api import sync_playwright

from drover_proto import fleet_pb2 as pb
from testbed.browser import CHROMIUM, FLAGS

SCREEN = {"width": 1440, "height": 900}
LIMIT_MS = 30_000.0
SETTLE_MS = 4_000.0  # charts come after the words
MOST_BYTES, COLOURS = 200_000, 256  # a larger one gets a palette


def pages(fleet: Live) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Name -> (path, theme, words that stand there once all of it is drawn)."""
    proof = ("What to do", "Reported", "Timeline", "band: peers")
    slow = fleet.found(EXPECTED["the slow GPU"])
    cooling = fleet.found(EXPECTED["the poorly cooled GPU"])
    return {
        "fleet": ("/", "dark", ("Open incidents", "confirmed 2", "What is wrong, where", f"{SLOW[0]} GPU {SLOW[1]}")),
        "incident": (f"/incidents?id={cooling.id if cooling else ''}", "dark", proof),
        "job": (f"/job?job={fleet.job}", "light", ("Its GPUs against each other", "named by an open incident")),
        "fabric": ("/fabric", "light", ("One of 16 nodes, not the switch", "leaf02", "serves GPU")),
        "thermals": ("/thermals", "dark", ("hot air", "r03", "Resistance")),
        "risk": ("/risk", "light", ("A ranking, not a prophecy", "Why it stands here", "this ranking")),
        "capacity": ("/capacity", "light", ("GPU-hours that faults cost", "GPUs of each pool, now", "leaf02")),
        "ledger": (
            "/capacity?show=ledger&span=1+day", "light", ("GPU-hours that jobs held", "By job", "What is not known"),
        ),
        "policy": ("/policy", "dark", ("Had it enforced in", "Held back, and what enforcing", "Rules: the first")),
        "silences": ("/silences", "light", ("Maintenance windows", "fan tray", "burn-in")),
        "audit": ("/audit?by=Drover+too", "dark", ("fan replaced, ticket 4502", "in force from this start on")),
        "node": (f"/node?node={SLOW[0]}&gpu={SLOW[1]}", "light", ("last report", "Inventory", "Events")),
        "probes": (f"/probes?node={EMPTY}", "light", ("Between its GPUs, GB/s", "passed", "History: gemm_bf16")),
        "system": ("/system", "dark", ("Connected now", "Detector", "Newest write took")),
        "slow-gpu": (f"/incidents?id={slow.id if slow else ''}", "light", proof),
    }  # fmt: skip


class MissingError(RuntimeError):
    """A page has not all that its picture is to show."""


def _stands(page: Any, word: str) -> bool:
    """Whether the page has the word in time."""
    try:
        page.get_by_text(word).first.wait_for(state="attached")
    except PlaywrightTimeoutError:
        return False
    return True


def silence(fleet: Live) -> None:
    """A silence and a maintenance window, for the page that lists them."""
    ask = pb.SilenceAsk(node=["r03n08"], hours=72, why="fan tray on order, ticket 4510", who="kim@example.com")
    fleet.stub.CreateSilence(ask, timeout=20)
    window = pb.SilenceAsk(rack=["r03"], hours=4, why="burn-in after the move", who="bo@example.com", maintenance=True)
    window.from_ms = round(time.time() * 1000) + 86_400_000
    fleet.stub.CreateSilence(window, timeout=20)


def take(browser: Any, fleet: Live, name: str, folder: Path) -> int:
    """Bytes of the picture.

    Raises:
        MissingError: not all of the page's words came.
    """
    path, theme, words = pages(fleet)[name]
    context = browser.new_context(viewport=SCREEN, color_scheme=theme, timezone_id="UTC")
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(fleet.url + path)
    missing = [word for word in words if not _stands(page, word)]
    page.wait_for_timeout(SETTLE_MS)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
    if missing:
        raise MissingError(f"{name}: no {', '.join(map(repr, missing))} on its page after {LIMIT_MS / 1000:g} s each")
    file = folder / f"{name}.png"
    picture.save(file, optimize=True)
    if file.stat().st_size > MOST_BYTES:
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PAGE", help="these alone")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    given.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="drover-pictures-") as name,
        live(Path(name)) as fleet,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        silence(fleet)
        missing = []
        for page in given.only or pages(fleet):
            try:
                print(f"{given.out / page}.png: {take(browser, fleet, page, given.out):,} bytes", flush=True)
            except MissingError as error:
                missing.append(str(error))
        browser.close()
    if missing:
        sys.exit("\n".join(missing))


if __name__ == "__main__":
    main()
