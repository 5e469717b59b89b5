"""OTLP in, from someone who means harm: each request is answered, none takes seconds, and nothing is kept of it."""

from __future__ import annotations

import gzip
import json
import random
import struct
import time
import zlib
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from drover_collector.scrape import otlp, otlp_json
from drover_collector.scrape.otlp import MALFORMED, MAX_BODY, MAX_JSON, MAX_PLAIN, VALUELESS, unpacked
from drover_collector.scrape.otlp_in import Form, OtlpTaker
from drover_collector.scrape.received import Received
from drover_collector.scrape.settings import OtlpInConfig
from drover_collector.scrape.wire import WriteError
from testbed.fleets import T0
from testbed.otlp_messages import Points, as_json, key_values, request

LABELS = {"gpu": "0", "UUID": "GPU-1"}
TARGET = {"service.instance.id": "n0:9400"}
JSON = Form(is_json=True)
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
SLOW_S = 40.0  # each takes well under a second, also on a slow machine


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def taker(received: Received) -> OtlpTaker:
    return OtlpTaker(OtlpInConfig(True), received)


def one(value: float = 50.0) -> ExportMetricsServiceRequest:
    return request([Points(TEMPERATURE, [(LABELS, value)])], T0, TARGET)


def point_of(message: ExportMetricsServiceRequest) -> Any:
    return message.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0]


def sent(taker: OtlpTaker, body: bytes, form: Form = Form()) -> tuple[int, str, int]:  # noqa: B008  # frozen
    begin_s = time.process_time()
    answer = taker.take(body, form, T0, 0.0)
    assert time.process_time() - begin_s < SLOW_S
    return answer.status, answer.text, answer.rejected


# ---- bombs


def bomb(size: int, claims: int | None = None) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()
    return data if claims is None else data[:-4] + struct.pack("<I", claims)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (bomb(64 << 20), "unpacks to 67108864 bytes"),  # it says so: unread
        (bomb(64 << 20, 1000), f"unpacks to more than {MAX_PLAIN} bytes"),  # it lies
        (zlib.compress(bytes(64 << 20)), f"unpacks to more than {MAX_PLAIN} bytes"),  # gRPC's deflate does not say it
        (gzip.compress(b"", mtime=0) * 1000, "more than one"),
        (gzip.compress(bytes(1000), mtime=0)[:-9], "cut off"),
        (gzip.compress(bytes(1000), mtime=0)[:-4] + bytes(4), "not gzip"),
        (b"\x1f\x8b" + b"\xff" * 60, "gzip|unpacks"),
        (b"no gzip, but long enough for it", "not gzip"),
        (b"", "not gzip"),
        (bytes(MAX_BODY + 1), f"more than {MAX_BODY} bytes"),
    ],
    ids=["says it", "lies", "deflate", "many", "cut", "wrong length", "no stream", "text", "empty", "too long"],
)
def test_what_would_unpack_to_too_much_stops_at_the_limit(body: bytes, why: str) -> None:
    with pytest.raises(WriteError, match=why):
        unpacked(body, True)


def test_json_is_bounded_closer_since_its_objects_take_more(taker: OtlpTaker) -> None:
    body = b'{"resourceMetrics":[' + b"{}," * (MAX_JSON // 3) + b"{}]}"
    status, text, _ = sent(taker, gzip.compress(body), Form(True, True))
    assert (status, f"at most {MAX_JSON}" in text) == (400, True)


# ---- many of each


def nested(depth: int) -> AnyValue:
    value = AnyValue(string_value="x")
    for _ in range(depth):
        value = AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key="k", value=value)]))
    return value


def test_ten_thousand_attributes_make_a_point_unused_and_spoil_no_other(taker: OtlpTaker, received: Received) -> None:
    message = one()
    bad = message.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points.add(time_unix_nano=T0 * 10**6)
    bad.as_double = 1.0
    bad.attributes.extend(key_values({f"a{n}": n for n in range(10_000)}))
    assert sent(taker, message.SerializeToString()) == (200, f"1 points {MALFORMED}", 1)
    many = one()
    many.resource_metrics[0].resource.attributes.extend(key_values({f"a{n}": n for n in range(10_000)}))
    assert sent(taker, many.SerializeToString()) == (200, f"1 points {MALFORMED}", 1)
    assert sent(taker, as_json(many), Form(is_json=True))[2] == 1
    ((made,),) = [list(received.rounds(3.0, {}))]
    assert list(made.found.gpus.values()) == [{"gpu_temp_c": 50.0}]


