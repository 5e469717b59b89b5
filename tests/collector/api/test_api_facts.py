"""What is kept of the store's answers, and for how long."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drover_collector.api import snapshot as api_facts
from drover_collector.api.snapshot import AHEAD_MS, ApiSnapshot


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(api_facts, "time", made)
    return made


@pytest.mark.parametrize(
    ("took_s", "kept_s"), [(0.01, api_facts.LONG_S), (0.5, 15.0), (1.0, 30.0), (30.0, api_facts.MOST_S)]
)
def test_what_takes_long_is_counted_seldom(clock: Clock, took_s: float, kept_s: float) -> None:
    counted = []

    def totals() -> Any:
        counted.append(clock.now_s)
        clock.now_s += took_s
        return SimpleNamespace(samples=len(counted))

    facts = ApiSnapshot(SimpleNamespace(store=SimpleNamespace(rollups=SimpleNamespace(totals=totals))), None, None)  # type: ignore[arg-type]  # nothing else is asked
    assert facts.totals().samples == 1
    began_s = counted[0]
    clock.now_s = began_s + kept_s - 0.1
    assert facts.totals().samples == 1
    clock.now_s = began_s + kept_s + 0.1
    assert facts.totals().samples == 2


def test_the_newest_sample_is_none_of_the_future(clock: Clock) -> None:
    now_ms = 1_800_000_000_000
    seen = np.array([0, now_ms - 3000, now_ms + AHEAD_MS + 1, now_ms - 9000])
    store = SimpleNamespace(entities=SimpleNamespace(last_seen=lambda _index: seen))
    pipeline = SimpleNamespace(store=store, index=None, now_ms=lambda: now_ms)
    facts = ApiSnapshot(pipeline, None, None)  # type: ignore[arg-type]  # nothing else is asked
    assert facts.newest_sample_ms() == now_ms - 3000
    seen = np.zeros(0, np.int64)
    clock.now_s += api_facts.LONG_S
    assert facts.newest_sample_ms() == 0


def test_what_was_kept_is_forgotten_after_its_time_and_there_is_never_much(clock: Clock) -> None:
    """A question has parts that a caller chooses: a key for each would fill the memory."""
    facts = ApiSnapshot(SimpleNamespace(), None, None)  # type: ignore[arg-type]  # nothing else is asked
    for number in range(10 * api_facts.MOST_KEPT):
        assert facts.once(("span", number), 15.0, lambda number=number: number) == number  # type: ignore[misc]  # bound now
        assert len(facts._kept) <= api_facts.MOST_KEPT
    facts.once("parts", 15.0, lambda: "the last one is shown while the store is away")
    clock.now_s += 16.0
    facts.once("another", 15.0, lambda: 1)
    assert set(facts._kept) == {"parts", "another"}
    assert not facts._locks


def test_callers_at_the_same_time_share_one_call(clock: Clock) -> None:
    facts = ApiSnapshot(SimpleNamespace(), None, None)  # type: ignore[arg-type]  # nothing else is asked
    begun, go, made = threading.Event(), threading.Event(), []

    def make() -> int:
        begun.set()
        assert go.wait(120)
        made.append(1)
        return len(made)

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(facts.once, "x", 5.0, make) for _ in range(4)]
        assert begun.wait(120)
        go.set()
        assert [answer.result(10) for answer in answers] == [1] * 4
    assert not facts._locks
