"""A node that reports and is not in the fleet file is adopted by an operator, with a few clicks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_dashboard.client import FleetClient
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person

PAGES = Path(drover_dashboard.__file__).parent / "pages"


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Person], None]:
    return lambda person: monkeypatch.setattr(signin, "person", lambda: person)


def opened() -> AppTest:
    app = AppTest.from_file(str(PAGES / "fleet.py"), default_timeout=120)
    app.run()
    assert not app.exception, app.exception
    return app


def labels(app: AppTest) -> list[str]:
    return [button.label for button in app.button]


def test_an_operator_adopts_a_node_with_its_rack_and_a_reason(
    shared: FleetClient, chosen, someone: Callable[[Person], None]
) -> None:
    someone(Person("", True))
    chosen.strangers = ["n8", "n9"]
    app = opened()
    app.selectbox(key="adopt_node").select("n9")
    app.text_input(key="adopt_Rack").input("r1")
    app.text_input(key="who_adopt").input("alex")
    app.text_input(key="why_adopt").input("new node")
    next(button for button in app.button if button.label == "Adopt it").click().run()
    assert not app.exception, app.exception
    assert chosen.acts == [("adopt", "n9 r1", "new node", "alex", False)]
    assert "n9 is adopted with 8 GPUs." in " ".join(text.value for text in app.text)


@pytest.mark.parametrize(("strangers", "may"), [([], True), (["n9"], False)])
def test_nobody_else_and_nothing_to_adopt_no_form(
    shared: FleetClient, chosen, someone: Callable[[Person], None], strangers: list[str], may: bool
) -> None:
    someone(Person("vera", may))
    chosen.strangers = strangers
    assert "Adopt it" not in labels(opened())
