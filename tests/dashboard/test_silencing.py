"""A silenced incident is seen wherever it is listed, says why nobody is notified, and its silence can be ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_core.model.events import Silence
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import silence_forms as silencing
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import table, view
from drover_proto import fleet_pb2 as pb

PAGES = Path(drover_dashboard.__file__).parent / "pages"
HOUR_MS = 3_600_000


def note(**more: Any) -> pb.SilenceNote:
    until_ms = time.time_ns() // 1_000_000 + HOUR_MS
    given: dict[str, Any] = {"id": "s1", "by": "alex", "until_ms": until_ms, "why": "part on Monday", "alone": True}
    return pb.SilenceNote(**(given | more))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tables by key, as their component gets them."""
    found: dict[str, Any] = {}

    class Shown:
        open = None

    def mount(key: str, data: Any, **_: Any) -> Shown:
        found[key] = data
        return Shown()

    monkeypatch.setattr(table, "component", lambda name: mount)
    return found


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Person], None]]:
    yield lambda person: monkeypatch.setattr(signin, "person", lambda: person)


def opened(page: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def press(app: AppTest, label: str) -> AppTest:
    next(button for button in app.button if button.label == label).click().run()
    assert not app.exception, app.exception
    return app


def texts_of(data: Any) -> str:
    parts = [data["empty"]] if not data["rows"] else []
    for row in data["rows"]:
        for cell in row["cells"]:
            parts += [cell["text"], cell.get("sub", ""), cell.get("mark", {}).get("text", "")]
    return " | ".join(parts)


def said(app: AppTest) -> str:
    return " ".join(text.value for text in app.text)


@pytest.mark.parametrize(
    ("page", "query", "key"),
    [
        ("fleet", {}, "open_incidents"), ("incidents", {}, "incidents"), ("node", {"node": "n2"}, "node_incidents"),
        ("incidents", {"id": "i1"}, "facts"), ("incidents", {"id": "i1"}, "notifications"),
    ],
)  # fmt: skip
def test_wherever_an_incident_stands_it_says_until_when_it_is_silenced_and_by_whom(
    shared: FleetClient, chosen, drawn: dict[str, Any], page: str, query: dict[str, str], key: str
) -> None:
    chosen.silence = note()
    opened(page, **query)
    assert "silenced until " in texts_of(drawn[key])
    assert "by alex" in texts_of(drawn[key])


def test_one_that_is_not_silenced_says_nothing_of_it(shared: FleetClient, drawn: dict[str, Any]) -> None:
    opened("incidents", id="i1")
    assert "silenced" not in " ".join(texts_of(data) for data in drawn.values())


def test_the_badge_is_drawn_by_the_fields_not_by_a_sentence(shared: FleetClient, chosen, drawn: dict[str, Any]) -> None:
    chosen.silence = note(by="bo", why="x")
    opened("incidents")
    (row,) = drawn["incidents"]["rows"]
    assert row["tone"] == "muted"
    assert row["cells"][1]["mark"]["tone"] == "muted"


def test_a_silence_is_seen_at_once_and_can_be_ended_there(
    shared: FleetClient, chosen, someone, drawn: dict[str, Any]
) -> None:
    someone(Person("", True))
    app = opened("incidents", id="i1")
    app.text_input(key="who_silence_i1").input("alex")
    app.text_input(key="why_silence_i1").input("part on Monday")
    press(app, "Silence it")
    assert "Silenced for 4 h by alex." in said(app)
    assert "silenced until " in texts_of(drawn["facts"]), "not the answer of before"
    app.run()
    assert "Silenced for 4 h by alex." in said(app), "it stays"
    assert app.text_input(key="who_end_silence_i1").value == "alex", "a name is given once"
    press(app, "End it")
    assert chosen.acts[1:] == [], "not without a reason"
    app.text_input(key="why_end_silence_i1").input("part came")
    press(app, "End it")
    assert chosen.acts[1:] == [("end", "s1", "part came", "alex", False)]
    assert "Silence ended by alex." in said(app)
    assert "silenced until" not in texts_of(drawn["facts"])
    assert app.text_input(key="why_silence_i1").value == "", "the form is empty again"


def test_a_viewer_sees_it_and_cannot_end_it(shared: FleetClient, chosen, someone, drawn: dict[str, Any]) -> None:
    someone(Person("kim", False))
    chosen.silence = note()
    chosen.silences = [stored()]
    assert "End it" not in {button.label for button in opened("incidents", id="i1").button}
    assert "End it" not in {button.label for button in opened("system").button}
    assert "alex | part on Monday" in texts_of(drawn["silences"])


@pytest.mark.parametrize(("choice", "left"), [("no", 0), ("only", 1), ("", 1)])
def test_silenced_ones_can_be_hidden(
    shared: FleetClient, chosen, drawn: dict[str, Any], choice: str, left: int
) -> None:
    chosen.silence = note()
    opened("incidents", **({"silenced": choice} if choice else {}))
    assert chosen.asked_silenced[-1] == choice
    assert len(drawn["incidents"]["rows"]) == left
    if choice == "no":
        assert drawn["incidents"]["empty"] == "No open incident that is not silenced."


def stored(**more: Any) -> Silence:
    now_ms = time.time_ns() // 1_000_000
    given: dict[str, Any] = {"rack": ("r1",), "kind": ("thermal",)}
    return Silence("s1", now_ms, now_ms, now_ms + HOUR_MS, "alex", "part on Monday", **(given | more))


def test_the_system_page_lists_them_and_ends_one(shared: FleetClient, chosen, drawn: dict[str, Any]) -> None:
    chosen.silences = [stored()]
    app = opened("system")
    assert "rack r1, kind thermal" in texts_of(drawn["silences"])
    app.text_input(key="who_end_any").input("bo")
    app.text_input(key="why_end_any").input("done")
    press(app, "End it")
    assert chosen.acts == [("end", "s1", "done", "bo", False)]
    assert "No silence and no maintenance window" in texts_of(drawn["silences"])


def test_a_window_says_that_drover_does_nothing_there_and_one_to_come_when() -> None:
    who = view.Viewer(UTC, 1_800_000_000_000)
    later = Silence("s2", 0, who.now_ms + 1, who.now_ms + HOUR_MS, "a", "b", node=("n1",), maintenance=True)
    (row,) = silencing.rows([later], who)
    assert row.cells[0].sub == "maintenance: Drover acts on none of it"
    assert row.cells[1].sub == "from 08:00:00"
    (row,) = silencing.rows([replace(later, from_ms=0, maintenance=False)], who)
    assert (row.cells[0].sub, row.cells[1].sub) == ("notifications only", "1 h 00 min left")
