"""Send a test message to receivers, past routes, silences and the outbox: `drover-collector notify-test`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from drover_collector.notify.base import Delivery, Notifier
from drover_collector.notify.receivers.webhook import message
from drover_core.model.events import (
    Evidence,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.settings import SettingsError


def example_incident(name: str, severity: Severity, now_ms: int, *, over: bool) -> Incident:
    """Return an incident without a fault. Each test of a receiver uses the same id, so one end ends them all."""
    return Incident(
        f"test-{name}", IncidentKind.IDLE, "test", "fleet", None, None, (), now_ms, now_ms, now_ms if over else None,
        severity, 1.0, RecommendedAction.NONE, f"This is a test of Drover's messages to {name}. Nothing is wrong.",
        "Nothing. Messages reach you.", (Evidence("Somebody ran drover-collector notify-test."),),
    )  # fmt: skip


def choose(notifiers: Sequence[Notifier], names: Sequence[str]) -> list[Notifier]:
    """Return the receivers with these names; without names all.

    Raises:
        SettingsError: no such receiver, or none is configured.
    """
    known = {notifier.name: notifier for notifier in notifiers}
    if not known:
        raise SettingsError("no receiver is configured: add one, such as [[notify.slack]] (docs/how-to/notify.md)")
    for name in names:
        if name not in known:
            raise SettingsError(f"no receiver {name!r} is configured; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def send_test(
    notifiers: Sequence[Notifier],
    severity: Severity,
    console_url: str,
    say: Callable[[str], None] = print,
    *,
    over: bool = False,
) -> bool:
    """Send a test message, or its end, to each receiver. Return whether all accepted it."""
    accepted = True
    for notifier in notifiers:
        now_ms = time.time_ns() // 1_000_000
        incident = example_incident(notifier.name, severity, now_ms, over=over)
        body = message(f"incident.{'closed' if over else 'opened'}", incident, now_ms, console_url)
        try:
            result = notifier.deliver(f"msg_test-{notifier.name}_{now_ms}", body.encode(), now_ms)
        except Exception as error:  # noqa: BLE001  # the others are tried too; its text may hold an address or a key
            result = Delivery(False, f"failed ({type(error).__name__})")
        finally:
            notifier.close()
        took_s = time.time() - now_ms / 1000
        outcome = f"accepted in {took_s:.1f} s" if result.delivered else f"NOT accepted: {result.detail}"
        say(f"{notifier.kind} {notifier.name}: {outcome}")
        accepted = accepted and result.delivered
    if accepted and not over:
        say("Check that the messages arrived. `notify-test --over` with the same names ends them.")
    return accepted
