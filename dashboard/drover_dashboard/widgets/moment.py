"""A page as of a moment: chosen here, in the address as `at` (`2026-11-28T03:12:00Z`), said loudly.

The client asks the collector for that moment (`client.share_moment`) and does nothing for a person meanwhile; the
viewer's clock stands there too (`view.viewer`). A moment goes along to the other pages that can show it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from drover_core.times import from_iso
from drover_dashboard.widgets import address, time_words, view

AT, PLAY = "at", "play"
NOW = "now"
PRESETS = ("10 min", "1 h", "6 h", "24 h", "7 days")  # ago
CARRIED = "moment"  # of the session
OF_NOW = "moment_of_now"  # of the session: its page shows now, whatever its address says
PATHS = {"" if page == view.FLEET else page.stem for page in view.OF_THE_PAST}
HELP = (
    "Now, or the page as of a moment in your zone: what was open, what ran, what the values were. Type it:"
    " 03:12, yesterday 14:00, 26 Nov 03:12, 45 min."
)
LEAST_MS = 1000  # ago
MOST_DAYS = 400  # ago: the collector answers of no older moment (drover_collector/api/moment.py)
MOST_MS = MOST_DAYS * 86_400_000 - 3_600_000  # an hour less: an open page asks for its moment again and again


def at_ms() -> int:
    """Return the moment that the page shows, ms; 0: now. Of a script run; elsewhere it is now."""
    if get_script_run_ctx(suppress_warning=True) is None or st.session_state.get(OF_NOW):
        return 0
    return read(st.query_params.get(AT, ""), time.time_ns() // 1_000_000)


def read(text: str, now_ms: int) -> int:
    """Return the ms of an address' moment; 0 for none, for what is no time, the future and what is too old. Pure."""
    if not text:
        return 0
    try:
        found = from_iso(text)
    except (ValueError, OverflowError):
        return 0
    return found if max(1, now_ms - MOST_MS) <= found <= now_ms - LEAST_MS else 0


def written(ms: int) -> str:
    """Return a moment as the address has it, to the second."""
    return datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def settle(page: str) -> None:
    """Before a page runs: bring the moment of the page before, say that it is the past, and lead back to now."""
    st.session_state[OF_NOW] = page not in PATHS  # else its ages would be counted from a moment that it does not show
    if page not in PATHS:
        if st.session_state.get(CARRIED) or AT in st.query_params:
            view.notice("moment_not_here", "remark", "This page shows now; it keeps nothing of the past to look at.")
        return
    came = st.session_state.get(f"{CARRIED}_page") != page and not address.is_back()
    if came and AT not in st.query_params and st.session_state.get(CARRIED):
        address.write(**{AT: st.session_state[CARRIED]})
    st.session_state[f"{CARRIED}_page"] = page
    asked = at_ms()
    st.session_state[CARRIED] = st.query_params.get(AT, "") if asked else ""
    with view.place():
        if asked:
            _banner(asked)
        elif AT in st.query_params:
            text = f"{st.query_params[AT][:60]!r} is no moment of the last {MOST_DAYS} days, so this is now."
            example = written(time.time_ns() // 1_000_000 - 3_600_000)
            view.notice("moment_wrong", "trouble", f"{text} Example: at={example}.")


def _banner(asked: int) -> None:
    real = view.Viewer(view.viewer().where, time.time_ns() // 1_000_000)
    day = day_of(asked, real)
    with st.container(key="past_bar", horizontal=True, vertical_alignment="center"):
        st.markdown(f"**THE PAST: as of {day} {real.zone_name()}**, {real.ago(asked)} ago. Nothing can be done here.")
        if st.button("Back to now", icon=":material/update:", key="past_now"):
            leave()
            st.rerun()


def day_of(ms: int, who: view.Viewer) -> str:
    """Return a moment for the banner, with its year unless that is this one. Pure."""
    then, now = (datetime.fromtimestamp(each / 1000, who.where) for each in (ms, who.now_ms))
    return then.strftime("%a %-d %b %H:%M:%S" if then.year == now.year else "%a %-d %b %Y %H:%M:%S")


def leave() -> None:
    """Show now, here and on the next pages."""
    st.session_state[CARRIED] = ""
    address.write(**{AT: None, PLAY: None})


def go(ms: int) -> None:
    """Show this moment; the caller runs the page again."""
    address.write(**{AT: written(ms)})


def pick(*, key: str) -> None:
    """Draw the choice of the moment."""
    asked, who = at_ms(), view.viewer()
    real = view.Viewer(who.where, time.time_ns() // 1_000_000)
    shown = f"the past: {real.clock(asked)}" if asked else NOW
    known = f"{key}_in_address"
    before = st.query_params.get(AT)
    if key not in st.session_state or st.session_state.get(known) != before or address.is_back():
        st.session_state[key] = shown
    st.session_state[known] = before
    options = [*([shown] if asked else []), NOW, *(f"{preset} ago" for preset in PRESETS)]
    chosen = st.selectbox(
        "Moment", options, key=key, accept_new_options=True, filter_mode="prefix", width=250 if asked else 140,
        help=HELP, label_visibility="collapsed", placeholder="type a time",
    )  # fmt: skip
    if not chosen or chosen == shown:
        return
    if chosen == NOW:
        leave()
        st.rerun()
    found = moment(str(chosen), real)
    if found is None:
        view.notice(
            "moment", "trouble",
            f"{chosen!r} is no time of the last {MOST_DAYS} days. Examples: 03:12, yesterday 14:00, 45 min.",
        )  # fmt: skip
        return
    go(found)
    st.rerun()


def moment(text: str, who: view.Viewer) -> int | None:
    """Return the moment that a person typed; None: it is none, lies ahead or is too old. Pure."""
    bare = text.strip().lower().removesuffix("ago").strip()
    if (span := time_words.span_of(bare)) is not None:
        found: int | None = who.now_ms - span
    else:
        found = time_words.moment_of(text, who.now_ms, who.where)
    return None if found is None or found < who.now_ms - MOST_MS else found


def last_hour(asked: int) -> tuple[int, int]:
    """Return the time (from, to), ms, to play around a moment."""
    now_ms = time.time_ns() // 1_000_000
    return asked - 30 * 60_000, min(now_ms, asked + 30 * 60_000)


def play(from_ms: int, to_ms: int, shown_ms: int) -> dict[str, str]:
    """Return the address' words for the map that plays a time, standing at a moment of it.

    The address has whole seconds: it stands at the next one, as an incident is not yet open in the one before.
    """
    return {AT: written(shown_ms + 999), PLAY: f"{from_ms // 1000}-{to_ms // 1000}"}
