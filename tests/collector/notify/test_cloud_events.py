"""Webhooks in the form of CloudEvents 1.0."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from datetime import datetime
from pathlib import Path

import pytest
import standardwebhooks

from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.factory import notifiers
from drover_collector.notify.receivers.webhook import Webhook, message
from drover_collector.notify.settings import NotifyConfig, WebhookConfig
from drover_core.model.events import Severity
from drover_core.model.fleet import FleetSpec
from drover_core.settings import SettingsError, load
from testbed.monitoring import INCIDENT
from testbed.receivers import http_receiver

KEY = b"k" * 32
NOW_MS = 1_790_000_000_000
BODY = message("incident.opened", INCIDENT, NOW_MS, "https://console/").encode()


def test_a_message_is_a_structured_event() -> None:
    with http_receiver() as receiver:
        hook = Webhook(ReceiverOptions("ops", Severity.WARNING, 5), receiver.url, KEY, cloud_events=True)
        assert hook.deliver("msg_1", BODY, NOW_MS).delivered
        hook.close()
    (request,) = receiver.got
    assert request.headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    event = request.json
    data = event.pop("data")
    assert event == {
        "specversion": "1.0", "id": "msg_1", "source": "https://console/incidents", "type": "drover.incident.opened",
        "subject": "i1", "time": "2026-09-21T14:13:20.000Z", "datacontenttype": "application/json",
    }  # fmt: skip
    assert datetime.fromisoformat(event["time"]).tzinfo is not None
    assert data == json.loads(BODY)["data"]


def test_any_library_of_standard_webhooks_takes_the_signature() -> None:
    now_ms = time.time_ns() // 1_000_000
    with http_receiver() as receiver:
        hook = Webhook(ReceiverOptions("ops", Severity.WARNING, 5), receiver.url, KEY, cloud_events=True)
        hook.deliver("msg_1", BODY, now_ms)
        hook.close()
    (request,) = receiver.got
    verifier = standardwebhooks.Webhook("whsec_" + b64encode(KEY).decode())
    assert verifier.verify(request.body, dict(request.headers))["id"] == "msg_1"


def test_an_id_stays_the_same_at_each_attempt_and_the_usual_form_is_unchanged() -> None:
    with http_receiver() as receiver:
        for cloud_events in (True, True, False):
            hook = Webhook(ReceiverOptions("ops", Severity.WARNING, 5), receiver.url, KEY, cloud_events=cloud_events)
            hook.deliver("msg_1", BODY, NOW_MS)
            hook.close()
    assert receiver.got[0].body == receiver.got[1].body
    assert receiver.got[2].body == BODY


def test_the_setting_chooses_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + b64encode(KEY).decode())
    secret.chmod(0o600)
    with http_receiver() as receiver:
        entry = WebhookConfig("ops", receiver.url, secret_file=str(secret), format="cloudevents")
        (hook,) = notifiers(NotifyConfig(webhook=(entry,)), (), FleetSpec((), (), "none"))
        hook.deliver("msg_1", BODY, NOW_MS)
        hook.close()
    assert receiver.got[0].json["specversion"] == "1.0"
    (tmp_path / "c.toml").write_text('[[webhook]]\nname = "a"\nformat = "xml"\n')
    with pytest.raises(SettingsError, match="must be one of drover, cloudevents"):
        load(NotifyConfig, tmp_path / "c.toml")
