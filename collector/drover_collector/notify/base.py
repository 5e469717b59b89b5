"""What a notifier is: one receiver of messages, with a request of its own form.

A message is always the stored JSON of `webhook.message`: `{"type": "incident.opened", "timestamp", "data": report}`.
Each notifier renders its own request out of it. Who is told of what is not its business (routes), nor when a failed
message is tried again (courier).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from drover_core.model.events import Severity


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of one try.

    Attributes:
        detail: why it failed, and what to do; never an address, a key or a password.
        permanent: no further try mends it, such as a request that the service calls invalid: give up at once.
        retry_after_s: how long the service asks us to wait before the next try (429); None: it does not say.
    """

    delivered: bool
    detail: str = ""
    permanent: bool = False
    retry_after_s: float | None = None


class Notifier(Protocol):
    """A receiver. Served by one thread at a time, its own.

    Attributes:
        name: a word that the operator chose, unique among all notifiers; part of the ids of messages.
        kind: webhook, slack, pagerduty, alertmanager or apprise; for sentences: "slack ops".
        min_severity: where no route says otherwise, it is told from this severity on.
        repeat_s: how often an open incident must be told again (`incident.repeated`), as it is forgotten otherwise;
            None: never.
    """

    name: str
    kind: str
    min_severity: Severity
    repeat_s: float | None

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        """One try, which blocks for at most about twice the notifier's timeout; whatever goes wrong is in the answer.

        Args:
            message_id: the same at each try of a message, by which a receiver knows it again.
            body: the stored JSON message.
        """
        ...

    def close(self) -> None:
        """Lets go of connections; may be called while a try that was left behind still runs."""
        ...
