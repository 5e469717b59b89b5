"""Telling people: messages about incidents, kept in the store until they are delivered or given up."""

from __future__ import annotations

from drover_collector.notify.base import Delivery, Notifier
from drover_collector.notify.outbox import Outbox
from drover_collector.notify.receivers.webhook import Webhook
from drover_collector.notify.state import tell

__all__ = ["Delivery", "Notifier", "Outbox", "Webhook", "tell"]
