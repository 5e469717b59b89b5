"""Notify people of incidents: messages are stored before they are sent, and kept until delivered or given up."""

from __future__ import annotations

from drover_collector.notify.base import Delivery, Notifier, ReceiverOptions
from drover_collector.notify.outbox import Outbox, OutboxOptions
from drover_collector.notify.receivers.webhook import Webhook
from drover_collector.notify.state import describe

__all__ = ["Delivery", "Notifier", "Outbox", "OutboxOptions", "ReceiverOptions", "Webhook", "describe"]
