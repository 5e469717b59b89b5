"""The OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0), made from the table of routes and fleet.proto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from drover_collector.rest import routes
from drover_collector.rest.annotations import PROPERTIES
from drover_collector.rest.requests import PAGE, PAGE_MOST, offered
from drover_collector.rest.routes import ROOT, ROUTES, Route
from drover_collector.rest.shapes import TIME as TIME_SCHEMA
from drover_collector.rest.shapes import Schema, Schemas, comments, public_name, scalar
from drover_core.model.events import Incident

VERSION = "1.0.0"  # of the schema, not of Drover: docs/reference/rest.md says what may change with each part of it
REQUIRED = {  # what a method refuses to be without; fleet.proto does not say it
    "PreviewAct": ("act",),
    "ActOnNode": ("act", "why"),
    "ApproveDecision": ("why",),
    "RejectDecision": ("why",),
    "CreateSilence": ("hours", "why"),
    "EndSilence": ("why",),
    "ReportMaintenance": ("why", "source", "id"),
    "AdoptNode": ("why",),
    "QuerySeries": ("scope", "targets", "metrics", "from", "to"),
    "ProbeHistory": ("node", "figure"),
}
ERRORS = {
    "400": "What was sent is wrong; `detail` says what to send.",
    "403": "The certificate's role may not do this.",
    "404": "There is no such thing.",
    "405": "Another verb is used here.",
    "429": "Too many requests are under way; try again after Retry-After.",
    "503": "The collector or its store cannot answer now; try again after Retry-After.",
    "504": "It took too long.",
}
ACT_ERRORS = {
    "409": "The state of the node, decision or silence is against it.",
    "411": "Content-Length is missing.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "422": "The Idempotency-Key came with another request before.",
}
PROBLEM: Schema = {
    "type": "object",
    "description": "RFC 9457.",
    "properties": {
        "type": {"type": "string", "description": "urn:drover:problem: and a word"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what is wrong and what to do"},
    },
    "required": ["type", "title", "status", "detail"],
}
WANTED = {
    "min_severity": "info (default), warning or critical",
    "node": "only those of this node",
    "kind": "only those of this kind, such as thermal",
}


def document() -> dict[str, Any]:
    """Return the document."""
    schemas = Schemas()
    schemas.components["Problem"] = PROBLEM
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(ROOT + route.path, {})[route.verb.lower()] = _operation(route, schemas)
    paths[routes.STREAM] = {"get": _stream_operation(schemas)}
    paths[routes.ANNOTATIONS] = {"get": _annotations_operation(schemas)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Drover's Fleet API",
            "version": VERSION,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "description": "Times are RFC 3339, UTC, with milliseconds; null is not known or none. Names that end in"
            " _ms are durations. Clients must accept new fields and new words.",
        },
        "servers": [{"url": "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.components.items()))},
    }


def _operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    required = REQUIRED.get(route.method.name, ())
    found: dict[str, Any] = {
        "operationId": route.operation,
        "tags": [route.tag],
        "summary": route.method.summary,
        "description": f"Roles: {', '.join(sorted(route.method.roles))}.",
    }
    parameters = [_parameter(name, "path", {"type": "string", "minLength": 1}, True) for name in route.variables]
    if route.acts:
        parameters.append(_parameter(
            "Idempotency-Key", "header", {"type": "string", "minLength": 1, "maxLength": 200}, True,
            "a new one for each act; the same one when it is sent again",
        ))  # fmt: skip
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _body(route, schemas)}}}
    else:
        kind = route.method.request.DESCRIPTOR.name
        for field in offered(route):
            name = public_name(field.name)
            text = "NODE, NODE/SLOT of a GPU, NODE/PORT of a link" if name == "targets" else (
                comments().get((kind, field.name), "")
            )  # fmt: skip
            parameters.append(_parameter(name, "query", _query_schema(field), name in required, text))
        parameters += _page_parameters() if route.paging else []
    reply = schemas.message(route.method.reply.DESCRIPTOR)
    if route.paging:
        reply = _page_schema(route, schemas)
    found["parameters"] = parameters
    found["responses"] = {"200": _json("Done." if route.acts else "Found.", reply), **_errors(route.acts)}
    if not route.acts:
        found["responses"]["304"] = {"description": "As If-None-Match has it."}
    return found


def _page_schema(route: Route, schemas: Schemas) -> Schema:
    """Give a list the field for its next page."""
    kind = route.method.reply.DESCRIPTOR
    reference = schemas.message(kind)
    schemas.components[kind.name]["properties"]["next_cursor"] = {
        "type": ["string", "null"], "description": "`cursor` of the next page; null: this is the last one"
    }  # fmt: skip
    schemas.components[kind.name]["required"].append("next_cursor")
    return reference


def _page_parameters() -> list[dict[str, Any]]:
    size = {"type": "integer", "minimum": 1, "maximum": PAGE_MOST, "default": PAGE}
    return [
        _parameter("limit", "query", size, False, "items of a page"),
        _parameter("cursor", "query", {"type": "string"}, False, "next_cursor of the page before"),
    ]


def _body(route: Route, schemas: Schemas) -> Schema:
    kind = route.method.request.DESCRIPTOR
    fields = {}
    for field in offered(route):
        shape = {"type": "array", "items": _bounded(field)} if field.is_repeated else _bounded(field)
        text = comments().get((kind.name, field.name))
        fields[public_name(field.name)] = {**shape, "description": text} if text else shape
    name = f"{route.method.name}Body"
    schemas.components[name] = {"type": "object", "properties": fields, "additionalProperties": False}
    if required := REQUIRED.get(route.method.name):
        schemas.components[name]["required"] = list(required)
    return {"$ref": f"#/components/schemas/{name}"}


def _query_schema(field: FieldDescriptor) -> Schema:
    one = {"type": "string"} if field.message_type is not None else _bounded(field)
    return {"type": "array", "items": one} if field.is_repeated else one


def _bounded(field: FieldDescriptor) -> Schema:
    found = scalar(field)
    return {**found, "maximum": 2**32 - 1} if found.get("minimum") == 0 else found


def _stream_operation(schemas: Schemas) -> dict[str, Any]:
    schemas.record(Incident)
    text = (
        "Server-sent events: first the open incidents, then each that changes, in its newest version. An event"
        " `incident` has an Incident as data. Last-Event-ID goes on behind an event; some may come again. An event"
        " `gap` says that the id is older than what is kept."
    )
    last = _parameter("Last-Event-ID", "header", {"type": "string"}, False, "id of the last event that was received")
    stream = {"description": "A stream.", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    return {
        "operationId": "stream_incidents", "tags": ["incidents"], "summary": "Incidents as they change.",
        "description": text, "parameters": [*_wanted(), last], "responses": {"200": stream, **_errors(False)},
    }  # fmt: skip


def _annotations_operation(schemas: Schemas) -> dict[str, Any]:
    schemas.components["Annotation"] = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
    listed = {"type": "array", "items": {"$ref": "#/components/schemas/Annotation"}}
    times = [
        _parameter("from", "query", TIME_SCHEMA, False, "a day before `to`, unless given"),
        _parameter("to", "query", TIME_SCHEMA, False, "now, unless given"),
    ]
    return {
        "operationId": "list_annotations", "tags": ["incidents"],
        "summary": "Incidents that were open in a time, as annotations of Grafana.",
        "parameters": [*_wanted(), *times],
        "responses": {"200": _json("Found.", listed), **_errors(False)},
    }  # fmt: skip


def _wanted() -> list[dict[str, Any]]:
    return [_parameter(name, "query", {"type": "string"}, False, text) for name, text in WANTED.items()]


def _parameter(name: str, place: str, schema: Schema, required: bool, text: str = "") -> dict[str, Any]:
    found = {"name": name, "in": place, "required": required, "schema": schema}
    return {**found, "description": text} if text else found


def _json(text: str, schema: Schema) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _errors(acts: bool) -> Mapping[str, Any]:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    both = {**ERRORS, **(ACT_ERRORS if acts else {"409": ACT_ERRORS["409"], "411": ACT_ERRORS["411"]})}
    return {status: {"description": text, "content": content} for status, text in sorted(both.items())}
