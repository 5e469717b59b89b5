"""What a queue says of itself while its receiver takes, and while it does not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from drover_collector.exporters.http_post import Answer
from drover_collector.exporters.sending import Sender
from testbed.waiting import wait_until


@dataclass(frozen=True)
class Item:
    ts_ms: int
    size: int = 8
    count: int = 1


def test_a_queue_says_how_late_its_receiver_took_the_newest_and_how_old_the_oldest_is() -> None:
    away = [True]

    def send(items: Sequence[Item]) -> tuple[Answer, int, int]:
        return (Answer("answered 503"), 1, 0) if away[0] else (Answer(), 1, 1)

    sender = Sender("ops", 1000, send, kind="otlp_metrics")
    now_ms = time.time_ns() // 1_000_000
    for age_s in (30, 20):
        sender.put(Item(now_ms - age_s * 1000))
    status = sender.status
    assert (status.kind, status.oldest_ms, status.taken_ms, status.latency_s) == (
        "otlp_metrics",
        now_ms - 30_000,
        0,
        None,
    )
    sender.start()
    try:
        wait_until(lambda: status.failures > 0, "the receiver is away")
        assert (status.oldest_ms, status.latency_s) == (now_ms - 30_000, None)
        away[0] = False
        wait_until(lambda: not status.waiting, "all is taken")
        assert (status.oldest_ms, status.taken_ms) == (0, now_ms - 20_000)
        assert status.latency_s is not None
        assert 20 <= status.latency_s < 60
    finally:
        sender.stop()
