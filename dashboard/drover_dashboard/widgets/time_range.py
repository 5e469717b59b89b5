"""The one time picker of all pages with charts: a span up to now, or a time of its own that a person typed or drew.

It is in the address as `span` (`6 h`) or `open` (`FROM-TO`, seconds since the epoch), so a link shows the same time. A
time that a person chose goes along to the next page that has charts.
"""

from __future__ import annotations

import streamlit as st

from drover_dashboard.widgets import address, charts, time_words, view

SPAN = charts.SPAN
PRESETS = ("15 min", "1 h", "6 h", "24 h", "7 days", "30 days")
USUAL = "1 h"
CARRIED = "time_range"  # of the session: (span, open) that a person chose
LIVE_MS = 120_000  # charts that end longer ago say so: the rest of the page shows what is now
HELP = f"A span up to now, or a time in your zone. Type it: {time_words.EXAMPLES}."


def pick(*, key: str, usual: str = USUAL, own: str = "") -> int | None:
    """Draw the picker. Return the span in ms that ends now; None: the page's `own` time. `charts.window` has a time
    that was typed or drawn.

    Args:
        key: unique among all pages.
        usual: the span that the address does not name.
        own: what the page calls a time that belongs to what it shows, such as an incident's; it is the usual then, and
            no other page's time replaces it.
    """
    if own:
        usual = own
    elif key not in st.session_state and not address.is_back():
        _bring()
    asked, who = _asked(), view.viewer()
    drawn = charts.drawn_open()
    span = asked[0] if asked[0] and time_words.span_of(asked[0]) else usual
    shown = time_words.words(*drawn, who.now_ms, who.where) if drawn else span
    before, taken = (address.named(key) or (asked, None)) if key in st.session_state else (asked, None)
    led = key not in st.session_state or before != asked or address.is_back()
    if led or (taken is not None and st.session_state[key] == taken):  # what was typed is shown in the picker's words
        st.session_state[key] = shown
    address.obeyed(key, shown, (asked, None))
    options = list(dict.fromkeys([*([shown] if drawn else []), *([own] if own else []), *PRESETS, span]))
    chosen = st.selectbox(
        "Time of the charts", options, key=key, accept_new_options=True, filter_mode="prefix", width=230, help=HELP,
        label_visibility="collapsed", placeholder="type a time",
    )  # fmt: skip
    with view.place():
        if drawn and not own and who.now_ms - drawn[1] > LIVE_MS:
            view.notice("not_now", "todo", f"Not now: these charts end {who.ago(drawn[1])} ago.")
    if chosen and chosen != shown:
        _take(key, str(chosen), usual, own)
    elif asked != (None, None) or before != asked:  # a zoom that was ended is not brought to the next page either
        st.session_state[CARRIED] = asked
    return None if own and span == own else time_words.span_of(span)


def follow(key: str) -> None:
    """In a part that refreshes itself: after a zoom all of the page runs again, so that the picker says so."""
    if (address.named(key) or (None, None))[0] != _asked():
        st.rerun()


def named() -> str:
    """Return the address' words for the time: part of the name of a chart's question."""
    return " ".join(word for word in _asked() if word)


def _take(key: str, text: str, usual: str, own: str) -> None:
    """Write what was chosen or typed to the address and run the page for it; say so if it is no time."""
    who = view.viewer()
    found = time_words.range_of(text, who.now_ms, who.where)
    span_ms = time_words.span_of(text)
    if text == own or span_ms is not None:
        named = own if text == own else time_words.label(span_ms or 0)
        bare = None if named == usual else named
        address.write({key: ((bare, None), text)}, **{SPAN: bare, charts.OPEN: None})
    elif found is not None:
        drawn = f"{found[0] // 1000}-{found[1] // 1000}"
        address.write({key: ((_asked()[0], drawn), text)}, **{charts.OPEN: drawn})
    else:
        view.notice("time", "trouble", f"{text!r} is no time of the past. Examples: {time_words.EXAMPLES}.")
        return
    if not own:
        st.session_state[CARRIED] = _asked()
    st.rerun()


def _bring() -> None:
    """The time of the page before, where the address names none."""
    span, drawn = st.session_state.get(CARRIED, (None, None))
    if _asked() == (None, None) and (span or drawn):
        address.write(**{SPAN: span, charts.OPEN: drawn})


def _asked() -> tuple[str | None, str | None]:
    return st.query_params.get(SPAN), st.query_params.get(charts.OPEN)
