"""`drover-collector notify-test`: a message to receivers now, past routes, silences and the outbox."""

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

Say = Callable[[str], None]


def trial(name: str, severity: Severity, now_ms: int, *, over: bool) -> Incident:
    """An incident about nothing. Its id is that of every trial of this receiver: the end of one ends the one before."""
    return Incident(
        f"test-{name}", IncidentKind.IDLE, "test", "fleet", None, None, (), now_ms, now_ms, now_ms if over else None,
        severity, 1.0, RecommendedAction.NONE, f"This is a test of Drover's messages to {name}. Nothing is wrong.",
        "Nothing. Whoever reads this can be reached.", (Evidence("Somebody ran drover-collector notify-test."),),
    )  # fmt: skip


def chosen(notifiers: Sequence[Notifier], names: Sequence[str]) -> list[Notifier]:
    """
    Args:
        names: none: all.
    Raises:
        SettingsError: there is no such receiver, or none at all.
    """
    known = {notifier.name: notifier for notifier in notifiers}
    if not known:
        raise SettingsError("no receiver is configured: add one, such as [[notify.slack]] (docs/how-to/notify.md)")
    for name in names:
        if name not in known:
            raise SettingsError(f"no receiver {name!r} is configured; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def try_out(
    notifiers: Sequence[Notifier], severity: Severity, console_url: str, say: Say = print, *, over: bool = False
) -> bool:
    """Sends a trial to each, or the end of it; whether all took it."""
    good = True
    for notifier in notifiers:
        now_ms = time.time_ns() // 1_000_000
        body = message(f"incident.{'closed' if over else 'opened'}", trial(notifier.name, severity, now_ms, over=over),
                       now_ms, console_url)  # fmt: skip
        try:
            result = notifier.deliver(f"msg_test-{notifier.name}_{now_ms}", body.encode(), now_ms)
        except Exception as error:  # noqa: BLE001  # the others are tried too; its words may hold an address or a key
            result = Delivery(False, f"failed ({type(error).__name__})")
        finally:
            notifier.close()
        took_s = time.time() - now_ms / 1000
        outcome = f"taken in {took_s:.1f} s" if result.delivered else f"NOT taken: {result.detail}"
        say(f"{notifier.kind} {notifier.name}: {outcome}")
        good = good and result.delivered
    if good and not over:
        say("Look whether it arrived. `notify-test --over` with the same names takes it back.")
    return good
