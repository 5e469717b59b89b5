"""Read a request of Prometheus remote_write 1.0: snappy-compressed protobuf, checked before it is unpacked. Pure.

The rules are those of https://prometheus.io/docs/specs/prw/remote_write_spec/, the messages those of
prometheus/prometheus, prompb/remote.proto (WriteRequest) and prompb/types.proto. Snappy's block format begins with the
size of what was packed (google/snappy, format_description.txt), so a request that would unpack to too much is refused
unread. Protobuf's own objects would take a hundred bytes for each two of a hostile request, so it is read by hand; the
labels of a series are the same bytes in each request, and are read once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from drover_collector.scrape.wire import WriteError, skip, varint
from drover_core.metrics.prometheus_text import MAX_LABELS, MAX_VALUE

MAX_BODY = 4 << 20  # bytes of a request as it comes; Prometheus sends 2,000 samples, some 100 kB
MAX_PLAIN = 32 << 20  # bytes of it unpacked
MAX_SERIES = 20_000  # of one request
MAX_POINTS = 100_000  # of one request
MAX_OTHERS = 20_000  # fields of a request that are no series, as metadata; an empty one has two bytes
MAX_SAMPLES = 64  # of one series in one request, with exemplars and histograms
MAX_POINT_BYTES = 64  # of one sample, which has 20
MAX_LABEL_FIELDS = 4  # of one label, which has two
MAX_LABEL_BYTES = 16_384  # of one series
MAX_KNOWN = 1_000_000  # series whose labels are kept; 1,000 nodes of 8 GPUs have 376,000
MAX_KNOWN_BYTES = 512 << 20  # of these labels; Python needs some more for each
STALE_BITS = 0x7FF0000000000002  # value.StaleNaN of prometheus/prometheus, model/value/value.go
T = TypeVar("T")
_SAMPLE = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Point:
    """`ended`: no value, but the mark that the series has ended."""

    ts_ms: int
    value: float
    ended: bool = False


def unpack(body: bytes) -> bytes:
    """
    Raises:
        WriteError: too large, as it comes or unpacked, or no snappy.
    """
    import pyarrow  # 60 MB, which a collector that takes no remote_write does not need in this process

    if len(body) > MAX_BODY:
        raise WriteError(f"the request has more than {MAX_BODY} bytes")
    size, _ = varint(body, 0, min(len(body), 5))
    if size > MAX_PLAIN:
        raise WriteError(f"the request unpacks to {size} bytes; at most {MAX_PLAIN} may be")
    try:
        plain: bytes = pyarrow.decompress(body, decompressed_size=size, codec="snappy", asbytes=True) if size else b""
    except (OSError, ValueError):
        raise WriteError("the request is not snappy's block format") from None
    if len(plain) != size:
        raise WriteError("the request unpacks to another size than it says")
    return plain


class Reader(Generic[T]):
    """Reads requests. `of_labels`: what a series is taken for by its labels; None: it is not used, and not kept."""

    def __init__(self, of_labels: Callable[[dict[str, str]], T | None]) -> None:
        self._of_labels = of_labels
        self._known: dict[bytes, T | None] = {}
        self._known_bytes = 0
        self.unused = 0  # series of requests that were not used, since the start

    def forget(self) -> None:
        """Ask again what each series is taken for."""
        self._known.clear()
        self._known_bytes = 0

    def read(self, plain: bytes) -> list[tuple[T, list[Point]]]:
        """Return the used series of a request, with their points in its order.

        Raises:
            WriteError: it is no WriteRequest, or too much.
        """
        found: list[tuple[T, list[Point]]] = []
        count, others, room, at, end = 0, 0, MAX_POINTS, 0, len(plain)
        while at < end:
            tag, at = varint(plain, at, end)
            if tag != 0x0A:  # metadata and what may come later
                others += 1
                if others > MAX_OTHERS:
                    raise WriteError(f"the request has more than {MAX_OTHERS} fields that are no series")
                at = skip(plain, at, end, tag)
                continue
            size, at = varint(plain, at, end)
            if at + size > end:
                raise WriteError("the request is cut off")
            count += 1
            if count > MAX_SERIES:
                raise WriteError(f"the request has more than {MAX_SERIES} series; set max_samples_per_send lower")
            series, points = self._series(plain, at, at + size)
            at += size
            room -= len(points)
            if room < 0:
                raise WriteError(f"the request has more than {MAX_POINTS} samples; set max_samples_per_send lower")
            if series is not None:
                found.append((series, points))
        return found

    def _series(self, plain: bytes, start: int, end: int) -> tuple[T | None, list[Point]]:
        at = start
        while at < end and plain[at] == 0x0A:
            size, at = varint(plain, at + 1, end)
            at += size
        if at > end or at - start > MAX_LABEL_BYTES:
            raise WriteError(f"a series is cut off, or has more than {MAX_LABEL_BYTES} bytes of labels")
        key = plain[start:at]
        if key in self._known:
            series = self._known[key]
        else:
            if len(self._known) >= MAX_KNOWN or self._known_bytes >= MAX_KNOWN_BYTES:
                self.forget()
            series = self._known[key] = self._of_labels(labels_of(key))
            self._known_bytes += len(key) if series is None else 2 * len(key)  # its labels are kept as text too
        if series is None:
            self.unused += 1
            return None, []
        return series, _points(plain, at, end)


def labels_of(data: bytes) -> dict[str, str]:
    """
    Raises:
        WriteError: too many, too long, twice, no UTF-8, or without a name.
    """
    found: dict[str, str] = {}
    at, end = 0, len(data)
    while at < end:
        size, at = varint(data, at + 1, end)
        texts, fields, stop = {1: "", 2: ""}, 0, at + size
        while at < stop:
            fields += 1
            if fields > MAX_LABEL_FIELDS:
                raise WriteError("a label has more than a name and a value")
            tag, at = varint(data, at, stop)
            if tag not in (0x0A, 0x12):
                at = skip(data, at, stop, tag)
                continue
            length, at = varint(data, at, stop)
            if at + length > stop:
                raise WriteError("a label is cut off")
            try:
                texts[tag >> 3] = data[at : at + length].decode()
            except UnicodeDecodeError:
                raise WriteError("a label is not UTF-8") from None
            at += length
        name, value = texts[1], texts[2]
        if not name or name in found or len(value) > MAX_VALUE or len(found) >= MAX_LABELS:
            raise WriteError(f"a label has no name, comes twice or is too long, or a series has over {MAX_LABELS}")
        found[name] = value
    if not found.get("__name__"):
        raise WriteError("a series has no __name__")
    return found


def _points(plain: bytes, at: int, end: int) -> list[Point]:
    found: list[Point] = []
    count = 0
    while at < end:
        tag, at = varint(plain, at, end)
        if tag == 0x0A:
            raise WriteError("a series has labels behind its samples")
        count += 1
        if count > MAX_SAMPLES:
            raise WriteError(f"a series has more than {MAX_SAMPLES} samples")
        if tag != 0x12:  # exemplars and histograms
            at = skip(plain, at, end, tag)
            continue
        size, at = varint(plain, at, end)
        if at + size > end or size > MAX_POINT_BYTES:
            raise WriteError(f"a sample is cut off, or has more than {MAX_POINT_BYTES} bytes")
        found.append(_point(plain, at, at + size))
        at += size
    return found


def _point(plain: bytes, at: int, end: int) -> Point:
    bits, ts_ms = 0, 0
    while at < end:
        tag, at = varint(plain, at, end)
        if tag == 0x09 and at + 8 <= end:
            (bits,) = _SAMPLE.unpack_from(plain, at)
            at += 8
        elif tag == 0x10:
            ts_ms, at = varint(plain, at, end)
            ts_ms -= (ts_ms >> 63) << 64  # int64
        else:
            at = skip(plain, at, end, tag)
    (value,) = _DOUBLE.unpack(_SAMPLE.pack(bits))
    return Point(ts_ms, value, bits == STALE_BITS)
