"""Prometheus remote_write 1.0 and 2.0: snapshots of the fleet as snappy-compressed protobuf.

The messages are those of prometheus/prometheus, prompb/remote.proto (WriteRequest) and
prompb/io/prometheus/write/v2/types.proto (io.prometheus.write.v2.Request); the rules are those of
https://prometheus.io/docs/specs/prw/remote_write_spec/ and .../remote_write_spec_2_0/. They are written here byte by
byte, as protobuf's own objects take ten times as long for a million series.

A series that has ended gets a staleness marker, so that no receiver shows a silent GPU's last value as its present one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow

from drover_collector.exporters.gpus import Identities, LastXids, PerGpu, column_of
from drover_collector.exporters.http_post import Answer, Poster
from drover_collector.exporters.sending import Sender
from drover_collector.exporters.settings import Credentials, RemoteWriteConfig, label_pairs
from drover_collector.fleet.buckets import Bucket, Floats
from drover_core import VERSION
from drover_core.metrics.series import GpuIdentity, Series, series_of
from drover_core.settings import SettingsError

STALE_BITS = np.uint64(0x7FF0000000000002)  # value.StaleNaN of prometheus/prometheus, model/value/value.go
STALE = np.array([STALE_BITS]).view(np.float64)[0]
NAME = "__name__"
WRITTEN = "x-prometheus-remote-write-samples-written"
_TYPES = {"counter": 1, "gauge": 2}  # Metadata.MetricType of 2.0

Pairs = Sequence[tuple[str, str]]


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_SMALL = [varint(value) for value in range(1 << 14)]  # numbers of symbols, and lengths


def small_varint(value: int) -> bytes:
    """Return a varint, of a small number quickly."""
    return _SMALL[value] if value < len(_SMALL) else varint(value)


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Samples of one moment.

    Attributes:
        rows: GPUs that `columns` have values of; None: all.
        columns: of each family, float64 [rows]: NaN: no sample, STALE: the series has ended.
    """

    ts_ms: int
    identities: Identities
    columns: tuple[Floats, ...]
    rows: npt.NDArray[np.intp] | None = None

    @property
    def size(self) -> int:
        return sum(column.nbytes for column in self.columns)

    @property
    def count(self) -> int:
        return sum(int(np.count_nonzero(is_sample(column))) for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0


def is_sample(values: Floats) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = ~np.isnan(values) | (values.view(np.uint64) == STALE_BITS)
    return found


class Snapshots:
    """Makes snapshots of buckets, with a marker for each series that has ended since the one before."""

    def __init__(self, families: Sequence[Series]) -> None:
        self._families = families
        self._before: Snapshot | None = None

    def of(self, bucket: Bucket, identities: Identities, xids: LastXids) -> list[Snapshot]:
        """Return what is to be sent of a bucket: first the ends of series whose job has changed, then the values."""
        absent = np.full(len(bucket.gpu_rows), np.nan)
        made = [column_of(family, bucket, xids) for family in self._families]
        values = [absent if column is None else column for column in made]
        before, found = self._before, []
        if before is not None and len(before) == len(absent):
            renamed = _renamed(before.identities, identities)
            if len(renamed):
                ends = tuple(np.where(np.isnan(column[renamed]), np.nan, STALE) for column in before.columns)
                found.append(Snapshot(bucket.end_ms, before.identities, ends, renamed))
            same = np.ones(len(absent), bool)
            same[renamed] = False
            values = [
                np.where(same & np.isnan(now) & ~np.isnan(then), STALE, now)
                for now, then in zip(values, before.columns, strict=True)
            ]
        self._before = Snapshot(bucket.end_ms, identities, tuple(values))
        return [*found, self._before]


def _renamed(before: Identities, now: Identities) -> npt.NDArray[np.intp]:
    """Return the GPUs whose labels differ."""
    if before is now:
        return np.zeros(0, np.intp)
    pairs = zip(before.jobs, now.jobs, strict=True)
    changed = {gpu for gpu, (then, job) in enumerate(pairs) if then != job}
    if before.known is not now.known:
        changed |= {gpu for gpu, (then, is_) in enumerate(zip(before.known, now.known, strict=True)) if then != is_}
    return np.array(sorted(changed), np.intp)


class Encoder:
    """Writes requests of either version. Used by one thread at a time."""

    def __init__(self, families: Sequence[Series], naming: str, labels: Mapping[str, str], version: int) -> None:
        self._families, self._naming, self._extra, self.version = families, naming, labels, version
        self._pairs: PerGpu[Pairs] = PerGpu(self._sorted)
        self._encoded: PerGpu[tuple[bytes, bytes]] = PerGpu(lambda gpu, job: _around(self._sorted(gpu, job)))

    def _sorted(self, gpu: GpuIdentity, job: str) -> Pairs:
        labels = {**self._extra, **gpu.labels(self._naming, job)}
        return sorted((name, value) for name, value in labels.items() if value)  # empty is the same as absent

    def request(self, snapshot: Snapshot, first: int, last: int) -> tuple[bytes, int]:
        """Return the request with rows `first` to `last` of all families, compressed, and its samples."""
        rows = range(first, last) if snapshot.rows is None else snapshot.rows[first:last].tolist()
        body, count = (self._v1 if self.version == 1 else self._v2)(snapshot, slice(first, last), rows)
        return bytes(pyarrow.compress(body, codec="snappy", asbytes=True)), count

    def _v1(self, snapshot: Snapshot, part: slice, rows: Sequence[int]) -> tuple[bytes, int]:
        every = self._encoded.of(snapshot.identities)
        head, tail = _sample_around(snapshot.ts_ms)
        parts: list[bytes] = []
        for family, column in zip(self._families, snapshot.columns, strict=True):
            name = field(1, field(1, NAME.encode()) + field(2, family.name.encode()))
            there, numbers = _values(column[part])
            fixed = len(name) + len(head) + 8 + len(tail)
            for at, place in enumerate(there):
                before, after = every[rows[place]]
                size = len(before) + len(after) + fixed
                value = numbers[8 * at : 8 * at + 8]
                parts.append(b"\x0a" + small_varint(size) + before + name + after + head + value + tail)
        return b"".join(parts), len(parts)

    def _v2(self, snapshot: Snapshot, part: slice, rows: Sequence[int]) -> tuple[bytes, int]:
        every = self._pairs.of(snapshot.identities)
        head, tail = _sample_around(snapshot.ts_ms)
        symbols: dict[str, int] = {"": 0}

        def ref(text: str) -> bytes:
            return small_varint(symbols.setdefault(text, len(symbols)))

        refs: dict[int, tuple[bytes, bytes]] = {}  # of each row with a sample
        parts: list[bytes] = []
        for family, column in zip(self._families, snapshot.columns, strict=True):
            name = ref(NAME) + ref(family.name)
            about = b"\x08" + varint(_TYPES[family.type]) + b"\x18" + ref(family.help) + b"\x20" + ref(family.unit)
            metadata = field(5, about)
            fixed = len(head) + 8 + len(tail) + len(metadata)
            there, numbers = _values(column[part])
            for at, place in enumerate(there):
                around = refs.get(place)
                if around is None:
                    before, after = _split(every[rows[place]])
                    around = refs[place] = (
                        b"".join(ref(n) + ref(v) for n, v in before), b"".join(ref(n) + ref(v) for n, v in after),
                    )  # fmt: skip
                labels = around[0] + name + around[1]
                start = b"\x0a" + small_varint(len(labels))
                size = b"\x2a" + small_varint(len(start) + len(labels) + fixed)
                parts.append(size + start + labels + head + numbers[8 * at : 8 * at + 8] + tail + metadata)
        return b"".join([*(field(4, symbol.encode()) for symbol in symbols), *parts]), len(parts)


def _split(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Return the labels that are sorted before the name, and those after it."""
    return [pair for pair in pairs if pair[0] < NAME], [pair for pair in pairs if pair[0] >= NAME]


def _around(pairs: Pairs) -> tuple[bytes, bytes]:
    before, after = (
        b"".join(field(1, field(1, n.encode()) + field(2, v.encode())) for n, v in side) for side in _split(pairs)
    )
    return before, after


def _sample_around(ts_ms: int) -> tuple[bytes, bytes]:
    """Return what comes before and after the eight bytes of a sample's value."""
    tail = b"\x10" + varint(ts_ms)
    return b"\x12" + varint(9 + len(tail)) + b"\x09", tail


def _values(column: Floats) -> tuple[list[int], bytes]:
    """Return the rows that have a sample, and their values, eight bytes each."""
    there = np.flatnonzero(is_sample(column))
    return there.tolist(), column[there].astype("<f8").tobytes()


class RemoteWrite:
    """One receiver. `take` from the thread that reads buckets; the rest from its own.

    Raises (at construction):
        SettingsError: its CA file cannot be used.
    """

    def __init__(self, config: RemoteWriteConfig, key: str) -> None:
        families = series_of(config.naming, config.metrics)
        self._snapshots = Snapshots(families)
        self._encoder = Encoder(families, config.naming, label_pairs(config.labels), config.version)
        self._rows = max(1, config.batch // max(len(families), 1))
        self._credentials = Credentials(key, config.token_file, config.username, config.password_file)
        try:
            self._poster = Poster(config.url, config.timeout_s, config.ca_file)
        except OSError as error:
            raise SettingsError(f"{key}.ca_file: {config.ca_file}: {error}") from None
        self._headers: Mapping[str, str] | None = None
        self._at: tuple[Snapshot | None, int] = (None, 0)  # what is under way, and the row to go on from
        self.interval_s = config.interval_s
        self.sender: Sender[Snapshot] = Sender(config.name, config.spool_bytes, self._send, kind="remote_write")

    def take(self, bucket: Bucket, identities: Identities, xids: LastXids) -> None:
        for snapshot in self._snapshots.of(bucket, identities, xids):
            self.sender.put(snapshot)

    def close(self) -> None:
        self.sender.end()
        self._poster.close()
        self.sender.stop()

    def _send(self, snapshots: Sequence[Snapshot]) -> tuple[Answer, int, int]:
        snapshot = snapshots[0]
        held, first = self._at
        if held is not snapshot:
            first = 0
        last = min(first + self._rows, len(snapshot))
        body, count = self._encoder.request(snapshot, first, last)
        answer = self._post(body) if count else Answer()
        if not answer.trouble or answer.permanent:
            self._at = snapshot, last
        return answer, count, int(last >= len(snapshot))

    def _post(self, body: bytes) -> Answer:
        if self._headers is None:
            try:
                self._headers = self._credentials.headers()
            except SettingsError as error:
                return Answer(str(error))
        answer = self._poster.post(body, {**_HEADERS[self._encoder.version], **self._headers})
        if answer.trouble in ("answered 401", "answered 403"):
            self._headers = None  # the file may have another token by now
        if self._encoder.version == 2 and not answer.trouble and WRITTEN not in (answer.headers or {}):
            return Answer("it does not say that it has written anything, so it does not know 2.0; set version = 1")
        return answer


_COMMON = {"content-encoding": "snappy", "user-agent": f"drover/{VERSION}"}
_HEADERS = {
    1: {**_COMMON, "content-type": "application/x-protobuf", "x-prometheus-remote-write-version": "0.1.0"},
    2: {
        **_COMMON,
        "content-type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
        "x-prometheus-remote-write-version": "2.0.0",
    },
}
