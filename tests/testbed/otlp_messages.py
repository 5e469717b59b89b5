"""Requests of OTLP metrics, made by opentelemetry-proto itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

DELTA, CUMULATIVE = 1, 2
Value = str | int | float | bool


@dataclass(frozen=True)
class Points:
    """Points of one metric. `values`: (attributes, value); None: a point that says that its series has ended."""

    name: str
    values: Sequence[tuple[Mapping[str, Value], float | int | None]]
    unit: str = ""
    kind: str = "gauge"
    temporality: int = CUMULATIVE
    ts_ms: int = 0  # 0: that of the request
    start_ns: int = 0
    resource: Mapping[str, Value] = field(default_factory=dict)


def any_value(value: Value) -> AnyValue:
    found = AnyValue()
    setattr(
        found, {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}[type(value)], value
    )
    return found


def key_values(values: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=name, value=any_value(value)) for name, value in values.items()]


def request(points: Iterable[Points], ts_ms: int, resource: Mapping[str, Value]) -> ExportMetricsServiceRequest:
    """Return a request; each metric has a resource of its own where it names one."""
    found = ExportMetricsServiceRequest()
    made: dict[tuple[tuple[str, Value], ...], Any] = {}
    for each in points:
        attributes = each.resource or resource
        key = tuple(attributes.items())
        if key not in made:
            of = found.resource_metrics.add()
            of.resource.attributes.extend(key_values(attributes))
            made[key] = of.scope_metrics.add()
        metric = made[key].metrics.add(name=each.name, unit=each.unit, description="of a test")
        data = getattr(metric, each.kind)
        if each.kind == "sum":
            data.aggregation_temporality, data.is_monotonic = each.temporality, True
        for labels, value in each.values:
            point = data.data_points.add(time_unix_nano=(each.ts_ms or ts_ms) * 1_000_000)
            point.attributes.extend(key_values(labels))
            if each.kind in ("gauge", "sum"):
                point.start_time_unix_nano = each.start_ns
                if value is None:
                    point.flags = 1
                elif isinstance(value, int):
                    point.as_int = value
                else:
                    point.as_double = value
    return found


def as_json(message: ExportMetricsServiceRequest) -> bytes:
    """Return OTLP's JSON: enums are numbers there, in which it differs from protobuf's own mapping."""
    return json.dumps(json_format.MessageToDict(message, use_integers_for_enums=True)).encode()
