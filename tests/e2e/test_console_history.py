"""The browser's history: each entry keeps the title of what it shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import drover_dashboard
from testbed.browsing import entries, lone_tab

STEPS = Path(drover_dashboard.__file__).parent / "assets" / "steps.js"
PAGE = """<!doctype html><title>old</title><script>{script}</script><button onclick="{click}">next</button>"""
TITLE, PUSH = "document.title = 'new'", "history.pushState({}, '', '/new')"


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a page that does on a click as the parameter says."""
    text = PAGE.format(script=STEPS.read_text(), click=request.param).encode()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "served",
    [f"{TITLE}; {PUSH}", f"{PUSH}; {TITLE}", f"{TITLE}; setTimeout(() => {PUSH}, 50)"],
    ids=["the title first", "the address first", "the title long before"],
    indirect=True,
)
def test_the_title_of_the_next_page_does_not_name_the_one_that_is_left(served: str, browser: Any) -> None:
    with lone_tab(browser, "light") as tab:
        tab.page.goto(f"{served}/old")
        tab.page.get_by_role("button").click()
        tab.page.wait_for_url("**/new")
        tab.page.wait_for_function("document.title === 'new'")
        assert entries(tab.page)[-2:] == [(f"{served}/old", "old"), (f"{served}/new", "new")]
