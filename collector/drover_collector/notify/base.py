"""Define what the outbox expects of a receiver, and what a receiver is made of.

A message is the stored JSON of `webhook.message`: `{"type": "incident.opened", "timestamp", "data": report}`. Each
receiver makes its own request from it. Routes decide which receivers get a message; the delivery worker decides when a
failed delivery is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from drover_core.model.events import Severity
from drover_core.model.fleet import NodeSpec


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of one attempt.

    Attributes:
        detail: why it failed and what to do; never an address, a key or a password.
        permanent: another attempt cannot succeed, such as after a request that the service calls invalid.
        retry_after_s: how long the service asks to wait before the next attempt (429); None: it does not say.
    """

    delivered: bool
    detail: str = ""
    permanent: bool = False
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Settings that receivers have in common.

    Attributes:
        name: unique among all receivers; part of the ids of messages.
        min_severity: without a matching route it gets incidents of this severity and above.
        timeout_s: for a connection, and for an answer.
        places: the fleet's nodes by name, for rack, pool and SKU in texts.
    """

    name: str
    min_severity: Severity
    timeout_s: float
    places: Mapping[str, NodeSpec] = field(default_factory=dict)
    ca_file: str | None = None
    proxy: str | None = None


class Notifier(Protocol):
    """A receiver. Only its delivery worker's thread uses it.

    Attributes:
        name, min_severity: as in `ReceiverOptions`.
        kind: webhook, slack, pagerduty, alertmanager or apprise.
        repeat_s: how often it needs `incident.repeated` for an open incident so as not to end it; None: never.
    """

    name: str
    kind: str
    min_severity: Severity
    repeat_s: float | None

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        """Try once. Block for at most about twice the timeout. Return errors instead of raising them.

        Args:
            message_id: the same at each attempt, so that a receiver can drop duplicates.
            body: the stored JSON message.
        """
        ...

    def close(self) -> None:
        """Close connections. May be called while an abandoned attempt still runs."""
        ...
