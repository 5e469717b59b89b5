"""Make the receivers that the settings name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drover_collector.notify.base import Notifier, ReceiverOptions
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
from drover_core.model.events import Severity
from drover_core.model.fleet import FleetSpec, NodeSpec


def notifiers(
    config: NotifyConfig,
    webhooks: tuple[WebhookConfig, ...],
    spec: FleetSpec,
    environment: Mapping[str, str] = os.environ,
) -> list[Notifier]:
    """Return the configured receivers.

    Args:
        webhooks: those of the older table `[[webhooks]]`.
        spec: gives racks, pools and SKUs for texts.
    Raises:
        SettingsError: a secret cannot be read, or apprise does not know an address.
    """
    return [_make(entry, key, spec.by_name, environment) for key, entry in receivers(config, webhooks)]


def _make(entry: Receiver, key: str, places: Mapping[str, NodeSpec], environment: Mapping[str, str]) -> Notifier:
    options = ReceiverOptions(
        entry.name, Severity(entry.min_severity), entry.timeout_s, places,
        ca_file=getattr(entry, "ca_file", None), proxy=getattr(entry, "proxy", None),
    )  # fmt: skip
    if isinstance(entry, WebhookConfig):
        secret = webhook_secret(entry, environment, key)
        return Webhook(options, webhook_url(entry, key), secret, cloud_events=entry.format == "cloudevents")
    if isinstance(entry, SlackConfig):
        return Slack(options, slack_url(entry, environment, key))
    if isinstance(entry, PagerdutyConfig):
        return PagerDuty(options, routing_key(entry, environment, key), entry.url)
    if isinstance(entry, AlertmanagerConfig):
        labels = dict(label.split("=", 1) for label in entry.labels)
        return Alertmanager(
            options, entry.urls, repeat_s=entry.repeat_s, labels=labels, authorization=authorization(entry, key)
        )
    return Apprise(options, apprise_urls(entry, environment, key))
