"""Settings as nested frozen dataclasses. One declaration gives the parser, its errors, the example file and the docs.

    @dataclass(frozen=True)
    class IngestConfig:
        listen: str = setting("127.0.0.1:7301", "address for agents")

A field whose key is a keyword of Python ends in `_` (`continue_`).

A file is TOML. A nested dataclass is a table, a `tuple[Dataclass, ...]` a list of tables (`[[webhooks]]`). Declare
scalars before tables, as TOML requires. Durations are in seconds and end in `_s`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class SettingsError(ValueError):
    """The settings cannot be used. The message names the file and the key, and says what to do."""


def setting(default: Any, help_: str, check: Callable[[Any], str | None] | None = None) -> Any:
    """Declare a field with its help. `check` returns what is wrong with a value, or None."""
    return dataclasses.field(default=default, metadata={"help": help_, "check": check})


def required(help_: str, check: Callable[[Any], str | None] | None = None) -> Any:
    """Declare a field without a default, before those that have one. A table without it is refused."""
    return dataclasses.field(metadata={"help": help_, "check": check})


def between(low: float, high: float) -> Callable[[Any], str | None]:
    """Return a check that a number is within these bounds, which are allowed too."""
    return lambda value: None if low <= value <= high else f"must be from {low:g} to {high:g}"


def one_of(*choices: str) -> Callable[[Any], str | None]:
    """Return a check that a text is one of these."""
    return lambda value: None if value in choices else f"must be one of {', '.join(choices)}"


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting, for docs and example files. Keys in a list of tables have the form `webhooks[].url`."""

    key: str
    type: str
    default: Any  # None: no default
    help: str


def load(kind: type[T], path: Path | None, overrides: dict[str, Any] | None = None) -> T:
    """Read `path` (None: defaults only) into `kind`. `overrides` have dotted keys and are applied last.

    Raises:
        SettingsError: missing file, invalid TOML, unknown key, wrong type or value; with the line.
    """
    text = ""
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}; check the path given with --config") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"{path}: not valid TOML: {error}") from None
    return load_text(kind, text, str(path) if path else "settings", overrides)


def load_text(kind: type[T], text: str, name: str, overrides: dict[str, Any] | None = None) -> T:
    """Return what `load` returns for a file of this text. `name`: of the file, for errors.

    Raises:
        SettingsError
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and tables in tables
        raise SettingsError(f"{name}: not valid TOML: {error}") from None
    for dotted, value in (overrides or {}).items():
        table = data
        *parents, last = dotted.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise SettingsError(f"{name}: {parent}: must be a table, [{parent}]")
        table[last] = value
    try:
        return _build(kind, data, name, "")
    except SettingsError as error:
        raise _error_at_key(str(error), name, text) from None


def error_at_key(message: str, path: Path | None) -> SettingsError:
    """Return the error `KEY: what is wrong` with the file and line of the key."""
    return SettingsError(message) if path is None else _error_at_key(message, str(path), path.read_text("utf-8"))


def _error_at_key(message: str, name: str, text: str) -> SettingsError:
    """Return `FILE:LINE: KEY: what is wrong`."""
    from drover_core.toml_lines import line_of  # loaded only after an error

    rest = message.removeprefix(f"{name}: ")
    line = line_of(text, rest.partition(":")[0])
    return SettingsError(message if line is None else f"{name}:{line}: {rest}")


def list_settings(kind: type, prefix: str = "") -> Iterator[SettingInfo]:
    """Yield all settings of `kind`, in order of declaration."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from list_settings(typing.cast(type, hint), f"{prefix}{item.name}.")
            continue
        default = None if item.default is dataclasses.MISSING else item.default
        yield SettingInfo(prefix + item.name.removesuffix("_"), _name(hint), default, item.metadata["help"])
        if entry := _table_of(hint):
            yield from list_settings(entry, f"{prefix}{item.name}[].")


def example_toml(kind: type) -> str:
    """Return a commented TOML file with every setting at its default. Lists of tables are one commented entry."""
    lines: list[str] = []
    table = ""
    for row in list_settings(kind):
        if row.type == _TABLES:
            lines += ["", f"# {row.help}"]
            continue
        parent, _, key = row.key.rpartition(".")
        listed = parent.endswith("[]")
        if parent != table:
            lines += [f"# [[{parent[:-2]}]]"] if listed else ["", f"[{parent}]"]
            table = parent
        lines.append(f"# # {row.help}" if listed else f"# {row.help}")
        value = "" if row.default is None else _toml(row.default)
        lines.append(f"# {key} = {value}".rstrip() if listed or row.default is None else f"{key} = {value}")
    return "\n".join(lines).lstrip("\n") + "\n"


_TABLES = "list of tables"


def _table_of(hint: Any) -> type | None:
    """Return the dataclass of a list of tables, None for every other type."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(args[0]):
        return typing.cast(type, args[0])
    return None


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def _name(hint: Any) -> str:
    if _table_of(hint):
        return _TABLES
    if typing.get_origin(hint) is tuple:
        return "list of " + _name(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _name(next(a for a in typing.get_args(hint) if a is not type(None)))
    return {"str": "string", "int": "whole number", "float": "number", "bool": "true or false"}.get(hint.__name__, "?")


def _build(kind: type[T], data: dict[str, Any], name: str, prefix: str) -> T:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    fields = {field.removesuffix("_"): field for field in hints}
    for key, value in data.items():
        if key not in fields:
            import difflib  # loaded only for a mistyped key: it would slow down every start

            close = difflib.get_close_matches(key, fields, n=1)
            hint_text = f"did you mean {prefix}{close[0]}?" if close else f"known here are {', '.join(fields)}"
            raise SettingsError(f"{name}: {prefix}{key}: unknown key; {hint_text}")
        field = fields[key]
        hint = hints[field]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise SettingsError(f"{name}: {prefix}{key}: must be a table, [{prefix}{key}]")
            values[key] = _build(typing.cast(type, hint), value, name, f"{prefix}{key}.")
        elif entry := _table_of(hint):
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise SettingsError(f"{name}: {prefix}{key}: must be a list of tables, [[{prefix}{key}]]")
            values[field] = tuple(_build(entry, item, name, f"{prefix}{key}[{i}].") for i, item in enumerate(value))
        else:
            values[field] = _checked(hint, value, f"{name}: {prefix}{key}")
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]  # callers pass dataclasses, which T cannot express
        check = item.metadata.get("check")
        if check and item.name in values and values[item.name] is not None and (wrong := check(values[item.name])):
            raise SettingsError(f"{name}: {prefix}{item.name}: {wrong}, found {_shown(values[item.name])}")
        if item.name in values:
            continue
        if dataclasses.is_dataclass(hints[item.name]):
            values[item.name] = hints[item.name]()
        elif item.default is dataclasses.MISSING:
            raise SettingsError(f"{name}: {prefix}{item.name}: missing; {item.metadata['help']}")
    return kind(**values)


def _shown(value: Any) -> str:
    """Return a wrong value for a message, without the user and password of an address: messages are logged."""
    return re.sub(r"[^\s'\"]*:[^\s'\"]*@", "...@", repr(value))


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(args[0], item, where) for item in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _checked(next(a for a in args if a is not type(None)), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        wanted = _name(hint) if hint is bool else f"a {_name(hint)}"
        raise SettingsError(f"{where}: must be {wanted}, found {_shown(value)}")
    return value
