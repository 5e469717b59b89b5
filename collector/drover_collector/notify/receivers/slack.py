"""Post to a Slack channel through its incoming webhook.

Sources: docs.slack.dev: messaging/sending-messages-using-incoming-webhooks, reference/block-kit (lengths),
messaging/formatting-message-text (what to escape), changelog 2016-05-17 (answers and their error codes).
"""

from __future__ import annotations

import json
import re
from typing import Any

from drover_collector.notify.base import Delivery, ReceiverOptions
from drover_collector.notify.http import Http, HttpAnswer, TimeLimited
from drover_collector.notify.wording import Notification, cut, read_message

MAX_TEXT = 3000  # of a section's or a context's text
MAX_FIELD = 2000
MAX_FIELDS = 10
MAX_LINE = 300  # of the line that a phone shows

COLORS = {"critical": "#c8102e", "warning": "#e8a200", "info": "#3a7bd5"}
CLOSED = "#2e9e5b"

ERRORS = {  # Slack's code -> what it means
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
    """Escape Slack's three control characters, so that no text can mention a channel or hide a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def payload(notification: Notification, now_ms: int) -> dict[str, Any]:
    """Return the request's JSON."""
    blocks: list[dict[str, Any]] = []
    if notification.news:
        blocks.append(_section(notification.what))
    if notification.over:
        blocks.append(_section(notification.end))
    elif notification.advice:
        blocks.append(_section(f"*What to do:* {escaped(notification.advice)}", ready=True))
    fields = [
        {"type": "mrkdwn", "text": cut(f"*{label}*\n{escaped(text)}", MAX_FIELD)}
        for label, text in notification.details(now_ms)[:MAX_FIELDS]
    ]
    blocks.append({"type": "section", "fields": fields})
    if notification.evidence and not notification.over:
        facts = "\n".join(f"• {escaped(fact)}" for fact in notification.evidence)
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": cut(facts, MAX_TEXT)}]})
    link = f"<{escaped(notification.link)}|Open it in the console> or " if notification.link else ""
    blocks.append(_section(f"{link}`{escaped(notification.command)}`", ready=True))
    return {
        "text": escaped(cut(notification.headline, MAX_LINE)),
        "attachments": [
            {"color": CLOSED if notification.over else COLORS.get(notification.severity, "#777777"), "blocks": blocks}
        ],
        "unfurl_links": False,
        "unfurl_media": False,
    }


def plain(notification: Notification, now_ms: int) -> dict[str, Any]:
    """Return the same as plain text, for when Slack refuses the blocks."""
    return {"text": escaped(cut(f"{notification.headline}\n\n{notification.text(now_ms)}", MAX_TEXT))}


def _section(text: str, *, ready: bool = False) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": cut(text if ready else escaped(text), MAX_TEXT)}}


class Slack:
    """One Slack channel. One thread at a time."""

    kind = "slack"
    repeat_s: float | None = None

    def __init__(self, options: ReceiverOptions, url: str) -> None:
        self.name = options.name
        self.min_severity = options.min_severity
        self._url = url
        self._places = options.places
        self._http = Http(options.timeout_s, proxy=options.proxy)
        self._call = TimeLimited[HttpAnswer](f"slack-{options.name}-try", 2 * options.timeout_s)

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:  # noqa: ARG002  # Slack has no ids
        notification = read_message(body, self._places)

        def post() -> HttpAnswer:
            answer = self._post(payload(notification, now_ms))
            return answer if answer.status != 400 else self._post(plain(notification, now_ms))

        answer = self._call.call(post)
        if answer is None:
            return Delivery(False, f"no complete answer within {2 * self._http.timeout_s:g} s")
        if answer.good:
            return Delivery(True)
        code = answer.body[:64].decode("ascii", "replace").strip()
        reason = f" ({code})" if re.fullmatch(r"[a-z_]+", code) else ""
        if answer.status == 429:
            return Delivery(False, "answered 429: too many messages", retry_after_s=answer.retry_after_s)
        if answer.status in (403, 404, 410):
            why = ERRORS.get(code, "this webhook no longer exists")
            remedy = "create a new one in Slack and put its address where the settings name it"
            return Delivery(False, f"answered {answer.status}{reason}: {why}; {remedy}", permanent=True)
        if answer.status == 400:
            return Delivery(False, f"answered 400{reason}: Slack does not accept the message", permanent=True)
        return Delivery(False, answer.problem() + reason, retry_after_s=answer.retry_after_s)

    def _post(self, request: dict[str, Any]) -> HttpAnswer:
        data = json.dumps(request, ensure_ascii=False).encode()
        return self._http.request("POST", self._url, {"content-type": "application/json; charset=utf-8"}, data)

    def close(self) -> None:
        self._http.close()
