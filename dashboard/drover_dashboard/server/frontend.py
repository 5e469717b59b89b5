"""Streamlit's own files as browsers get them: packed once, and the page names at once what it will need in the end.

Streamlit sends its scripts as they lie on the disk, 2.9 MB for a first visit, because it would pack them again for each
(`starlette_gzip_middleware.py`): here each is packed once and kept. And its page learns only from the server, part by
part, which of its scripts one of our pages needs: a chain of questions, each as long as the way to the server. Which
files those are stands in the manifest of its build (Vite's; https://vite.dev/guide/backend-integration.html), so they
and our own are named in the page's head (`modulepreload`), and the fleet's picture is asked for before any script runs.

What is not known here, asked for in parts or of an odd kind, Streamlit answers itself. Nothing of its files is changed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import mimetypes
import re
import threading
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import Response
from streamlit import file_util

from drover_dashboard.server import auth_settings as people
from drover_dashboard.server import frame
from drover_dashboard.server.proxy_auth import (
    App,
    Receive,
    Scope,
    Send,
    signed_in,
)
from drover_dashboard.widgets import fleet_picture as fleet_canvas
from drover_dashboard.widgets.components import ASSETS
from drover_dashboard.widgets.theme import STREAMLIT

log = logging.getLogger(__name__)

STATIC = "/static/"
PACKED = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}  # fonts and pictures are it already
LEVEL = 9  # once for each file
KEPT_BYTES = 32 << 20  # of all files together, packed; a console needs 2
YEAR_S = 31_536_000  # as Streamlit says itself: the names of its files change with what is in them
HEAD_END, HEAD_BEGIN = "</head>", '<meta charset="UTF-8" />'
ENTRY = re.compile(r'<script type="module" crossorigin src="([^"<>]+)"></script>')
MODULE = re.compile(r'<link rel="modulepreload" crossorigin href="([^"<>]+)">\s*')
OWN = "./drover/assets/"

# The parts of Streamlit and our files that a page shows first; a page that is not named here gets those of all.
PARTS = ("Html", "BidiComponent")
FIRST: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "/": (
        ("Selectbox",),
        (
            "fleet_early.js",
            "fleet.js",
            "fleet_keys.js",
            "fleet_layout.js",
            "fleet_pixels.js",
            "common.js",
            "table.js",
            "figures.js",
        ),
    ),
}
STRIPS = ("clusters_early.js", "clusters.js", "common.js")  # of the page of all clusters
OURS = ("table.js", "common.js")


class Frontend:
    """ASGI middleware."""

    def __init__(self, app: App, pages: Iterable[str]) -> None:
        """`pages`: paths of the console's pages, such as `/node`."""
        self._app = app
        self._root = Path(file_util.get_static_dir())
        self._kept: dict[str, tuple[bytes, str, bool]] = {}  # body, its type, whether it is packed
        self._lock = threading.Lock()
        self._pages = self._made(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        if scope["type"] == "http" and scope["method"] == "GET":
            connection = HTTPConnection(scope)
            path = str(scope["path"])
            if path in self._pages:
                response = self._page(path, connection)
            elif path.startswith(STATIC) and not any(word in connection.headers for word in ("range", "if-none-match")):
                response = await run_in_threadpool(self._file, path, connection)
        await (response or self._app)(scope, receive, send)

    def _page(self, path: str, asked: HTTPConnection) -> Response:
        plain, early = self._pages[path]
        # Who has to sign in first would be refused the picture.
        body = plain if people.chosen().oidc and not signed_in(asked) else early
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()[:20]}"', "Cache-Control": "no-cache"}
        if asked.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="text/html", headers=headers)

    def _file(self, path: str, asked: HTTPConnection) -> Response | None:
        found = self._read(path)
        if found is None or (found[2] and "gzip" not in asked.headers.get("accept-encoding", "")):
            return None
        body, media_type, is_packed = found
        headers = {"Cache-Control": f"public, immutable, max-age={YEAR_S}"}
        if is_packed:
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(body, media_type=media_type, headers=headers)

    def _read(self, path: str) -> tuple[bytes, str, bool] | None:
        """A file of Streamlit's as it travels; None: it is none, or there is no room for more."""
        kept = self._kept.get(path)
        if kept is not None:
            return kept
        file = (self._root / path[1:]).resolve()
        if not file.is_relative_to(self._root.resolve() / "static") or not file.is_file():
            return None
        body, is_packed = file.read_bytes(), file.suffix in PACKED
        media_type = PACKED.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        if is_packed:
            body = gzip.compress(body, LEVEL, mtime=0)
        with self._lock:
            if sum(len(held) for held, _, _ in self._kept.values()) + len(body) > KEPT_BYTES:
                return None
            self._kept[path] = body, media_type, is_packed
        return self._kept[path]

    def _made(self, pages: Iterable[str]) -> dict[str, tuple[bytes, bytes]]:
        """Of each page its HTML, and the same with the picture asked for early (the same where there is none)."""
        try:
            page = (self._root / "index.html").read_text("utf-8")
            manifest = json.loads((self._root / "manifest.json").read_text("utf-8"))
            if page.count(HEAD_END) != 1 or page.count(HEAD_BEGIN) != 1:
                raise ValueError("its head is another one")
            scripts = "\n".join((ASSETS / name).read_text("utf-8") for name in ("preferences.js", "steps.js"))
            frame = _frame()
            made = {}
            for path in pages:
                parts, ours = FIRST.get(path, ((), OURS))
                links = [*_chunks(manifest, (*PARTS, *parts)), *(f"{OWN}{name}" for name in ours)]
                tags = "".join(f'<link rel="modulepreload" crossorigin href="{escape(link)}">\n    ' for link in links)
                plain = page.replace(HEAD_BEGIN, f"{HEAD_BEGIN}\n    <script>\n{scripts}</script>\n    {frame}")
                plain = plain.replace(HEAD_END, f"{tags}{HEAD_END}")
                made[path] = plain.encode(), (_early(plain) if path == "/" else plain).encode()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning(
                "Streamlit's index.html has an unknown layout (%s); serving it unmodified, first paint will be slower",
                error,
            )
            return {}
        return made


