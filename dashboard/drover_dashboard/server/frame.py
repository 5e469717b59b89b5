"""What the frame of every page shows and finds (assets/frame.js): one answer for all open pages, a bounded search."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drover_core.model.events import SEVERITY_ORDER, Incident
from drover_dashboard import client, clusters
from drover_dashboard.client import Answer, FleetClient
from drover_dashboard.pages import incident_handling as handling
from drover_dashboard.pages import incident_rows
from drover_dashboard.server import auth_settings as people
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.fleet_picture import trouble_line
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import LIST_INCIDENTS, SEARCH

OVER_DAYS, OVER, OVER_FRESH_S = 3.0, 50, 10.0  # of what is over: the bell has what opened and closed unseen
OPEN = 50  # as many as the Fleet page asks for, so that both share one answer
TEXT_CHARS = 200
UNCACHED = {"Cache-Control": "no-store"}
ALL = "all clusters"
IN_EACH = 6  # hits of a cluster, on the page of all


def given() -> dict[str, Any]:
    """What assets/frame.js knows from the start."""
    paths = {page: "" if page == view.FLEET else page.stem for page in view.ALL_PAGES}
    pages = [{"path": path, "title": page_title(page.stem)} for page, path in paths.items()]
    return {
        "pages": pages,
        "several": clusters.shared() is not None,
        "asks_name": not people.chosen().asks,
        "sign_in": people.chosen().oidc,  # then nothing is asked before a page of the console stands
    }


def page_title(stem: str) -> str:
    return fmt.capital(stem.replace("_", " "))


def fleet_of(request: Request) -> FleetClient | None:
    """Return the client of the cluster that the request names; None: it names none of this console."""
    found, name = clusters.shared(), request.query_params.get("cluster", "")
    if found is None:
        return client.fleet()
    return found.client(name) if name in found.names() else None


def no_cluster(request: Request) -> Response:
    name = request.query_params.get("cluster", "")
    return JSONResponse({"trouble": f"no cluster {json.dumps(name)}: choose one on the page of all clusters"}, 400)


def frame(request: Request) -> Response:
    """Cluster, mode, what waits for a person and what is open."""
    fleet, several = fleet_of(request), clusters.shared()
    if fleet is None and several is not None:
        waiting = sum(one.status.value.pending for one in several.received() if one.status.value is not None)
        return JSONResponse({"cluster": ALL, "pending": waiting}, headers=UNCACHED)
    if fleet is None:
        return no_cluster(request)
    return JSONResponse(_of_one(fleet), headers=UNCACHED)


def _of_one(fleet: FleetClient) -> dict[str, Any]:
    status, opened = fleet.status(), fleet.incidents("open", limit=OPEN)
    found: dict[str, Any] = {"cluster": fleet.cluster, "target": fleet.target, **_trouble(status)}
    if status.value is not None:
        found |= {
            "cluster": fleet.cluster or status.value.fleet or "fleet",
            "mode": status.value.mode,
            "mode_text": fmt.MODES.get(status.value.mode, status.value.mode),
            "pending": status.value.pending,
            "judged": bool(status.value.newest_tick_ms),
            "ts_ms": status.value.ts_ms,
            "health": {} if status.trouble else dict(status.value.gpus_by_health),
        }
    if opened.value is not None:
        incidents = sorted(incident_rows.parse(opened.value), key=_worst_first)
        found |= {
            "open_total": opened.value.total,
            "opened": [_row(one, fleet.cluster, opened.value) for one in incidents],
            "over": _over(fleet),
        }
    return found


def _over(fleet: FleetClient) -> list[dict[str, Any]] | None:
    """What opened in the last days and is over, the newest first; None: not known."""
    request = pb.ListIncidentsRequest(state="closed", limit=OVER, sort="newest")
    request.since_ms = time.time_ns() // 1_000_000 - round(OVER_DAYS * 86_400_000)
    answer = fleet.ask(LIST_INCIDENTS, request, "over", fresh_s=OVER_FRESH_S)
    if answer.value is None:
        return None
    found = incident_rows.parse(answer.value)
    return [_row(one, fleet.cluster, answer.value) for one in found if one.opened_ms >= request.since_ms]


def _trouble(status: Answer[pb.Status]) -> dict[str, str]:
    """The loudest of what is wrong with Drover itself, in a few words and in full."""
    if status.trouble is not None and not status.trouble.slow:
        return {"trouble": fmt.capital(status.trouble.what), "trouble_text": trouble_line(status.trouble)}
    if status.value is not None and status.value.blind:
        return {"trouble": "Drover does not see or judge all", "trouble_text": " ".join(status.value.blind)}
    if status.value is not None and status.value.role == "standby":
        return {"trouble": "standby: it does not act", "trouble_text": "Another collector detects and acts."}
    return {}


def _worst_first(incident: Incident) -> tuple[int, int]:
    return -SEVERITY_ORDER.index(incident.severity), -incident.opened_ms


def _row(incident: Incident, cluster: str, reply: pb.IncidentList) -> dict[str, Any]:
    notes = reply.handling.get(incident.id)
    state = {} if incident.closed_ms is None else {"state": "all"}
    return {
        "id": incident.id,
        "title": _words(incident.summary),
        "severity": incident.severity.value,
        "opened_ms": incident.opened_ms,
        "closed_ms": incident.closed_ms,
        "handled": handling.words(notes, short=True),
        "calm": incident.id in reply.silences or bool(notes and notes.acknowledged_by),
        "href": view.href(view.INCIDENTS, cluster=cluster or None, id=incident.id, **state),
    }


def search(request: Request) -> Response:
    """What a text names, each with the page that shows it."""
    text = request.query_params.get("text", "")[:TEXT_CHARS]
    fleet, several = fleet_of(request), clusters.shared()
    if fleet is None and several is not None:
        return JSONResponse(_in_all(several, text), headers=UNCACHED)
    if fleet is None:
        return no_cluster(request)
    answer = fleet.ask(SEARCH, pb.SearchRequest(text=text))
    if answer.value is None or answer.trouble is not None:
        trouble = trouble_line(answer.trouble) if answer.trouble else "no answer"
        return JSONResponse({"trouble": fmt.capital(trouble)}, 503, headers=UNCACHED)
    hits = [_hit(hit, fleet.cluster, text) for hit in answer.value.hits]
    return JSONResponse({"hits": hits, "more": answer.value.more}, headers=UNCACHED)


def _in_all(several: clusters.Clusters, text: str) -> dict[str, Any]:
    """Clusters of that name, then what each of them found; one that does not answer in time is named."""
    names = [name for name in several.names() if text.casefold() in name.casefold()]
    hits = [{"kind": "cluster", "name": name, "href": f"./?{urlencode({'cluster': name})}"} for name in names]
    answers = several.ask_all(lambda fleet: fleet.ask(SEARCH, pb.SearchRequest(text=text, limit=IN_EACH)).value)
    for name, reply in answers.items():
        for hit in reply.hits if reply is not None else ():
            found = _hit(hit, name, text)
            hits.append(found | {"detail": f"cluster {name}: {found['detail']}"})
    missing = [name for name, reply in answers.items() if reply is None]
    more = any(reply.more for reply in answers.values() if reply is not None)
    said = {"trouble": f"No answer from {', '.join(missing)}"} if missing else {}
    order = {hit["kind"]: number for number, hit in reversed(list(enumerate(hits)))}  # one group for each kind
    return {"hits": sorted(hits, key=lambda hit: order[hit["kind"]]), "more": more, **said}


def _hit(hit: pb.SearchHit, cluster: str, text: str) -> dict[str, Any]:
    return {
        "kind": hit.kind,
        "name": _words(hit.name) if hit.kind == "incident" else hit.name,
        "detail": _words(hit.detail),
        "state": hit.state,
        "exact": hit.name.casefold() == text.strip().casefold(),
        "href": _href(hit, cluster or None),
    }


def _href(hit: pb.SearchHit, cluster: str | None) -> str | None:
    """None: there is no page of it, such as an XID that no incident has; what it means stands in its row."""
    if hit.incident:
        return view.href(view.INCIDENTS, cluster=cluster, id=hit.incident, state="all")
    if hit.kind in ("node", "gpu"):
        return view.href(view.NODE, cluster=cluster, node=hit.node, gpu=hit.gpu if hit.HasField("gpu") else None)
    pages = {"job": (view.JOB, "job"), "rack": (view.THERMALS, "rack"), "leaf": (view.FABRIC, "leaf")}
    if hit.kind not in pages:
        return None
    page, name = pages[hit.kind]
    return view.href(page, **{"cluster": cluster, name: hit.name})


def _words(text: str) -> str:
    """A sentence of the collector; its times stay ISO, which the browser writes in the viewer's zone."""
    return fmt.in_words(text).replace("degC", "°C").replace("+- ", "± ")