@pytest.mark.parametrize(
    "attributes",
    [
        key_values({**LABELS, "long": "x" * 5000}),
        [*key_values(LABELS), *key_values({"gpu": "1"})],  # twice
        key_values({**LABELS, **{f"a{n}": n for n in range(63)}}),
    ],
    ids=["long", "twice", "many"],
)
def test_attributes_past_a_limit_make_a_point_unused(taker: OtlpTaker, attributes: list[KeyValue]) -> None:
    message = one()
    del point_of(message).attributes[:]
    point_of(message).attributes.extend(attributes)
    expected = (200, f"1 points {MALFORMED}", 1)
    assert sent(taker, message.SerializeToString()) == expected
    assert sent(taker, as_json(message), Form(is_json=True)) == expected


def test_lists_of_attributes_are_left_out_and_not_looked_into(taker: OtlpTaker, received: Received) -> None:
    message = one()
    point_of(message).attributes.extend([
        KeyValue(key="deep", value=nested(20)),
        KeyValue(key="list", value=AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1)] * 1000))),
        KeyValue(key="bytes", value=AnyValue(bytes_value=b"\xff")),
    ])  # fmt: skip
    assert sent(taker, message.SerializeToString()) == (200, "", 0)
    ((made,),) = [list(received.rounds(3.0, {}))]
    assert len(made.found.gpus) == 1
    deep = b'{"resourceMetrics":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert sent(taker, deep, Form(is_json=True))[0] == 400


def test_a_huge_histogram_is_not_read_and_one_of_a_wanted_name_is_counted(taker: OtlpTaker) -> None:
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    resource.resource.attributes.extend(key_values(TARGET))
    for name in ("http.server.request.duration", TEMPERATURE):
        metric = resource.scope_metrics.add().metrics.add(name=name)
        point = metric.histogram.data_points.add(time_unix_nano=T0 * 10**6, count=1)
        point.bucket_counts.extend(range(500_000))
    assert len(message.SerializeToString()) > MAX_BODY
    status, _, rejected = sent(taker, gzip.compress(message.SerializeToString(), 1), Form(is_gzip=True))
    assert (status, rejected) == (200, 1)


@pytest.mark.parametrize("field", [b"\x0a\x00", b"\x18\x00"], ids=["resources", "numbers"])
def test_many_empty_messages_end_at_the_limit_of_fields(
    taker: OtlpTaker, monkeypatch: pytest.MonkeyPatch, field: bytes
) -> None:
    monkeypatch.setattr(otlp, "MAX_FIELDS", 50_000)
    assert sent(taker, field * 50_000)[0] == 200
    status, text, _ = sent(taker, field * 50_001)
    assert (status, "more than 50000 fields" in text) == (400, True)


