"""Settings as nested frozen dataclasses: one declaration gives the parser, its errors, the sample file and the docs.

    @dataclass(frozen=True)
    class IngestConfig:
        listen: str = setting("127.0.0.1:7301", "address for agents")

A file is TOML; a nested dataclass is a table. Durations are numbers of seconds and end in `_s`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class SettingsError(ValueError):
    """A configuration that cannot be used; the message names the file, the key and the mend."""


def setting(default: Any, help_: str, check: Callable[[Any], str | None] | None = None) -> Any:
    """A field with its help. `check` returns what is wrong with a value, or None."""
    return dataclasses.field(default=default, metadata={"help": help_, "check": check})


def between(low: float, high: float) -> Callable[[Any], str | None]:
    return lambda value: None if low <= value <= high else f"must be from {low:g} to {high:g}"


def one_of(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else f"must be one of {', '.join(choices)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, for docs and samples."""

    key: str
    type: str
    default: Any
    help: str


def load(kind: type[T], path: Path | None, overrides: dict[str, Any] | None = None) -> T:
    """Read `path` (None: defaults only) into `kind`; `overrides` are dotted keys, applied last.

    Raises:
        SettingsError: missing file, bad TOML, unknown key, wrong type or a value out of range.
    """
    data: dict[str, Any] = {}
    name = str(path) if path else "settings"
    if path is not None:
        try:
            data = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}; check the path given with --config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: not valid TOML: {error}") from None
    for dotted, value in (overrides or {}).items():
        table = data
        *parents, last = dotted.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    return _build(kind, data, name, "")


def rows(kind: type, prefix: str = "") -> Iterator[Row]:
    """All settings of `kind`, in order of declaration."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from rows(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            yield Row(prefix + item.name, _name(hint), item.default, item.metadata["help"])


def sample(kind: type) -> str:
    """A commented TOML file with every setting at its default."""
    lines: list[str] = []
    table = ""
    for row in rows(kind):
        parent, _, key = row.key.rpartition(".")
        if parent != table:
            lines += ["", f"[{parent}]"]
            table = parent
        lines.append(f"# {row.help}")
        lines.append(f"# {key} = " if row.default is None else f"{key} = {_toml(row.default)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "list of " + _name(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _name(next(a for a in typing.get_args(hint) if a is not type(None)))
    return {"str": "string", "int": "whole number", "float": "number", "bool": "true or false"}.get(hint.__name__, "?")


def _build(kind: type[T], data: dict[str, Any], name: str, prefix: str) -> T:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            mend = f"did you mean {prefix}{close[0]}?" if close else f"known here are {', '.join(hints)}"
            raise SettingsError(f"{name}: {prefix}{key}: unknown key; {mend}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise SettingsError(f"{name}: {prefix}{key}: must be a table, [{prefix}{key}]")
            values[key] = _build(typing.cast(type, hint), value, name, f"{prefix}{key}.")
        else:
            values[key] = _checked(hint, value, f"{name}: {prefix}{key}")
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]  # callers pass dataclasses; T cannot say so
        check = item.metadata.get("check")
        if check and item.name in values and values[item.name] is not None and (wrong := check(values[item.name])):
            raise SettingsError(f"{name}: {prefix}{item.name}: {wrong}, found {values[item.name]!r}")
        if item.name not in values and dataclasses.is_dataclass(hints[item.name]):
            values[item.name] = hints[item.name]()
    return kind(**values)


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(args[0], item, where) for item in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _checked(next(a for a in args if a is not type(None)), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise SettingsError(f"{where}: must be a {_name(hint)}, found {value!r}")
    return value
