"""One signed POST, as standardwebhooks.com describes it: id, timestamp and an HMAC-SHA256 over both and the body.

The address of a webhook is often a secret of its own, so no message names it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

from drover_collector.notify.base import Delivery
from drover_collector.notify.http import Bounded, Http, HttpAnswer
from drover_core.model.events import Incident, NoteKind, Severity
from drover_core.model.reports import incident_report
from drover_core.times import iso


def sign(secret: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of the webhook-signature header."""
    signed = b".".join((message_id.encode(), str(timestamp_s).encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def message(kind: str, incident: Incident, ts_ms: int, console_url: str, news: str = "") -> str:
    """The body. `kind`: of `telling.py`; `news`: the sentence of those that have one."""
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


class Webhook:
    """A receiver. `deliver` blocks for at most about twice `timeout_s`; not for use by two threads at once."""

    kind = "webhook"
    repeat_s: float | None = None

    def __init__(
        self,
        name: str,
        url: str,
        secret: bytes,
        min_severity: Severity,
        timeout_s: float,
        ca_file: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self.name = name
        self.min_severity = min_severity
        self._url = url
        self._secret = secret
        self._http = Http(timeout_s, ca_file, proxy)
        self._bounded = Bounded[HttpAnswer](f"{self.kind}-{name}-try", 2 * timeout_s)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        """Post once. Only a 2xx answer counts; 410 is the receiver's word that it is gone for good."""
        timestamp_s = now_ms // 1000
        headers = {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": sign(self._secret, message_id, timestamp_s, body),
        }
        answer = self._bounded.call(lambda: self._http.request("POST", self._url, headers, body, read=False))
        if answer is None:
            return Delivery(False, f"no whole answer within {2 * self._http.timeout_s:g} s")
        if answer.good:
            return Delivery(True)
        if answer.status == 410:
            return Delivery(False, "answered 410: this address is gone for good; set its new one", permanent=True)
        return Delivery(False, answer.told(), retry_after_s=answer.retry_after_s)

    def close(self) -> None:
        self._http.close()
