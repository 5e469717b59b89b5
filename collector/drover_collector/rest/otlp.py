"""Forms of OTLP/HTTP: what a request says of its own form, and the answers, in protobuf or JSON.

The rules are those of https://opentelemetry.io/docs/specs/otlp/#otlphttp-response: an answer has the form of its
request; an ExportMetricsServiceResponse with 200, else a google.rpc.Status.
"""

from __future__ import annotations

import json

from drover_collector.scrape.otlp_in import Answer, Form

PROTOBUF, JSON = "application/x-protobuf", "application/json"


def form_of(content_type: str, content_encoding: str) -> Form | str:
    """Return the form of a request, or what it should be."""
    kind = content_type.partition(";")[0].strip().lower()
    encoding = content_encoding.strip().lower()
    if kind not in (PROTOBUF, JSON):
        return f"send Content-Type: {PROTOBUF} or {JSON}"
    if encoding not in ("", "identity", "gzip"):
        return "send Content-Encoding: gzip, or none"
    return Form(kind == JSON, encoding == "gzip")


def content_type(form: Form) -> str:
    return JSON if form.is_json else PROTOBUF


def taken(form: Form, answer: Answer) -> bytes:
    """Return the ExportMetricsServiceResponse. With a text it is a partial success, or a warning where nothing was
    rejected."""
    if form.is_json:
        partial = {"rejectedDataPoints": str(answer.rejected), "errorMessage": answer.text}
        return json.dumps({"partialSuccess": partial} if answer.text else {}).encode()
    if not answer.text:
        return b""
    rejected = b"\x08" + _varint(answer.rejected) if answer.rejected else b""
    return _field(1, rejected + _field(2, answer.text.encode()))


def failed(form: Form, text: str) -> bytes:
    """Return the Status of a request that was not taken. `code` is not used by this protocol."""
    return json.dumps({"message": text}).encode() if form.is_json else _field(2, text.encode())


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
