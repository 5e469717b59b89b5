"""The ledger on the Capacity page: what GPU-hours were used for, by team and job."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import job_parts, ledger_parts
from drover_proto import fleet_pb2 as pb

PAGES = Path(drover_dashboard.__file__).parent / "pages"
H = ledger_parts.HOUR_MS


def row(name: str, useful: int, lost: int, unknown: int = 0, **more: Any) -> pb.LedgerRow:
    shares = pb.LedgerShares(useful_ms=useful * H, lost_ms=lost * H, unknown_ms=unknown * H)
    return pb.LedgerRow(name=name, shares=shares, held_ms=(useful + lost + unknown) * H, gpus=8, **more)


def ledger() -> pb.Ledger:
    return pb.Ledger(
        from_ms=1_799_400_000_000, to_ms=1_800_000_000_000, total=row("", 70, 10, 20, cost=250.0, lost_cost=25.0),
        teams=[row("vision", 60, 10), row("", 10, 0, 20)], pools=[row("a100", 70, 10, 20)],
        jobs=[row("=812", 60, 10, interruptions=2)], jobs_total=3, other_jobs=row("", 10, 0, 20), currency="EUR",
        availability=[pb.Availability(available=0.9985)], objective=0.999, doubts=["Steps are not known."],
    )  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def component(_name: str) -> Any:
        def draw(*, key: str, data: dict[str, Any], **_more: Any) -> SimpleNamespace:
            found[key] = data
            return SimpleNamespace(open=None)

        return draw

    for module in ("bars", "table"):
        monkeypatch.setattr(f"drover_dashboard.widgets.{module}.component", component)
    return found


def opened(**query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / "capacity.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def test_the_ledger_has_each_team_and_job_and_is_asked_for_when_it_is_looked_at(
    shared: FleetClient, chosen: Any, drawn: dict[str, dict[str, Any]]
) -> None:
    chosen.ledger = ledger()
    opened()
    assert "ledger" not in chosen.calls, "a large fleet's takes the collector a minute"
    app = opened(show="ledger")
    assert {metric.label: str(metric.value) for metric in app.metric} == {
        "Held by jobs": "100.0", "Goodput": "70.0 to 90.0 %", "Faults took": "10.0", "In service": "99.85 %",
        "Energy": "not known",
    }  # fmt: skip
    assert "objective 99.9 % missed" in {metric.delta for metric in app.metric}
    labels = [bar["label"] for bar in drawn["ledger_bars"]["rows"]]
    assert labels == ["All jobs", "vision", "unknown"]
    jobs = [[cell["text"] for cell in line["cells"]] for line in drawn["ledger_jobs"]["rows"]]
    assert jobs == [
        ["job =812", "70.0", "85.7 %", "10.0", "2", "0.0", "0.0"],
        ["2 more jobs", "30.0", "33.3 to 100.0 %", "0.0", "0", "0.0", "20.0"],
    ]  # fmt: skip
    assert "Steps are not known." in {text.value for text in app.text}


def test_of_many_teams_none_is_left_out_of_the_sum(
    shared: FleetClient, chosen: Any, drawn: dict[str, dict[str, Any]]
) -> None:
    found = ledger()
    del found.teams[:]
    found.teams.extend(row(f"team {number}", 3, 1, interruptions=1) for number in range(25))
    found.total.CopyFrom(row("", 75, 25, interruptions=25))
    chosen.ledger = found
    opened(show="ledger")
    bars = drawn["ledger_bars"]["rows"]
    assert bars[-1]["label"] == "13 more teams"
    assert sum(sum(each["values"]) for each in bars[1:]) == 100
    last = [cell["text"] for cell in drawn["ledger_groups"]["rows"][-1]["cells"]]
    assert last == ["13 more teams", "52.0", "75.0 %", "13.0", "13", "0.0", "0.0"]
    assert drawn["ledger_groups"]["columns"][0]["wrap"], "a name of 200 letters is no table of 200 letters"


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED])
def test_a_ledger_that_does_not_come_can_be_asked_for_again(
    shared: FleetClient, chosen: Any, drawn: dict[str, dict[str, Any]], code: grpc.StatusCode
) -> None:
    chosen.ledger, chosen.failure = ledger(), (code, "another report is being made")
    app = opened(show="ledger")
    assert any("Collector" in text.value for text in app.text)
    chosen.failure = None
    next(button for button in app.button if button.label == "Ask again").click().run()
    assert app.metric
    assert "Ask again" not in {button.label for button in app.button}


def test_the_longest_time_is_never_longer_than_a_ledger_may_be(
    shared: FleetClient, chosen: Any, drawn: dict[str, dict[str, Any]]
) -> None:
    """The collector's clock may be seconds ahead, and the question takes its way."""
    opened(show="ledger", span="90 days")
    (asked,) = chosen.ledgers
    assert asked.to_ms - asked.from_ms == 35 * 86_400_000


def test_no_job_is_no_goodput_of_zero(shared: FleetClient, chosen: Any, drawn: dict[str, dict[str, Any]]) -> None:
    chosen.ledger = pb.Ledger(total=pb.LedgerRow())
    app = opened(show="ledger")
    assert any("No job is known to have held a GPU" in text.value for text in app.text)
    assert not app.metric


def test_the_csv_adds_up_and_runs_no_formula() -> None:
    rows = list(csv.DictReader(io.StringIO(ledger_parts.csv_rows(ledger()))))
    jobs = [line for line in rows if line["table"] in ("job", "other jobs")]
    total = next(line for line in rows if line["table"] == "total")
    assert sum(float(line["held_h"]) for line in jobs) == float(total["held_h"]) == 100
    assert jobs[0]["name"] == "'=812"
    assert total["repeated_h"] == "", "without checkpoints it is not known"
    assert (total["cost_of_faults"], total["currency"]) == ("25.0", "EUR")


def test_a_sentence_about_the_ports_stands_once() -> None:
    ports, network = "No agent reports ports.", "No step is known."
    detail = pb.JobDetail(absent=[network, ports], ports_absent=ports, metrics=[pb.JobMetric(metric="power_w")])
    assert job_parts.unsaid(detail) == [network]
    detail.ports.add(node="n1")
    assert job_parts.unsaid(detail) == [network, ports]
