"""PagerDuty, Events API v2: an alert for each incident, raised, made worse and resolved under the incident's id.

Sources: PagerDuty/api-schema, reference/events-v2/openapiv3.json (fields, answers, what to send again);
developer.pagerduty.com/docs/events-api-v2 (lengths, 512 KB). A trigger of an alert that is open overwrites it, and
raises the urgency where the service has "Dynamic notifications based on alert severity" (sensu-plugins-pagerduty
issue 30), so that one that becomes critical pages; it never lowers it.
"""

from __future__ import annotations

import json
from typing import Any

from drover_collector.notify.base import Delivery
from drover_collector.notify.http import Bounded, Http, HttpAnswer
from drover_collector.notify.wording import Places, Story, cut, story
from drover_core.model.events import Severity
from drover_core.times import iso

MAX_SUMMARY = 1024
MAX_KEY = 255
MAX_DETAIL = 4000
SEVERITIES = {"critical": "critical", "warning": "warning", "info": "info"}


def event(told: Story, routing_key: str, now_ms: int) -> dict[str, Any]:
    """The request's JSON, a few kB at most."""
    key = {"routing_key": routing_key, "dedup_key": cut(told.id, MAX_KEY)}
    if told.over:
        return {**key, "event_action": "resolve"}
    details = {label: cut(text, MAX_DETAIL) for label, text in told.details(now_ms)}
    details = {"What": cut(told.summary, MAX_DETAIL), "What to do": cut(told.advice, MAX_DETAIL), **details}
    details["Seen"] = cut("\n".join(told.evidence), MAX_DETAIL)
    details["Look"] = told.command
    payload = {
        "summary": cut(told.headline, MAX_SUMMARY),
        "source": cut(told.node or told.where, MAX_KEY),
        "severity": SEVERITIES.get(told.severity, "error"),
        "timestamp": iso(told.opened_ms),
        "component": "" if told.gpu is None else f"GPU {told.gpu}",
        "group": cut(told.pool or told.rack, MAX_KEY),
        "class": cut(told.topic, MAX_KEY),
        "custom_details": {label: text for label, text in details.items() if text},
    }
    request: dict[str, Any] = {
        **key,
        "event_action": "trigger",
        "payload": {name: value for name, value in payload.items() if value},
        "client": "Drover",
    }
    if told.link:
        request["client_url"] = told.link
        request["links"] = [{"href": told.link, "text": "The incident in Drover's console"}]
    return request


class PagerDuty:
    """One service; not for use by two threads at once."""

    kind = "pagerduty"
    repeat_s: float | None = None

    def __init__(
        self,
        name: str,
        routing_key: str,
        url: str,
        min_severity: Severity,
        timeout_s: float,
        places: Places,
        proxy: str | None = None,
    ) -> None:
        self.name = name
        self.min_severity = min_severity
        self._key = routing_key
        self._url = url
        self._places = places
        self._http = Http(timeout_s, proxy=proxy)
        self._bounded = Bounded[HttpAnswer](f"pagerduty-{name}-try", 2 * timeout_s)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:  # noqa: ARG002  # dedup_key is the id
        data = json.dumps(event(story(body, self._places), self._key, now_ms), ensure_ascii=False).encode()
        headers = {"content-type": "application/json"}
        answer = self._bounded.call(lambda: self._http.request("POST", self._url, headers, data))
        if answer is None:
            return Delivery(False, f"no whole answer within {2 * self._http.timeout_s:g} s")
        if answer.good:
            return Delivery(True)
        if answer.status == 400:
            mend = "check the Integration Key: it must be one of an Events API v2 integration"
            return Delivery(False, f"answered 400{self._said(answer)}; {mend}", permanent=True)
        if answer.status == 429:
            return Delivery(False, "answered 429: too many events", retry_after_s=answer.retry_after_s)
        return Delivery(False, answer.told(), retry_after_s=answer.retry_after_s)

    def _said(self, answer: HttpAnswer) -> str:
        """PagerDuty's own words, without the key."""
        try:
            said = json.loads(answer.body)
            words = [str(said["message"]), *map(str, said.get("errors") or ())]
        except (ValueError, KeyError, TypeError, AttributeError):
            return ""
        return ": " + cut(" ".join("; ".join(words).replace(self._key, "***").split()), 300)

    def close(self) -> None:
        self._http.close()
