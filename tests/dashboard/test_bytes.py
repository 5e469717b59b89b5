"""What the browser components are given: frames of the picture and lines of the charts."""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import grpc
import numpy as np
import pytest

from drover_core.metrics.catalog import BY_NAME
from drover_dashboard.client import FleetClient
from drover_dashboard.widgets import charts
from drover_dashboard.widgets import fleet_picture as fleet_canvas
from drover_proto import fleet_pb2 as pb


def read_frame(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """As assets/fleet.js does."""
    length = struct.unpack_from("<I", body)[0]
    head = json.loads(body[4 : 4 + length])
    pad = lambda size: (size + 3) & ~3  # noqa: E731  # mirrors the browser's code
    parts, at = [], pad(4 + length)
    sizes = [head["gpus"]] + ([head["gpus"], 4 * head["gpus"] if head["has_values"] else 0] if "metric" in head else [])
    for size in sizes:
        parts.append(body[at : at + size])
        at += pad(size)
    assert at == len(body)
    return head, parts


def test_a_frame_by_health(shared: FleetClient) -> None:
    body, trouble = fleet_canvas.frame(shared, "health")
    assert body is not None
    assert trouble is None
    head, (health,) = read_frame(body)
    assert health == bytes([0, 0, 0, 2])
    assert head["legend"][2] == "confirmed"
    assert head["trouble"] is None


def test_a_frame_is_packed_once_for_all_consoles_and_unpacks_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    compress = gzip.compress
    monkeypatch.setattr(
        fleet_canvas.gzip, "compress", lambda *given, **more: times.append(1) or compress(*given, **more)
    )
    bodies = [bytes([number]) * 1000 for number in range(fleet_canvas.PACKED + 1)]
    assert [gzip.decompress(fleet_canvas.packed(body)) for body in bodies] == bodies
    assert fleet_canvas.packed(bodies[-1]) == fleet_canvas.packed(bodies[-1])
    assert len(times) == len(bodies)
    fleet_canvas.packed(bodies[0])
    assert len(times) == len(bodies) + 1, "the oldest is forgotten"


def test_a_frame_by_metric_tells_health_too_and_keeps_absence(shared: FleetClient) -> None:
    body, _ = fleet_canvas.frame(shared, "power_w")
    assert body is not None
    head, (health, cells, values) = read_frame(body)
    assert health == bytes([0, 0, 0, 2])
    assert cells == bytes([1, 128, 255, 0])
    np.testing.assert_array_equal(np.frombuffer(values, "<f4"), [300, 400, 500, np.nan])
    assert (head["label"], head["unit"], head["low_text"], head["high_text"]) == ("Power", "W", "300 W", "500 W")


def test_a_very_large_fleet_sends_colours_only(shared: FleetClient, monkeypatch) -> None:
    monkeypatch.setattr(fleet_canvas, "EXACT_VALUES", 3)
    body, _ = fleet_canvas.frame(shared, "power_w")
    assert body is not None
    head, (_, cells, values) = read_frame(body)
    assert not head["has_values"]
    assert len(cells) == 4
    assert values == b""


def test_an_old_frame_says_so_and_no_frame_says_why(served: str, chosen) -> None:
    now = [1_000_000]
    fleet = FleetClient(served, now_ms=lambda: now[0])
    fleet_canvas.frame(fleet, "health")
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    now[0] += 60_000
    body, trouble = fleet_canvas.frame(fleet, "health")
    assert body is not None
    assert trouble is not None
    assert "has not answered (connection refused): is drover-collector running?" in read_frame(body)[0]["trouble"]
    assert fleet_canvas.frame(FleetClient(served), "health")[0] is None
    fleet.close()


def read_chart(body: bytes) -> tuple[dict[str, Any], np.ndarray, list[np.ndarray]]:
    """As assets/chart.js does."""
    length = struct.unpack_from("<I", body)[0]
    head = json.loads(body[4 : 4 + length])
    at, points = (4 + length + 7) & ~7, head["points"]
    times = np.frombuffer(body, "<f8", points, at)
    lines = [np.frombuffer(body, "<f4", points, at + 8 * points + 4 * points * k) for k in range(len(head["lines"]))]
    return head, times, lines


def reply(metric: str, roles: dict[str, list[float]]) -> pb.SeriesReply:
    made = pb.SeriesReply(ts_ms=np.array([1000, 2500], "<i8").tobytes())
    for role, values in roles.items():
        series = made.series.add(node="n1", metric=metric, role=role, values=np.array(values, "<f4").tobytes())
        if role == "value":
            series.gpu = 5
    made.series.add(node="n1", metric="another", values=np.zeros(2, "<f4").tobytes())
    return made


def chart(metric: str, roles: dict[str, list[float]]) -> charts.Chart:
    found = reply(metric, roles)
    lines = charts.lines_of(found, metric)
    return charts.Chart(BY_NAME[metric], charts.times_of(found), lines, 0, 5000, [(1500, "onset")])


def test_a_chart_keeps_gaps_and_puts_the_band_together() -> None:
    nan = float("nan")
    values = {"peers_p90": [0.9, 0.9], "peers_median": [0.8, 0.8], "value": [0.5, nan], "peers_p10": [0.7, nan]}
    head, times, lines = read_chart(charts.encode(chart("gpu_util_ratio", values)))
    assert [line["role"] for line in head["lines"]] == ["value", "peers_p10", "peers_p90", "peers_median"]
    assert head["title"] == "GPU utilisation, %"
    assert head["marks"] == [{"at_s": 1.5, "text": "onset"}]
    np.testing.assert_array_equal(times, [1.0, 2.5])
    np.testing.assert_array_equal(lines[0], [50, nan])
    np.testing.assert_allclose(lines[2], [90, 90])


def test_bytes_get_the_prefix_that_fits_the_largest() -> None:
    head, _, lines = read_chart(charts.encode(chart("nvlink_tx_bytes_per_s", {"value": [2e9, float("nan")]})))
    assert head["unit"] == "GB/s"
    np.testing.assert_array_equal(lines[0], [2, np.nan])


def test_sums_of_time_become_a_share_of_the_time() -> None:
    """Of [1 s, 2.5 s]: 0.75 s of these 1.5 s."""
    head, _, lines = read_chart(charts.encode(chart("throttle_power_us", {"value": [9e6, 9.75e6]})))
    assert head["unit"] == "% of the time"
    np.testing.assert_allclose(lines[0], [np.nan, 50])


def test_a_chart_without_any_value_is_known_as_such() -> None:
    nan = float("nan")
    found = reply("power_w", {"value": [nan, nan], "peers_p10": [1, 2], "peers_p90": [2, 3]})
    assert charts.nothing_there(charts.lines_of(found, "power_w"))
    empty = charts.Chart(BY_NAME["power_w"], np.empty(0, np.int64), [], 0, 1)
    assert read_chart(charts.encode(empty))[0]["points"] == 0
