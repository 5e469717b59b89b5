"""A list as a CSV file that a spreadsheet opens."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence

import streamlit as st

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\0")


def csv_text(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a list as RFC 4180 has it. What is None is empty, and no text is a formula.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(headers)
    writer.writerows([_safe(cell) for cell in row] for row in rows)
    return out.getvalue()


def _safe(cell: object) -> object:
    if cell is None:
        return ""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def button(key: str, name: str, make: Callable[[], str]) -> None:
    """A button that downloads `NAME.csv`. `make` runs when it is pressed, on a thread that knows no page."""
    st.download_button(
        "CSV", make, file_name=f"{name}.csv", mime="text/csv", icon=":material/download:", key=key, on_click="ignore"
    )
