"""Filters of Drover's roles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML: values first, then tables, then lists of tables. Texts and lists are as in JSON.

    Raises:
        TypeError: a value that TOML does not have, as a null: leave the key out instead.
    """
    return "\n".join(_table(dict(settings), "")) + "\n"


def _table(settings: Mapping[str, Any], name: str) -> list[str]:
    lines: list[str] = []
    tables: list[str] = []
    for key, value in settings.items():
        full = f"{name}.{_key(key)}" if name else _key(key)
        if isinstance(value, Mapping):
            tables += ["", f"[{full}]", *_table(value, full)]
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for each in value:
                tables += ["", f"[[{full}]]", *_table(each, full)]
        else:
            lines.append(f"{_key(key)} = {_value(value, full)}")
    return lines + tables


def _key(key: str) -> str:
    text = str(key)
    plain = text.replace("_", "").replace("-", "")
    return text if plain.isascii() and plain.isalnum() else _text(text)


def _value(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each, name) for each in value) + "]"
    raise TypeError(f"{name}: {type(value).__name__} is nothing that TOML has; leave the key out")


def _text(text: str) -> str:
    """As in JSON, but for what JSON writes unchanged and TOML does not take."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def why(result: Mapping[str, Any]) -> str:
    """Of a task that failed, perhaps at some items of its loop: what it said, in words."""
    failed = [each for each in result.get("results", [result]) if each.get("failed")] or [result]
    shown = failed[0]
    return str(shown.get("stderr") or shown.get("msg") or "it failed without a word").strip()


def reach(address: str) -> str:
    """Where what listens on an address answers on its own machine."""
    plain = address.strip("[]")
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plain, plain)  # noqa: S104  # only asked, never bound


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"reach": reach, "to_toml": to_toml, "why": why}
