"""What the services document of their requests, as JSON schemas of our own; lengths and words are theirs.

PagerDuty: github.com/PagerDuty/api-schema, reference/events-v2/openapiv3.json, and for lengths
developer.pagerduty.com/docs/events-api-v2-overview. Alertmanager: github.com/prometheus/alertmanager,
api/v2/openapi.yaml (postableAlerts; unknown keys are refused there). Slack: docs.slack.dev/reference/block-kit
(blocks, text objects) and docs.slack.dev/messaging/sending-messages-using-incoming-webhooks.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _text(most: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most, **more}


_URL = _text(3000, pattern="^https?://")
_TIME = _text(30, pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")

PAGERDUTY_PAYLOAD = _object(
    ["summary", "severity", "source"],
    summary=_text(1024),
    timestamp=_TIME,
    severity={"enum": ["critical", "warning", "error", "info"]},
    source=_text(255),
    component=_text(255),
    group=_text(255),
    **{"class": _text(255)},
    custom_details={"type": "object"},
)
PAGERDUTY = _object(
    ["routing_key", "event_action"],
    routing_key=_text(32, minLength=32),
    event_action={"enum": ["trigger", "acknowledge", "resolve"]},
    dedup_key=_text(255),
    payload=PAGERDUTY_PAYLOAD,
    client={"type": "string"},
    client_url=_URL,
    links={"type": "array", "items": _object(["href"], href=_URL, text={"type": "string"})},
)
PAGERDUTY_BYTES = 512 * 1024

_LABELS = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"},
    "additionalProperties": {"type": "string", "minLength": 1},
}
ALERTMANAGER = {
    "type": "array",
    "minItems": 1,
    "items": _object(
        ["labels"],
        labels={**_LABELS, "required": ["alertname"]},
        annotations=_LABELS,
        startsAt=_TIME,
        endsAt=_TIME,
        generatorURL=_URL,
    ),
}

_MRKDWN = _object(["type", "text"], type={"const": "mrkdwn"}, text=_text(3000))
_FIELD = _object(["type", "text"], type={"const": "mrkdwn"}, text=_text(2000))
_BLOCK = {
    "oneOf": [
        _object(["type", "text"], type={"const": "section"}, text=_MRKDWN),
        _object(
            ["type", "fields"],
            type={"const": "section"},
            fields={"type": "array", "minItems": 1, "maxItems": 10, "items": _FIELD},
        ),
        _object(
            ["type", "elements"],
            type={"const": "context"},
            elements={"type": "array", "minItems": 1, "maxItems": 10, "items": _MRKDWN},
        ),
    ]
}
SLACK = _object(
    ["text"],
    text=_text(40_000),
    attachments={
        "type": "array",
        "items": _object(
            ["blocks"],
            color=_text(7, pattern="^#[0-9a-f]{6}$"),
            blocks={"type": "array", "minItems": 1, "maxItems": 50, "items": _BLOCK},
        ),
    },
    unfurl_links={"type": "boolean"},
    unfurl_media={"type": "boolean"},
)

# github.com/cloudevents/spec, cloudevents/cloudevents.json of v1.0, with the rules of spec.md that a schema can hold:
# names of attributes are lower-case letters and digits, and each attribute is a text that is not empty.
CLOUD_EVENT = {
    "type": "object",
    "required": ["specversion", "id", "type", "source"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": _text(1000),
        "type": _text(200, pattern=r"^drover(\.[A-Za-z0-9_]+)+$"),
        "source": _text(1000, format="uri-reference"),
        "subject": _text(1000),
        "time": _TIME,
        "datacontenttype": {"const": "application/json"},
        "data": {"type": "object"},
    },
    "propertyNames": {"pattern": "^[a-z0-9]+$"},
    "additionalProperties": False,
}
