"""Streamlit's files as browsers get them: packed once, with all that a page needs named in its head."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from streamlit import file_util

from drover_dashboard.server import auth_settings as people
from drover_dashboard.server import frontend
from drover_dashboard.server.auth_settings import SignIn
from drover_dashboard.server.frontend import Frontend
from drover_dashboard.widgets.components import ASSETS

ROOT = Path(file_util.get_static_dir())
SCRIPT = next(path for path in sorted((ROOT / "static" / "js").glob("index.*.js")) if path.stat().st_size > 100_000)
FONT = next(iter(sorted((ROOT / "static" / "media").glob("*.woff2"))))
PAGES = ("/", "/node")
EARLY = b"given.modules"
INNER = (299, {}, b"Streamlit's own answer")


async def inner(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": INNER[0], "headers": []})
    await send({"type": "http.response.body", "body": INNER[2]})


@pytest.fixture(scope="module")
def app() -> Frontend:
    return Frontend(inner, PAGES)


def ask(app: Frontend, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    sent: list[dict[str, Any]] = []
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": encoded, "query_string": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(part.get("body", b"") for part in sent[1:])


def given(page: str) -> Any:
    """What the head's script is given."""
    mark = "const given = "
    return json.JSONDecoder().raw_decode(page, page.index(mark) + len(mark))[0]


def path_of(file: Path) -> str:
    return "/" + str(file.relative_to(ROOT))


def test_a_script_is_packed_once_and_unpacks_to_itself(app: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    status, headers, body = ask(app, path_of(SCRIPT), accept_encoding="gzip, br")
    assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "Accept-Encoding")
    assert headers["content-type"].startswith("text/javascript")
    assert "immutable" in headers["cache-control"]
    assert gzip.decompress(body) == SCRIPT.read_bytes()
    monkeypatch.setattr(frontend.gzip, "compress", lambda *_given, **_more: pytest.fail("packed again"))
    assert ask(app, path_of(SCRIPT), accept_encoding="gzip")[2] == body


def test_a_font_travels_unchanged(app: Frontend) -> None:
    _, headers, body = ask(app, path_of(FONT), accept_encoding="gzip")
    assert "content-encoding" not in headers
    assert body == FONT.read_bytes()


@pytest.mark.parametrize(
    ("path", "method", "headers"),
    [
        (path_of(SCRIPT), "GET", {}),  # takes nothing packed
        (path_of(SCRIPT), "GET", {"accept_encoding": "gzip", "range": "bytes=0-9"}),
        (path_of(SCRIPT), "GET", {"accept_encoding": "gzip", "if_none_match": '"x"'}),
        (path_of(SCRIPT), "HEAD", {"accept_encoding": "gzip"}),
        ("/static/js/no_such.js", "GET", {"accept_encoding": "gzip"}),
        ("/static/../index.html", "GET", {"accept_encoding": "gzip"}),
        ("/static/../../__init__.py", "GET", {"accept_encoding": "gzip"}),
        ("/_stcore/health", "GET", {}),
        ("/nodes", "GET", {}),
    ],
)
def test_all_else_is_left_to_streamlit(app: Frontend, path: str, method: str, headers: dict[str, str]) -> None:
    assert ask(app, path, method, **headers) == INNER


def test_what_does_not_fit_is_left_to_streamlit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "KEPT_BYTES", 1000)
    assert ask(Frontend(inner, PAGES), path_of(SCRIPT), accept_encoding="gzip") == INNER


@pytest.mark.parametrize("path", PAGES)
def test_a_page_names_files_that_are_there_each_once(app: Frontend, path: str) -> None:
    status, headers, body = ask(app, path)
    assert (status, headers["cache-control"]) == (200, "no-cache")
    links = frontend.MODULE.findall(body.decode()) or given(body.decode())["modules"]
    named = [link.removeprefix("./") for link in links]
    assert len(named) == len(set(named))
    ours = [name.removeprefix("drover/assets/") for name in named if name.startswith("drover/")]
    assert ("fleet.js" in ours) == (path == "/")
    assert all((ASSETS / name).is_file() for name in ours)
    assert all((ROOT / name).is_file() for name in named if not name.startswith("drover/"))
    for part in (*frontend.PARTS, *(("Selectbox",) if path == "/" else ())):
        assert any(name.startswith(f"static/js/{part}.") for name in named), part
    original = (ROOT / "index.html").read_text()
    ours_there = r"    <style>.*?</style>\n    <script>\n//.*?</script>\n    <template .*?</template>\n"
    without = re.sub(ours_there, "", body.decode(), count=1, flags=re.DOTALL) if path == "/" else body.decode()
    framed = r"    <style>.*?</style>\n    <script type=.application/json.*?</script>\n    <template .*?</template>\n"
    without, frames = re.subn(rf"{framed}    <script type=.module. async.*?</script>", "", without, flags=re.DOTALL)
    assert frames == 1, "the frame of every page"
    steps = f"<script>\n{(ASSETS / 'preferences.js').read_text()}\n{(ASSETS / 'steps.js').read_text()}</script>"
    assert without.count(steps) == 1, "before anything that changes the address"
    assert without.index(steps) < without.index("<script type=" if path != "/" else frontend.HEAD_END)
    without = without.replace(steps, "")
    if path == "/":
        original, entries = frontend.ENTRY.subn("", original)
        assert entries == 1, "what begins Streamlit is begun by early.js, after the picture"
    assert re.sub(r"\s*<link rel=.modulepreload.[^>]*>", "", without).split() == (
        re.sub(r"\s*<link rel=.modulepreload.[^>]*>", "", original).split()
    ), "nothing else is changed"
    assert ask(app, path, if_none_match=headers["etag"])[0] == 304


def test_the_early_picture_has_what_the_component_gets(app: Frontend) -> None:
    """And Streamlit's own script is begun."""
    page = ask(app, "/")[2].decode()
    data = given(page)
    assert data["entry"] == frontend.ENTRY.findall((ROOT / "index.html").read_text())[0]
    assert data["modules"][0].endswith("/fleet_early.js"), "it is asked for before all others"
    assert data["modules"][-1] == data["entry"]
    begin = page.index('<template id="drover_fleet_early"')
    kept = page[begin : page.index("</template>", begin)]
    assert (ASSETS / "fleet.html").read_text() in kept
    assert "</" not in page[page.index("const given") : page.index("</script>")], "nothing given ends the script"
    wanted = set(re.findall(r"--st-[a-z-]+", kept))
    assert set(data["themes"]["dark"]) == set(data["themes"]["light"]) >= wanted


def test_the_picture_is_asked_for_early_by_those_who_may_see_it(app: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EARLY in ask(app, "/")[2]
    assert EARLY not in ask(app, "/node")[2]
    monkeypatch.setattr(people, "_shared", SignIn(oidc=True))
    assert EARLY not in ask(app, "/")[2], "who has to sign in first would be refused it"


def test_another_page_of_streamlit_is_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index.html").write_text("<html></html>")
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(frontend.file_util, "get_static_dir", lambda: str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert ask(Frontend(inner, PAGES), "/") == INNER
    assert "first paint will be slower" in caplog.text
