"""The policy's page, and a person's answer on it and on the incident's page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_core.model.events import Decision, RecommendedAction
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import (
    approval_form as answering,
)
from drover_dashboard.pages import (
    incident_detail,
)
from drover_dashboard.pages import (
    policy_backtest as backtest_parts,
)

from .conftest import HOSTILE, Chosen

PAGES = Path(drover_dashboard.__file__).parent / "pages"
WAITS = Decision(
    "d1", "i1", 1_800_000_000_000, "n2", RecommendedAction.DRAIN, "approve", "pending_approval", "fatal", "asks to"
)


def opened(page: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def test_it_shows_the_breaker_and_a_bad_file_and_hostile_text_stays_text(shared: FleetClient) -> None:
    app = opened("policy")
    texts = " ".join(text.value for text in app.text)
    assert "The breaker is open" in texts
    assert "ours.toml:3: guard.x: unknown key" in texts
    assert not any("script" in element.value for element in (*app.markdown, *app.caption, *app.title, *app.header))


@pytest.mark.parametrize(("ceiling", "lowered"), [("observe", True), ("approve", False), ("enforce", False)])
def test_a_mode_beyond_the_settings_is_shown_with_its_limit(
    shared: FleetClient, chosen, ceiling: str, lowered: bool
) -> None:
    chosen.ceiling = ceiling
    texts = " ".join(text.value for text in opened("policy").text)
    assert ("no more than observe is done" in texts) is lowered


@pytest.mark.parametrize(("page", "query"), [("policy", {}), ("incidents", {"id": "i1"})])
def test_who_may_not_answer_is_not_asked(shared: FleetClient, chosen, page: str, query: dict[str, str]) -> None:
    chosen.decision = WAITS
    assert [button.label for button in opened(page, **query).button if button.label in ("Approve", "Reject")] == []


@pytest.mark.parametrize(("page", "query"), [("policy", {}), ("incidents", {"id": "i1"})])
@pytest.mark.parametrize("label", ["Approve", "Reject"])
def test_an_answer_has_a_name_and_a_reason(
    shared: FleetClient, chosen, page: str, query: dict[str, str], label: str
) -> None:
    chosen.decision, chosen.may_answer = WAITS, True
    app = opened(page, **query)
    next(button for button in app.button if button.label == label).click().run()
    assert any("Give your name and the reason" in text.value for text in app.text)
    assert chosen.answers == []
    app.text_input(key="who_d1").input("Bo")
    app.text_input(key="why_d1").input("seen the log")
    next(button for button in app.button if button.label == label).click().run()
    assert not app.exception, app.exception
    assert chosen.answers == [(label.lower(), "d1", "Bo", "seen the log")]


def test_past_incidents_are_decided_again_when_somebody_asks_and_not_before(
    shared: FleetClient, chosen: Chosen
) -> None:
    app = opened("policy")
    assert "backtest" not in chosen.calls
    next(button for button in app.button if button.label.startswith("Decide the last 7 days again")).click().run()
    assert not app.exception, app.exception
    (said,) = [text.value for text in app.text if text.value.startswith("Decided again")]
    assert "the newest 1,000 of 1,203 incidents" in said
    app.run()
    assert chosen.calls.count("backtest") == 1, "what was found stays, and is not decided every 5 s"


def test_a_row_says_what_each_policy_would_have_done(shared: FleetClient, chosen: Chosen) -> None:
    answer = shared.backtest().value
    assert answer is not None
    assert [[(cell.text, cell.sub) for cell in backtest_parts._row(row).cells] for row in answer.policies] == [
        [("ours", "in force"), ("no node", ""), ("0", ""), ("0", ""), ("0.0", ""), ("0", ""), ("advise 3", "")],
        [
            (HOSTILE, "preset"), ("50 nodes", "n1, n2, n3, n4 and 46 more"), ("60", ""), ("7", ""), ("1,234.5", ""),
            ("4, 1 mass event", ""), ("drain 1,200", ""),
        ],
    ]  # fmt: skip


def test_a_decision_that_a_newer_one_replaced_is_no_longer_asked() -> None:
    advise = replace(WAITS, id="d0", ts_ms=WAITS.ts_ms - 60_000, wanted=RecommendedAction.ADVISE)
    held = replace(WAITS, id="d2", ts_ms=WAITS.ts_ms + 1, outcome="held")
    other = replace(WAITS, id="d3", node="n1")
    assert incident_detail.waiting([WAITS, advise]) == [WAITS]
    assert incident_detail.waiting([advise, WAITS, held]) == []
    assert incident_detail.waiting([held, other, advise]) == [other]


def test_what_is_wanted_most_is_asked_first() -> None:
    advise = replace(WAITS, id="d0", ts_ms=WAITS.ts_ms - 60_000, wanted=RecommendedAction.ADVISE)
    later = replace(WAITS, id="d2", ts_ms=WAITS.ts_ms + 1)
    assert answering.strongest_first([later, advise, WAITS]) == [WAITS, later, advise]
