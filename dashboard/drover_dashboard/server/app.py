"""The console's web server: Streamlit with routes of our own (assets, layout and picture of the fleet, the frame of
every page, search), behind `door.py` and `frontend.py`."""

from __future__ import annotations

import gc
import gzip
import hashlib
import importlib
import json
import pkgutil
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from drover_dashboard import client, clusters
from drover_dashboard.server import frame
from drover_dashboard.server import streamlit_patches as streamlit_mends
from drover_dashboard.server.frontend import Frontend
from drover_dashboard.server.proxy_auth import TrustedProxyMiddleware
from drover_dashboard.widgets import cluster_choice, fleet_picture, moment, trends, view
from drover_dashboard.widgets.components import ASSETS
from drover_dashboard.widgets.fleet_picture import Frame, metrics, trouble_line
from drover_dashboard.widgets.grouping import GROUPS, USUAL, grouped
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

FRAME_HEADER = "Drover-Frame"  # assets/fleet.js reads it
TREND_FRESH_S = 4.0  # while days are still counted the browser asks again
LAYOUT_LEVEL = 6  # of gzip: a tenth of its size, and it seldom changes
PACKAGE = Path(__file__).parents[1]
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}


def build() -> st.App:
    streamlit_mends.mend()
    client.share_moment(moment.at_ms)
    routes = [
        Route("/drover/assets/{path:path}", asset),
        Route("/drover/layout", layout),
        Route("/drover/picture", picture),
        Route("/drover/playback", playback),
        Route("/drover/trend", trend),
        Route("/drover/clusters", strips),
        Route("/drover/frame", frame.frame),
        Route("/drover/search", frame.search),
    ]
    script = PACKAGE / "script" / "console.py"
    pages = ["/", *(f"/{page.stem}" for page in view.ALL_PAGES if page != view.FLEET)]
    return st.App(
        script, routes=routes, middleware=[Middleware(TrustedProxyMiddleware), Middleware(Frontend, pages=pages)]
    )


def share_several(found: clusters.Clusters) -> None:
    """Let each page use the client of the cluster that it names, and begin to ask all."""
    clusters.share(found)
    client.share_choice(cluster_choice.client, cluster_choice.name)
    found.start()


def warm() -> None:
    """Import what the first page would wait for, pandas above all, through which Streamlit passes what components get.

    Then keep what stays for good out of garbage collection: 100,000 objects, 40 ms for each run."""
    scripts = {page.stem for page in view.ALL_PAGES}  # they run once for each view, never on import
    for room in ("server", "widgets", "pages"):
        for module in pkgutil.iter_modules([str(PACKAGE / room)]):
            if room != "pages" or module.name not in scripts:
                importlib.import_module(f"drover_dashboard.{room}.{module.name}")
    importlib.import_module("pandas")
    gc.collect()
    gc.freeze()


def asset(request: Request) -> Response:
    """A file of `assets/`; browsers ask again each time and get 304 while it is the same."""
    path = (ASSETS / request.path_params["path"]).resolve()
    media_type = MEDIA_TYPES.get(path.suffix)
    if media_type is None or not path.is_relative_to(ASSETS.resolve()) or not path.is_file():
        return JSONResponse({"trouble": "no such file"}, 404)
    body = path.read_bytes()
    headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()[:20]}"', "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def layout(request: Request) -> Response:
    """Groups of nodes with the places of their GPUs in a picture's bytes."""
    by = request.query_params.get("group", USUAL)
    if by not in GROUPS:
        return JSONResponse({"trouble": f"unknown group {json.dumps(by)}; choose one of {', '.join(GROUPS)}"}, 400)
    if (fleet := frame.fleet_of(request)) is None:
        return frame.no_cluster(request)
    answer = fleet.layout(jobs=by == "job")
    if answer.value is None:
        return JSONResponse({"trouble": trouble_line(answer.trouble) if answer.trouble else "no layout"}, 503)
    return _unpacked_if_asked(request, _arranged(answer.value, by, fleet.cluster), "application/json")


# By cluster and group: the newest layout, gzip, which all open pages share.
_layouts: dict[tuple[str, str], tuple[pb.Layout, bytes]] = {}


def strips(_request: Request) -> Response:
    """What is known of each cluster now, without asking any; 404 where there is one collector."""
    found = clusters.shared()
    if found is None:
        return JSONResponse({"trouble": "this console has one collector"}, 404)
    content = clusters.strips(found.received(), clusters.now_ms())
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


def _arranged(layout: pb.Layout, by: str, cluster: str) -> bytes:
    of, body = _layouts.get((cluster, by), (None, b""))
    if of is not layout and of != layout:
        content = {"version": layout.version, "group": by, "racks": grouped(layout, by)}
        body = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), LAYOUT_LEVEL, mtime=0)
        _layouts[cluster, by] = layout, body
    return body


def _unpacked_if_asked(request: Request, body: bytes, media_type: str, header: str = "") -> Response:
    """Send `body`, which is gzip; unpack it for a browser that takes none."""
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if header:
        headers[FRAME_HEADER] = header
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        body = gzip.decompress(body)
    return Response(body, media_type=media_type, headers=headers)


def picture(request: Request) -> Response:
    """One frame of the picture, coloured by health or a metric of the catalog."""
    color_by = request.query_params.get("color_by", "health")
    if color_by != "health" and color_by not in {metric.name for metric in metrics()}:
        return JSONResponse({"trouble": f"unknown metric {json.dumps(color_by)}; choose one of the list"}, 400)
    if (fleet := frame.fleet_of(request)) is None:
        return frame.no_cluster(request)
    found = fleet_picture.frame(fleet, color_by)
    if not isinstance(found, Frame):
        return JSONResponse({"trouble": trouble_line(found)}, 503)
    return _unpacked_if_asked(request, found.body, "application/octet-stream", found.header)


def playback(request: Request) -> Response:
    """All frames of a time (`from`, `to` in seconds), for the picture that plays it."""
    color_by = request.query_params.get("color_by", "health")
    if color_by != "health" and color_by not in {metric.name for metric in metrics()}:
        return JSONResponse({"trouble": f"unknown metric {json.dumps(color_by)}; choose one of the list"}, 400)
    given = [request.query_params.get(name, "") for name in ("from", "to")]
    if not all(text.isdecimal() and len(text) <= 10 for text in given):
        return JSONResponse({"trouble": "no time to play: give from and to in seconds"}, 400)
    if (fleet := frame.fleet_of(request)) is None:
        return frame.no_cluster(request)
    found = fleet_picture.frames(fleet, color_by, int(given[0]) * 1000, int(given[1]) * 1000)
    if not isinstance(found, Frame):
        return JSONResponse({"trouble": trouble_line(found)}, 503)
    return _unpacked_if_asked(request, found.body, "application/octet-stream", found.header)


def trend(request: Request) -> Response:
    """The fleet by day. A thread of its own waits for the collector: no page does."""
    if (fleet := frame.fleet_of(request)) is None:
        return frame.no_cluster(request)
    answer = fleet.ask(methods.GET_TREND, pb.TrendRequest(), fresh_s=TREND_FRESH_S)
    if answer.value is None:
        return JSONResponse({"trouble": trouble_line(answer.trouble) if answer.trouble else "no trend"}, 503)
    return JSONResponse(trends.content(answer.value), headers={"Cache-Control": "no-store"})
