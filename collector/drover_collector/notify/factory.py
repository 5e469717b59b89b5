"""The notifiers that the settings ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drover_collector.notify.base import Notifier
from drover_collector.notify.receivers.alertmanager import Alertmanager
from drover_collector.notify.receivers.apprise import Apprise
from drover_collector.notify.receivers.pagerduty import PagerDuty
from drover_collector.notify.receivers.slack import Slack
from drover_collector.notify.receivers.webhook import Webhook
from drover_collector.notify.settings import (
    AlertmanagerConfig,
    NotifyConfig,
    PagerdutyConfig,
    Receiver,
    SlackConfig,
    WebhookConfig,
    apprise_urls,
    authorization,
    receivers,
    routing_key,
    slack_url,
    webhook_secret,
    webhook_url,
)
from drover_collector.notify.wording import Places
from drover_core.model.events import Severity
from drover_core.model.fleet import FleetSpec


def notifiers(
    config: NotifyConfig,
    webhooks: tuple[WebhookConfig, ...],
    spec: FleetSpec,
    environment: Mapping[str, str] = os.environ,
) -> list[Notifier]:
    """
    Args:
        webhooks: those of the older form.
        spec: says where nodes are.
    Raises:
        SettingsError: a secret cannot be read, or apprise does not know an address.
    """
    return [_made(entry, key, spec.by_name, environment) for key, entry in receivers(config, webhooks)]


def _made(entry: Receiver, key: str, places: Places, environment: Mapping[str, str]) -> Notifier:
    name, least, timeout_s = entry.name, Severity(entry.min_severity), entry.timeout_s
    if isinstance(entry, WebhookConfig):
        secret = webhook_secret(entry, environment, key)
        return Webhook(name, webhook_url(entry, key), secret, least, timeout_s, entry.ca_file, entry.proxy)
    if isinstance(entry, SlackConfig):
        return Slack(name, slack_url(entry, environment, key), least, timeout_s, places, entry.proxy)
    if isinstance(entry, PagerdutyConfig):
        secret_key = routing_key(entry, environment, key)
        return PagerDuty(name, secret_key, entry.url, least, timeout_s, places, entry.proxy)
    if isinstance(entry, AlertmanagerConfig):
        return Alertmanager(
            name, entry.urls, least, timeout_s, places, repeat_s=entry.repeat_s, ca_file=entry.ca_file,
            labels=dict(label.split("=", 1) for label in entry.labels), authorization=authorization(entry, key),
        )  # fmt: skip
    return Apprise(name, apprise_urls(entry, environment, key), least, timeout_s, places)
