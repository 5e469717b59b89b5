"""Read a request of OTLP metrics: protobuf or JSON, gzipped or not, checked before and while it is unpacked. Pure.

The messages are those of open-telemetry/opentelemetry-proto, collector/metrics/v1/metrics_service.proto and
metrics/v1/metrics.proto; JSON is their mapping as https://opentelemetry.io/docs/specs/otlp/ has it. Gzip ends with the
size of what was packed (RFC 1952, 2.3.1), so a request that would unpack to too much is mostly refused unread, and one
that lies about it stops at the limit. Points are read by hand: Protobuf's own objects would take a hundred bytes for
each two of a hostile request. The attributes of a series are the same bytes in each request, and are read once.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from drover_collector.scrape.wire import Budget, WriteError, fields, varint
from drover_core.metrics.prometheus_text import MAX_LABELS, MAX_VALUE

MAX_BODY = 4 << 20  # bytes of a request as it comes; 8,192 points of a Collector's batch are 2 MB, 100 kB with gzip
MAX_PLAIN = 32 << 20  # bytes of it unpacked
MAX_JSON = 4 << 20  # bytes of JSON unpacked: its objects take up to thirty times that
MAX_FIELDS = 1_000_000  # of all messages of a request; a point has some 15
MAX_POINTS = 50_000  # of one request
MAX_ATTRIBUTES_BYTES = 16_384  # of one point
MAX_RESOURCE_BYTES = 65_536  # of one resource
MAX_RESOURCE_LABELS = 512
MAX_UNIT = 63  # characters that are kept of a unit, as an SDK allows; a longer one is none of the conventions'
MAX_UNUSED_NAMES, MAX_NAME = 64, 128  # of metrics that nobody wants: so many are named, in so many characters
MAX_PARTS = 200_000  # resources, scopes, metrics, points and attributes of a request in JSON
MAX_KNOWN = 500_000  # series whose attributes are kept; 1,000 nodes of 8 GPUs have some 376,000
MAX_KNOWN_BYTES = 512 << 20  # of these attributes; Python needs some more for each
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects the format
PIECE = 1 << 20  # bytes that are unpacked at a time
NO_VALUE = 1  # DataPointFlags: the series has ended
ENDED = math.nan  # its value then: absent, as any NaN
CUMULATIVE = 2  # AggregationTemporality
GAUGE, SUM = "gauge", "sum"
# Field of a Metric -> its kind. Of those without a name here no point is used.
KINDS: Mapping[int, str] = {5: GAUGE, 7: SUM, 9: "histogram", 10: "exponential histogram", 11: "summary"}
MALFORMED, VALUELESS = "attributes that are too many, too long, twice or no UTF-8", "without a value"
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Labels = dict[str, str]
_FIXED = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")
_INTEGER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Instrument:
    """`is_cumulative`: a Sum counts since its start, or it is no Sum."""

    name: str
    unit: str
    kind: str
    is_cumulative: bool = True


@dataclass(slots=True)
class Point(Generic[T]):
    """`start`: ns since when a Sum counts; 0: it does not say. `value`: NaN: there is none."""

    series: T
    ts_ms: int
    start: int
    value: float


@dataclass(slots=True)
class Read(Generic[T]):
    """`rejected`: why points are not used -> how many. `unused`: metrics that nobody wants, which are not read;
    `unused_names`: of some of them."""

    points: list[Point[T]] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    unused: int = 0
    unused_names: set[str] = field(default_factory=set)

    def leave_out(self, name: str) -> None:
        """Count a metric that nobody wants."""
        self.unused += 1
        if len(self.unused_names) < MAX_UNUSED_NAMES:
            self.unused_names.add(name[:MAX_NAME])


class Taker(Protocol[T_co]):
    """Says what is used. A text is the reason why something is rejected."""

    def refusal(self, instrument: Instrument) -> str | None:
        """Return why no point of it can be used; "": some can; None: nobody wants it."""
        ...

    def series(self, resource: Mapping[str, str], instrument: Instrument, attributes: Labels) -> T_co | str:
        """Return what points with these attributes are taken for."""
        ...


def unpacked(body: bytes, is_gzip: bool, most: int = MAX_PLAIN) -> bytes:
    """
    Args:
        is_gzip: or zlib's format, which gRPC calls deflate.
    Raises:
        WriteError: too large, as it comes or unpacked, or no gzip.
    """
    if len(body) > MAX_BODY:
        raise WriteError(f"the request has more than {MAX_BODY} bytes")
    if is_gzip:
        body = _gunzipped(body, most)
    if len(body) > most:
        raise WriteError(f"the request has {len(body)} bytes; at most {most} may be")
    return body


def _gunzipped(body: bytes, most: int) -> bytes:
    if not body:
        raise WriteError("the request is not gzip, as it says")
    size = int.from_bytes(body[-4:], "little") if body[:2] == b"\x1f\x8b" else 0  # zlib's own format does not say it
    if size > most:
        raise WriteError(f"the request unpacks to {size} bytes; at most {most} may be")
    stream, parts, total = zlib.decompressobj(GZIP_OR_ZLIB), [], 0
    piece, part = body, b"begin"
    try:
        while not stream.eof and (piece or part):
            part = stream.decompress(piece, PIECE)
            total += len(part)
            if total > most:
                raise WriteError(f"the request unpacks to more than {most} bytes")
            parts.append(part)
            piece = stream.unconsumed_tail
    except zlib.error:
        raise WriteError("the request is not gzip, as it says") from None
    if not stream.eof or stream.unused_data:
        raise WriteError("the request's gzip is cut off, or is more than one")
    return b"".join(parts)


@dataclass(slots=True)
class _Resource(Generic[T]):
    """`labels`: None: it cannot be read, so none of its points is used."""

    labels: Labels | None
    known: dict[tuple[Instrument, bytes], T | str] = field(default_factory=dict)


class KnownSeries(Generic[T]):
    """What series are taken for, by the bytes that name them; bounded, and kept from request to request."""

    def __init__(self, taker: Taker[T]) -> None:
        self.taker = taker
        self._resources: dict[bytes, _Resource[T]] = {}
        self._count = self._bytes = 0

    def forget(self) -> None:
        """Ask again what each series is taken for."""
        self._resources.clear()
        self._count = self._bytes = 0

    def resource(self, key: bytes, labels_of: Callable[[], Labels | None]) -> _Resource[T]:
        if len(key) > MAX_RESOURCE_BYTES:
            return _Resource(None)
        found = self._resources.get(key)
        if found is None:
            self._make_room()
            found = self._resources[key] = _Resource(labels_of())
            self._count, self._bytes = self._count + 1, self._bytes + 2 * len(key)
        return found

    def series(
        self, resource: _Resource[T], instrument: Instrument, key: bytes, labels_of: Callable[[], Labels | None]
    ) -> T | str:
        if len(key) > MAX_ATTRIBUTES_BYTES:
            return MALFORMED
        at = instrument, key
        found = resource.known.get(at)
        if found is None:
            labels = labels_of()
            if labels is None or resource.labels is None:
                found = MALFORMED
            else:
                found = self.taker.series(resource.labels, instrument, labels)
            self._make_room()  # what is forgotten meanwhile is found again by the next request
            resource.known[at] = found
            self._count, self._bytes = self._count + 1, self._bytes + 2 * len(key) + 128
        return found

    def _make_room(self) -> None:
        if self._count >= MAX_KNOWN or self._bytes >= MAX_KNOWN_BYTES:
            self.forget()


class Reader(Generic[T]):
    """Reads requests in protobuf, one after the other."""

    def __init__(self, known: KnownSeries[T]) -> None:
        self._known = known

    def read(self, plain: bytes) -> Read[T]:
        """
        Raises:
            WriteError: it is no ExportMetricsServiceRequest, or too much.
        """
        request = _Request(plain, self._known)
        for tag, _, at, stop in fields(plain, 0, len(plain), request.budget):
            if tag == 0x0A:
                request.resource_metrics(at, stop)
        return request.found


class _Request(Generic[T]):
    def __init__(self, plain: bytes, known: KnownSeries[T]) -> None:
        self._plain, self._known = plain, known
        self.budget = Budget(MAX_FIELDS)
        self.found: Read[T] = Read()
        self._room = MAX_POINTS

    def resource_metrics(self, at: int, end: int) -> None:
        resource, scopes = b"", []
        for tag, _, begin, stop in fields(self._plain, at, end, self.budget):
            if tag == 0x0A:
                resource = self._plain[begin:stop]
            elif tag == 0x12:
                scopes.append((begin, stop))
        held = self._known.resource(resource, lambda: attributes_of(resource, 0x0A, MAX_RESOURCE_LABELS, self.budget))
        for begin, stop in scopes:
            for tag, _, inner, inner_stop in fields(self._plain, begin, stop, self.budget):
                if tag == 0x12:
                    self._metric(held, inner, inner_stop)

    def _metric(self, resource: _Resource[T], at: int, end: int) -> None:
        instrument, data = self._instrument(at, end)
        if self._known.taker.refusal(instrument) is None:  # nobody wants this name: its points are not read
            self.found.leave_out(instrument.name)
            return
        points, temporality = [], 0
        for tag, _, begin, stop in fields(self._plain, *data, self.budget):
            if tag == 0x0A:
                points.append((begin, stop))
            elif tag == 0x10:
                temporality, _ = varint(self._plain, begin, stop)
        self._take_room(len(points))
        if instrument.kind == SUM and temporality != CUMULATIVE:
            instrument = replace(instrument, is_cumulative=False)
        if why := self._known.taker.refusal(instrument):
            if points:
                self.found.rejected[why] += len(points)
            return
        for begin, stop in points:
            self._point(resource, instrument, begin, stop)

    def _instrument(self, at: int, end: int) -> tuple[Instrument, tuple[int, int]]:
        """Return a metric's instrument, and where its data begins and ends."""
        name = unit = b""
        kind, data = "", (0, 0)
        for tag, _, begin, stop in fields(self._plain, at, end, self.budget):
            if tag == 0x0A:
                name = self._plain[begin:stop]
            elif tag == 0x1A:
                unit = self._plain[begin:stop]
            elif tag & 7 == 2 and tag >> 3 in KINDS:
                kind, data = KINDS[tag >> 3], (begin, stop)
        try:
            return Instrument(name.decode(), unit.decode()[:MAX_UNIT], kind), data
        except UnicodeDecodeError:
            raise WriteError("the name or unit of a metric is not UTF-8") from None

    def _take_room(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise WriteError(f"the request has more than {MAX_POINTS} points; set send_batch_max_size lower")

    def _point(self, resource: _Resource[T], instrument: Instrument, at: int, end: int) -> None:
        plain, parts = self._plain, []
        ts = start = flags = 0
        value: float | None = None
        for tag, whole, begin, stop in fields(self._plain, at, end, self.budget):
            if tag == 0x3A:
                parts.append(plain[whole:stop])
            elif tag == 0x19:
                (ts,) = _FIXED.unpack_from(plain, begin)
            elif tag == 0x11:
                (start,) = _FIXED.unpack_from(plain, begin)
            elif tag == 0x21:
                (value,) = _DOUBLE.unpack_from(plain, begin)
            elif tag == 0x31:
                (number,) = _INTEGER.unpack_from(plain, begin)
                value = float(number)
            elif tag == 0x40:
                flags, _ = varint(plain, begin, stop)
        key = b"".join(parts)
        series = self._known.series(
            resource, instrument, key, lambda: attributes_of(key, 0x3A, MAX_LABELS, self.budget)
        )  # fmt: skip
        add_point(self.found, series, instrument, (ts, start), ENDED if flags & NO_VALUE else value)


def add_point(
    found: Read[T], series: T | str, instrument: Instrument, times: tuple[int, int], value: float | None
) -> None:
    """Add a point, or why it is not used.

    Args:
        times: its own and that since when it counts, in ns.
        value: None: it has none, and does not say that it has ended, which ENDED says.
    """
    if isinstance(series, str):
        found.rejected[series] += 1
    elif value is None:
        found.rejected[VALUELESS] += 1
    else:
        start = times[1] if instrument.kind == SUM else 0
        found.points.append(Point(series, times[0] // 1_000_000, start, value))


def attributes_of(data: bytes, wanted: int, most: int, budget: Budget) -> Labels | None:
    """Return the attributes that are KeyValues with the tag `wanted`; None: too many, too long, twice or no UTF-8.

    Arrays, lists of attributes and bytes name no series: they are left out, and not looked into.

    Raises:
        WriteError: it is cut off.
    """
    found: Labels = {}
    count = 0
    try:
        for tag, _, at, stop in fields(data, 0, len(data), budget):
            if tag != wanted:
                continue
            count += 1
            name, value = _key_value(data, at, stop, budget)
            if count > most or name in found or max(len(name), len(value or "")) > MAX_VALUE:
                return None
            if value is not None and name:
                found[name] = value
    except UnicodeDecodeError:
        return None
    return found


def _key_value(data: bytes, at: int, end: int, budget: Budget) -> tuple[str, str | None]:
    name, value = b"", None
    for tag, _, begin, stop in fields(data, at, end, budget):
        if tag == 0x0A:
            name = data[begin:stop]
        elif tag == 0x12:
            value = _any_value(data, begin, stop, budget)
    return name.decode(), value


def _any_value(data: bytes, at: int, end: int, budget: Budget) -> str | None:
    """Return a value as text; None: it is no text, number or truth."""
    found: str | None = None
    for tag, _, begin, stop in fields(data, at, end, budget):
        if tag == 0x0A:
            found = data[begin:stop].decode()
        elif tag == 0x10:
            found = "true" if varint(data, begin, stop)[0] else "false"
        elif tag == 0x18:
            number, _ = varint(data, begin, stop)
            found = str(number - ((number >> 63) << 64))
        elif tag == 0x21:
            found = repr(_DOUBLE.unpack_from(data, begin)[0])
    return found
