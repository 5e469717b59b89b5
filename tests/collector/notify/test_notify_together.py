"""All kinds of receivers behind one outbox and a real store: one hangs, a collector restarts."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drover_collector.notify import Notifier, Outbox, delivery_pool
from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers.alertmanager import Alertmanager
from drover_collector.notify.receivers.apprise import Apprise
from drover_collector.notify.receivers.pagerduty import PagerDuty
from drover_collector.notify.receivers.slack import Slack
from drover_collector.notify.receivers.webhook import Webhook
from drover_collector.store import Store
from drover_core.model.events import Incident, Severity
from testbed.alertmanager import alertmanager
from testbed.notified import LOST_GPU, PLACES
from testbed.receivers import HttpReceiver, Reply, http_receiver, mail_server
from testbed.waiting import wait_until

LEAST = Severity.WARNING
Start = Callable[..., Outbox]


@pytest.fixture
def start(store: Store) -> Iterator[Start]:
    made: list[Outbox] = []

    def begin(*notifiers: Notifier) -> Outbox:
        made.append(Outbox(store, notifiers, "https://drover.example"))
        made[-1].start()
        return made[-1]

    yield begin
    for outbox in made:
        outbox.stop()


def lived(id_: str, **changes: Any) -> Incident:
    now_ms = time.time_ns() // 1_000_000
    return dataclasses.replace(LOST_GPU, id=id_, opened_ms=now_ms, since_ms=now_ms, **changes)


def delivered(store: Store, incident: str) -> set[str]:
    return {row.notifier for row in store.outbox.of_incidents(incident) if row.state == "delivered"}


def test_one_that_hangs_delays_no_other_and_no_stop(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_pool, "STOP_S", 0.2)
    with http_receiver() as hung, http_receiver() as well, mail_server() as box:
        hung.usual = Reply(how="trickle")
        well.usual = Reply(200, b"[]")
        mail = f"mailto://127.0.0.1:{box.port}?mode=insecure&from=a@example.org&to=ops@example.org"
        outbox = start(
            Slack(ReceiverOptions("hung", LEAST, 30, PLACES), hung.url),
            Apprise(ReceiverOptions("hung2", LEAST, 30, PLACES), (f"json://127.0.0.1:{hung.port}",)),
            Webhook(ReceiverOptions("hook", LEAST, 30), well.url, b"x" * 32),
            Slack(ReceiverOptions("chat", LEAST, 30, PLACES), well.url),
            PagerDuty(ReceiverOptions("pager", LEAST, 30, PLACES), "k" * 32, well.url),
            Alertmanager(ReceiverOptions("am", LEAST, 30, PLACES), (well.url,), repeat_s=60),
            Apprise(ReceiverOptions("mail", LEAST, 30, PLACES), (mail,)),
        )
        outbox.enqueue([lived("i1")])
        wait_until(lambda: delivered(store, "i1") == {"hook", "chat", "pager", "am", "mail"}, "the others have it")
        wait_until(lambda: len(hung.got) == 2, "those that hang were asked")
        stopping = threading.Thread(target=outbox.stop)
        stopping.start()
        stopping.join(25)  # the two that hang would take a minute each
        assert not stopping.is_alive()
        assert {row.notifier for row in store.outbox.pending()} == {"hung", "hung2"}  # they go again after a start


@pytest.mark.system
def test_an_incident_lives_in_a_real_alertmanager_over_a_restart_of_the_collector(
    start: Start, store: Store, tmp_path: Path
) -> None:
    with http_receiver() as hook, alertmanager(tmp_path, hook.url) as real:

        def notifier() -> Alertmanager:
            return Alertmanager(ReceiverOptions("am", LEAST, 10, PLACES), real.urls, repeat_s=2)

        def severities() -> list[str]:
            return [labels["severity"] for labels in real.firing()]

        incident = lived("i1", severity=Severity.WARNING)
        first = start(notifier())
        first.enqueue([incident])
        wait_until(lambda: severities() == ["warning"], "it burns")
        first.stop()

        second = start(notifier())
        worse = dataclasses.replace(incident, severity=Severity.CRITICAL, version=2)
        second.enqueue([worse])
        wait_until(lambda: severities() == ["critical"], "escalated, and no stale warning")
        ends = real.alerts()[0]["endsAt"]

        def is_sent_again() -> bool:
            second.sweep({"i1": worse})
            return bool(real.alerts()) and real.alerts()[0]["endsAt"] > ends

        wait_until(is_sent_again, "sent again, so that it does not expire")
        assert severities() == ["critical"]
        assert len(store.outbox.of_incidents("i1")) == 2, "what only says the same again is not stored"
        second.enqueue([dataclasses.replace(worse, closed_ms=time.time_ns() // 1_000_000, version=3)])
        wait_until(lambda: severities() == [], "over")
        wait_until(lambda: _alerts_received(hook) == [("critical", "resolved")], "and people are notified")


def _alerts_received(hook: HttpReceiver) -> list[tuple[str, str]]:
    """The newest page."""
    return [(one["labels"]["severity"], one["status"]) for one in hook.got[-1].json["alerts"]] if hook.got else []
