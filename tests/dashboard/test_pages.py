"""The pages run against a served fleet, and texts of the fleet never become HTML or Markdown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_dashboard.client import Answer, FleetClient
from drover_dashboard.widgets import fleet_picture, strip, table, trends
from drover_proto import fleet_pb2 as pb

IMPORTED = (fleet_picture, strip, table, trends)  # else they would keep what a test puts in the place of `component`
PAGES = Path(drover_dashboard.__file__).parent / "pages"


def opened(page: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


@pytest.mark.parametrize(
    ("page", "query"),
    [("fleet", {}), ("fleet", {"color": "power_w"}), ("incidents", {"id": "i1"}), ("node", {"node": "n2", "gpu": "1"})],
)
def test_pages_run_and_hostile_text_stays_text(shared: FleetClient, page: str, query: dict[str, str]) -> None:
    app = opened(page, **query)
    formatted = [element.value for element in (*app.markdown, *app.caption, *app.title, *app.header)]
    assert not any("script" in text or ":red[**" in text for text in formatted)
    assert all("script" not in metric.label + str(metric.value) + str(metric.delta) for metric in app.metric)


def test_the_fleet_page_shows_the_numbers_that_matter(shared: FleetClient, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, Any]] = []

    def component(name: str) -> Any:
        return lambda **given: drawn.extend(given["data"].get("figures", [])) or SimpleNamespace(open=None)

    monkeypatch.setattr("drover_dashboard.widgets.components.component", component)
    app = opened("fleet")
    shown = {figure["label"]: figure for figure in drawn}
    assert [shown[name]["value"] for name in ("Healthy", "Confirmed", "Open incidents")] == ["3", "1", "1"]
    assert [shown[name]["tone"] for name in ("Confirmed", "Suspect", "Unknown")] == ["bad", "calm", "unknown"], (
        "a silent node"
    )
    assert shown["Jobs hurt"]["value"] == "0"
    assert shown["Confirmed"]["href"] == "incidents?severity=critical"
    texts = " ".join(text.value for text in app.text)
    assert "Drover only watches, nothing is drained" in texts
    assert "the store is slow" in texts


def test_what_nobody_has_judged_yet_is_not_zero(shared: FleetClient, chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, Any]] = []

    def component(name: str) -> Any:
        return lambda **given: drawn.append(given["data"]) or SimpleNamespace(open=None)

    monkeypatch.setattr("drover_dashboard.widgets.components.component", component)
    monkeypatch.setattr("drover_dashboard.widgets.table.component", component)
    chosen.judged = False
    opened("fleet")
    figures = {f["label"]: f["value"] for data in drawn for f in data.get("figures", [])}
    assert (figures["Open incidents"], figures["Jobs hurt"]) == ("not known", "not known")
    opened("incidents")
    lists = [data["empty"] for data in drawn if "columns" in data and data["columns"][0]["label"] == "Severity"]
    assert len(lists) == 2
    assert all("nothing is judged yet" in empty for empty in lists)

    drawn.clear()
    detail = pb.JobDetail(row=pb.JobRow(job="812", gpus=8, nodes=1))
    monkeypatch.setattr(shared, "job", lambda name, **_: Answer(detail, 1))
    texts = [text.value for text in opened("job", job="812").text]
    lists = [data["empty"] for data in drawn if "columns" in data and data["columns"][0]["label"] == "Severity"]
    assert ["nothing is judged yet" in empty for empty in lists] == [True]
    assert not any("No open incident" in text for text in texts)


def test_a_standby_is_not_about_to_judge(shared: FleetClient, chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[str] = []
    monkeypatch.setattr(
        "drover_dashboard.pages.incidents.incident_rows.show", lambda *_, empty, **__: lists.append(empty)
    )
    chosen.judged, chosen.role = False, "standby"
    opened("incidents")
    assert lists == ["What is wrong is not known: another collector judges."]


@pytest.mark.parametrize("quiet_ms", [5000, 240_000])
def test_silence_of_all_agents_is_said(shared: FleetClient, chosen, quiet_ms: int) -> None:
    chosen.quiet_ms = quiet_ms
    said = any(text.value.startswith("No telemetry for 4 min") for text in opened("fleet").text)
    assert said == (quiet_ms > 60_000)


def test_an_incident_says_what_to_do_and_what_the_policy_would_do(shared: FleetClient) -> None:
    texts = [text.value for text in opened("incidents", id="i1").text]
    assert any(text.startswith("n2 GPU 1 is lost") for text in texts)
    assert any(text.startswith("What to do: drain the node\nDrain n2.") for text in texts)
    assert any("would act (observe mode: nothing is done)" in text for text in texts)


@pytest.mark.parametrize(
    ("page", "query", "said"),
    [("incidents", {"id": "zz"}, "No incident 'zz'"), ("node", {"node": "n9"}, "No node 'n9'")],
)
def test_a_link_to_something_gone_says_so(shared: FleetClient, page: str, query: dict[str, str], said: str) -> None:
    assert any(said in text.value for text in opened(page, **query).text)
