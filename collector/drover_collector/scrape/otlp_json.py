"""Read a request of OTLP metrics in JSON: the mapping of https://opentelemetry.io/docs/specs/otlp/. Pure.

Names are in lowerCamelCase, enums are numbers, and numbers of 64 bits may be texts. What has an unknown name is left
out. A NaN is the text "NaN", and null is a field that is not there, as protobuf's mapping has it
(https://protobuf.dev/programming-guides/json/).
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from drover_collector.scrape.otlp import (
    CUMULATIVE,
    ENDED,
    GAUGE,
    MAX_PARTS,
    MAX_RESOURCE_LABELS,
    MAX_UNIT,
    NO_VALUE,
    SUM,
    Instrument,
    KnownSeries,
    Labels,
    Read,
    add_point,
)
from drover_collector.scrape.wire import Budget, WriteError
from drover_core.metrics.prometheus_text import MAX_LABELS, MAX_VALUE

T = TypeVar("T")
KINDS = (GAUGE, SUM, "histogram", "exponentialHistogram", "summary")
# The name of the enum is none of OTLP's forms. Protobuf's own printer writes it, and a Collector takes it.
_CUMULATIVE = (CUMULATIVE, "AGGREGATION_TEMPORALITY_CUMULATIVE")
_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class JsonReader(Generic[T]):
    """Reads requests in JSON, one after the other."""

    def __init__(self, known: KnownSeries[T]) -> None:
        self._known = known

    def read(self, plain: bytes) -> Read[T]:
        """
        Raises:
            WriteError: it is no ExportMetricsServiceRequest, or too much.
        """
        try:
            return self._read(json.loads(plain, parse_constant=_no_constant))
        except WriteError:
            raise
        except (ValueError, RecursionError):
            raise WriteError("the request is not JSON, or nested too deeply") from None

    def _read(self, request: Any) -> Read[T]:
        found: Read[T] = Read()
        budget = Budget(MAX_PARTS)
        if _object(request) and "resourceMetrics" not in request:
            raise WriteError("the request has no resourceMetrics; OTLP's names are in lowerCamelCase")
        for each in _list(request, "resourceMetrics", budget):
            attributes = _list(_member(_object(each), "resource"), "attributes", budget)
            resource = self._known.resource(_key(attributes), partial(_labels, attributes, MAX_RESOURCE_LABELS))
            for scope in _list(each, "scopeMetrics", budget):
                for metric in _list(_object(scope), "metrics", budget):
                    self._metric(found, resource, _object(metric), budget)
        return found

    def _metric(self, found: Read[T], resource: Any, metric: dict[str, Any], budget: Budget) -> None:
        kind = next((each for each in KINDS if metric.get(each) is not None), "")
        data = _member(metric, kind)
        is_cumulative = kind != SUM or data.get("aggregationTemporality") in _CUMULATIVE
        instrument = Instrument(_text(metric, "name"), _text(metric, "unit")[:MAX_UNIT], kind, is_cumulative)
        why = self._known.taker.refusal(instrument)
        if why is None:
            found.leave_out(instrument.name)
            return
        points = _list(data, "dataPoints", budget)
        if why:
            if points:
                found.rejected[why] += len(points)
            return
        for point in points:
            attributes = _list(_object(point), "attributes", budget)
            series = self._known.series(
                resource, instrument, _key(attributes), partial(_labels, attributes, MAX_LABELS)
            )  # fmt: skip
            self._point(found, series, instrument, point)

    @staticmethod
    def _point(found: Read[T], series: T | str, instrument: Instrument, point: dict[str, Any]) -> None:
        value = _number(point.get("asInt") if point.get("asDouble") is None else point["asDouble"])
        if _integer(point, "flags") & NO_VALUE:
            value = ENDED
        times = _integer(point, "timeUnixNano"), _integer(point, "startTimeUnixNano")
        add_point(found, series, instrument, times, value)


def _no_constant(_: str) -> NoReturn:
    raise ValueError("JSON has no such constant")


def _key(attributes: list[Any]) -> bytes:
    return b"json" + json.dumps(attributes, separators=(",", ":")).encode()


def _labels(attributes: list[Any], most: int) -> Labels | None:
    """Return attributes; None: too many, too long or twice. Arrays, lists of attributes and bytes are left out."""
    found: Labels = {}
    if len(attributes) > most:
        return None
    for each in attributes:
        name, value = _text(_object(each), "key"), _any_value(_member(each, "value"))
        if name in found or max(len(name), len(value or "")) > MAX_VALUE:
            return None
        if name and value is not None:
            found[name] = value
    return found


def _any_value(value: dict[str, Any]) -> str | None:
    value = {name: given for name, given in value.items() if given is not None}
    if "stringValue" in value:
        return _text(value, "stringValue")
    if "boolValue" in value:
        return "true" if value["boolValue"] is True else "false"
    if "intValue" in value:
        return str(_integer(value, "intValue"))
    if "doubleValue" in value:
        return repr(_number(value["doubleValue"]))
    return None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WriteError("the request's JSON has something else where an object is expected")
    return value


def _member(of: dict[str, Any], name: str) -> dict[str, Any]:
    value = of.get(name)
    return {} if value is None else _object(value)


def _list(of: dict[str, Any], name: str, budget: Budget) -> list[Any]:
    value = of.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise WriteError(f"the request's JSON has something else where {name} lists")
    budget.spend(len(value))
    return value


def _text(of: dict[str, Any], name: str) -> str:
    value = of.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise WriteError(f"the request's JSON has something else where {name} is a text")
    return value


def _integer(of: dict[str, Any], name: str) -> int:
    value = of.get(name)
    if value is None:
        return 0
    if isinstance(value, str) and len(value) <= 20 and value.removeprefix("-").isdecimal() and value.isascii():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise WriteError(f"the request's JSON has something else where {name} is a whole number")
    return value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value in _NUMBERS:
            return _NUMBERS[value]
        try:
            return float(value) if len(value) <= 40 else _no_number()
        except ValueError:
            _no_number()
    if isinstance(value, bool) or not isinstance(value, int | float):
        _no_number()
    try:
        return float(value)
    except OverflowError:
        _no_number()


def _no_number() -> NoReturn:
    raise WriteError("the request's JSON has something else where a number is expected")
