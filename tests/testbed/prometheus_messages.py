"""The messages of remote_write, read by protobuf itself, and a receiver that keeps what it was sent.

Fields: prompb/remote.proto and prompb/types.proto of prometheus/prometheus, and
prompb/io/prometheus/write/v2/types.proto.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cramjam
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_F = descriptor_pb2.FieldDescriptorProto
_TYPES = {"string": _F.TYPE_STRING, "double": _F.TYPE_DOUBLE, "int64": _F.TYPE_INT64, "uint32": _F.TYPE_UINT32}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Label": {"name": (1, "string"), "value": (2, "string")},
    "Sample": {"value": (1, "double"), "timestamp": (2, "int64")},
    "TimeSeries": {"labels": (1, "*Label"), "samples": (2, "*Sample")},
    "WriteRequest": {"timeseries": (1, "*TimeSeries")},
    "Metadata": {"type": (1, "uint32"), "help_ref": (3, "uint32"), "unit_ref": (4, "uint32")},
    "Series2": {"labels_refs": (1, "*uint32"), "samples": (2, "*Sample"), "metadata": (5, "Metadata")},
    "Request": {"symbols": (4, "*string"), "timeseries": (5, "*Series2")},
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="testbed.proto", package="testbed", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.lstrip("*")
            added = message.field.add(
                name=field, number=number, label=_F.LABEL_REPEATED if kind[0] == "*" else _F.LABEL_OPTIONAL,
                type=_TYPES.get(plain, _F.TYPE_MESSAGE),
            )  # fmt: skip
            if plain in _MESSAGES:
                added.type_name = f".testbed.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"testbed.{name}")) for name in _MESSAGES}


CLASSES = _classes()


@dataclass(frozen=True)
class Written:
    """One sample."""

    labels: dict[str, str]
    value: float
    ts_ms: int
    type: int = 0
    help: str = ""

    @property
    def name(self) -> str:
        return self.labels["__name__"]


def written(body: bytes, version: int = 1) -> list[Written]:
    """What a request says. Its labels must be sorted and not empty."""
    raw = bytes(cramjam.snappy.decompress_raw(body))
    found = []
    if version == 1:
        for series in CLASSES["WriteRequest"].FromString(raw).timeseries:
            pairs = [(label.name, label.value) for label in series.labels]
            found += [(pairs, sample.value, sample.timestamp, 0, "") for sample in series.samples]
    else:
        request = CLASSES["Request"].FromString(raw)
        texts = list(request.symbols)
        assert texts[0] == ""
        assert len(set(texts)) == len(texts)
        for series in request.timeseries:
            refs = [texts[ref] for ref in series.labels_refs]
            pairs = list(zip(refs[::2], refs[1::2], strict=True))
            about = series.metadata
            found += [(pairs, s.value, s.timestamp, about.type, texts[about.help_ref]) for s in series.samples]
    for pairs, *_ in found:
        assert pairs == sorted(pairs)
        assert all(name and value for name, value in pairs)
    return [Written(dict(pairs), *rest) for pairs, *rest in found]
