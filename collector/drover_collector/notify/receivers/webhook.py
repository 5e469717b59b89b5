"""Write a message as JSON, and send it as one signed POST.

The signature follows standardwebhooks.com: an HMAC-SHA256 over id, timestamp and body. A webhook's address is often a
secret, so no error names it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

from drover_collector.notify.base import Delivery, ReceiverOptions
from drover_collector.notify.http import Http, HttpAnswer, TimeLimited
from drover_core.model.events import Incident, NoteKind
from drover_core.model.reports import incident_report
from drover_core.times import iso


def sign(secret: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Return the value of the webhook-signature header."""
    signed = b".".join((message_id.encode(), str(timestamp_s).encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def message(kind: str, incident: Incident, ts_ms: int, console_url: str, news: str = "") -> str:
    """Return a message's JSON, which the outbox stores and every receiver reads.

    Args:
        kind: `incident.opened` and the others of `state.py`. news: the sentence of an update; "" for others.
    """
    data: dict[str, Any] = incident_report(incident)
    data["version"] = incident.version
    if (end := incident.end) is not None:
        data["closed_because"] = end.why or end.text
        if end.kind is NoteKind.ABSORBED:
            data["merged_into"] = end.incident
    if news:
        data["news"] = news
    data["console"] = f"{console_url.rstrip('/')}/incidents?id={incident.id}"
    return json.dumps({"type": kind, "timestamp": iso(ts_ms), "data": data}, separators=(",", ":"), allow_nan=False)


def cloud_event(message_id: str, body: bytes) -> bytes:
    """Return a stored message as a CloudEvent in structured JSON.

    Attributes: https://github.com/cloudevents/spec, v1.0.2, spec.md and formats/json-format.md. `source` is the
    console's page of incidents, `subject` the incident; the two and `type` say what it is about without its data.
    """
    stored = json.loads(body)
    data = stored["data"]
    event = {
        "specversion": "1.0",
        "id": message_id,
        "source": str(data.get("console", "")).partition("?")[0] or "drover",
        "type": f"drover.{stored['type']}",
        "subject": str(data.get("id", "")),
        "time": stored["timestamp"],
        "datacontenttype": "application/json",
        "data": data,
    }
    if not event["subject"]:
        del event["subject"]  # the specification has no empty one
    return json.dumps(event, separators=(",", ":"), allow_nan=False).encode()


class Webhook:
    """One address for signed webhooks. One thread at a time."""

    kind = "webhook"
    repeat_s: float | None = None

    def __init__(self, options: ReceiverOptions, url: str, secret: bytes, *, cloud_events: bool = False) -> None:
        """`cloud_events`: send CloudEvents instead of Drover's own form."""
        self.name = options.name
        self.min_severity = options.min_severity
        self._url = url
        self._secret, self._cloud_events = secret, cloud_events
        self._http = Http(options.timeout_s, options.ca_file, options.proxy)
        self._call = TimeLimited[HttpAnswer](f"{self.kind}-{options.name}-try", 2 * options.timeout_s)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        """Post once. Only 2xx is a success; after 410 (gone) no further attempt is useful."""
        timestamp_s = now_ms // 1000
        content_type = "application/json"
        if self._cloud_events:
            content_type, body = "application/cloudevents+json; charset=utf-8", cloud_event(message_id, body)
        headers = {
            "content-type": content_type,
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": sign(self._secret, message_id, timestamp_s, body),
        }
        answer = self._call.call(lambda: self._http.request("POST", self._url, headers, body, read=False))
        if answer is None:
            return Delivery(False, f"no complete answer within {2 * self._http.timeout_s:g} s")
        if answer.good:
            return Delivery(True)
        if answer.status == 410:
            return Delivery(False, "answered 410: this address is gone; set the new one", permanent=True)
        return Delivery(False, answer.problem(), retry_after_s=answer.retry_after_s)

    def close(self) -> None:
        self._http.close()
