"""The fleet by day, as a strip that the browser asks for by itself once the page stands."""

from __future__ import annotations

from typing import Any, Literal

from drover_dashboard import client
from drover_dashboard.widgets import view
from drover_dashboard.widgets.components import component
from drover_proto import fleet_pb2 as pb

SPAN = "30 days"  # of the Capacity page, which the figures lead to
# Field, label, unit, factor; whether more is worse.
FIGURES: tuple[tuple[Literal["util_ratio", "power_w", "gpu_hours_lost", "goodput"], str, str, float, bool], ...] = (
    ("util_ratio", "Utilisation", "%", 100.0, False), ("power_w", "GPU power", "kW", 0.001, False),
    ("gpu_hours_lost", "GPU-hours lost", "h", 1.0, True), ("goodput", "Goodput", "%", 100.0, False),
)  # fmt: skip


def show() -> None:
    """Draw the strip."""
    data = {"cluster": client.fleet_name(), "href": view.href(view.CAPACITY, span=SPAN)}
    component("trend")(key="fleet_trend", data=data, height="content")


def content(trend: pb.Trend) -> dict[str, Any]:
    """As assets/trend.js takes it. A figure that is not known is null. Pure."""
    return {
        "days_ms": [day.from_ms for day in trend.days],
        "pending": trend.pending,
        "waits": [day.pending for day in trend.days],
        "figures": [
            {
                "label": label, "unit": unit, "bad": bad,
                "values": [factor * getattr(day, name) if day.HasField(name) else None for day in trend.days],
            }
            for name, label, unit, factor, bad in FIGURES
        ],
    }  # fmt: skip
