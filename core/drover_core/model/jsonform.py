"""Convert the dataclasses of `events` to and from the JSON in which they are stored and sent."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from drover_core.model import legacy

T = TypeVar("T")


def to_dict(value: Any) -> dict[str, Any]:
    """Return a dict of a dataclass, ready for `json`."""
    return dataclasses.asdict(value)


def to_json(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"), allow_nan=False)


def from_json(kind: type[T], text: str | bytes) -> T:
    """Read what `to_json` wrote. Unknown keys are ignored.

    Raises:
        ValueError: not JSON, a missing field, or a value of the wrong type.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__}: expected an object, found {type(data).__name__}")
    return from_dict(kind, data)


def from_dict(kind: type[T], data: dict[str, Any]) -> T:
    """Return a dataclass from a dict.

    Raises:
        ValueError: a missing field or a value of the wrong type.
    """
    hints = _hints(typing.cast(typing.Hashable, kind))
    if (reader := legacy.READERS.get(kind.__name__)) is not None:
        data = reader(data)
    try:
        return kind(**{key: _convert(hints[key], item, key) for key, item in data.items() if key in hints})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


@functools.cache
def _hints(kind: typing.Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Return a JSON value as the type of a field.

    Raises:
        ValueError: it has another type.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, key)
    if origin is tuple:
        return _convert_tuple(args, value, key)
    if origin is Mapping or dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{key}: expected an object, found {value!r}")
        if origin is not Mapping:
            return from_dict(typing.cast(type, hint), value)
        return {name: item if args[1] is Any else _convert(args[1], item, key) for name, item in value.items()}
    return _convert_scalar(hint, value, key)


def _convert_tuple(args: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key}: expected a list, found {value!r}")
    if len(args) == 2 and args[1] is ...:
        return tuple(_convert(args[0], item, key) for item in value)
    if len(args) != len(value):
        raise ValueError(f"{key}: expected {len(args)} items, found {value!r}")
    return tuple(_convert(hint, item, key) for hint, item in zip(args, value, strict=True))


def _convert_scalar(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{key}: expected {hint.__name__}, found {value!r}")
    return value
