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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from drover_dashboard import client

WRITTEN = "address_written"  # in the session
LATE_S, LATE_MOST = 3.0, 8


@dataclass(slots=True)
class _Written:
    """What the page of a session wrote itself.

    A choice while the page still runs ends that run, at any use of st.session_state or of st.query_params. So what
    belongs together is changed here, in one object, and the browser is sent the address last. A run that ended
    between two of these steps took the choice of one click for an address that somebody else had asked for, and the
    next click was lost.

    Attributes:
        now: its address, whether the browser has received it or not.
        before: its addresses of before, and until when (time.monotonic) one of them is no link.
        named: selector -> what `now` says of it.
        chosen: selector -> its choice, as last obeyed.
    """

    page: str
    now: dict[str, str]
    before: list[tuple[dict[str, str], float]] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Any] = field(default_factory=dict)

    def move(self, before: dict[str, str], after: dict[str, str]) -> None:
        self.before = [*self.before, (before, time.monotonic() + LATE_S)][-LATE_MOST:]
        self.now = after


def settle(page: str) -> None:
    """Before a page runs: the address that it wrote itself holds until the browser has received it.

    Who clicks on two selectors within a moment sends the second choice with the address of before the first. A new
    choice is sent by no link, so its address may be late by any time: a page under load runs for seconds.
    """
    asked, written = st.query_params.to_dict(), _written()
    if written.page != page:
        st.session_state[WRITTEN] = _Written(page, asked, named=written.named)
        return
    if asked != written.now and not _back() and _is_late(written, asked):
        st.query_params.from_dict(written.now)
        return
    written.now = asked


def _is_late(written: _Written, asked: dict[str, str]) -> bool:
    """Return whether the browser had not received the newest address when it sent this one."""
    known = [until for address, until in written.before if address == asked]
    drawn = {key: choice for key, choice in written.chosen.items() if key in st.session_state}
    chose = any(st.session_state[key] != choice for key, choice in drawn.items())
    return bool(known) and (chose or max(known) > time.monotonic())


def _written() -> _Written:
    found = st.session_state.get(WRITTEN)
    if not isinstance(found, _Written):  # a page without a frame, or that of an older console
        found = st.session_state[WRITTEN] = _Written("", {})
    return found


def write(named: Mapping[str, Any] | None = None, /, **changes: str | None) -> None:
    """Change the address at once, so that it is one step back; None takes a name away.

    `named`: selector -> what the address says of it from now on.
    """
    before, written = st.query_params.to_dict(), _written()
    after = {name: value for name, value in (before | changes).items() if value is not None}
    # From here on nothing can end the run before the last line.
    written.named.update(named or {})
    if after == before:
        return
    written.move(before, after)
    st.query_params.from_dict(after)


def named(key: str) -> Any:
    """Return what the address says of a selector that has its own words for it; None: the selector is new here."""
    return _written().named.get(key)


def obeyed(key: str, choice: Any, says: Any) -> None:
    """Note a selector's choice that the page shows, and what the address `says` of it."""
    written = _written()
    written.chosen[key], written.named[key] = choice, says


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
    asked, written = st.query_params.get(name), _written()
    if key not in st.session_state or written.named.get(key) != asked or _back():
        st.session_state[key] = asked if asked in options else usual
    chosen: str | None = widget()
    says = None if chosen == (usual if bare is _USUAL else bare) else chosen
    if says != asked:
        write({key: says}, **dict.fromkeys(drops), **{name: says})
    written.named[key], written.chosen[key] = says, chosen
    return chosen


def _back() -> bool:
    """Whether this run is one of the browser's Back or forward."""
    run = get_script_run_ctx()
    return run is not None and run.is_history_navigation


def is_back() -> bool:
    """Return whether the browser's Back or forward asked for this run: the address is right and needs no change."""
    return _back()
