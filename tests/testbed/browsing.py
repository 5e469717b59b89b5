"""Real Chromium, and what axe-core finds on a page of the console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed.browser import CHROMIUM, FLAGS

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text("utf-8")
SCREEN = {"width": 1440, "height": 900}


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield started
        started.close()


def barriers(page: Any) -> list[str]:
    """What axe-core finds serious or critical on the page as it stands, shadow trees too."""
    page.evaluate(f"() => {{ if (!window.axe) {{ {AXE} }} }}")
    told = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert told["passes"], "it looked"
    return [
        f"{rule['id']} ({rule['impact']}): {one['target']} {one['html'][:160]} {one.get('failureSummary', '')[:200]}"
        for rule in told["violations"]
        if rule["impact"] in ("serious", "critical")
        for one in rule["nodes"][:5]
    ]
