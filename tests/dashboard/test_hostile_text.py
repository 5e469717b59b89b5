"""HTML and scripts in what the fleet says, in a real browser: the words are shown, and nothing of them runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

import drover_dashboard
from testbed.browser import CHROMIUM, FLAGS
from testbed.system_processes import free_port
from testbed.waiting import wait_until

MARKUP = '<img src=x onerror="window.owned=1"><script>window.owned=2</script><b onmouseover="window.owned=3">b</b>'
PACKAGE = Path(drover_dashboard.__file__).parent


@pytest.fixture
def console(served: str, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The real console before a collector whose every text is MARKUP."""
    monkeypatch.setattr(sys.modules[type(chosen).__module__], "HOSTILE", MARKUP)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "drover_dashboard.main", "--port", str(port), "--collector", served]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def up() -> bool:
        try:
            return urllib3.request("GET", f"{url}/_stcore/health", timeout=10, retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    try:
        wait_until(up, "the console is up")
        yield url
    finally:
        child.terminate()
        child.wait(120)


@pytest.mark.system
def test_html_of_an_xid_message_stays_text(console: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for path in ("incidents?id=i1", "node?node=n2&gpu=1", "system"):
            page.goto(f"{console}/{path}")
            page.get_by_text("<img src=x onerror").first.wait_for(timeout=60_000)
            page.mouse.move(400, 400)
            assert page.evaluate("window.owned") is None, path
            assert page.locator('img[src="x"]').count() == 0, path
        browser.close()
    assert [url for url in asked if url.endswith("/x")] == []


def test_no_page_and_no_component_writes_html() -> None:
    """Streamlit's and the browser's doors for markup stay shut: the only HTML is the package's own style sheet."""
    found = []
    for path in (*PACKAGE.rglob("*.py"), *(p for p in PACKAGE.rglob("*.js") if "uplot" not in p.parts)):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|unsafe_allow_html|st\.html\(", line):
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    assert [line for line in found if 'st.html(ASSETS / "page.css")' not in line] == []
    assert len(found) == 1
