"""Why a form that was sent did nothing. The reason stands until the form is sent again, also when the page refreshes
itself: without this the next refresh, at most 10 s later, would take it away while somebody reads it."""

from __future__ import annotations

import time

import streamlit as st

from drover_dashboard import client
from drover_dashboard.client import Trouble
from drover_dashboard.widgets import view

STANDS_S = 120.0  # then it is old: what was in the way may have gone


def keep(key: str, sent: bool) -> None:
    """Draw why the form `key` was refused last. `sent`: it has just been sent again, which is judged again."""
    name = _name(key)
    text, until_s = st.session_state.get(name, ("", 0.0))
    with view.place():
        if sent or time.monotonic() >= until_s:
            st.session_state.pop(name, None)
        else:
            _draw(key, text)


def refuse(key: str, text: str) -> None:
    """Say why the form `key` that was just sent did nothing."""
    st.session_state[_name(key)] = text, time.monotonic() + STANDS_S
    _draw(key, text)


def fail(key: str, trouble: Trouble | None) -> None:
    """The same, where the collector did not do what was asked."""
    if trouble is not None:
        refuse(key, view.trouble_text(trouble, 0, view.viewer()))


def _draw(key: str, text: str) -> None:
    view.notice(f"refused_{key}", "trouble", text)


def _name(key: str) -> str:
    return client.scoped(f"refused_{key}")
