"""How fast samples come in, asked now and then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drover_collector.pipeline import stats as ticks


def test_the_first_who_asks_gets_the_time_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(ticks, "time", SimpleNamespace(monotonic=lambda: now))
    rate = ticks.Rate()
    now = 104.0
    assert rate.per_s(40) == 10
    now = 120.0
    assert rate.per_s(40 + 160 * 3) == 30  # of the last 16 s
    now = 130.0
    assert rate.per_s(40 + 160 * 3 + 50) == 5
