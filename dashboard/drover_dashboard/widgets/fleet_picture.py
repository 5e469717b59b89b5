"""The picture of every GPU: bytes for the browser, and the component that draws and polls them."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Metric, Scope
from drover_dashboard.client import FleetClient, Trouble
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import theme
from drover_dashboard.widgets.components import component

EXACT_VALUES = (
    16_384  # GPUs up to which the exact values travel too (64 kB); beyond, a hover shows the colour's own step
)
REFRESH_S = 5
PICTURE_PX = 575  # its height with the legend
LEVEL = 1  # of gzip: to it the cells of a metric are noise, and higher levels save less than 1 %

STATE_UNITS = ("bitmask", "enum")  # codes: a ramp from low to high would say nothing


@dataclass(frozen=True, slots=True)
class Clicked:
    node: str
    gpu: int


def metrics() -> list[Metric]:
    """What the picture can be coloured by."""
    return [m for m in catalog.of_scope(Scope.GPU) if m.unit not in STATE_UNITS]


def _theme_data() -> dict[str, Any]:
    return {"every_s": REFRESH_S, "height": PICTURE_PX, "palette": theme.palette()}


def early() -> dict[str, Any]:
    """What assets/fleet_early.js draws it with while nothing of Streamlit is there yet."""
    return {"data": _theme_data(), "rem": theme.STREAMLIT["theme.baseFontSize"], "themes": theme.css()}


def canvas(color_by: str, group: str) -> Clicked | None:
    """Draw the picture; the GPU just clicked, else None."""
    data = _theme_data() | {"color_by": color_by, "group": group}
    shown = component("fleet")(key="fleet_picture", data=data, on_open_change=lambda: None, height=PICTURE_PX)
    opened: dict[str, Any] | None = shown.open
    return Clicked(opened["node"], opened["gpu"]) if opened else None


def trouble_line(trouble: Trouble) -> str:
    """Without the time: the browser shows its own next to it."""
    return f"{trouble.what} ({trouble.reason}): {trouble.advice}"


def frame(client: FleetClient, color_by: str, for_s: float = 0.0) -> tuple[bytes | None, Trouble | None]:
    """The newest picture as the browser takes it (see assets/fleet.js), or why there is none.

    An answer kept from before the collector fell silent is given with its trouble in the header. `for_s`: one that
    will do so long from now, too.
    """
    health = client.picture("health", for_s)
    picture, trouble = health.value, health.trouble
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    if picture is None:
        return None, trouble
    gpus, ts_ms = len(picture.cells), picture.ts_ms
    if color_by != "health":
        colored = client.picture(color_by, for_s)
        trouble = trouble or colored.trouble
        if colored.value is None or len(colored.value.cells) != gpus:
            return None, trouble or Trouble("no picture", "the layout is changing", "wait a moment", health.as_of_ms)
        header, parts = _colored(color_by, colored.value, gpus)
        ts_ms = min(ts_ms, colored.value.ts_ms)
    header |= {
        "gpus": gpus,
        "layout_version": picture.layout_version,
        "ts_ms": ts_ms,
        "legend": list(picture.legend),
        "trouble": trouble_line(trouble) if trouble else None,
    }
    text = json.dumps(header).encode()
    blocks = [struct.pack("<I", len(text)) + text, picture.cells, *parts]
    return b"".join(block + bytes(-len(block) % 4) for block in blocks), trouble


_packed: OrderedDict[bytes, bytes] = OrderedDict()  # of the newest frames and layouts, which all open pages share
PACKED = 8


def packed(body: bytes, level: int = LEVEL) -> bytes:
    """A frame or layout for the wire, gzip. Most consoles ask within a second of each other: packed once for all."""
    key = hashlib.blake2b(body, digest_size=16).digest()
    found = _packed.get(key)
    if found is None:
        found = _packed[key] = gzip.compress(body, level, mtime=0)
        while len(_packed) > PACKED:
            _packed.popitem(last=False)
    return found


def ready(client: FleetClient, color_by: str, for_s: float) -> None:
    """Have a frame packed before it is asked for."""
    body, _ = frame(client, color_by, for_s)
    if body is not None:
        packed(body)


def _colored(color_by: str, picture: Any, gpus: int) -> tuple[dict[str, Any], list[bytes]]:
    metric = catalog.BY_NAME[color_by]
    exact = gpus <= EXACT_VALUES and len(picture.values) == 4 * gpus
    values = np.frombuffer(picture.values, "<f4") if exact else np.empty(0, np.float32)
    known = bool(np.any(np.frombuffer(picture.cells, np.uint8)))
    header = {
        "metric": color_by,
        "label": fmt.capital(metric.label),
        "unit": fmt.unit(metric),
        "scale": 100 if fmt.unit(metric) == "%" else 1,
        "low": picture.low,
        "high": picture.high,
        "low_text": fmt.value(metric, picture.low) if known else "no GPU reports this",
        "high_text": fmt.value(metric, picture.high) if known else "",
        "has_values": exact,
    }
    return header, [picture.cells, values.tobytes()] if exact else [picture.cells]