def _early(page: str) -> str:
    """The page with what asks for the picture and draws it, then for Streamlit's scripts, and begins with its first."""
    scripts, modules = ENTRY.findall(page), MODULE.findall(page)
    if len(scripts) != 1:
        raise ValueError(f"it begins with {len(scripts)} scripts")
    modules.sort(key=lambda name: OWN not in name)
    drawn = fleet_canvas.early()
    kinds = ("fleet", "clusters") if drawn["several"] else ("fleet",)
    strips = [f"{OWN}{name}" for name in STRIPS]
    given = json.dumps(drawn | {"entry": scripts[0], "modules": [*modules, *scripts], "strips": strips})
    script = (ASSETS / "early.js").read_text("utf-8").replace("GIVEN", given.replace("<", "\\u003c"))  # no end of it
    dark = f"html {{ background: {STREAMLIT['theme.dark.backgroundColor']}; }}"
    style = f"@media (prefers-color-scheme: dark) {{ {dark} }}"
    body = "".join(map(_template, kinds))
    head = f"{HEAD_BEGIN}\n    <style>{style}</style>\n    <script>\n{script}</script>\n    {body}"
    return MODULE.sub("", ENTRY.sub("", page)).replace(HEAD_BEGIN, head)


def _frame() -> str:
    """What the frame of every page (frame.js) is made of, and its script, which waits for none of Streamlit's."""
    known = json.dumps(frame.given()).replace("<", "\\u003c")  # no end of the element
    return (
        f"<style>{(ASSETS / 'frame_room.css').read_text('utf-8')}</style>\n"
        f'    <script type="application/json" id="drover_frame_given">{known}</script>\n'
        f"    {_template('frame', 'drover_frame_parts')}\n"
        f'    <script type="module" async crossorigin src="{OWN}frame.js"></script>'
    )


def _template(name: str, as_id: str = "") -> str:
    """What a script that draws early (fleet_early.js, clusters_early.js) puts on the page."""
    css, html = ((ASSETS / f"{name}.{kind}").read_text("utf-8") for kind in ("css", "html"))
    return f'<template id="{as_id or f"drover_{name}_early"}"><style>{css}</style>{html}</template>'


def _chunks(manifest: dict[str, Any], parts: Iterable[str]) -> list[str]:
    """Files of Streamlit's that these parts need and its page does not name itself."""
    named = _needed(manifest, ["index.html"])
    wanted = [
        key for part in parts for key, row in manifest.items()
        if row.get("isDynamicEntry") and key.endswith(f"/{part}.tsx")
    ]  # fmt: skip
    return [f"./{manifest[key]['file']}" for key in _needed(manifest, wanted) if key not in named]


def _needed(manifest: dict[str, Any], keys: list[str]) -> dict[str, None]:
    """These and all that they import."""
    found: dict[str, None] = {}
    while keys:
        key = keys.pop(0)
        if key not in found:
            found[key] = None
            keys += manifest[key].get("imports", [])
    return found
