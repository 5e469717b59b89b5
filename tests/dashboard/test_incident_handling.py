"""Who handles an incident is seen and changed on its page; lists filter; silences, windows and the audit have pages."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_core.model.events import Incident, IncidentKind, RecommendedAction, Severity, Silence, to_json
from drover_core.model.incident_title import MOST_WORDS, WORDS, incident_title
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import incident_filters, incident_handling, incident_past, incident_rows, silence_new
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import csv_file, table, view
from drover_proto import fleet_pb2 as pb

PAGES = Path(drover_dashboard.__file__).parent / "pages"
T0 = 1_800_000_000_000
LOST = Incident(
    "i1", IncidentKind.XID, "xid_79", "gpu", "n2", 1, (("n2", 1),), T0, T0, None, Severity.CRITICAL, 0.9,
    RecommendedAction.DRAIN, "=gone, really", "Reset it.",
)  # fmt: skip


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
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signin, "person", lambda: Person("", True))
    return


def test_one_acknowledges_with_a_name_and_everybody_sees_it(
    shared: FleetClient, chosen: Any, operator: None, drawn: dict[str, Any]
) -> None:
    app = opened("incidents", id="i1")
    assert "by nobody: not acknowledged" in texts_of(drawn["facts"])
    press(app, "Acknowledge it")
    assert chosen.acts == [], "not without a name"
    app.text_input(key="who_acknowledge_i1").input("alex")
    press(app, "Acknowledge it")
    assert chosen.acts == [("acknowledge", "", "", "alex", False)]
    assert "Acknowledged by alex." in said(app)
    assert "acknowledged by alex" in texts_of(drawn["facts"])
    (row,) = drawn["incidents"]["rows"]
    assert (row["tone"], row["cells"][1]["mark"]["text"]) == ("muted", "acknowledged by alex")
    press(app, "Unacknowledge")  # the name is known now
    assert chosen.acts[1:] == [("unacknowledge", "", "", "alex", False)]
    assert "by nobody: not acknowledged" in texts_of(drawn["facts"])


def test_a_form_hands_over_and_what_was_not_stored_stays_in_it(
    shared: FleetClient, chosen: Any, operator: None, drawn: dict[str, Any]
) -> None:
    app = opened("incidents", id="i1")
    app.text_input(key="who_note_i1").input("alex")
    press(app, "Save")
    assert chosen.acts == [], "nothing is filled in"
    app.run()
    assert "Fill in at least one field." in said(app), "a refresh of the page does not take it away"
    app.text_input(key="assign_note_i1").input("bo")
    app.text_input(key="ticket_note_i1").input("https://tickets/OPS-4711")
    app.text_area(key="text_note_i1").input("**new** board <b>today</b>")
    chosen.refuses = "comment"
    press(app, "Save")
    assert app.text_area(key="text_note_i1").value == "**new** board <b>today</b>"
    refused = said(app)
    assert "Fill in" not in refused, "it was judged again"
    app.run()
    assert said(app) == refused, "why it was not stored outlasts a refresh"
    chosen.refuses = ""
    press(app, "Save")
    assert said(app) != refused
    assert [act[:2] for act in chosen.acts] == [
        ("assign", "bo"), ("ticket", "https://tickets/OPS-4711"), ("comment", "")
    ], "each once"  # fmt: skip
    assert app.text_area(key="text_note_i1").value == ""
    assert "assigned to bo" in texts_of(drawn["facts"])
    assert "**new** board <b>today</b>" in texts_of(drawn["comments"])
    assert not any("board" in element.value for element in app.markdown), "text, never Markdown"


def test_a_forms_refusal_outlasts_a_refresh_and_belongs_to_one_incident(
    shared: FleetClient, chosen: Any, operator: None, drawn: dict[str, Any]
) -> None:
    app = opened("incidents", id="i1")
    lacks = "Give your name and the reason: both are kept with the answer."
    press(app, "Silence it")
    app.run()
    assert said(app).count(lacks) == 1
    app.text_input(key="who_silence_i1").input("alex")
    app.text_input(key="why_silence_i1").input("noise")
    press(app, "Silence it")
    assert lacks not in said(app)


@pytest.mark.parametrize(
    ("ticket", "label"),
    [
        ("https://tickets.example.com/browse/OPS-4711/", "OPS-4711 (tickets.example.com)"),
        ("https://good.example.com@bad.example.com/x?y=1", "x?y=1 (bad.example.com)"),
        ("https://tickets.example.com", "tickets.example.com"),
        ("http://[", "["),
    ],
)
def test_a_tickets_button_says_whose_ticket_it_is(ticket: str, label: str) -> None:
    assert incident_handling.ticket_label(ticket) == label


def test_a_viewer_sees_who_handles_it_and_has_no_button(
    shared: FleetClient, chosen: Any, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signin, "person", lambda: Person("kim", False))
    labels = {button.label for button in opened("incidents", id="i1").button}
    assert not labels & {"Acknowledge", "Acknowledge it", "Save"}
    assert "by nobody" in texts_of(drawn["facts"])


def test_run_book_and_what_helped_before_stand_with_it(shared: FleetClient, drawn: dict[str, Any]) -> None:
    app = opened("incidents", id="i1")
    assert any("What it means" in element.value for element in app.markdown)
    before = texts_of(drawn["similar"])
    assert "n2 GPU 1 (here)" in before
    assert "it was a real fault" in before
    assert "came back after 2 h 13 min" in before


def test_each_kind_has_a_run_book_that_stands_alone() -> None:
    for kind in IncidentKind:
        text = incident_past.run_book(kind)
        assert "**First look**" in text, kind
        assert "](" not in text, kind


@pytest.mark.parametrize(("kind", "cause"), [*WORDS, (IncidentKind.XID, "xid_79"), (IncidentKind.MEMORY, "ecc_storm")])
def test_a_title_has_at_most_ten_words(kind: IncidentKind, cause: str) -> None:
    incident = replace(LOST, kind=kind, cause=cause)
    title = incident_title(incident)
    assert title.endswith(" on n2 GPU 1")
    assert len(title.split()) <= MOST_WORDS
    long = replace(incident, scope="job", job=" ".join("abcdefghijkl"))
    assert len(incident_title(long).split()) == MOST_WORDS


def test_titles_name_cause_and_place() -> None:
    rack = replace(LOST, kind=IncidentKind.THERMAL, cause="inlet", scope="rack", node=None, gpu=None,
                   members=(("n1", None), ("n2", None)))  # fmt: skip
    assert incident_title(LOST) == "XID 79 on n2 GPU 1"
    assert incident_title(rack, {"n1": "r1", "n2": "r1"}) == "Hot inlet air in rack r1"
    assert incident_title(rack) == "Hot inlet air on 2 nodes"


def test_a_link_is_a_view_of_the_list(shared: FleetClient, chosen: Any, drawn: dict[str, Any]) -> None:
    query = {"kind": "xid", "text": "n2", "rack": "r1", "acknowledged": "no", "sort": "oldest", "state": "all"}
    app = opened("incidents", since="7d", **query)
    asked = chosen.asked_filters[-1]
    assert {name: getattr(asked, name) for name in query} == query
    assert asked.since_ms
    app.text_input(key="incidents_text").input("").run()
    assert chosen.asked_filters[-1].text == ""
    assert "text" not in app.query_params


def test_the_csv_has_all_columns_and_no_formula() -> None:
    reply = pb.IncidentList(
        incidents_json=[to_json(LOST)], handling={"i1": pb.IncidentHandling(assignee="bo", tickets=["OPS-1", "OPS-2"])}
    )
    (row,) = csv.DictReader(io.StringIO(incident_filters.csv_of(reply, {"n2": "r1"})))
    assert row["title"] == "XID 79 on n2 GPU 1"
    assert (row["rack"], row["assignee"], row["tickets"], row["gpu_hours_lost"]) == ("r1", "bo", "OPS-1 OPS-2", "")
    assert row["summary"] == "'=gone, really"
    steering = ("=1", "\t=1", "\r=1", "\n=1", "\0=1")
    for (safe,) in list(csv.reader(io.StringIO(csv_file.csv_text([], [[text] for text in steering]), newline="")))[1:]:
        assert safe.startswith("'")
    assert csv_file.csv_text(["a"], [[-1.5]]) == "a\r\n-1.5\r\n"


def test_silences_and_windows_stand_apart_and_one_can_be_made_and_ended(
    shared: FleetClient, chosen: Any, operator: None, drawn: dict[str, Any]
) -> None:
    now_ms = view.viewer().now_ms
    one = Silence("s1", now_ms, now_ms, now_ms + 3_600_000, "alex", "noise", rack=("r1",))
    chosen.silences = [one, replace(one, id="s2", maintenance=True, why="firmware", from_ms=now_ms + 60_000)]
    app = opened("silences")
    assert "in force" in texts_of(drawn["silences"])
    assert "noise" in texts_of(drawn["silences"])
    assert "to come" in texts_of(drawn["windows"])
    assert "firmware" in texts_of(drawn["windows"])
    app.text_input(key="names_silence_new").input("n1")
    app.text_input(key="who_silence_new").input("alex")
    app.text_input(key="why_silence_new").input("RMA")
    app.text_input(key="from_silence_new").input("soon")
    press(app, "Make it")
    wrong = "'soon' is no time"
    assert any(wrong in text.value for text in app.text)
    app.run()
    assert any(wrong in text.value for text in app.text), "a refresh of the page does not take it away"
    app.text_input(key="from_silence_new").input("")
    press(app, "Make it")
    assert not any(wrong in text.value for text in app.text)
    assert chosen.acts[-1][:4] == ("silence", "n1", "RMA", "alex")
    app.text_input(key="who_end_any").input("alex")
    app.text_input(key="why_end_any").input("done")
    press(app, "End it")
    assert chosen.acts[-1] == ("end", "s1", "done", "alex", False)


def test_what_a_form_of_a_silence_asks_for() -> None:
    who = view.Viewer(view.fmt.zone("Europe/Berlin"), T0)
    given: dict[str, Any] = {"place": "rack", "names": ["r1", "r2"], "kinds": ["thermal"], "held": True}
    asked = silence_new.ask(given, 4.0, "2027-01-15 10:00", who)
    assert isinstance(asked, pb.SilenceAsk)
    assert (list(asked.rack), list(asked.kind), asked.maintenance) == (["r1", "r2"], ["thermal"], True)
    assert asked.from_ms == T0 + 3_600_000, "in the viewer's zone"
    assert "Name at least one rack" in str(silence_new.ask(given | {"names": []}, 4.0, "", who))
    assert "at least one kind" in str(silence_new.ask(given | {"place": "everywhere", "kinds": []}, 4.0, "", who))
    assert "is no time" in str(silence_new.ask(given, 4.0, "tomorrow", who))
    for far in ("0001-01-01", "9999-12-31 23:00"):
        assert "check the year" in str(silence_new.ask(given, 4.0, far, who))


def test_the_audit_says_who_did_what_and_filters(shared: FleetClient, chosen: Any, drawn: dict[str, Any]) -> None:
    app: AppTest = opened("audit", by="Drover too", about="n2")
    assert "audit True n2" in chosen.calls
    rows = drawn["audit"]["rows"]
    assert [row.get("href", "") for row in rows] == ["node?node=n2", "incidents?id=0123456789abcdef&state=all"]
    app.text_input(key="audit_text").input("BOARD came").run()
    assert [row["cells"][0]["sub"] for row in drawn["audit"]["rows"]] == ["bo"]


def test_the_audit_and_silences_name_an_incident_by_its_title(
    shared: FleetClient, chosen: Any, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At night nobody knows what was silenced by its id alone."""
    monkeypatch.setattr(incident_rows, "titles", lambda: {"0123456789abcdef": "XID 79 on n2 GPU 1"})
    opened("audit", by="Drover too")
    cells = [row["cells"][1] for row in drawn["audit"]["rows"] if row["cells"][1]["text"] == "comment"]
    assert [(cell["sub"].split(" · ")[0], cell["title"]) for cell in cells] == [
        ("XID 79 on n2 GPU 1", "0123456789abcdef")
    ]
    until_ms = 2 * T0
    chosen.silences = [Silence("s1", T0, T0, until_ms, "bo", "cable is ordered", incident=("0123456789abcdef",))]
    opened("silences")
    assert drawn["silences"]["rows"][0]["cells"][0]["sub"] == "XID 79 on n2 GPU 1"
