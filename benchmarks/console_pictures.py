"""Takes the pictures of the console in README.md and docs/how-to/console.md, of a live simulated fleet with faults.

Real collector, agents, console and Chromium (`benchmarks/console/live_fleet.py`); some five minutes. Writes
docs/images/PAGE.png.

    python benchmarks/console_pictures.py [--only PAGE ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from console.live_fleet import EMPTY, EXPECTED, SLOW, Live, live
from PIL import Image
from playwright.sync_api import sync_playwright

from testbed.browser import CHROMIUM, FLAGS

SCREEN = {"width": 1440, "height": 900}
LIMIT_MS = 120_000.0
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
        "policy": ("/policy", "dark", ("Had it enforced in", "Held back by the guard", "Rules: the first")),
        "node": (f"/node?node={SLOW[0]}&gpu={SLOW[1]}", "light", ("last report", "Inventory", "Events")),
        "probes": (f"/probes?node={EMPTY}", "light", ("Between its GPUs, GB/s", "passed", "History: gemm_bf16")),
        "system": ("/system", "dark", ("Connected now", "Detector", "Newest write took")),
        "slow-gpu": (f"/incidents?id={slow.id if slow else ''}", "light", proof),
    }  # fmt: skip


def take(browser: Any, fleet: Live, name: str, folder: Path) -> int:
    """Bytes of the picture."""
    path, theme, words = pages(fleet)[name]
    context = browser.new_context(viewport=SCREEN, color_scheme=theme, timezone_id="UTC")
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(fleet.url + path)
    for word in words:
        page.get_by_text(word).first.wait_for(state="attached")
    page.wait_for_timeout(SETTLE_MS)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
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
        for page in given.only or pages(fleet):
            print(f"{given.out / page}.png: {take(browser, fleet, page, given.out):,} bytes", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
