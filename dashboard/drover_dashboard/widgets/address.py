"""A page's address says what it shows: selectors that keep their choice in it, and the title of the tab.

Each selector has a key, so that Streamlit knows it again in the next run, and its state is in the session: without a
key a widget is known by its default, and one whose default was read from the address that the same run had just
written was another widget in the next run, which dropped what the browser sent. The address is written from the state;
it leads the state where something else changed it: a link, a row, Back.

Streamlit's own `bind="query-params"` does not fit: it writes the labels of options where our links have names
(`color=power_w`), a widget's key would be the name for all pages, and it adds no entry to the browser's history.
A step of a person is one entry there: assets/steps.js.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from drover_dashboard import client

WRITTEN = "address_written"  # in the session: the page, its address of now, and those that it had just before
LATE_S, LATE_MOST = 3.0, 8


def settle(page: str) -> None:
    """Before a page runs: the address that it wrote itself holds until the browser has received it.

    Who clicks on two selectors within a moment sends the second choice with the address of before the first.
    """
    asked = st.query_params.to_dict()
    of, now, late = st.session_state.get(WRITTEN, (page, asked, ()))
    late = [(address, until) for address, until in late if until > time.monotonic()] if of == page else []
    if of == page and asked != now and not _back() and any(address == asked for address, _ in late):
        st.query_params.from_dict(now)
        asked = now
    st.session_state[WRITTEN] = (page, asked, late)


def write(**changes: str | None) -> None:
    """Change the address at once, so that it is one step back; None takes a name away."""
    before = st.query_params.to_dict()
    after = {name: value for name, value in (before | changes).items() if value is not None}
    if after == before:
        return
    st.query_params.from_dict(after)
    page, _, late = st.session_state.get(WRITTEN, ("", before, ()))
    late = [*late, (before, time.monotonic() + LATE_S)][-LATE_MOST:]
    st.session_state[WRITTEN] = (page, after, late)


def title(what: str) -> None:
    """Of the tab and of its entry in the browser's history."""
    st.set_page_config(page_title=f"{what} · Drover")


def select(
    name: str, label: str, options: Sequence[str], usual: str, *, key: str, drops: Sequence[str] = (), **more: Any
) -> str:
    """A list to choose from, in the address as `name`, which stays bare while it is the usual. `key`: unique among all
    pages. `drops`: names that leave the address with another choice."""

    more = {"label_visibility": "collapsed", **more}

    def widget() -> Any:
        return st.selectbox(label, options, key=key, **more)

    return _kept(name, key, options, usual, widget, drops=drops) or usual


def segments(
    name: str, label: str, options: Sequence[str], usual: str, *, key: str, drops: Sequence[str] = (), **more: Any
) -> str:
    """The same as a row of buttons. `drops`: names that leave the address with another choice."""

    def widget() -> Any:
        return st.segmented_control(label, options, key=key, required=True, **more)

    return _kept(name, key, options, usual, widget, drops=drops) or usual


def text(name: str, label: str, *, key: str, drops: Sequence[str] = (), **more: Any) -> str:
    """A line of text in the address as `name`, which stays bare while it is empty."""

    def widget() -> Any:
        return st.text_input(label, key=key, **more)

    asked = st.query_params.get(name)
    return (_kept(name, key, [asked] if asked else [], "", widget, drops=drops) or "").strip()


def node(placeholder: str, *, key: str, usual: str | None = None, width: int = 260, drops: Sequence[str] = ()) -> str:
    """A node of the fleet, "" for none. The address always has it, also where it is the `usual` ("": the first), which
    may be another one the next time."""
    layout = client.fleet().layout()
    names = [one.name for rack in layout.value.racks for one in rack.nodes] if layout.value else []
    asked = st.query_params.get("node", "")
    if asked and asked not in names:
        names.insert(0, asked)  # the answer says whether it exists

    def widget() -> Any:
        return st.selectbox(
            "Node", names, index=None if usual is None else 0, key=key, placeholder=placeholder,
            label_visibility="collapsed", width=width,
        )  # fmt: skip

    first = usual if usual in names or usual is None else next(iter(names), None)
    return _kept("node", key, names, first, widget, drops=drops, bare=None) or ""


_USUAL: Any = object()


def _kept(
    name: str, key: str, options: Sequence[str], usual: str | None, widget: Callable[[], Any],
    *, drops: Sequence[str] = (), bare: str | None = _USUAL,
) -> str | None:  # fmt: skip
    """The choice. `bare`: the one that the address does not name."""
    asked, known = st.query_params.get(name), f"{key}_in_address"
    if key not in st.session_state or st.session_state.get(known) != asked or _back():
        st.session_state[key] = asked if asked in options else usual
    chosen: str | None = widget()
    named = None if chosen == (usual if bare is _USUAL else bare) else chosen
    st.session_state[known] = named
    if named != asked:
        write(**dict.fromkeys(drops), **{name: named})
    return chosen


def _back() -> bool:
    """Whether this run is one of the browser's Back or forward."""
    run = get_script_run_ctx()
    return run is not None and run.is_history_navigation


def is_back() -> bool:
    """Return whether the browser's Back or forward asked for this run: the address is right and needs no change."""
    return _back()
