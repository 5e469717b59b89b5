"""A ticket by webhook when a node goes to repair: one signed POST (standardwebhooks.com), off unless configured.

Its id is the action's, also when it is tried again after a stop: a receiver that takes each id once opens one ticket.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence

from drover_collector.actions.base import ActError, CheckLease, LaterError, NodeState, Result
from drover_collector.actions.command import payload
from drover_collector.actions.settings import TicketConfig
from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers.webhook import Webhook
from drover_collector.notify.settings import webhook_secret, webhook_url
from drover_core.model.events import Act, Action, Severity
from drover_core.times import iso

KEY = "act.repair_webhook"


class Ticket:
    name = "ticket"
    repeatable = True
    surveys = False

    def __init__(self, config: TicketConfig) -> None:
        """
        Raises:
            SettingsError: the secret or the address cannot be read.
        """
        self._webhook: Webhook | None = None
        if config.on:
            secret = webhook_secret(config, os.environ, KEY)
            options = ReceiverOptions(
                self.name, Severity.INFO, config.timeout_s, ca_file=config.ca_file, proxy=config.proxy
            )
            self._webhook = Webhook(options, webhook_url(config, KEY), secret)
        self.acts = frozenset({Act.REPAIR} if config.on else ())

    def knows(self, act: Act) -> bool:
        return act in self.acts

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        if self._webhook is None or action.action is not Act.REPAIR:
            raise ActError(f"no webhook for it: set {KEY} in the collector's settings")
        now_ms = time.time_ns() // 1_000_000
        body = json.dumps({"type": "node.repair", "timestamp": iso(now_ms), "data": payload(action)})
        check_lease()
        outcome = self._webhook.deliver(f"ticket_{action.id}", body.encode(), now_ms)
        if outcome.delivered:
            return Result("the ticket's webhook took it")
        raise (ActError if outcome.permanent else LaterError)(f"the ticket's webhook: {outcome.detail}")

    def before(self, node: str) -> str:  # noqa: ARG002  # nothing that could be put back
        return ""

    def observe(self, node: str) -> NodeState:
        raise ActError(f"a ticket does not show the state of {node}")

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:  # noqa: ARG002  # a ticket has no such question
        return {}

    def survey(self, nodes: Sequence[str]) -> None:  # noqa: ARG002  # a ticket has no such question
        return None
