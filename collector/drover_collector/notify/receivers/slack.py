"""Slack, by an incoming webhook of a channel.

Sources: docs.slack.dev: messaging/sending-messages-using-incoming-webhooks, reference/block-kit (lengths),
messaging/formatting-message-text (what to escape), changelog 2016-05-17 (answers and their words).
"""

from __future__ import annotations

import json
import re
from typing import Any

from drover_collector.notify.base import Delivery
from drover_collector.notify.http import Bounded, Http, HttpAnswer
from drover_collector.notify.wording import Places, Story, cut, story
from drover_core.model.events import Severity

MAX_TEXT = 3000  # of a section's or a context's text
MAX_FIELD = 2000
MAX_FIELDS = 10
MAX_LINE = 300  # of the line above, which is what a phone shows

COLORS = {"critical": "#c8102e", "warning": "#e8a200", "info": "#3a7bd5"}
OVER = "#2e9e5b"

MENDS = {
    "invalid_token": "the webhook was revoked",
    "action_prohibited": "the workspace does not let this webhook post there",
    "channel_not_found": "its channel is gone",
    "channel_is_archived": "its channel is archived",
    "no_service": "the webhook was removed",
    "no_active_hooks": "the webhook was switched off",
    "no_team": "the workspace is gone",
    "user_not_found": "the user it writes to is gone",
}


def escaped(text: str) -> str:
    """Slack's three control characters; without them no text can mention a channel or hide a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def payload(told: Story, now_ms: int) -> dict[str, Any]:
    """The request's JSON."""
    blocks: list[dict[str, Any]] = []
    if told.news:
        blocks.append(_section(told.what))
    if told.over:
        blocks.append(_section(told.end))
    elif told.advice:
        blocks.append(_section(f"*What to do:* {escaped(told.advice)}", ready=True))
    fields = [
        {"type": "mrkdwn", "text": cut(f"*{label}*\n{escaped(text)}", MAX_FIELD)}
        for label, text in told.details(now_ms)[:MAX_FIELDS]
    ]
    blocks.append({"type": "section", "fields": fields})
    if told.evidence and not told.over:
        facts = "\n".join(f"• {escaped(fact)}" for fact in told.evidence)
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": cut(facts, MAX_TEXT)}]})
    link = f"<{escaped(told.link)}|Open it in the console> or " if told.link else ""
    blocks.append(_section(f"{link}`{escaped(told.command)}`", ready=True))
    return {
        "text": escaped(cut(told.headline, MAX_LINE)),
        "attachments": [{"color": OVER if told.over else COLORS.get(told.severity, "#777777"), "blocks": blocks}],
        "unfurl_links": False,
        "unfurl_media": False,
    }


def plain(told: Story, now_ms: int) -> dict[str, Any]:
    """The same without any form, for when Slack does not take that."""
    return {"text": escaped(cut(f"{told.headline}\n\n{told.text(now_ms)}", MAX_TEXT))}


def _section(text: str, *, ready: bool = False) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": cut(text if ready else escaped(text), MAX_TEXT)}}


class Slack:
    """One channel; not for use by two threads at once."""

    kind = "slack"
    repeat_s: float | None = None

    def __init__(
        self, name: str, url: str, min_severity: Severity, timeout_s: float, places: Places, proxy: str | None = None
    ) -> None:
        self.name = name
        self.min_severity = min_severity
        self._url = url
        self._places = places
        self._http = Http(timeout_s, proxy=proxy)
        self._bounded = Bounded[HttpAnswer](f"slack-{name}-try", 2 * timeout_s)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:  # noqa: ARG002  # Slack has no ids
        told = story(body, self._places)

        def post() -> HttpAnswer:
            answer = self._post(payload(told, now_ms))
            return answer if answer.status != 400 else self._post(plain(told, now_ms))

        answer = self._bounded.call(post)
        if answer is None:
            return Delivery(False, f"no whole answer within {2 * self._http.timeout_s:g} s")
        if answer.good:
            return Delivery(True)
        word = answer.body[:64].decode("ascii", "replace").strip()
        said = f" ({word})" if re.fullmatch(r"[a-z_]+", word) else ""
        if answer.status == 429:
            return Delivery(False, "answered 429: too many messages", retry_after_s=answer.retry_after_s)
        if answer.status in (403, 404, 410):
            why = MENDS.get(word, "this webhook is not there any more")
            mend = "make a new one in Slack and put its address where the settings name it"
            return Delivery(False, f"answered {answer.status}{said}: {why}; {mend}", permanent=True)
        if answer.status == 400:
            return Delivery(False, f"answered 400{said}: it does not take the message", permanent=True)
        return Delivery(False, answer.told() + said, retry_after_s=answer.retry_after_s)

    def _post(self, request: dict[str, Any]) -> HttpAnswer:
        data = json.dumps(request, ensure_ascii=False).encode()
        return self._http.request("POST", self._url, {"content-type": "application/json; charset=utf-8"}, data)

    def close(self) -> None:
        self._http.close()
