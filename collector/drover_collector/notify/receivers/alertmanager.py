"""Prometheus' Alertmanager, API v2: an alert for each open incident, told again before it expires.

An alert is its labels: with another severity it is another alert. So that one that is escalated leaves none behind,
Alertmanager itself is asked which alerts it has of the incident, and all but the new one are ended in the same request:
nothing is to be remembered over a restart, and a change of the settings' labels is mended too.

Each member of a cluster gets each alert, as they do not tell each other of alerts. One member is enough for a delivery:
the others get it when it is told again.

Sources: prometheus/alertmanager, api/v2/openapi.yaml; prometheus.io/docs/alerting/latest/alerts_api.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from typing import Any
from urllib.parse import quote

from drover_collector.notify.base import Delivery
from drover_collector.notify.http import Bounded, Http, HttpAnswer
from drover_collector.notify.wording import Places, Story, cut, moment, story
from drover_core.model.events import Severity
from drover_core.times import from_iso, iso

log = logging.getLogger(__name__)

EXPIRES = 3  # times `repeat_s`: two messages may be lost
REMEMBERED = 20_000  # incidents whose labels are known
MAX_TEXT = 4000

Labels = dict[str, str]


def labels(told: Story, more: Labels) -> Labels:
    """What routes, groups and silences go by. Nothing here moves while an incident only goes on."""
    topic = told.cause if told.scope == "fleet" else told.kind  # of the guard's events: DroverMassEvent
    all_of = {
        **more,
        "alertname": "Drover" + topic.title().replace("_", ""),
        "incident": told.id,
        "severity": told.severity,
        "kind": told.kind,
        "scope": told.scope,
        "node": told.node,
        "gpu": "" if told.gpu is None else str(told.gpu),
        "rack": told.rack,
        "pool": told.pool,
    }
    return {name: value for name, value in all_of.items() if value}


def alert(told: Story, more: Labels, now_ms: int, repeat_s: float) -> dict[str, Any]:
    """The alert of an open incident."""
    notes = {
        "summary": told.news or told.what,
        "description": told.text(now_ms),
        "advice": told.advice,
        "since": moment(told.since_ms),
        "cause": told.cause,
        "job": told.job,
    }
    return {
        "labels": labels(told, more),
        "annotations": {name: cut(text, MAX_TEXT) for name, text in notes.items() if text},
        "startsAt": iso(told.since_ms),
        "endsAt": iso(max(told.since_ms, now_ms) + round(EXPIRES * repeat_s * 1000)),
        "generatorURL": told.link,
    }


class Alertmanager:
    """One Alertmanager, or a cluster; not for use by two threads at once."""

    kind = "alertmanager"

    def __init__(
        self,
        name: str,
        urls: tuple[str, ...],
        min_severity: Severity,
        timeout_s: float,
        places: Places,
        *,
        repeat_s: float,
        labels: Labels | None = None,
        authorization: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.name = name
        self.min_severity = min_severity
        self.repeat_s: float | None = repeat_s
        self._every_s = repeat_s
        self._places = places
        self._labels = labels or {}
        self._authorization = authorization
        headers = {} if authorization is None else {"authorization": authorization}
        self._members = [_Member(name, url, number, timeout_s, headers, ca_file) for number, url in enumerate(urls, 1)]

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:  # noqa: ARG002  # labels are the id
        told = story(body, self._places)
        new = None if told.over else alert(told, self._labels, now_ms, self._every_s)
        for member in self._members:
            member.start(told, new, now_ms)
        answers = [member.result() for member in self._members]
        for member, answer in zip(self._members, answers, strict=True):
            if not answer.good and not member.failing:
                log.warning(
                    "alertmanager %s, member %d: %s", self.name, member.number, answer.told() + self._said(answer)
                )
            member.failing = not answer.good
        bad = [answer for answer in answers if not answer.good]
        if len(bad) < len(answers):
            return Delivery(True)
        detail = "; ".join(dict.fromkeys(answer.told() + self._said(answer) for answer in bad))
        permanent = all(answer.status == 400 for answer in bad)
        return Delivery(False, detail, permanent=permanent, retry_after_s=bad[0].retry_after_s)

    def _said(self, answer: HttpAnswer) -> str:
        """Alertmanager's own words about a bad request, without what it was let in by."""
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
    def __init__(
        self, name: str, url: str, number: int, timeout_s: float, headers: dict[str, str], ca_file: str | None
    ) -> None:
        self.http = Http(timeout_s, ca_file)
        self.number = number
        self.failing = False
        self._url = f"{url.rstrip('/')}/api/v2/alerts"
        self._headers = headers
        self._bounded = Bounded[HttpAnswer](f"alertmanager-{name}-{number}-try", 2 * timeout_s)
        self._known: OrderedDict[str, Labels] = OrderedDict()  # incident -> labels of its only alert there

    def start(self, told: Story, new: dict[str, Any] | None, now_ms: int) -> None:
        self._bounded.start(lambda: self._tell(told, new, now_ms))

    def result(self) -> HttpAnswer:
        return self._bounded.result() or HttpAnswer(0, "no whole answer in time")

    def _tell(self, told: Story, new: dict[str, Any] | None, now_ms: int) -> HttpAnswer:
        """
        Args:
            new: the alert as it is now; None: the incident is over.
        """
        alerts = [] if new is None else [new]
        if new is None or self._known.get(told.id) != new["labels"]:
            matcher = f'incident="{told.id}"'
            asked = self.http.request("GET", f"{self._url}?filter={quote(matcher)}", self._headers)
            if not asked.good:
                return asked
            try:
                alerts += [_ended(old, told, now_ms) for old in json.loads(asked.body) if _other(old, new)]
            except (ValueError, KeyError, TypeError, AttributeError):
                return HttpAnswer(0, "answers no list of alerts; is this the address of an Alertmanager?")
            if not alerts:
                return asked  # none of its alerts is there any more
        data = json.dumps(alerts, ensure_ascii=False).encode()
        answer = self.http.request("POST", self._url, {"content-type": "application/json", **self._headers}, data)
        if answer.good and new is not None:
            self._known[told.id] = new["labels"]
            self._known.move_to_end(told.id)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.pop(told.id, None)
        return answer


def _other(old: dict[str, Any], new: dict[str, Any] | None) -> bool:
    return new is None or old["labels"] != new["labels"]


def _ended(old: dict[str, Any], told: Story, now_ms: int) -> dict[str, Any]:
    ends_ms = min(now_ms, told.ended_ms) if told.over else now_ms
    return {
        "labels": old["labels"],
        "annotations": old.get("annotations") or {},
        "startsAt": old["startsAt"],
        "endsAt": iso(max(ends_ms, from_iso(old["startsAt"]))),
        "generatorURL": old.get("generatorURL", ""),
    }
