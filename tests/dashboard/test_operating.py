"""System, Capacity and Risk as pages, and what a person does to nodes and incidents: as whom, and not as a viewer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import capacity_parts
from drover_dashboard.server import auth_settings as people
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_proto import fleet_pb2 as pb

PAGES = Path(drover_dashboard.__file__).parent / "pages"


def opened(page: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def texts(app: AppTest) -> str:
    return " ".join(text.value for text in app.text)


@pytest.mark.parametrize("page", ["system", "capacity", "risk"])
def test_pages_run_and_hostile_text_stays_text(shared: FleetClient, chosen, page: str) -> None:
    app = opened(page)
    formatted = [element.value for element in (*app.markdown, *app.caption, *app.title, *app.header)]
    assert not any("script" in text or ":red[**" in text for text in formatted)
    assert all("script" not in metric.label + str(metric.value) + str(metric.delta) for metric in app.metric)


@pytest.mark.parametrize("page", ["system", "capacity", "risk"])
def test_without_a_collector_they_say_why(shared: FleetClient, chosen, page: str) -> None:
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert "has not answered since" in texts(opened(page))


def test_the_system_shows_what_is_not_known(shared: FleetClient) -> None:
    shown = {metric.label: str(metric.value) for metric in opened("system").metric}
    assert shown["Store"] == "does not answer"
    assert shown["Worst clock"] == "not reported"
    assert shown["Messages waiting"] == "3"


@pytest.mark.parametrize(("currency", "cost"), [("", "no price set"), ("EUR", "no price set")])
def test_without_a_price_costs_are_hours(shared: FleetClient, chosen, currency: str, cost: str) -> None:
    chosen.currency = currency
    app = opened("capacity")
    shown = {metric.label: str(metric.value) for metric in app.metric}
    assert shown["GPU-hours faults took"] == "4.0", "what is out of service is counted apart"
    assert shown["What that cost"] == cost
    assert shown["Free"] == shown["Held and idle"] == "not known"
    assert "Nothing was judged in the last minute" in texts(app)


def test_costs_are_added_up_where_all_have_a_price() -> None:
    rows = [
        pb.LostHours(kind="xid", cause="a", lost=1, cost=2.5), pb.LostHours(kind="idle", cause="idle_gpus", lost=9),
        pb.LostHours(kind="memory", cause="b", waited=2, cost=5.0),
    ]  # fmt: skip
    reply = pb.Capacity(currency="EUR", lost=rows)
    assert capacity_parts.fault_cost(reply) == 7.5
    assert capacity_parts.hours(reply) == (1, 2, 0)
    assert capacity_parts.money(reply, 7.5) == "7.50 EUR"
    rows[0].ClearField("cost")
    assert capacity_parts.fault_cost(pb.Capacity(currency="EUR", lost=rows)) is None


@pytest.mark.parametrize("measured", [True, False])
def test_the_ranking_is_no_prophecy(shared: FleetClient, chosen, measured: bool) -> None:
    chosen.measured = measured
    said = texts(opened("risk"))
    assert "A ranking, not a prophecy" in said
    assert ("Measured on a public trace, a trace" in said) is measured
    assert ("does not report how good the ranking is" in said) is not measured
    assert "1 more nodes show no sign: 2.0 % each" in said


# ---- acts


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Makes that person the one who looks."""
    yield lambda person: monkeypatch.setattr(signin, "person", lambda: person)


def press(app: AppTest, label: str) -> AppTest:
    next(button for button in app.button if button.label == label).click().run()
    assert not app.exception, app.exception
    return app


def labels(app: AppTest) -> set[str]:
    return {button.label for button in app.button}


ACTS = {"Drain ...", "Drain GPU ...", "Resume ...", "Probe ..."}


@pytest.mark.parametrize(("person", "may"), [(Person("", True), True), (Person("kim", False), False), (None, False)])
def test_a_viewer_finds_nothing_to_press(shared: FleetClient, chosen, someone, person, may: bool) -> None:
    someone(person)
    chosen.may_answer = True
    assert (labels(opened("node", node="n2")) >= ACTS) is may
    assert ("Silence it" in labels(opened("incidents", id="i1"))) is may


