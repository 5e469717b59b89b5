"""The time picker: what a person may type, what stands in the address, and that the time goes along."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_dashboard.client import Answer, FleetClient
from drover_dashboard.widgets import charts, time_range, time_words
from drover_proto import fleet_pb2 as pb

PAGES = Path(drover_dashboard.__file__).parent / "pages"
BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 28, 10, 30, tzinfo=BERLIN)  # a Saturday
NOW_MS = round(NOW.timestamp() * 1000)
MIN_MS, HOUR_MS = 60_000, 3_600_000


def at(text: str) -> int:
    return round(datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=BERLIN).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("03:12", "2026-11-28 02:42", "2026-11-28 03:42"),
        ("23:50", "2026-11-27 23:20", "2026-11-28 00:20"),  # of last night
        ("10:20", "2026-11-28 09:50", "2026-11-28 10:30"),  # until now
        ("yesterday", "2026-11-27 00:00", "2026-11-28 00:00"),
        ("yesterday 03:12", "2026-11-27 02:42", "2026-11-27 03:42"),
        ("today", "2026-11-28 00:00", "2026-11-28 10:30"),
        ("Tuesday", "2026-11-24 00:00", "2026-11-25 00:00"),
        ("26 Nov", "2026-11-26 00:00", "2026-11-27 00:00"),
        ("Dec 24", "2025-12-24 00:00", "2025-12-25 00:00"),
        ("03:00 to 04:30", "2026-11-28 03:00", "2026-11-28 04:30"),
        ("03:00-04:30", "2026-11-28 03:00", "2026-11-28 04:30"),
        ("23:00 to 01:00", "2026-11-27 23:00", "2026-11-28 01:00"),
        ("26 nov 14:00 \N{EN DASH} 16:00", "2026-11-26 14:00", "2026-11-26 16:00"),
        ("2026-11-26 14:00 to now", "2026-11-26 14:00", "2026-11-28 10:30"),
        ("2026-11-26T13:00:00Z", "2026-11-26 13:30", "2026-11-26 14:30"),
    ],
)
def test_a_time_is_read_as_a_person_types_it(text: str, start: str, end: str) -> None:
    found = time_words.range_of(text, NOW_MS, BERLIN)
    assert found == (at(start), at(end))
    assert time_words.range_of(time_words.words(*found, NOW_MS, BERLIN), NOW_MS, BERLIN) == found, "as shown"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "25:00",
        "30 Feb",
        "29 Nov 2026",
        "2026-11-29",
        "04:00 to 03:00 to 02:00",
        "2020-01-01 to now",
        "<b>",
        "9999-12-31",
        "9999-12-31 23:50",
        "0001-01-01 00:10",
        "9999-12-31T23:59Z",
    ],
)
def test_what_is_no_time_of_the_past_is_none(text: str) -> None:
    assert time_words.range_of(text, NOW_MS, BERLIN) is None


def test_spans() -> None:
    known = {
        "15 min": 15 * MIN_MS,
        "1 h": HOUR_MS,
        "36 hours": 36 * HOUR_MS,
        "last 2 days": 48 * HOUR_MS,
        "1.5h": 90 * MIN_MS,
    }
    assert {text: time_words.span_of(text) for text in known} == known
    assert all(time_words.span_of(text) is None for text in ("0 min", "500 d", "h", "03:12", "5 parsecs"))
    assert all(time_words.label(time_words.span_of(preset) or 0) == preset for preset in time_range.PRESETS)


def opened(page: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    return app.run()


def chose(app: AppTest, text: str) -> AppTest:
    """Choose or type it: AppTest knows only options."""
    picker = app.selectbox(key="node_time")
    if text not in picker.options:
        picker.options.append(text)
    return picker.set_value(text).run()


def test_each_of_several_choices_stands_in_the_address_and_a_wrong_one_says_so(shared: FleetClient) -> None:
    app = opened("node", node="n2")
    picker = app.selectbox(key="node_time")
    assert picker.value == "15 min"
    for choice, span, drawn in (("6 h", "6 h", False), ("36 h", "36 h", False), ("yesterday", "36 h", True)):
        app = chose(app, choice)
        assert not app.exception
        assert app.query_params.get(time_range.SPAN) == span
        assert (charts.OPEN in app.query_params) == drawn
    assert " to " in app.selectbox(key="node_time").value, "a time of its own, in words"
    assert any(text.value.startswith("Not now: these charts end ") for text in app.text)
    app = chose(app, "<b>soon</b>")
    assert any("is no time of the past" in text.value for text in app.text)
    app = chose(app, "15 min")
    assert not {time_range.SPAN, charts.OPEN} & set(app.query_params)


def test_the_time_goes_along_to_a_page_whose_address_has_none(shared: FleetClient) -> None:
    app = AppTest.from_file(str(PAGES / "node.py"), default_timeout=120)
    app.query_params["node"] = "n2"
    app.session_state[time_range.CARRIED] = ("6 h", None)
    app.run()
    assert app.query_params[time_range.SPAN] == "6 h"
    other = AppTest.from_file(str(PAGES / "node.py"), default_timeout=120)
    other.query_params["node"], other.query_params[time_range.SPAN] = "n2", "1 h"
    other.session_state[time_range.CARRIED] = ("6 h", None)
    other.run()
    assert other.query_params[time_range.SPAN] == "1 h", "what a link says holds"


@pytest.mark.parametrize(
    ("name", "value"),
    [(charts.OPEN, "999999999000-999999999900"), ("gpu", "\N{SUPERSCRIPT TWO}"), ("vs", "\N{SUPERSCRIPT TWO}")],
)
def test_a_mangled_address_still_shows_the_node(shared: FleetClient, name: str, value: str) -> None:
    app = opened("node", node="n2", **{name: value})
    assert not app.exception
    assert app.selectbox(key="node_time").value == "15 min"


def test_a_zoom_that_a_person_ended_does_not_come_back_on_the_next_page(shared: FleetClient) -> None:
    app = opened("node", node="n2", open=f"{(NOW_MS - HOUR_MS) // 1000}-{NOW_MS // 1000}")
    assert app.session_state[time_range.CARRIED][1]
    del app.query_params[charts.OPEN]  # as a double click does
    app.run()
    assert app.session_state[time_range.CARRIED] == (None, None)


@pytest.mark.parametrize(("page", "query"), [("fabric", {"leaf": "leaf1"}), ("thermals", {"rack": "r1"})])
def test_fabric_and_thermals_have_charts_of_what_is_chosen(
    shared: FleetClient, monkeypatch: pytest.MonkeyPatch, page: str, query: dict[str, str]
) -> None:
    port, hot = pb.PortRow(node="n2", link="mlx5_0"), pb.HotGpu(node="n2", gpu=1, rack="r1")
    fabric = pb.Fabric(ports=[port], ports_total=1)
    thermals = pb.Thermals(nodes=[pb.NodeHeat(node="n2")], hot=[hot, pb.HotGpu(node="n9", gpu=0, rack="r2")])
    asked: list[pb.SeriesRequest] = []
    monkeypatch.setattr(FleetClient, "fabric", lambda *_: Answer(fabric, 1))
    monkeypatch.setattr(FleetClient, "thermals", lambda *_: Answer(thermals, 1))
    monkeypatch.setattr(FleetClient, "series", lambda _, request, key: (asked.append(request), Answer(None, 0))[1])
    app = opened(page, **query, span="6 h")
    assert not app.exception
    found = [(one.scope, [(at.node, at.gpu, at.link) for at in one.targets]) for one in asked]
    of_node = [("node", [("n2", 0, "")]), ("gpu", [("n2", 1, "")])]
    assert found == ([("link", [("n2", 0, "mlx5_0")])] if page == "fabric" else of_node)
    assert all(one.to_ms - one.from_ms == 6 * HOUR_MS for one in asked)
