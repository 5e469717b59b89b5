"""Send alerts to PagerDuty (Events API v2): one for each incident, triggered, escalated and resolved under its id.

Sources: PagerDuty/api-schema, reference/events-v2/openapiv3.json (fields, answers, what to retry);
developer.pagerduty.com/docs/events-api-v2 (lengths, 512 KB). A trigger of an alert that is open overwrites it, and
raises the urgency where the service has "Dynamic notifications based on alert severity" (sensu-plugins-pagerduty
issue 30), so an alert that becomes critical pages; the urgency never falls.
"""

from __future__ import annotations

import json
from typing import Any

from drover_collector.notify.base import Delivery, ReceiverOptions
from drover_collector.notify.http import Http, HttpAnswer, TimeLimited
from drover_collector.notify.wording import Notification, cut, read_message
from drover_core.times import iso

MAX_SUMMARY = 1024
MAX_KEY = 255
MAX_DETAIL = 4000
SEVERITIES = {"critical": "critical", "warning": "warning", "info": "info"}


def event(notification: Notification, routing_key: str, now_ms: int) -> dict[str, Any]:
    """Return the request's JSON, at most a few kB."""
    key = {"routing_key": routing_key, "dedup_key": cut(notification.id, MAX_KEY)}
    if notification.over:
        return {**key, "event_action": "resolve"}
    details = {label: cut(text, MAX_DETAIL) for label, text in notification.details(now_ms)}
    details = {
        "What": cut(notification.summary, MAX_DETAIL),
        "What to do": cut(notification.advice, MAX_DETAIL),
        **details,
    }
    details["Seen"] = cut("\n".join(notification.evidence), MAX_DETAIL)
    details["Look"] = notification.command
    payload = {
        "summary": cut(notification.headline, MAX_SUMMARY),
        "source": cut(notification.node or notification.where, MAX_KEY),
        "severity": SEVERITIES.get(notification.severity, "error"),
        "timestamp": iso(notification.opened_ms),
        "component": "" if notification.gpu is None else f"GPU {notification.gpu}",
        "group": cut(notification.pool or notification.rack, MAX_KEY),
        "class": cut(notification.topic, MAX_KEY),
        "custom_details": {label: text for label, text in details.items() if text},
    }
    request: dict[str, Any] = {
        **key,
        "event_action": "trigger",
        "payload": {name: value for name, value in payload.items() if value},
        "client": "Drover",
    }
    if notification.link:
        request["client_url"] = notification.link
        request["links"] = [{"href": notification.link, "text": "The incident in Drover's console"}]
    return request


class PagerDuty:
    """One PagerDuty service. One thread at a time."""

    kind = "pagerduty"
    repeat_s: float | None = None

    def __init__(self, options: ReceiverOptions, routing_key: str, url: str) -> None:
        self.name = options.name
        self.min_severity = options.min_severity
        self._key = routing_key
        self._url = url
        self._places = options.places
        self._http = Http(options.timeout_s, proxy=options.proxy)
        self._call = TimeLimited[HttpAnswer](f"pagerduty-{options.name}-try", 2 * options.timeout_s)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:  # noqa: ARG002  # dedup_key is the id
        data = json.dumps(event(read_message(body, self._places), self._key, now_ms), ensure_ascii=False).encode()
        headers = {"content-type": "application/json"}
        answer = self._call.call(lambda: self._http.request("POST", self._url, headers, data))
        if answer is None:
            return Delivery(False, f"no complete answer within {2 * self._http.timeout_s:g} s")
        if answer.good:
            return Delivery(True)
        if answer.status == 400:
            remedy = "check the Integration Key: it must belong to an Events API v2 integration"
            return Delivery(False, f"answered 400{self._reason(answer)}; {remedy}", permanent=True)
        if answer.status == 429:
            return Delivery(False, "answered 429: too many events", retry_after_s=answer.retry_after_s)
        return Delivery(False, answer.problem(), retry_after_s=answer.retry_after_s)

    def _reason(self, answer: HttpAnswer) -> str:
        """Return PagerDuty's reason, without the key."""
        try:
            reply = json.loads(answer.body)
            words = [str(reply["message"]), *map(str, reply.get("errors") or ())]
        except (ValueError, KeyError, TypeError, AttributeError):
            return ""
        return ": " + cut(" ".join("; ".join(words).replace(self._key, "***").split()), 300)

    def close(self) -> None:
        self._http.close()
