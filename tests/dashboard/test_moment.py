"""Pages as of a moment of the past: what is asked of the collector, and that nothing can be done there."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_collector.api import moment as collector_moment
from drover_dashboard import client
from drover_dashboard.client import FleetClient
from drover_dashboard.widgets import moment, strip, trends, view
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

BERLIN = ZoneInfo("Europe/Berlin")
NOW_MS = round(datetime(2026, 11, 28, 10, 30, tzinfo=BERLIN).timestamp() * 1000)
WHO = view.Viewer(BERLIN, NOW_MS)
AT_MS = NOW_MS - 3_600_000
THEN_MS = round(time.time() * 1000) - 3 * 86_400_000  # of a page that runs, whose clock is the real one
PAGES = Path(drover_dashboard.__file__).parent / "pages"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1 h ago", "2026-11-28T08:30:00Z"), ("45 min", "2026-11-28T08:45:00Z"), ("03:12", "2026-11-28T02:12:00Z"),
        ("23:50", "2026-11-27T22:50:00Z"), ("yesterday 14:00", "2026-11-27T13:00:00Z"),
        ("2026-11-26T13:00:00Z", "2026-11-26T13:00:00Z"),
    ],
)  # fmt: skip
def test_a_moment_is_read_as_a_person_types_it_and_stands_in_the_address(typed: str, expected: str) -> None:
    found = moment.moment(typed, WHO)
    assert found is not None
    assert moment.written(found) == expected
    assert moment.read(expected, NOW_MS) == found


@pytest.mark.parametrize(
    "text",
    ["", "x", "2026-11-28T09:30:00Z", "2027-01-01T00:00:00Z", "99999999999999999999", "2025-10-24T09:30:00Z"],
)
def test_no_time_the_future_and_what_is_too_old_are_now(text: str) -> None:
    assert moment.read(text, NOW_MS) == 0


def test_nobody_gets_to_a_moment_that_the_collector_refuses() -> None:
    """It answers of the last 400 days."""
    assert moment.MOST_DAYS == collector_moment.MOST_DAYS
    for typed, known in (("399 days", True), ("401 days", False), ("2024-01-01", False)):
        assert (moment.moment(typed, WHO) is not None) is known


def test_what_is_played_stands_at_its_beginning_and_not_in_the_second_before() -> None:
    for begun_ms in (AT_MS, AT_MS + 1, AT_MS + 999):
        stands = moment.read(moment.play(AT_MS - 600_000, AT_MS + 600_000, begun_ms)["at"], NOW_MS)
        assert begun_ms <= stands < begun_ms + 1000


def test_a_moment_of_another_year_is_said_with_its_year() -> None:
    assert moment.day_of(AT_MS, WHO) == "Sat 28 Nov 09:30:00"
    assert moment.day_of(AT_MS - 366 * 86_400_000, WHO) == "Thu 27 Nov 2025 09:30:00"


def test_a_page_of_now_counts_its_ages_from_now_whatever_its_address_says() -> None:
    def script(page: str) -> None:
        import streamlit as st

        from drover_dashboard.widgets import moment

        moment.settle(page)
        st.text(str(moment.at_ms()))

    for page, known in (("system", False), ("node", True)):
        test = AppTest.from_function(script, kwargs={"page": page})
        test.query_params["at"] = moment.written(THEN_MS)
        test.run()
        assert not test.exception
        assert (test.text[-1].value != "0") is known


def test_only_what_can_answer_of_then_is_asked_of_then_and_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def call(_self: object, _method: object, request: object, _deadline_s: float) -> object:
        asked.append(request)
        return pb.NodeDetail() if isinstance(request, pb.NodeRequest) else pb.Status()

    monkeypatch.setattr("drover_dashboard.client.CollectorChannel.call", call)
    monkeypatch.setattr(client, "_moment", lambda: AT_MS)
    fleet = FleetClient("127.0.0.1:1")
    fleet.node("n1")
    fleet.status()
    done = fleet.act(methods.ACT_ON_NODE, pb.ActRequest(node="n1", act="drain"))
    assert asked == [pb.NodeRequest(node="n1", at_ms=AT_MS), pb.StatusRequest()]
    assert done.trouble is not None
    assert done.trouble.reason == "this page shows the past"
    monkeypatch.setattr(client, "_moment", int)
    fleet.node("n1")
    assert asked[-1] == pb.NodeRequest(node="n1"), "what was kept of then is not shown for now"


@pytest.mark.parametrize("page", ["node", "incidents"])
def test_a_page_of_the_past_has_nothing_to_press(
    page: str, shared: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buttons(at: str) -> set[str]:
        test = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
        test.query_params["node"], test.query_params["id"] = "n2", "i1"
        if at:
            test.query_params["at"] = at
        test.run()
        assert not test.exception
        return {button.label for button in test.button}

    monkeypatch.setattr(client, "_moment", int)
    now = buttons("")
    monkeypatch.setattr(client, "_moment", lambda: AT_MS)
    then = buttons(moment.written(THEN_MS))
    acts = {label for label in now if any(word in label for word in ("Drain", "Resume", "Probe", "Acknowledge"))}
    assert acts
    assert not acts & then


def test_changes_that_are_not_known_are_not_none() -> None:
    found = strip.changes(
        [
            pb.Change(from_ms=1000, to_ms=5000, kind="agent", text="drover-agent 2 started on n1"),
            pb.Change(from_ms=1000, to_ms=5000, kind="maintenance", text="maintenance of n1"),
        ],
        WHO,
    )  # fmt: skip
    assert [(part.word, part.high_ms, part.look) for part in found.parts] == [
        ("agents started", 1000, "change"), ("maintenance", 5000, "maintenance"),
    ]  # fmt: skip
    assert not strip.changes(None, WHO).known


def test_a_day_without_data_is_a_gap_and_not_zero() -> None:
    days = [pb.TrendDay(from_ms=1), pb.TrendDay(from_ms=2, util_ratio=0.5, gpu_hours_lost=0), pb.TrendDay(pending=True)]
    made = trends.content(pb.Trend(days=days, pending=1))
    values = {figure["label"]: figure["values"] for figure in made["figures"]}
    assert values["Utilisation"] == [None, 50.0, None]
    assert values["GPU-hours lost"] == [None, 0.0, None]
    assert made["waits"] == [False, False, True]
