"""The picture of every GPU: bytes for the browser, and the component that draws and polls them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Metric, Scope
from drover_dashboard import client, clusters
from drover_dashboard.client import Answer, FleetClient, Trouble
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import theme
from drover_dashboard.widgets.components import component
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

REFRESH_S = 5
PICTURE_PX = 575  # its height with the legend
FRAMES, LEAST_FRAME_MS = 60, 10_000  # of a time that is played
PLAYER_PX = 46  # below the picture
TROUBLE_CHARS = 1000  # proxies bound the headers of an answer; 4 kB is a common limit

STATE_UNITS = ("bitmask", "enum")  # codes: a ramp from low to high would say nothing


@dataclass(frozen=True, slots=True)
class Clicked:
    node: str
    gpu: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture as assets/fleet.js reads it.

    Attributes:
        header: JSON of one line in ASCII: what the bytes are, how to label them, and what is wrong.
        body: the collector's bytes as they came (`Picture.frame` in fleet.proto), gzip.
    """

    header: str
    body: bytes


def metrics() -> list[Metric]:
    """What the picture can be coloured by."""
    return [m for m in catalog.of_scope(Scope.GPU) if m.unit not in STATE_UNITS]


def _theme_data() -> dict[str, Any]:
    return {"every_s": REFRESH_S, "height": PICTURE_PX, "palette": theme.palette()}


def early() -> dict[str, Any]:
    """What assets/fleet_early.js draws it with while nothing of Streamlit is there yet."""
    several = clusters.shared() is not None
    return {
        "data": _theme_data(),
        "several": several,
        "rem": theme.STREAMLIT["theme.baseFontSize"],
        "themes": theme.css(),
    }


@dataclass(frozen=True, slots=True)
class Past:
    """The picture of the past: the time that it plays (the same: one moment), and the moment that it shows, ms."""

    from_ms: int
    to_ms: int
    at_ms: int


def canvas(color_by: str, group: str, past: Past | None = None) -> Clicked | int | None:
    """Draw the picture, of now or of the past; the GPU just clicked, the moment (ms) just chosen, else None."""
    data = _theme_data() | {"color_by": color_by, "group": group, "cluster": client.fleet_name(), "past": None}
    height = PICTURE_PX
    if past is not None:
        data["past"] = {"from_s": past.from_ms // 1000, "to_s": past.to_ms // 1000, "at_s": past.at_ms // 1000}
        height += PLAYER_PX if past.from_ms < past.to_ms else 0
    shown = component("fleet")(
        key="fleet_picture", data=data, on_open_change=lambda: None, on_moment_change=lambda: None, height=height
    )  # fmt: skip
    opened: dict[str, Any] | None = shown.open
    if opened:
        return Clicked(opened["node"], opened["gpu"])
    return int(shown.moment) * 1000 if shown.moment else None


def trouble_line(trouble: Trouble) -> str:
    """Without the time: the browser shows its own next to it."""
    return f"{trouble.what} ({trouble.reason}): {trouble.advice}"


def frame(fleet: FleetClient, color_by: str) -> Frame | Trouble:
    """Return the newest picture, or why there is none.

    An answer kept from before the collector fell silent is given with its trouble in the header.
    """
    answer = fleet.picture(color_by)
    picture, trouble = answer.value, answer.trouble
    if picture is None:
        return trouble or Trouble("no picture", "the collector gave none", "see the collector's log", answer.as_of_ms)
    if not picture.frame:
        return Trouble(
            "no picture", "the collector is older than this console", "run both at one version", answer.as_of_ms
        )
    header: dict[str, Any] = {
        "gpus": picture.gpus,
        "layout_version": picture.layout_version,
        "ts_ms": picture.ts_ms,
        "legend": list(picture.legend),
        "trouble": trouble_line(trouble)[:TROUBLE_CHARS] if trouble else None,
    }
    if color_by != "health":
        header |= _metric_header(catalog.BY_NAME[color_by], picture)
    return Frame(json.dumps(header), picture.frame)


def playback(fleet: FleetClient, color_by: str, from_ms: int, to_ms: int, count: int) -> Answer[pb.Playback]:
    """Return how the fleet looked at `count` moments of a time."""
    request = pb.PlaybackRequest(color_by=color_by, from_ms=from_ms, to_ms=to_ms, frames=count)
    return fleet.ask(methods.GET_PLAYBACK, request)


def frames(fleet: FleetClient, color_by: str, from_ms: int, to_ms: int) -> Frame | Trouble:
    """Return all frames of a time, or why there are none. Its body is `Playback.frames` of fleet.proto."""
    count = 1 if from_ms == to_ms else max(2, min(FRAMES, (to_ms - from_ms) // LEAST_FRAME_MS + 1))
    answer = playback(fleet, color_by, from_ms, to_ms, count)
    played = answer.value
    if played is None:
        return answer.trouble or Trouble("no playback", "the collector gave none", "see its log", answer.as_of_ms)
    header: dict[str, Any] = {
        "gpus": played.gpus, "layout_version": played.layout_version, "frames_ms": list(played.frames_ms),
        "legend": list(played.legend), "absent": list(played.absent),
        "trouble": trouble_line(answer.trouble)[:TROUBLE_CHARS] if answer.trouble else None,
    }  # fmt: skip
    if color_by != "health":
        as_picture = pb.Picture(low=played.low, high=played.high, known=int(played.known), unit=played.unit)
        header |= _metric_header(catalog.BY_NAME[color_by], as_picture)
    return Frame(json.dumps(header), played.frames)


def _metric_header(metric: Metric, picture: pb.Picture) -> dict[str, Any]:
    unit = fmt.unit(metric)
    return {
        "metric": metric.name,
        "label": fmt.capital(metric.label),
        "unit": unit,
        "scale": 100 if unit == "%" else 1,
        "low": picture.low,
        "high": picture.high,
        "low_text": fmt.value(metric, picture.low) if picture.known else "no GPU reports this",
        "high_text": fmt.value(metric, picture.high) if picture.known else "",
        "has_values": picture.exact,
    }
