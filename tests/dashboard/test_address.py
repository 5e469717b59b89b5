"""Selectors keep their choice in the page's address, which leads them where something else changed it."""

from __future__ import annotations

import pytest
from streamlit.runtime.scriptrunner_utils.exceptions import StopException
from streamlit.runtime.state import QueryParamsProxy
from streamlit.testing.v1 import AppTest

from drover_dashboard.widgets import address


def script() -> None:
    import streamlit as st

    from drover_dashboard.widgets import address

    address.settle("page")
    address.select("by", "By", ["a", "b", "c", "d"], "a", key="test_by")
    address.select("span", "Span", ["1 h", "6 h", "24 h"], "1 h", key="test_span")
    if st.button("row"):
        address.write(by="d", span=None)
        st.rerun()


def opened(**asked: str) -> AppTest:
    app = AppTest.from_function(script, default_timeout=120)
    return at(app, **asked)


def at(app: AppTest, **asked: str) -> AppTest:
    """Run with what the browser says of its address."""
    app.query_params.clear()
    for name, value in asked.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def shown(app: AppTest) -> tuple[str, str]:
    return app.selectbox(key="test_by").value, app.selectbox(key="test_span").value


def asked(app: AppTest) -> dict[str, str]:
    """Its address."""
    return {name: one if isinstance(one, str) else one[-1] for name, one in app.query_params.items()}


def test_three_choices_in_a_row() -> None:
    app = opened()
    for option in ("b", "c", "d"):
        app.selectbox(key="test_by").select(option).run()
        assert shown(app) == (option, "1 h")
        assert asked(app) == {"by": option}
    app.selectbox(key="test_by").select("a").run()
    assert asked(app) == {}, "bare while it is the usual"


def test_a_link_a_row_and_back_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(by="c", span="24 h")
    assert shown(app) == ("c", "24 h")
    app.button[0].click().run()
    assert (shown(app), asked(app)) == (("d", "1 h"), {"by": "d"})
    monkeypatch.setattr(address, "_back", lambda: True)
    assert shown(at(app, by="c", span="24 h")) == ("c", "24 h"), "the one of a moment ago"


def test_what_is_no_option_is_the_usual() -> None:
    app = opened(by="<script>", span="6 h")
    assert (shown(app), asked(app)) == (("a", "6 h"), {"span": "6 h"})


def test_a_second_choice_that_the_browser_sent_with_the_address_of_before_the_first() -> None:
    app = opened()
    app.selectbox(key="test_by").select("b").run()
    app.selectbox(key="test_span").select("6 h")
    at(app)
    assert (shown(app), asked(app)) == (("b", "6 h"), {"by": "b", "span": "6 h"})


def test_an_address_of_long_ago_is_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "LATE_S", 0.0)
    app = opened()
    app.selectbox(key="test_by").select("b").run()
    assert (shown(at(app)), asked(app)) == (("a", "1 h"), {})


def test_a_choice_is_obeyed_however_late_the_page_runs_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of the choice before runs for seconds, and no link comes with a new choice."""
    monkeypatch.setattr(address, "LATE_S", 0.0)
    app = opened()
    app.selectbox(key="test_by").select("b").run()
    app.selectbox(key="test_by").select("c")
    at(app)
    assert (shown(app), asked(app)) == (("c", "1 h"), {"by": "c"})


@pytest.mark.parametrize("sent", [True, False])
def test_a_click_that_ends_the_run_of_the_one_before_at_the_address_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """A run ends where it is when the next choice comes: before the browser is sent the address, or after."""
    app, send = opened(), QueryParamsProxy.from_dict

    def ends(params: QueryParamsProxy, values: dict[str, str]) -> None:
        if sent:
            send(params, values)
        raise StopException

    with monkeypatch.context() as patched:
        patched.setattr(QueryParamsProxy, "from_dict", ends)
        app.selectbox(key="test_by").select("b").run()
    app.selectbox(key="test_by").select("c")
    at(app, **({"by": "b"} if sent else {}))
    assert (shown(app), asked(app)) == (("c", "1 h"), {"by": "c"})


def picker() -> None:
    from drover_dashboard.widgets import address, time_range

    address.settle("page")
    time_range.pick(key="test_time")


def test_a_quick_second_time_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that was to show the first one ended at its begin, and the browser has the address of before."""
    app = AppTest.from_function(picker, default_timeout=120)
    at(app)

    def ends() -> None:
        raise StopException

    with monkeypatch.context() as patched:
        patched.setattr("drover_dashboard.widgets.time_range.st.rerun", ends)
        app.selectbox(key="test_time").select("6 h").run()
    app.selectbox(key="test_time").select("24 h")
    at(app)
    assert (app.selectbox(key="test_time").value, asked(app)) == ("24 h", {"span": "24 h"})
