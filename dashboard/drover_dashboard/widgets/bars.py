"""Rows of stacked bars, each part with a pattern of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from drover_dashboard.widgets.components import component


@dataclass(frozen=True, slots=True)
class Kind:
    """A part of each bar; `kind` chooses its look in assets/bars.css."""

    kind: str
    label: str
    help: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """`values`: one for each kind, in `unit`; `value` stands behind the bar."""

    label: str
    values: tuple[float, ...]
    value: str = ""
    sub: str = ""


def bars(key: str, kinds: Sequence[Kind], rows: Sequence[Bar], unit: str, empty: str, *, shares: bool = False) -> None:
    """Draw them against the longest; with `shares` each has the whole width."""
    most = max((sum(row.values) for row in rows), default=0.0)
    data = {
        "kinds": [asdict(kind) for kind in kinds],
        "rows": [asdict(row) for row in rows],
        "unit": unit,
        "most": most or 1.0,
        "shares": shares,
        "empty": empty,
    }
    component("bars")(key=key, data=data, height="content")
