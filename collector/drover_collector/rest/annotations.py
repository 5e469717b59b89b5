"""Incidents as annotations of Grafana's boards: a flat list in the form of its Infinity data source.

Its annotations need the fields time, timeEnd, title, text and tags:
https://grafana.com/docs/plugins/yesoreyeram-infinity-datasource/latest/query/ and
https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/annotate-visualizations/
"""

from __future__ import annotations

from html import escape
from typing import Any
from urllib.parse import quote

from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.rest.incident_stream import Wanted
from drover_collector.rest.shapes import time_text

MOST = 1000
PROPERTIES = {
    "id": {"type": "string"},
    "time": {"type": "string", "format": "date-time", "description": "onset"},
    "timeEnd": {
        "type": "string",
        "format": "date-time",
        "description": "when it was closed; of an open one the end asked for",
    },
    "title": {"type": "string"},
    "text": {"type": "string", "description": "what to do, and a link to the incident in the console"},
    "tags": {"type": "string", "description": "kind, severity, node and job, separated by commas"},
    "url": {"type": "string"},
}


def annotated(facts: ApiSnapshot, wanted: Wanted, from_ms: int, to_ms: int) -> list[dict[str, Any]]:
    """Return the incidents that were open between two times, the newest first, at most MOST."""
    found = [i for i in facts.incidents(from_ms) if i.since_ms <= to_ms and wanted.has(i)]
    newest = sorted(found, key=lambda i: (-i.since_ms, i.id))[:MOST]
    return [_annotation(facts, incident, to_ms) for incident in newest]


def _annotation(facts: ApiSnapshot, incident: Any, to_ms: int) -> dict[str, Any]:
    url = f"{facts.config.console.url.rstrip('/')}/incidents?id={quote(incident.id, safe='')}"
    tags = [incident.kind.value, incident.severity.value, incident.node or "", incident.job or ""]
    return {
        "id": incident.id,
        "time": time_text(incident.since_ms),
        "timeEnd": time_text(incident.closed_ms or to_ms),
        "title": incident.summary,
        "text": f'{escape(incident.advice)} <a href="{escape(url)}">Open in Drover</a>',
        "tags": ",".join(tag for tag in tags if tag),
        "url": url,
    }
