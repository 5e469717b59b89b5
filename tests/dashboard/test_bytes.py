"""What the browser components are given: frames of the picture and lines of the charts."""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import grpc
import numpy as np
from starlette.requests import Request

from drover_core.metrics.catalog import BY_NAME
from drover_dashboard.client import FleetClient, Trouble
from drover_dashboard.server import app
from drover_dashboard.widgets import charts
from drover_dashboard.widgets import fleet_picture as fleet_canvas
from drover_proto import fleet_pb2 as pb


def read_frame(frame: fleet_canvas.Frame | Trouble) -> tuple[dict[str, Any], list[bytes]]:
    """As assets/fleet.js does."""
    assert isinstance(frame, fleet_canvas.Frame)
    head, body = json.loads(frame.header), gzip.decompress(frame.body)
    parts, at = [], 0
    sizes = [head["gpus"]] + ([head["gpus"], 4 * head["gpus"] if head["has_values"] else 0] if "metric" in head else [])
    for size in sizes:
        parts.append(body[at : at + size])
        at += (size + 3) & ~3
    assert at == len(body)
    return head, parts


def test_a_frame_by_health(shared: FleetClient) -> None:
    head, (health,) = read_frame(fleet_canvas.frame(shared, "health"))
    assert health == bytes([0, 0, 0, 2])
    assert head["legend"][2] == "confirmed"
    assert head["trouble"] is None


def test_a_frame_by_metric_has_its_labels_and_the_cells_by_health(shared: FleetClient) -> None:
    head, (health, cells, values) = read_frame(fleet_canvas.frame(shared, "power_w"))
    assert health == bytes([0, 0, 0, 2])
    assert cells == bytes([1, 128, 255, 0])
    np.testing.assert_array_equal(np.frombuffer(values, "<f4"), [300, 400, 500, np.nan])
    assert (head["label"], head["unit"], head["low_text"], head["high_text"]) == ("Power", "W", "300 W", "500 W")


def test_a_metric_that_no_gpu_reports_has_no_ends_of_its_scale(shared: FleetClient, chosen) -> None:
    chosen.known = 0
    head, _ = read_frame(fleet_canvas.frame(shared, "power_w"))
    assert (head["low_text"], head["high_text"]) == ("no GPU reports this", "")


def test_an_old_frame_says_so_and_no_frame_says_why(served: str, chosen) -> None:
    now = [1_000_000]
    fleet = FleetClient(served, now_ms=lambda: now[0])
    fleet_canvas.frame(fleet, "health")
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused\n\u2026" + 2000 * "x")
    now[0] += 60_000
    found = fleet_canvas.frame(fleet, "health")
    assert read_frame(found)[0]["trouble"].startswith("Collector")
    assert "has not answered (connection refused" in read_frame(found)[0]["trouble"]
    assert found.header.isascii(), "it travels as a header of HTTP"
    assert "\n" not in found.header
    assert len(found.header) < 2000
    missing = fleet_canvas.frame(FleetClient(served), "health")
    assert isinstance(missing, Trouble)
    fleet.close()


def test_a_collector_that_knows_no_packed_pictures_is_named_as_the_reason(shared: FleetClient, chosen) -> None:
    chosen.packs = False
    found = fleet_canvas.frame(shared, "health")
    assert isinstance(found, Trouble)
    assert (
        fleet_canvas.trouble_line(found)
        == "no picture (the collector is older than this console): run both at one version"
    )


def picture_request(headers: dict[str, str], query: str = "color_by=power_w") -> Request:
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": sent, "query_string": query.encode()})


def test_the_collectors_bytes_pass_through_unchanged(shared: FleetClient) -> None:
    answer = app.picture(picture_request({"accept-encoding": "gzip, br"}))
    assert answer.body == shared.picture("power_w").value.frame
    assert answer.headers["content-encoding"] == "gzip"
    assert json.loads(answer.headers["drover-frame"])["metric"] == "power_w"


def test_a_browser_without_gzip_gets_them_unpacked(shared: FleetClient) -> None:
    answer = app.picture(picture_request({}))
    assert answer.body == gzip.decompress(shared.picture("power_w").value.frame)
    assert "content-encoding" not in answer.headers


def test_without_a_picture_the_endpoint_says_why(shared: FleetClient, chosen) -> None:
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "the store cannot answer: x")
    answer = app.picture(picture_request({}))
    assert answer.status_code == 503
    assert "the store cannot answer: x" in json.loads(bytes(answer.body))["trouble"]


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
    return charts.Chart(BY_NAME[metric], charts.times_of(found), lines, 0, 5000, [1500])


def test_a_chart_keeps_gaps_and_puts_the_band_together() -> None:
    nan = float("nan")
    values = {"peers_p90": [0.9, 0.9], "peers_median": [0.8, 0.8], "value": [0.5, nan], "peers_p10": [0.7, nan]}
    head, times, lines = read_chart(charts.encode(chart("gpu_util_ratio", values)))
    assert [line["role"] for line in head["lines"]] == ["value", "peers_p10", "peers_p90", "peers_median"]
    assert head["title"] == "GPU utilisation, %"
    assert head["marks"] == [1.5]
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


def test_the_share_over_a_gap_is_that_of_the_whole_gap() -> None:
    nan = float("nan")
    times = np.array([0, 1000, 2000, 4000, 5000], np.int64)
    line = charts.Line("n1", "value", np.array([1e6, nan, 1.5e6, 2e6, 1e6], "f4"))
    head, _, lines = read_chart(charts.encode(charts.Chart(BY_NAME["throttle_power_us"], times, [line], 0, 5000)))
    np.testing.assert_allclose(lines[0], [nan, nan, 25, 25, nan])  # less at the end: it restarted
    assert head["absent"] == ""


def test_one_value_of_a_sum_of_time_is_no_line_and_says_so() -> None:
    nan = float("nan")
    head, _, lines = read_chart(charts.encode(chart("throttle_power_us", {"value": [9e6, nan]})))
    assert np.isnan(lines[0]).all()
    assert head["absent"] == "fewer than two values in this time"


def test_a_chart_without_any_value_is_known_as_such() -> None:
    nan = float("nan")
    found = reply("power_w", {"value": [nan, nan], "peers_p10": [1, 2], "peers_p90": [2, 3]})
    assert charts.nothing_there(charts.lines_of(found, "power_w"))
    empty = charts.Chart(BY_NAME["power_w"], np.empty(0, np.int64), [], 0, 1)
    assert read_chart(charts.encode(empty))[0]["points"] == 0
