"""OTLP metrics and logs, over HTTP (protobuf) and gRPC.

The messages are those of open-telemetry/opentelemetry-proto v1 (metrics.proto, logs.proto and their services), written
byte by byte as in `remote_write.py`, so that nothing more needs to be installed. The rules are those of
https://opentelemetry.io/docs/specs/otlp/. A node is a resource with `host.name`, as the conventions for hardware ask.
"""

from __future__ import annotations

import gzip
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np

from drover_collector.exporters.gpus import Identities, LastXids, PerGpu
from drover_collector.exporters.http_post import Answer, Poster
from drover_collector.exporters.otlp_names import COUNTER, GAUGE, Instrument, instrument_of
from drover_collector.exporters.records import Record
from drover_collector.exporters.remote_write import Snapshot, Snapshots, field, is_sample, small_varint, varint
from drover_collector.exporters.sending import Sender
from drover_collector.exporters.settings import Credentials, OtlpConfig, label_pairs
from drover_collector.fleet.buckets import Bucket, Floats
from drover_core import VERSION
from drover_core.metrics.series import DROVER, GpuIdentity, series_of
from drover_core.model.events import Severity
from drover_core.settings import SettingsError

LOGS_BATCH = 500
NO_VALUE = b"\x40\x01"  # NumberDataPoint.flags = FLAG_NO_RECORDED_VALUE: the series has ended
CUMULATIVE = b"\x10\x02"  # Sum.aggregation_temporality
_SEVERITY = {Severity.INFO: 9, Severity.WARNING: 13, Severity.CRITICAL: 17}  # INFO, WARN, ERROR
_SERVICES = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
SHARED = ("hw.errors", "hw.temperature")  # by several metrics of the catalog, each with a description of its own
_PERMANENT = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS})


def _value(value: str | float) -> bytes:
    """Return an AnyValue."""
    if isinstance(value, str):
        return field(1, value.encode("utf-8", "replace"))
    if isinstance(value, int):
        return b"\x18" + varint(value & (2**64 - 1))
    return b"\x21" + struct.pack("<d", value)


def _attributes(number: int, values: Mapping[str, str | float]) -> bytes:
    """Return KeyValues as the field `number` of a message."""
    return b"".join(field(number, field(1, k.encode()) + field(2, _value(v))) for k, v in values.items())


_SCOPE = field(1, field(1, b"drover") + field(2, VERSION.encode()))


