"""Rows of text; some open an incident or a node when clicked.

Texts come from logs of the fleet: the browser puts every one of them in as text, never as HTML or Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drover_dashboard.widgets.components import component
from drover_dashboard.widgets.theme import Stroke


@dataclass(frozen=True, slots=True)
class Mark:
    """A remark behind a value; `tone` is bad or warn."""

    text: str
    tone: str


@dataclass(frozen=True, slots=True)
class Cell:
    """`badge` is the class of a framed word (a severity or health), `kind` one of absent, faint, strong,
    mono, prose (its lines stay)."""

    text: str
    sub: str = ""
    badge: str = ""
    kind: str = ""
    title: str = ""
    mark: Mark | None = None
    line: Stroke | None = None  # a sample of its line in the charts, put before the text


@dataclass(frozen=True, slots=True)
class Column:
    label: str = ""
    align: str = ""
    wrap: bool = False
    help: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """`href`, relative to the page, is what a click on the row opens; `id` is what the click reports."""

    cells: tuple[Cell, ...]
    id: str = ""
    href: str = ""
    tone: str = ""


def _row(row: Row) -> dict[str, Any]:
    """As assets/table.js takes it; what is not set is left out, as rows are sent again whenever one changes."""
    set_ = {name: value for name in ("id", "href", "tone") if (value := getattr(row, name))}
    return {"cells": [_cell(cell) for cell in row.cells]} | set_


def _cell(cell: Cell) -> dict[str, Any]:
    data: dict[str, Any] = {"text": cell.text}
    data |= {name: value for name in ("sub", "badge", "kind", "title") if (value := getattr(cell, name))}
    return data | {name: asdict(value) for name in ("mark", "line") if (value := getattr(cell, name)) is not None}


def table(
    key: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    empty: str,
    selected: str = "",
    link_column: int = 0,
    height: int | None = None,
) -> str | None:
    """Show rows; the `id` of a row just clicked, else None. `height`, px: longer lists scroll inside."""
    data: dict[str, Any] = {
        "columns": [asdict(column) for column in columns],
        "rows": [_row(row) for row in rows],
        "empty": empty,
        "selected": selected,
        "link_column": link_column,
        "height": height,
    }
    shown = component("table")(key=key, data=data, on_open_change=lambda: None)
    opened: str | None = shown.open
    return opened
