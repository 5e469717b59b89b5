"""The button that leads from a page to Grafana's board of the same nodes and time, where a Grafana is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from drover_core.grafana import Grafana
from drover_dashboard import client
from drover_dashboard.widgets import charts

_known: Mapping[str, Grafana] = {}


def share(known: Mapping[str, Grafana]) -> None:
    """Set the Grafana of each cluster, by its name; of one collector under ""."""
    global _known
    _known = known


def button(key: str, time: tuple[str, str], nodes: Sequence[str] = (), job: str = "") -> None:
    """Draw the button; nothing where no Grafana is set for the cluster of this page."""
    found = _known.get(client.fleet_name())
    if found is not None:
        st.link_button(
            "Grafana", found.link(*time, nodes, job), icon=":material/open_in_new:", key=key,
            help="the board of the GPUs for these nodes and this time, in a new tab",
        )  # fmt: skip


def span(span_ms: int) -> tuple[str, str]:
    """Return the time of a page's charts: what was drawn or typed, else a span up to now that goes on there."""
    drawn = charts.drawn_open()
    return (str(drawn[0]), str(drawn[1])) if drawn else (f"now-{max(1, span_ms // 1000)}s", "now")
