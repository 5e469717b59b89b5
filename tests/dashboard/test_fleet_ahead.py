"""Pictures are made before the pages that show them ask again: as often as before, and only while somebody looks."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from starlette.requests import Request

from drover_dashboard.client import FleetClient
from drover_dashboard.server import app
from drover_dashboard.server import picture_prefetch as fleet_ahead
from drover_dashboard.server.picture_prefetch import (
    LATE_S,
    LEAD_S,
    MOST,
    PicturePrefetcher,
)
from drover_dashboard.widgets import fleet_picture as fleet_canvas
from drover_dashboard.widgets.fleet_picture import REFRESH_S
from testbed.waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s

    def ms(self) -> int:
        return round(self.s * 1000)


def request(color_by: str) -> Request:
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "headers": [],
        "query_string": f"color_by={color_by}".encode(),
    }
    return Request(scope)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ahead(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PicturePrefetcher:
    """Without its thread: tests say when it looks."""
    monkeypatch.setattr(PicturePrefetcher, "_run", lambda self: None)
    return PicturePrefetcher(lambda color_by, for_s: None, clock)


def test_a_question_is_foreseen_once_and_forgotten_when_nobody_asks_again(
    ahead: PicturePrefetcher, clock: Clock
) -> None:
    ahead.answered("power_w")
    assert ahead.due() == ([], pytest.approx(REFRESH_S - LEAD_S))
    clock.s += 1
    ahead.answered("health")
    clock.s += REFRESH_S - LEAD_S - 1
    assert ahead.due() == (["power_w"], pytest.approx(1))
    clock.s += 1
    assert ahead.due() == (["health"], None)
    clock.s += 100
    assert ahead.due() == ([], None)


def test_many_pages_are_one_question_and_what_is_foreseen_is_bounded(ahead: PicturePrefetcher, clock: Clock) -> None:
    for _ in range(MOST + 50):
        ahead.answered("power_w")
    assert len(ahead._foreseen) == MOST
    clock.s += REFRESH_S
    assert ahead.due() == (["power_w"], None)


def test_the_page_finds_the_picture_made_and_the_collector_is_asked_no_oftener(
    served: str, chosen: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PicturePrefetcher, "_run", lambda self: None)
    fleet = FleetClient(served, now_ms=clock.ms)
    ahead = PicturePrefetcher(lambda color_by, for_s: fleet_canvas.ready(fleet, color_by, for_s), clock)
    fleet_canvas.frame(fleet, "power_w")
    for _ in range(4):
        ahead.answered("power_w")
        asked = len(chosen.calls)
        clock.s += REFRESH_S - LEAD_S
        for color_by in ahead.due()[0]:
            ahead.make(color_by)
        assert chosen.calls[asked:] == ["picture health", "picture power_w"]
        clock.s += LEAD_S + LATE_S
        body, trouble = fleet_canvas.frame(fleet, "power_w")
        assert body is not None
        assert trouble is None
        assert len(chosen.calls) == asked + 2, "who asked waited for nothing"
    fleet.close()


def test_what_is_young_enough_for_the_next_question_is_not_asked_for(
    served: str, chosen: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PicturePrefetcher, "_run", lambda self: None)
    fleet = FleetClient(served, now_ms=clock.ms)
    ahead = PicturePrefetcher(lambda color_by, for_s: fleet_canvas.ready(fleet, color_by, for_s), clock)
    fleet_canvas.frame(fleet, "power_w")  # another page's
    asked = len(chosen.calls)
    ahead.make("power_w")
    assert len(chosen.calls) == asked
    fleet.close()


def test_a_failure_is_told_to_who_asks_and_nothing_is_foreseen_then(
    shared: FleetClient, chosen: Any, ahead: PicturePrefetcher, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(app, "_ahead", ahead)
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "the store cannot answer: x")
    answer = app.picture(request("power_w"))
    assert answer.status_code == 503
    assert b"trouble" in bytes(answer.body)
    assert ahead.due() == ([], None)
    chosen.failure = None
    monkeypatch.setattr(shared, "_away", None)
    assert app.picture(request("power_w")).status_code == 200
    assert ahead.due()[1] == pytest.approx(REFRESH_S - LEAD_S)


def test_a_defect_is_logged_and_the_next_picture_is_made(caplog: pytest.LogCaptureFixture) -> None:
    PicturePrefetcher(lambda color_by, for_s: 1 / 0).make("power_w")
    assert "could not be made" in caplog.text


def test_its_thread_makes_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_ahead, "REFRESH_S", LEAD_S)  # at once
    made: list[tuple[str, float]] = []
    ahead = PicturePrefetcher(lambda color_by, for_s: made.append((color_by, for_s)))
    for count in (1, 2):
        ahead.answered("power_w")
        wait_until(lambda count=count: len(made) >= count, "it is made", 30)
    assert made[0] == ("power_w", LEAD_S + LATE_S)