@pytest.mark.parametrize(("act", "call"), [("Drain", "drain"), ("Resume", "resume"), ("Probe", "probe")])
def test_an_act_goes_with_the_name_of_who_signed_in(shared: FleetClient, chosen, someone, act: str, call: str) -> None:
    someone(Person("alex@example.com", True))
    app = press(opened("node", node="n2"), f"{act} ...")
    press(app, f"{act} n2")
    assert chosen.acts == [], "without a reason nothing is done"
    app.text_input(key=f"why_{call}").input("fan replaced")
    press(app, f"{act} n2")
    assert chosen.acts == [(call, "n2", "fan replaced", "alex@example.com", False)]


def test_one_gpu_goes_by_the_board_that_was_seen(shared: FleetClient, chosen, someone) -> None:
    someone(Person("alex@example.com", True))
    chosen.preview = pb.ActPreview(may_act=True, grounds=["No new pod gets GPU 1 of n2 (GPU-1)."])
    app = press(opened("node", node="n2"), "Drain GPU ...")
    assert "Drain GPU 1 of n2" not in labels(app), "nothing is chosen for a person"
    app.selectbox(key="target_drain_gpu").select("GPU 1 of n2: GPU-1").run()
    assert "No new pod gets GPU 1 of n2 (GPU-1)." in texts(app)
    app.text_input(key="why_drain_gpu").input("it rattles")
    press(app, "Drain GPU 1 of n2")
    assert chosen.acts == [("drain", "n2 GPU 1 GPU-1", "it rattles", "alex@example.com", False)]
    assert "Drain GPU 1 of n2: done: no new jobs (by alex@example.com)." in texts(app)


def test_what_the_guard_holds_back_is_done_only_when_that_is_said(shared: FleetClient, chosen) -> None:
    job = pb.JobThere(job="train", gpus_here=2, gpus=8, nodes=4)
    chosen.preview = pb.ActPreview(
        may_act=True, guard="2 of 2 nodes would be out", jobs=[job], maintenance="maintenance window: new firmware"
    )
    app = press(opened("node", node="n2"), "Drain ...")
    assert "The guard would hold it back: 2 of 2 nodes would be out." in texts(app)
    assert "Drover itself does nothing there: maintenance window: new firmware." in texts(app)
    app.text_input(key="who_drain").input("Bo")
    app.text_input(key="why_drain").input("I know")
    press(app, "Drain n2")
    assert chosen.acts == []
    app.checkbox(key="force").check()
    press(app, "Drain n2")
    assert chosen.acts == [("drain", "n2", "I know", "Bo", True)]
    assert chosen.save_s == 0, "jobs are asked only where the box says so"
    app = press(app, "Drain ...")
    app.text_input(key="who_drain").input("Bo")
    app.text_input(key="why_drain").input("I know")
    app.checkbox(key="force").check()
    app.checkbox(key="save_first").check()
    press(app, "Drain n2")
    assert chosen.save_s == 300


@pytest.mark.parametrize(
    ("look", "says"),
    [
        (pb.ActPreview(may_act=True, hindrance="it only observes"), "It cannot be done: it only observes."),
        (pb.ActPreview(may_act=True, guard="2 of 2", no_force=True), "past it acts an admin's"),
        (pb.ActPreview(may_act=False), "This console's own certificate is a viewer's"),
    ],
)
def test_what_cannot_be_done_has_no_form(shared: FleetClient, chosen, look: pb.ActPreview, says: str) -> None:
    chosen.preview = look
    app = press(opened("node", node="n2"), "Drain ...")
    assert says in texts(app)
    assert "Drain n2" not in labels(app)


def test_an_incident_is_silenced(shared: FleetClient, chosen, someone) -> None:
    someone(Person("alex@example.com", True))
    app = opened("incidents", id="i1")
    app.text_input(key="why_silence_i1").input("known, part comes on Monday")
    press(app, "Silence it")
    assert chosen.acts == [("silence", "i1", "known, part comes on Monday", "alex@example.com", True)]


def test_nobody_is_asked_by_default() -> None:
    assert people.chosen().asks is False
    assert signin.person() == Person("", True)
