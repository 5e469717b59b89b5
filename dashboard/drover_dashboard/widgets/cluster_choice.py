"""Which cluster a page shows, where the console has several. It stands in the address and in the page's frame.

The choice is bound to the session when the whole page runs. Parts that refresh themselves, and forms that act, use
what is bound; an address that names another cluster runs the whole page again first. Nothing is guessed: a page
without a cluster shows none.
"""

from __future__ import annotations

import streamlit as st

from drover_dashboard import clusters
from drover_dashboard.client import FleetClient
from drover_dashboard.widgets import address, theme, view
from drover_dashboard.widgets.components import component

NAME = "cluster"  # in the address and in the session
CHOICE = "cluster_choice"
STRIPS_S = 2  # between two looks of a browser at what is known of all
OVERVIEW = "all clusters"


class NoClusterError(RuntimeError):
    """A page asked a collector without a cluster that says which."""


def settle(page: str) -> str:
    """Bind this run to the cluster of its address, else to that of the page before; "" where neither names one.

    The Fleet page without a cluster is the one of all of them. `page`: its path.
    """
    found = clusters.shared()
    if found is None:
        return ""
    asked = st.query_params.get(NAME)
    chosen = st.session_state.get(NAME) if asked is None and page else asked
    if chosen not in found.names():
        st.session_state.pop(NAME, None)
        return ""
    st.session_state[NAME] = chosen
    if asked != chosen:
        address.write(**{NAME: chosen})
    return str(chosen)


def client() -> FleetClient:
    """Return the client of the cluster that this session is bound to.

    Raises:
        NoClusterError: it is bound to none.
    """
    found, bound = clusters.shared(), st.session_state.get(NAME)
    asked = st.query_params.get(NAME)
    if found is None or bound not in found.names():
        raise NoClusterError("this page names no cluster")
    if asked is not None and asked != bound:
        st.rerun()  # all of the page: this part was drawn for another cluster
    return found.client(str(bound))


def name() -> str:
    """Return the bound cluster; "" where there is one collector."""
    return "" if clusters.shared() is None else str(st.session_state.get(NAME, ""))


def inside(text: str) -> str:
    """`text` with the cluster that it is about, where there are several: of an act, before and after it."""
    return f"{text} in cluster {name()}" if name() else text


def bar() -> None:
    """Above each page: which cluster this is, a way to another and to all."""
    found = clusters.shared()
    if found is None:
        return
    st.session_state[CHOICE] = name()
    with st.container(horizontal=True, vertical_alignment="center", key="cluster_bar"):
        st.page_link(view.FLEET, label="All clusters", icon=":material/arrow_back:")
        st.selectbox(
            "Cluster", found.names(), key=CHOICE, on_change=_choose, label_visibility="collapsed", width=220,
            format_func=lambda cluster: f"cluster {cluster}",
        )  # fmt: skip
        status = next(one for one in found.received() if one.name == name()).status.value
        parts = [] if status is None else [status.mode, f"fleet {status.fleet}" if status.fleet else ""]
        view.notice("cluster_of", "remark", "  ·  ".join(filter(None, [*parts, found.client(name()).target])))


def _choose() -> None:
    """The same page of another cluster; what was chosen on it was the other's."""
    st.query_params.from_dict({NAME: st.session_state[CHOICE]})


def strips(page: str, **kept: str) -> str | None:
    """Draw a strip for each cluster; return the one just clicked. `page`: where a strip leads, with `kept` of its
    address."""
    data = {"every_s": STRIPS_S, "palette": theme.palette(), "page": page, "kept": kept}
    shown = component("clusters")(key="clusters", data=data, on_open_change=lambda: None, height="content")
    opened: str | None = shown.open
    return opened