def test_many_resources_full_of_empty_attributes_share_the_limit_of_fields(
    taker: OtlpTaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MAX_FIELDS", 50_000)
    inner = b"\x0a\x02\x0a\x00" * 500  # KeyValues with an empty key
    resources = b""
    for number in range(50):
        body = inner + b"\x10" + bytes((number % 128,)) + b"\x18" + bytes((number // 128,))  # each is another
        resource = b"\x0a" + _varint(len(body)) + body
        resources += b"\x0a" + _varint(len(resource)) + resource
    assert sent(taker, resources)[0] == 400


@pytest.mark.parametrize(
    "piece", [b"{}", b'{"resource":{"attributes":[' + b"{}," * 500 + b"{}]}}"], ids=["empty", "full"]
)
def test_many_empty_objects_of_json_end_at_the_limit_of_parts(
    taker: OtlpTaker, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(otlp_json, "MAX_PARTS", 20_000)
    body = b'{"resourceMetrics":[' + b",".join([piece] * (200_000 // len(piece))) + b"]}"
    status, text, _ = sent(taker, body, Form(is_json=True))
    assert (status, "more than 20000 fields" in text) == (400, True)


def test_too_many_points_are_refused_whole(taker: OtlpTaker) -> None:
    message = one()
    point_of(message)
    gauge = message.resource_metrics[0].scope_metrics[0].metrics[0].gauge
    plain = gauge.SerializeToString() * 50_001
    metric = b"\x0a" + bytes((len(TEMPERATURE),)) + TEMPERATURE.encode() + b"\x2a" + _varint(len(plain)) + plain
    scope = b"\x12" + _varint(len(metric)) + metric
    resource = b"\x12" + _varint(len(scope)) + scope
    status, text, _ = sent(taker, b"\x0a" + _varint(len(resource)) + resource)
    assert (status, "more than 50000 points" in text) == (400, True)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def test_what_is_kept_of_series_is_limited(taker: OtlpTaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_KNOWN_BYTES", 100_000)
    for number in range(100):
        labels = {"gpu": "0", "UUID": f"GPU-{number}", "l": "x" * 4000}
        sent(taker, request([Points(TEMPERATURE, [(labels, 1.0)])], T0, TARGET).SerializeToString())
    kept = sum(len(key) for of in taker._known._resources.values() for _, key in of.known)
    assert 0 < kept <= 105_000


def test_what_is_too_long_is_not_kept(taker: OtlpTaker) -> None:
    message = one()
    point_of(message).attributes.extend(key_values({"long": "x" * 20_000}))
    message.resource_metrics[0].scope_metrics[0].metrics[0].unit = "u" * 100_000
    assert sent(taker, message.SerializeToString())[2] == 1
    assert sent(taker, as_json(message), Form(is_json=True))[2] == 1
    long = one()
    long.resource_metrics[0].resource.attributes.extend(key_values({"long": "x" * 70_000}))
    assert sent(taker, long.SerializeToString())[2] == 1
    kept = taker._known._resources
    assert sum(len(key) for key in kept) < 200
    assert not any(of.known for of in kept.values())


def test_nodes_that_are_made_up_are_limited(
    taker: OtlpTaker, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.scrape.received.MAX_TARGETS", 10)
    points = [Points(TEMPERATURE, [(LABELS, 1.0)], resource={"host.name": f"n{n}"}) for n in range(20)]
    _, _, rejected = sent(taker, request(points, T0, TARGET).SerializeToString())
    assert (len(received.nodes), rejected) == (10, 10)
    sources = [Points(TEMPERATURE, [(LABELS, 1.0)], resource={"node": "n0", "instance": f"i{n}"}) for n in range(20)]
    sent(taker, request(sources, T0, TARGET).SerializeToString())
    assert len(received.nodes["n0"].sources) == 8


# ---- wrong types


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "7", '"x"', "{", '{"resourceMetrics":{}}', '{"resourceMetrics":[1]}',
        '{"resourceMetrics":[{"resource":[]}]}', '{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":7}]}]}]}',
        '{"resourceMetrics":[{"resource":{"attributes":[{"key":"node","value":"n0"}]}}]}',
        '{"resourceMetrics":[{"resource":{"attributes":[{"key":"node","value":{"intValue":"x"}}]}}]}',
        '{"resourceMetrics":[{"resource":{"attributes":[{"key":"node","value":{"intValue":' + "9" * 5000 + "}}]}}]}",
    ],
)  # fmt: skip
def test_json_of_another_form_is_refused(taker: OtlpTaker, text: str) -> None:
    assert sent(taker, text.encode(), Form(is_json=True))[0] == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("asDouble", True), ("asDouble", []), ("asDouble", "0x10"), ("asDouble", "1" * 50),
        ("timeUnixNano", 1.5), ("timeUnixNano", "-"), ("timeUnixNano", 2**64), ("flags", "a"), ("attributes", {}),
        ("attributes", [{"key": "\ud800", "value": {"stringValue": "x"}}]),
    ],
)  # fmt: skip
def test_a_point_of_wrong_types_is_refused(taker: OtlpTaker, received: Received, name: str, value: object) -> None:
    message = json.loads(as_json(one()))
    message["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"][0][name] = value
    assert sent(taker, json.dumps(message).encode(), Form(is_json=True))[0] == 400
    assert not list(received.rounds(3.0, {}))


def test_null_is_an_absent_field_and_an_enum_may_be_its_name(taker: OtlpTaker, received: Received) -> None:
    """protobuf.dev/programming-guides/json: null is any field's default; a Collector's receiver takes enums' names."""
    name = "node_disk_read_bytes_total"
    text = as_json(request([Points(name, [({"device": "sda"}, 1.0)], kind="sum")], T0, TARGET)).decode()
    message = json.loads(text.replace('"aggregationTemporality": 2', '"aggregationTemporality": null'))
    message["resourceMetrics"].append({"resource": None, "scopeMetrics": None, "schemaUrl": None})
    metrics = message["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    metrics[0] |= {"gauge": None, "unit": None, "description": None}
    data = metrics[0]["sum"]
    data["dataPoints"][0] |= {"flags": None, "startTimeUnixNano": None, "asInt": None}
    data["dataPoints"][0]["attributes"].append({"key": "empty", "value": None})
    data["dataPoints"][0]["attributes"].append({"key": "bare", "value": {"doubleValue": None}})
    for value, rejected in ((None, 1), ("AGGREGATION_TEMPORALITY_DELTA", 1), ("AGGREGATION_TEMPORALITY_CUMULATIVE", 0)):
        data["aggregationTemporality"] = value
        status, _, count = sent(taker, json.dumps(message).encode(), Form(is_json=True))
        assert (status, count) == (200, rejected)
    [source] = received.nodes["n0"].sources.values()
    [page] = source.pages.values()
    assert page.samples == {name: [({"device": "sda"}, 1.0)]}


def test_a_request_in_protobufs_own_names_is_not_answered_as_taken(taker: OtlpTaker) -> None:
    """OTLP forbids them, so all would be an unknown field: its sender would never learn that nothing is used."""
    status, text, _ = sent(taker, json_format.MessageToJson(one(), preserving_proto_field_name=True).encode(), JSON)
    assert status == 400 and "resourceMetrics" in text
    assert sent(taker, b"{}", JSON) == (200, "", 0)


def test_a_metric_without_points_is_no_rejection(taker: OtlpTaker, received: Received) -> None:
    empty = request([Points(TEMPERATURE, [], kind="histogram")], T0, TARGET)
    for body, form in ((empty.SerializeToString(), Form()), (as_json(empty), JSON)):
        assert sent(taker, body, form)[1:] == ("", 0)
    assert not received.left_out


def test_numbers_may_be_texts_and_no_value_is_no_zero(taker: OtlpTaker, received: Received) -> None:
    message = json.loads(as_json(one()))
    point = message["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"][0]
    del point["asDouble"]
    expected = (200, f"1 points {VALUELESS}", 1)
    assert sent(taker, json.dumps(message).encode(), Form(is_json=True)) == expected
    bare = one()
    point_of(bare).ClearField("as_double")
    assert sent(taker, bare.SerializeToString()) == expected
    for text in ("NaN", "-Infinity", float("nan")):
        point["asDouble"] = text
        status, _, _ = sent(taker, json.dumps(message).encode(), Form(is_json=True))
        assert status == (400 if isinstance(text, float) else 200)  # JSON has no NaN of its own
    point["asDouble"], point["asInt"] = None, "52"
    del point["asDouble"]
    assert sent(taker, json.dumps(message).encode(), Form(is_json=True)) == (200, "", 0)
    ((made,),) = [list(received.rounds(3.0, {}))]
    assert list(made.found.gpus.values()) == [{"gpu_temp_c": 52.0}]


def test_no_bytes_make_the_reader_fail_otherwise(taker: OtlpTaker) -> None:
    rng = random.Random(7)
    message = request(
        [Points(TEMPERATURE, [(LABELS, 1.0)] * 3), Points("hw.errors", [({"hw.id": "0"}, 1)], "{error}", "sum")],
        T0, TARGET,
    )  # fmt: skip
    for good, form in ((message.SerializeToString(), Form()), (as_json(message), Form(is_json=True))):
        answers = set()
        for number in range(800):
            data = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            end = rng.randrange(len(data) + 1) if number % 2 else len(data)
            answers.add(taker.take(bytes(data[:end]), form, T0, 0.0).status)
        assert answers == {200, 400}
