"""The Streamlit script: navigation and the page's frame. Started by app.py, never by hand.

It lies in a folder of its own: Streamlit takes a `pages/` next to its script for pages that run without this frame."""

from __future__ import annotations

import logging

import streamlit as st

from drover_dashboard import clusters
from drover_dashboard.pages import approval_form, clusters_overview
from drover_dashboard.server import code_reload as upgraded
from drover_dashboard.server import signin
from drover_dashboard.widgets import address, cluster_choice, moment, view
from drover_dashboard.widgets.components import ASSETS

ICON = (ASSETS / "icon.svg").read_text("utf-8")  # a local one: a named icon would be fetched from the internet

st.set_page_config(page_icon=ICON, layout="wide", initial_sidebar_state="collapsed")
st.html(ASSETS / "page.css")
who = signin.person()
if who is None:
    st.set_page_config(page_title="Drover")
    signin.ask()
    st.stop()
page = st.navigation(
    [
        st.Page(view.FLEET, title="Fleet", default=True),
        st.Page(view.INCIDENTS, title="Incidents"),
        st.Page(view.NODE, title="Node"),
        st.Page(view.JOB, title="Job"),
        st.Page(view.FABRIC, title="Fabric"),
        st.Page(view.THERMALS, title="Thermals"),
        st.Page(view.PROBES, title="Probes"),
        st.Page(view.RISK, title="Risk"),
        st.Page(view.CAPACITY, title="Capacity"),
        st.Page(view.POLICY, title="Policy"),
        st.Page(view.SILENCES, title="Silences"),
        st.Page(view.AUDIT, title="Audit"),
        st.Page(view.SYSTEM, title="System"),
    ],
    position="top",
)
address.settle(page.url_path)
several = clusters.shared()
cluster = cluster_choice.settle(page.url_path)
if several is not None and not cluster:
    if page.url_path or cluster_choice.NAME in st.query_params:
        clusters_overview.choose(page.url_path)
    else:
        clusters_overview.show(several)
    signin.foot(who)
    st.stop()
cluster_choice.bar()
moment.settle(page.url_path)
if upgraded.replaced():
    view.notice("upgraded", "trouble", upgraded.TEXT)
    try:
        page.run()
    except Exception:  # a new page on old modules may fail in any way; the notice says what to do
        logging.getLogger(__name__).exception("a page failed after the console's files were replaced")
else:
    page.run()
signin.foot(who)
if not who.name:
    approval_form.remember_name()
