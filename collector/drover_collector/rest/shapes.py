"""Turn messages of fleet.proto, and the records inside them, into JSON, and write the schema of that JSON.

One set of rules makes both, so that they agree:

- A time, `*_ms` in the messages, loses the suffix and is an RFC 3339 string in UTC with milliseconds; 0, which stands
  for none, is null. `ts_ms` is `time`. A duration keeps its suffix and is a number.
- Records that a message holds as JSON text, `*_json`, are objects.
- Packed arrays are lists; NaN in them is null.
- Every field is there. What is optional and absent is null.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import drover_proto
from drover_core.model import events
from drover_core.times import iso

Schema = dict[str, Any]

DURATIONS = frozenset({
    "between_ms", "held_ms", "idle_ms", "in_ms", "kept_ms", "known_ms", "lost_ms", "ms", "out_ms", "recovery_ms",
    "repeated_ms", "restarting_ms", "silent_ms", "slow_ms", "step_ms", "unknown_ms", "useful_ms", "waiting_ms",
})  # fmt: skip
TIMES = frozenset({
    "acknowledged_ms", "again_ms", "answered_ms", "asked_ms", "at_ms", "before_ms", "certificate_ends_ms", "closed_ms",
    "conditions_read_ms", "counted_from_ms", "drift_since_ms", "ended_ms", "frames_ms", "from_ms", "health_from_ms",
    "health_to_ms", "judged_ms",
    "last_seen_ms", "made_ms", "newest_ms",
    "newest_sample_ms", "newest_tick_ms", "oldest_ms", "opened_ms", "received_ms", "saved_ms", "since_ms", "started_ms",
    "taken_ms", "to_ms", "ts_ms", "until_ms", "updated_ms",
})  # fmt: skip
# Numbers that a message holds as bytes: message and field -> numpy's type.
PACKED: Mapping[tuple[str, str], str] = {
    ("Layout", "jobs"): "<i4",
    ("Picture", "cells"): "u1",
    ("Picture", "values"): "<f4",
    ("SeriesReply", "ts_ms"): "<i8",
    ("Series", "values"): "<f4",
    ("ProbeFigure", "fleet"): "<f4",
    ("JobMetric", "values"): "<f4",
}
# Forms for one client alone, twins of other fields, and what detectors keep for themselves.
HIDDEN = frozenset({
    ("Picture", "frame"), ("Picture", "exact"), ("Picture", "gpus"), ("Picture", "known"),
    ("PictureRequest", "packed"), ("IncidentList", "silenced"),
    ("IncidentDetail", "silenced"), ("RiskRow", "in_trouble"), ("Incident", "snapshots"),
})  # fmt: skip
RECORDS: Mapping[str, type] = {
    "actions_json": events.Action,
    "audit_json": events.Audit,
    "breaker_json": events.Incident,
    "decisions_json": events.Decision,
    "duties_json": events.NodeOutage,
    "events_json": events.Event,
    "held_json": events.Decision,
    "incident_json": events.Incident,
    "incidents_json": events.Incident,
    "order_json": events.ProbeOrder,
    "pending_json": events.Decision,
    "policy_json": dict,
    "probe_orders_json": events.ProbeOrder,
    "probe_verdicts_json": events.ProbeVerdict,
    "results_json": events.ProbeResult,
    "silence_json": events.Silence,
    "silences_json": events.Silence,
    "verdicts_json": events.ProbeVerdict,
}
TIME: Schema = {"type": "string", "format": "date-time"}
MEMBER: Schema = {
    "type": "object",
    "description": "A GPU of a node, or the node itself.",
    "properties": {"node": {"type": "string"}, "gpu": {"type": ["integer", "null"]}},
    "required": ["node", "gpu"],
}
INTEGERS = frozenset({
    FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
})  # fmt: skip
REALS = frozenset({FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT})


def public_name(name: str) -> str:
    """Return the name in JSON of a field.

    Raises:
        TypeError: it ends in _ms, and is neither among the times nor among the durations.
    """
    if name in TIMES:
        return "time" if name == "ts_ms" else name.removesuffix("_ms")
    if (name.endswith("_ms") or name == "ms") and name not in DURATIONS:
        raise TypeError(f"{name}: write it into TIMES or DURATIONS of rest/shapes.py")
    return name.removesuffix("_json")


def time_text(ms: int | None) -> str | None:
    """Return `2026-11-21T06:17:00.250Z`; None for 0, and for a time that no calendar has (a clock may be wrong)."""
    if not ms:
        return None
    try:
        return iso(ms)
    except (ValueError, OverflowError, OSError):
        return None


def visible(kind: Descriptor) -> Iterator[FieldDescriptor]:
    return (field for field in kind.fields if (kind.name, field.name) not in HIDDEN)


# ---- messages


def to_plain(message: Message) -> dict[str, Any]:
    """Return a message as what `json` writes."""
    return {public_name(field.name): _field(message, field) for field in visible(cast(Descriptor, message.DESCRIPTOR))}


def _field(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.has_presence and not message.HasField(field.name):
        return None
    if (packed := PACKED.get((message.DESCRIPTOR.name, field.name))) is not None:
        return _unpack(value, packed, field.name in TIMES)
    if _is_map(field):
        return {key: _number(each) if not isinstance(each, Message) else to_plain(each) for key, each in value.items()}
    if field.is_repeated:
        return [_single(each, field) for each in value]
    return _single(value, field)


def _single(value: Any, field: FieldDescriptor) -> Any:
    if field.name in RECORDS:
        return None if not value else _record(RECORDS[field.name], json.loads(value))
    if isinstance(value, Message):
        return to_plain(value)
    return time_text(value) if field.name in TIMES else _number(value)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unpack(value: bytes, packed: str, times: bool) -> list[Any]:
    numbers = np.frombuffer(value, packed)
    if times:
        return [time_text(each) for each in numbers.tolist()]
    return [_number(each) for each in numbers.tolist()]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# ---- records


def record_plain(value: Any) -> dict[str, Any]:
    """Return a record of drover_core.model.events as what `json` writes."""
    return typing.cast("dict[str, Any]", _record(type(value), events.to_dict(value)))


def _record(kind: type, data: Any) -> Any:
    if not dataclasses.is_dataclass(kind):
        return data
    return {public_name(name): _item(hint, data.get(name), name) for name, hint in _fields(kind).items()}


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if (kind.__name__, f.name) not in HIDDEN}


def _item(hint: Any, value: Any, name: str) -> Any:
    if value is None:
        return None
    if name in TIMES:
        return time_text(value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _item(next(a for a in args if a is not type(None)), value, name)
    if hint == events.Member:
        return {"node": value[0], "gpu": value[1]}
    if origin is tuple:
        return [_item(args[0], each, "") for each in value]
    return _record(hint, value) if isinstance(hint, type) else value


# ---- schemas


class Schemas:
    """The schemas of what is sent, each once, by the name of its message or record."""

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {"Member": MEMBER}

    def message(self, kind: Descriptor) -> Schema:
        """Return a reference to the schema of a message."""
        if kind.name not in self.components:
            self.components[kind.name] = {}  # taken, should it hold itself
            self.components[kind.name] = _object({
                public_name(field.name): self.field(kind, field) for field in visible(kind)
            })  # fmt: skip
        return {"$ref": f"#/components/schemas/{kind.name}"}

    def field(self, kind: Descriptor, field: FieldDescriptor) -> Schema:
        found = self._shape(kind, field)
        if field.has_presence or (field.name in TIMES and not field.is_repeated and found.get("type") != "array"):
            found = _nullable(found)
        text = comments().get((kind.name, field.name), "")
        if text and "$ref" not in found:
            found = {**found, "description": re.sub(r"\b0: ", "null: ", text) if field.name in TIMES else text}
        return found

    def _shape(self, kind: Descriptor, field: FieldDescriptor) -> Schema:
        if (packed := PACKED.get((kind.name, field.name))) is not None:
            real = {"type": ["number", "null"]}
            of: Schema = TIME if field.name in TIMES else real if "f" in packed else {"type": "integer"}
            return {"type": "array", "items": of}
        if _is_map(field):
            return {
                "type": "object",
                "additionalProperties": self._of(cast(Descriptor, field.message_type).fields_by_name["value"]),
            }
        return {"type": "array", "items": self._of(field)} if field.is_repeated else self._of(field)

    def _of(self, field: FieldDescriptor) -> Schema:
        if field.name in RECORDS:
            return self.record(RECORDS[field.name])
        if field.message_type is not None:
            return self.message(field.message_type)
        return scalar(field)

    def record(self, kind: type) -> Schema:
        """Return a reference to the schema of a record."""
        if not dataclasses.is_dataclass(kind):
            return {"type": "object", "additionalProperties": True}
        if kind.__name__ not in self.components:
            self.components[kind.__name__] = {}
            self.components[kind.__name__] = _object({
                public_name(name): self._hinted(hint, name) for name, hint in _fields(kind).items()
            })  # fmt: skip
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    def _hinted(self, hint: Any, name: str) -> Schema:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if name in TIMES:
            return _nullable(TIME)
        if origin in (typing.Union, types.UnionType):
            return _nullable(self._hinted(next(a for a in args if a is not type(None)), name))
        if hint == events.Member:
            return {"$ref": "#/components/schemas/Member"}
        if origin is tuple:
            return {"type": "array", "items": self._hinted(args[0], "")}
        if origin is Mapping:
            return {"type": "object", "additionalProperties": True}
        if dataclasses.is_dataclass(hint):
            return self.record(typing.cast(type, hint))
        if issubclass(hint, StrEnum):  # open: a client must not fail for a word of a later version
            words = ", ".join(str(each) for each in hint if str(each))
            return {"type": "string", "description": f"One of {words}. Later versions may add words."}
        return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}


def scalar(field: FieldDescriptor) -> Schema:
    """Return the schema of one value of a field that holds no message."""
    if field.name in TIMES:
        return TIME
    if field.cpp_type in INTEGERS:
        unsigned = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
        return {"type": "integer", "minimum": 0} if unsigned else {"type": "integer"}
    if field.cpp_type in REALS:
        return {"type": "number"}
    return {"type": "boolean" if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else "string"}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _nullable(schema: Schema) -> Schema:
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]} if isinstance(schema.get("type"), str) else schema


@functools.cache
def comments() -> Mapping[tuple[str, str], str]:
    """Return what fleet.proto says of each field in the same line: (message, field) -> text."""
    found, message = {}, ""
    for line in importlib.resources.files(drover_proto).joinpath("fleet.proto").read_text("utf-8").splitlines():
        if begun := re.match(r"message (\w+) \{", line):
            message = begun[1]
        elif said := re.match(r" +[\w<>, .]+ (\w+) = \d+;  // (.+)", line):
            found[message, said[1]] = said[2].strip()
    return found
