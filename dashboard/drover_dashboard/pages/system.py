"""Drover itself: is it healthy, does every node report, does it keep up, are people notified."""

from __future__ import annotations

import streamlit as st

from drover_dashboard import client
from drover_dashboard.pages import silence_forms as silencing
from drover_dashboard.pages import system_parts
from drover_dashboard.widgets import address, view

EVERY_S = 3


@st.fragment(run_every=EVERY_S)
def show() -> None:
    who = view.viewer()
    answer = client.fleet().system()
    view.trouble("system", answer.trouble, answer.as_of_ms, who)
    system = answer.value
    if answer.trouble is not None and not answer.trouble.slow:
        system_parts.away(client.fleet().status(), who)
    if system is None:
        return
    with view.place():
        for number, text in enumerate(system.troubles):
            view.notice(f"own_{number}", "trouble", who.localize(text))
    system_parts.tiles(system, who)
    left, right = st.columns(2, gap="medium")
    with left:
        view.heading("Agents and ingest")
        system_parts.agents(system, who)
        system_parts.ingest(system.ingest)
        view.heading("Storage")
        system_parts.store(system.store)
    with right:
        view.heading("Judging")
        system_parts.detection(system, who)
        view.heading("Notifications")
        system_parts.notifiers(system.notifiers)
        silencing.listing(who)


address.title("System")
show()
