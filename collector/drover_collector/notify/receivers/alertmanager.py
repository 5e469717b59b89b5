"""Send alerts to Prometheus' Alertmanager (API v2): one for each open incident, repeated before it expires.

An alert's identity is its labels, so another severity makes another alert. Before each change the receiver asks
Alertmanager which alerts it has for the incident and ends all but the new one in the same request. This needs no memory
over restarts and also ends alerts with labels of earlier settings.

Members of a cluster do not share alerts, so each gets every alert. A delivery succeeds when one member accepts it; the
repetition reaches the others.

Sources: prometheus/alertmanager, api/v2/openapi.yaml; prometheus.io/docs/alerting/latest/alerts_api.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from typing import Any
from urllib.parse import quote

from drover_collector.notify.base import Delivery, ReceiverOptions
from drover_collector.notify.http import Http, HttpAnswer, TimeLimited
from drover_collector.notify.wording import Notification, clock_time, cut, read_message
from drover_core.times import from_iso, iso

log = logging.getLogger(__name__)

EXPIRES = 3  # times `repeat_s`: two messages may be lost
MAX_KNOWN = 20_000  # incidents
MAX_TEXT = 4000

Labels = dict[str, str]


def labels(notification: Notification, more: Labels) -> Labels:
    """Return the labels, by which Alertmanager routes, groups and silences. They change only when the incident does."""
    topic = notification.cause if notification.scope == "fleet" else notification.kind  # so DroverMassEvent
    all_of = {
        **more,
        "alertname": "Drover" + topic.title().replace("_", ""),
        "incident": notification.id,
        "severity": notification.severity,
        "kind": notification.kind,
        "scope": notification.scope,
        "node": notification.node,
        "gpu": "" if notification.gpu is None else str(notification.gpu),
        "rack": notification.rack,
        "pool": notification.pool,
    }
    return {name: value for name, value in all_of.items() if value}


def alert(notification: Notification, more: Labels, now_ms: int, repeat_s: float) -> dict[str, Any]:
    """Return the alert of an open incident."""
    notes = {
        "summary": notification.news or notification.what,
        "description": notification.text(now_ms),
        "advice": notification.advice,
        "since": clock_time(notification.since_ms),
        "cause": notification.cause,
        "job": notification.job,
    }
    return {
        "labels": labels(notification, more),
        "annotations": {name: cut(text, MAX_TEXT) for name, text in notes.items() if text},
        "startsAt": iso(notification.since_ms),
        "endsAt": iso(max(notification.since_ms, now_ms) + round(EXPIRES * repeat_s * 1000)),
        "generatorURL": notification.link,
    }


class Alertmanager:
    """One Alertmanager or a cluster. One thread at a time."""

    kind = "alertmanager"

    def __init__(
        self,
        options: ReceiverOptions,
        urls: tuple[str, ...],
        *,
        repeat_s: float,
        labels: Labels | None = None,
        authorization: str | None = None,
    ) -> None:
        self.name = options.name
        self.min_severity = options.min_severity
        self.repeat_s: float | None = repeat_s
        self._repeat_s = repeat_s
        self._places = options.places
        self._labels = labels or {}
        self._authorization = authorization
        headers = {} if authorization is None else {"authorization": authorization}
        self._members = [_Member(options, url, number, headers) for number, url in enumerate(urls, 1)]

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:  # noqa: ARG002  # labels are the id
        notification = read_message(body, self._places)
        new = None if notification.over else alert(notification, self._labels, now_ms, self._repeat_s)
        for member in self._members:
            member.start(notification, new, now_ms)
        answers = [member.result() for member in self._members]
        for member, answer in zip(self._members, answers, strict=True):
            if not answer.good and not member.failing:
                log.warning(
                    "alertmanager %s, member %d: %s", self.name, member.number, answer.problem() + self._reason(answer)
                )
            member.failing = not answer.good
        bad = [answer for answer in answers if not answer.good]
        if len(bad) < len(answers):
            return Delivery(True)
        detail = "; ".join(dict.fromkeys(answer.problem() + self._reason(answer) for answer in bad))
        permanent = all(answer.status == 400 for answer in bad)
        return Delivery(False, detail, permanent=permanent, retry_after_s=bad[0].retry_after_s)

    def _reason(self, answer: HttpAnswer) -> str:
        """Return what Alertmanager says of a bad request, without credentials."""
        if answer.status == 401:
            return ": give username and password_file, or token_file"
        if answer.status != 400:
            return ""
        words = " ".join(answer.body.decode("utf-8", "replace").split())
        if self._authorization is not None:
            words = words.replace(self._authorization.partition(" ")[2], "***")
        return f": {cut(words, 300)}"

    def close(self) -> None:
        for member in self._members:
            member.http.close()


class _Member:
    """One address of the cluster."""

    def __init__(self, options: ReceiverOptions, url: str, number: int, headers: dict[str, str]) -> None:
        self.http = Http(options.timeout_s, options.ca_file)
        self.number = number
        self.failing = False
        self._url = f"{url.rstrip('/')}/api/v2/alerts"
        self._headers = headers
        self._call = TimeLimited[HttpAnswer](f"alertmanager-{options.name}-{number}-try", 2 * options.timeout_s)
        self._known: OrderedDict[str, Labels] = OrderedDict()  # incident -> labels of its only alert there

    def start(self, notification: Notification, new: dict[str, Any] | None, now_ms: int) -> None:
        self._call.start(lambda: self._update(notification, new, now_ms))

    def result(self) -> HttpAnswer:
        return self._call.result() or HttpAnswer(0, "no complete answer in time")

    def _update(self, notification: Notification, new: dict[str, Any] | None, now_ms: int) -> HttpAnswer:
        """Post the incident's alert and end its other alerts.

        Args:
            new: the current alert; None: the incident is closed.
        """
        alerts = [] if new is None else [new]
        if new is None or self._known.get(notification.id) != new["labels"]:
            matcher = f'incident="{notification.id}"'
            asked = self.http.request("GET", f"{self._url}?filter={quote(matcher)}", self._headers)
            if not asked.good:
                return asked
            try:
                alerts += [_ended(old, notification, now_ms) for old in json.loads(asked.body) if _other(old, new)]
            except (ValueError, KeyError, TypeError, AttributeError):
                return HttpAnswer(
                    0, "the answer is not a list of alerts; check that this is the address of an Alertmanager"
                )
            if not alerts:
                return asked  # its alerts have ended already
        data = json.dumps(alerts, ensure_ascii=False).encode()
        answer = self.http.request("POST", self._url, {"content-type": "application/json", **self._headers}, data)
        if answer.good and new is not None:
            self._known[notification.id] = new["labels"]
            self._known.move_to_end(notification.id)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.pop(notification.id, None)
        return answer


def _other(old: dict[str, Any], new: dict[str, Any] | None) -> bool:
    return new is None or old["labels"] != new["labels"]


def _ended(old: dict[str, Any], notification: Notification, now_ms: int) -> dict[str, Any]:
    ends_ms = min(now_ms, notification.ended_ms) if notification.over else now_ms
    return {
        "labels": old["labels"],
        "annotations": old.get("annotations") or {},
        "startsAt": old["startsAt"],
        "endsAt": iso(max(ends_ms, from_iso(old["startsAt"]))),
        "generatorURL": old.get("generatorURL", ""),
    }