def gpu_attributes(gpu: GpuIdentity, job: str) -> dict[str, str]:
    """Return the attributes of a GPU's points. `hw.id` is unique within its host."""
    found = {
        "hw.id": gpu.uuid or f"gpu{gpu.gpu}", "hw.name": f"gpu{gpu.gpu}", "hw.model": gpu.model,
        "hw.vendor": "NVIDIA" if "NVIDIA" in gpu.model else "", "drover.job": job,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


class MetricsEncoder:
    """Writes ExportMetricsServiceRequests. Used by one thread at a time."""

    def __init__(self, metrics: Sequence[str], labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._instruments = [instrument_of(metric) for metric in metrics]
        self._points: PerGpu[bytes] = PerGpu(lambda gpu, job: _attributes(7, gpu_attributes(gpu, job)))

    def request(self, snapshot: Snapshot, first: int, last: int) -> tuple[bytes, int]:
        """Return the request with rows `first` to `last` of all metrics, and its points."""
        rows = list(range(first, last)) if snapshot.rows is None else snapshot.rows[first:last].tolist()
        attributes = self._points.of(snapshot.identities)
        known = snapshot.identities.known
        columns = [_Column(instrument, column[first:last]) for instrument, column in self._used(snapshot)]
        moment = b"\x19" + struct.pack("<Q", snapshot.ts_ms * 1_000_000)
        parts, count, at = [], 0, 0
        for node, group in groupby(rows, lambda row: known[row].node):
            own = list(group)
            texts = [attributes[row] for row in own]
            metrics, points = _node(columns, moment, at, texts)
            at, count = at + len(own), count + points
            if points:
                resource = {"service.name": "drover", "host.name": node, **self._labels}
                if rack := known[own[0]].rack:
                    resource["drover.rack"] = rack
                parts.append(field(1, field(1, _attributes(1, resource)) + field(2, _SCOPE + metrics)))
        return b"".join(parts), count

    def _used(self, snapshot: Snapshot) -> Iterator[tuple[Instrument, Floats]]:
        return zip(self._instruments, snapshot.columns, strict=True)


class _Column:
    """The points of one metric, ready to be written: of each row whether there is one, and its value's bytes."""

    def __init__(self, instrument: Instrument, values: Floats) -> None:
        self.instrument = instrument
        self.there: list[bool] = is_sample(values).tolist()
        self.ended: list[bool] = np.isnan(values).tolist()
        self.numbers = values.astype("<f8").tobytes()
        self.more = _attributes(7, instrument.attributes)


def _node(columns: Sequence[_Column], moment: bytes, first: int, texts: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the metrics of one node's GPUs. `texts`: the attributes of each, encoded."""
    found: dict[str, tuple[Instrument, list[bytes]]] = {}
    count = 0
    for column in columns:
        points: list[bytes] = []
        for row, text in enumerate(texts, first):
            if column.there[row]:
                said = NO_VALUE if column.ended[row] else b"\x21" + column.numbers[8 * row : 8 * row + 8]
                point = moment + said + text + column.more
                points.append(b"\x0a" + small_varint(len(point)) + point)
        if points:
            found.setdefault(column.instrument.name, (column.instrument, []))[1].extend(points)
            count += len(points)
    return b"".join(_metric(instrument, points) for instrument, points in found.values()), count


def _metric(instrument: Instrument, points: Sequence[bytes]) -> bytes:
    head = field(1, instrument.name.encode()) + field(3, instrument.unit.encode())
    if instrument.name not in SHARED:
        head += field(2, instrument.description.encode())
    data = b"".join(points)
    if instrument.kind == GAUGE:
        return field(2, head + field(5, data))
    monotonic = b"\x18\x01" if instrument.kind == COUNTER else b""
    return field(2, head + field(7, data + CUMULATIVE + monotonic))


def logs_request(records: Sequence[Record], labels: Mapping[str, str]) -> bytes:
    """Return an ExportLogsServiceRequest."""
    resource = {"service.name": "drover", "service.version": VERSION, "host.name": socket.gethostname(), **labels}
    return field(1, field(1, _attributes(1, resource)) + field(2, _SCOPE + b"".join(map(_log, records))))


def _log(record: Record) -> bytes:
    moment = struct.pack("<Q", record.ts_ms * 1_000_000)
    facts = {f"drover.{record.kind}.{name}": value for name, value in record.attributes.items()}
    return field(
        2,
        b"\x09" + moment + b"\x10" + varint(_SEVERITY[record.severity]) + field(3, str(record.severity).encode())
        + field(5, _value(record.text)) + _attributes(6, facts) + b"\x59" + moment
        + field(12, f"drover.{record.kind}.{record.name}".encode()),
    )  # fmt: skip


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message of varints and texts.

    Raises:
        ValueError, IndexError: it is none.
    """
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("no varint")

    while at < len(data):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        elif key & 7 == 2:
            size = number()
            yield key >> 3, data[at : at + size]
            at += size
        else:
            raise ValueError("an unknown field")


def rejected(body: bytes) -> int:
    """Return how many points or records an answer says were refused (partial_success); 0 where it cannot be read."""
    try:
        for number, content in _fields(body):
            if number == 1 and isinstance(content, bytes):
                return sum(n for inner, n in _fields(content) if inner == 1 and isinstance(n, int))
    except (ValueError, IndexError):
        return 0
    return 0


def retry_info(metadata: Iterable[Any]) -> float | None:
    """Return the seconds that a gRPC answer asks to wait; None: it does not say.

    RetryInfo (google/rpc/error_details.proto) is one of the `details` of google/rpc/status.proto.
    """
    for key, content in metadata:
        if key != "grpc-status-details-bin" or not isinstance(content, bytes):
            continue
        try:
            for detail in (d for number, d in _fields(content) if number == 3 and isinstance(d, bytes)):
                parts = dict(_fields(detail))
                kind, info = parts.get(1), parts.get(2, b"")
                if isinstance(kind, bytes) and kind.endswith(b"/google.rpc.RetryInfo") and isinstance(info, bytes):
                    delay = dict(_fields(info)).get(1, b"")
                    own = dict(_fields(delay)) if isinstance(delay, bytes) else {}
                    return float(own.get(1, 0)) + float(own.get(2, 0)) / 1e9
        except (ValueError, IndexError):
            return None
    return None


class _Http:
    def __init__(self, config: OtlpConfig, signal: str) -> None:
        self._poster = Poster(f"{config.url.rstrip('/')}/v1/{signal}", config.timeout_s, config.ca_file)

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        own = {"content-type": "application/x-protobuf", "content-encoding": "gzip", **headers}
        return self._poster.post(gzip.compress(body, 1), own)

    def close(self) -> None:
        self._poster.close()


class _Grpc:
    def __init__(self, config: OtlpConfig, signal: str) -> None:
        parts = urlsplit(config.url)
        host = parts.hostname or ""
        address = f"{f'[{host}]' if ':' in host else host}:{parts.port or 4317}"
        options = (("grpc.max_receive_message_length", 1 << 20), ("grpc.enable_retries", 0))
        if parts.scheme == "https":
            authority = None
            if config.ca_file is not None:
                authority = Path(config.ca_file).read_bytes()
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self._call: Callable[..., bytes] = self._channel.unary_unary(_SERVICES[signal])
        self._timeout_s = config.timeout_s

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        try:
            answer = self._call(
                body, timeout=self._timeout_s, metadata=tuple(headers.items()), compression=grpc.Compression.Gzip
            )
        except grpc.RpcError as error:
            code, retry_s = error.code(), retry_info(error.trailing_metadata() or ())
            # What is too large gets this code, and would keep back all after it: only RetryInfo says that it may pass.
            never = code in _PERMANENT or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_s is None)
            return Answer(f"answered {code.name}", never, retry_s)  # its text may repeat a secret
        except ValueError:
            return Answer("the channel is closed")
        return Answer(body=answer)

    def close(self) -> None:
        self._channel.close()


class Otlp:
    """One receiver. `take` and `take_record` from any thread.

    Raises (at construction):
        SettingsError: its CA file cannot be used.
    """

    def __init__(self, config: OtlpConfig, key: str) -> None:
        self._labels, self.interval_s = label_pairs(config.labels), config.interval_s
        metrics = tuple(dict.fromkeys(config.metrics))  # one may be listed twice
        self._encoder = MetricsEncoder(metrics, self._labels)
        self._snapshots = Snapshots(series_of(DROVER, metrics))
        self._rows = max(1, config.batch // max(len(metrics), 1))
        self._at: tuple[Snapshot | None, int] = (None, 0)  # what is under way, and the row to go on from
        self._credentials = Credentials(key, config.token_file)
        self._headers: Mapping[str, str] | None = None
        kind = _Grpc if config.protocol == "grpc" else _Http
        try:
            self._clients = {signal: kind(config, signal) for signal in config.signals}
        except OSError as error:
            raise SettingsError(f"{key}.ca_file: {config.ca_file}: {error}") from None
        self.metrics: Sender[Snapshot] = Sender(
            f"{config.name}-metrics", config.spool_bytes, self._send_metrics, kind="otlp_metrics"
        )
        self.logs: Sender[Record] = Sender(
            f"{config.name}-logs", config.spool_bytes, self._send_logs, LOGS_BATCH, "otlp_logs"
        )

    @property
    def senders(self) -> list[Sender[Snapshot] | Sender[Record]]:
        both: dict[str, Sender[Snapshot] | Sender[Record]] = {"metrics": self.metrics, "logs": self.logs}
        return [sender for signal, sender in both.items() if signal in self._clients]

    def take(self, bucket: Bucket, identities: Identities, xids: LastXids) -> None:
        if "metrics" in self._clients:
            for snapshot in self._snapshots.of(bucket, identities, xids):
                self.metrics.put(snapshot)

    def take_record(self, record: Record) -> None:
        if "logs" in self._clients:
            self.logs.put(record)

    def close(self) -> None:
        for sender in self.senders:
            sender.end()
        for client in self._clients.values():
            client.close()
        for sender in self.senders:
            sender.stop()

    def _send_metrics(self, snapshots: Sequence[Snapshot]) -> tuple[Answer, int, int]:
        snapshot = snapshots[0]
        held, first = self._at
        if held is not snapshot:
            first = 0
        last = min(first + self._rows, len(snapshot))
        body, count = self._encoder.request(snapshot, first, last)
        answer = self._post("metrics", body) if count else Answer()
        if not answer.trouble or answer.permanent:
            self._at = snapshot, last
        return answer, count, int(last >= len(snapshot))

    def _send_logs(self, records: Sequence[Record]) -> tuple[Answer, int, int]:
        answer = self._post("logs", logs_request(records, self._labels))
        done = len(records) if not answer.trouble or answer.permanent else 0
        return answer, done, done

    def _post(self, signal: str, body: bytes) -> Answer:
        headers = self._headers  # two threads: one may read the file while the other has its token refused
        if headers is None:
            try:
                headers = self._headers = self._credentials.headers()
            except SettingsError as error:
                return Answer(str(error))
        answer = self._clients[signal].post(body, headers)
        if answer.trouble in ("answered 401", "answered 403", "answered UNAUTHENTICATED", "answered PERMISSION_DENIED"):
            self._headers = None  # the file may have another token by now
        if not answer.trouble and (refused := rejected(answer.body)):
            return Answer("it leaves out some of what it takes", permanent=True, refused=refused)
        return answer
