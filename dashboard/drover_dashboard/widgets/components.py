"""The console's own browser components, registered once; their code lies in `assets/`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import streamlit as st

ASSETS = Path(__file__).parents[1] / "assets"


@functools.cache
def component(name: str, *styles: str) -> Any:
    """The mounting function of the component whose files are `assets/NAME.html`, `.css` and `.js`.

    The browser gets a small loader here, which fetches the module itself from the console's server (app.py).
    """
    css = "\n".join((ASSETS / style).read_text("utf-8") for style in (*styles, f"{name}.css"))
    return st.components.v2.component(
        f"drover_{name}",
        html=(ASSETS / f"{name}.html").read_text("utf-8"),
        css=css,
        js=(ASSETS / "loader.js").read_text("utf-8").replace("MODULE", f"{name}.js"),
    )
