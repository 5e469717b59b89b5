"""Write drover_client/models.py and api.py from the OpenAPI document. tests/client compares them."""

from __future__ import annotations

import keyword
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drover_collector.rest import openapi, routes

HERE = Path(__file__).parent / "drover_client"
SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
OWN = frozenset({"stream_incidents"})  # written by hand in transport.py


def models(document: Mapping[str, Any]) -> str:
    lines = [
        '"""The answers of REST. Made by client/generate.py: change nothing here."""', "",
        "from __future__ import annotations", "", "from typing import Any, TypedDict", "",
    ]  # fmt: skip
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Body") or name == "Problem":
            continue
        fields = ", ".join(f'"{key}": {_type(each, quoted=True)}' for key, each in schema["properties"].items())
        if any(keyword.iskeyword(key) for key in schema["properties"]):  # `from` is no name of a class's field
            lines += ["", f'{name} = TypedDict("{name}", {{{fields}}})']
        else:
            each = [f"    {key}: {_type(shape)}" for key, shape in schema["properties"].items()]
            lines += ["", f"class {name}(TypedDict):", *(each or ["    pass"]), ""]
    return "\n".join(lines) + "\n"


def api(document: Mapping[str, Any]) -> str:
    lines = [
        '"""The operations of REST. Made by client/generate.py: change nothing here."""', "",
        "from __future__ import annotations", "", "from collections.abc import AsyncIterator, Iterator, Sequence",
        "from datetime import datetime", "from typing import cast", "from urllib.parse import quote", "",
        "from drover_client import models", "from drover_client.transport import AsyncTransport, Transport", "",
        f'SCHEMA_VERSION = "{document["info"]["version"]}"', "",
    ]  # fmt: skip
    for name, base, waits in (("Drover", "Transport", False), ("AsyncDrover", "AsyncTransport", True)):
        what = "asyncio" if waits else "blocking calls"
        lines += ["", f"class {name}({base}):", f'    """Drover\'s REST for {what}."""', ""]
        for path, verbs in document["paths"].items():
            for verb, operation in verbs.items():
                if operation["operationId"] not in OWN:
                    lines += _operation(path, verb, operation, document, waits)
    return "\n".join(lines) + "\n"


def _operation(path: str, verb: str, operation: dict[str, Any], document: Mapping[str, Any], waits: bool) -> list[str]:
    places = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
    options = dict(_options(operation, document))
    names = {name: f"{name}_" if keyword.iskeyword(name) else name for name in options}
    arguments = [f"{place}: str" for place in places] + (["*"] if options or verb == "post" else [])
    for name, (kind, required) in sorted(options.items(), key=lambda each: not each[1][1]):
        arguments.append(f"{names[name]}: {kind}" if required else f"{names[name]}: {kind} | None = None")
    arguments += ["idempotency_key: str | None = None"] if verb == "post" else []
    reply = operation["responses"]["200"]["content"]["application/json"]["schema"]
    returned, where = _type(reply, "models."), re.sub(r"\{(\w+)\}", r"{quote(\1, safe='')}", path)
    wheref = f'f"{where}"' if places else f'"{path}"'
    given = "{" + ", ".join(f'"{name}": {names[name]}' for name in options) + "}"
    sent = f"self._post({wheref}, {given}, idempotency_key)" if verb == "post" else f"self._get({wheref}, {given})"
    name, wait = operation["operationId"], "await " if waits else ""
    made = [
        f"    {'async ' if waits else ''}def {name}(self, {', '.join(arguments)}) -> {returned}:".replace("(self, )", "(self)"),
        f'        """{operation["summary"]}"""', f'        return cast("{returned}", {wait}{sent})', "",
    ]  # fmt: skip
    paging = next((r.paging for r in routes.ROUTES if r.operation == name), None)
    if paging is None or not name.startswith("list_"):
        return made
    items = document["components"]["schemas"][reply["$ref"].rpartition("/")[2]]["properties"][paging.items]["items"]
    kept = [each for each in arguments if not each.startswith(("cursor:", "limit:"))]
    rest = "{" + ", ".join(f'"{each}": {names[each]}' for each in options if each not in ("cursor", "limit")) + "}"
    iterator, loop = ("AsyncIterator", "async for") if waits else ("Iterator", "for")
    signature = ", ".join(kept if kept != ["*"] else [])
    more = ', "limit": 1000}' if rest != "{}" else '"limit": 1000}'
    iterate = name.replace("list_", "iterate_")
    return [
        *made,
        f"    {'async ' if waits else ''}def {iterate}(self, {signature}) -> {iterator}[{_type(items, 'models.')}]:".replace("(self, )", "(self)"),
        f'        """{operation["summary"]} All pages, an item at a time."""',
        f'        {loop} item in self._pages({wheref}, {rest[:-1]}{more}, "{paging.items}"):',
        f'            yield cast("{_type(items, "models.")}", item)', "",
    ]  # fmt: skip


def _options(operation: dict[str, Any], document: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, bool]]]:
    for each in operation["parameters"]:
        if each["in"] == "query":
            yield each["name"], (_argument(each["schema"]), each["required"])
    if "requestBody" in operation:
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
        for key, shape in schema["properties"].items():
            yield key, (_argument(shape), key in schema.get("required", ()))


def _argument(schema: Mapping[str, Any]) -> str:
    if schema["type"] == "array":
        return f"Sequence[{_argument(schema['items'])}]"
    return "datetime | str" if schema.get("format") == "date-time" else SIMPLE[schema["type"]]


def _type(schema: Mapping[str, Any], prefix: str = "", quoted: bool = False) -> str:
    if "$ref" in schema:
        name = prefix + schema["$ref"].rpartition("/")[2]
        return f'"{name}"' if quoted else name
    if "anyOf" in schema:
        return _union([_type(each, prefix) for each in schema["anyOf"]], quoted)
    kind = schema["type"]
    if isinstance(kind, list):
        return _union([SIMPLE[each] for each in kind], quoted)
    if kind == "array":
        inner = _type(schema["items"], prefix)
        return f'"list[{inner}]"' if quoted else f"list[{inner}]"
    if kind == "object":
        more = schema.get("additionalProperties")
        inner = _type(more, prefix) if isinstance(more, dict) else "Any"
        return f'"dict[str, {inner}]"' if quoted else f"dict[str, {inner}]"
    return SIMPLE[kind]


def _union(kinds: list[str], quoted: bool) -> str:
    text = " | ".join(kinds)
    return f'"{text}"' if quoted else text


def generate() -> dict[str, str]:
    """Return the text of each file by its name, not yet formatted."""
    document = openapi.document()
    return {"models.py": models(document), "api.py": api(document)}


if __name__ == "__main__":
    for name, text in generate().items():
        (HERE / name).write_text(text, "utf-8")
        subprocess.run(["ruff", "check", "--fix", "--quiet", "--exit-zero", HERE / name], check=True)
        subprocess.run(["ruff", "format", "--quiet", HERE / name], check=True)
