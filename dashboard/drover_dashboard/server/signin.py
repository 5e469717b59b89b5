"""Who looks at this page; what is shown to those who have to sign in first, and below each page."""

from __future__ import annotations

import streamlit as st

from drover_dashboard.server.auth_settings import Person, chosen
from drover_dashboard.widgets import view


def person() -> Person | None:
    """Who looks at this page; None: they have to sign in first."""
    way = chosen()
    if way.header:
        return way.of_headers(st.context.headers)
    if way.oidc:
        return way.of_claims(st.user.to_dict())
    return Person("", True)


def ask() -> None:
    """Instead of a page, of somebody who is not known."""
    view.notice("sign_in", "summary", "Drover: sign in to look at the fleet.")
    if chosen().header:  # the door lets nobody in without
        view.notice("sign_in_how", "remark", "The proxy before this console named nobody. Come through it again.")
        return
    if st.button("Sign in", type="primary", key="sign_in"):
        st.login()


def foot(who: Person) -> None:
    """Below each page: as whom, and out."""
    if not chosen().asks:
        return
    with st.container(horizontal=True, vertical_alignment="center", key="signed_in"):
        role = "operator: may act" if who.may_act else "viewer: may look"
        view.notice("signed_in_as", "remark", f"Signed in as {who.name} ({role})")
        if chosen().oidc and st.button("Sign out", key="sign_out"):
            st.logout()
