"""Read a request of REST: parameters of the query and the JSON body as the message of the method, or refuse it."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from drover_collector.api.snapshot import bad_argument
from drover_collector.rest.routes import Route
from drover_collector.rest.shapes import INTEGERS, REALS, TIMES, public_name, visible
from drover_core.times import from_iso
from drover_proto import fleet_pb2 as pb

PAGE, PAGE_MOST = 100, 1000  # items of a page
KEYS_BEFORE = 8  # that a cursor has of items before the last of its page: so many may leave between two pages
PARAMETERS_MOST = 1100  # a silence or a series of 1,000 targets
TIME_FORM = "2026-11-21T06:17:00.250Z"
INT32, UINT32 = 2**31, 2**32


class Cursor:
    """Where the next page begins: behind an item, or behind the one before it if that item has left the list.

    Args:
        place: behind the item, in the list of that time.
        before: keys of some items before it, the nearest first.
    """

    def __init__(self, place: int, key: str, before: Sequence[str] = ()) -> None:
        self.place, self.key, self.before = place, key, tuple(before[:KEYS_BEFORE])

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(json.dumps([self.place, self.key, *self.before]).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, most: int) -> Cursor:
        """
        Raises:
            RefusalError: it is none.
        """
        try:
            place, key, *before = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            if isinstance(place, bool) or not isinstance(place, int):
                raise ValueError(text)
            if not all(isinstance(each, str) for each in (key, *before)):
                raise ValueError(text)
        except (ValueError, TypeError, binascii.Error, RecursionError):
            raise bad_argument("cursor: give the next_cursor of a page unchanged") from None
        return cls(min(max(place, 0), most), key, before)


def parameters(query: str) -> dict[str, list[str]]:
    """
    Raises:
        RefusalError: too many, or not UTF-8.
    """
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS_MOST, errors="strict")
    except UnicodeDecodeError:
        raise bad_argument("the query is not UTF-8; encode it with percent signs") from None
    except ValueError:
        raise bad_argument(f"the query has more than {PARAMETERS_MOST} parameters; give fewer") from None
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def one(given: dict[str, list[str]], name: str) -> str:
    """Take a parameter that may be given once. Empty: it is not there."""
    values = given.pop(name, [""])
    if len(values) > 1:
        raise bad_argument(f"{name}: give it once")
    return values[0]


def page_size(given: dict[str, list[str]]) -> int:
    """Take `limit`: items of a page, 1 to PAGE_MOST."""
    text = one(given, "limit")
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if text and not 1 <= size <= PAGE_MOST:
        raise bad_argument(f"limit: give a number from 1 to {PAGE_MOST}; `cursor` leads to the next page")
    return size or PAGE


def time_of(given: dict[str, list[str]], name: str) -> int:
    """Take a time in ms. 0: it is not given."""
    text = one(given, name)
    return _time(name, text) if text else 0


def offered(route: Route) -> Iterator[FieldDescriptor]:
    """The fields of a request that are parameters or keys of the body. A list's `limit` is REST's own."""
    for field in visible(route.method.request.DESCRIPTOR):
        if public_name(field.name) not in route.variables and not (route.paging and field.name == "limit"):
            yield field


def from_query(route: Route, given: Mapping[str, list[str]], path: Mapping[str, str]) -> Message:
    """Return the request of a GET. `given` has no parameters of pages.

    Raises:
        RefusalError: a parameter that is unknown, repeated or has another form.
    """
    request = _of_path(route, path)
    fields = {public_name(field.name): field for field in offered(route)}
    _check_names(route, given, [*fields, *(["limit", "cursor"] if route.paging else [])])
    for name, values in given.items():
        field = fields[name]
        if isinstance(request, pb.SeriesRequest) and name == "targets":
            request.targets.extend(_target(given, each) for each in values)
        elif field.is_repeated:
            getattr(request, field.name).extend([_of_text(field, each) for each in values])
        elif len(values) > 1:
            raise bad_argument(f"{name}: give it once")
        elif values[0] or field.has_presence:
            setattr(request, field.name, _of_text(field, values[0]))
    return request


def from_body(route: Route, body: bytes, path: Mapping[str, str]) -> Message:
    """Return the request of a POST.

    Raises:
        RefusalError: not an object in JSON, or a key that is unknown or has another type.
    """
    request = _of_path(route, path)
    try:
        data = json.loads(body or b"{}", object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise bad_argument(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise bad_argument('the body is not an object; send JSON such as {"why": "..."}')
    fields = {public_name(field.name): field for field in offered(route)}
    _check_names(route, data, list(fields))
    for name, value in data.items():
        field = fields[name]
        if value is None:
            continue
        if not field.is_repeated:
            setattr(request, field.name, _of_json(field, value))
        elif isinstance(value, list):
            getattr(request, field.name).extend([_of_json(field, each) for each in value])
        else:
            raise bad_argument(f"{name}: give a list")
    return request


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """
    Raises:
        RefusalError: a key is there twice; what looked at it before may have read the other.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise bad_argument(f"{next(n for n in names if names.count(n) > 1)[:80]!r} is there twice; give it once")
    return found


def _of_path(route: Route, path: Mapping[str, str]) -> Message:
    request: Message = route.method.request()
    for name, quoted in path.items():
        try:
            setattr(request, name, _text(name, unquote(quoted, errors="strict")))
        except UnicodeDecodeError:
            raise bad_argument(f"{name}: it is not UTF-8; encode it with percent signs") from None
    return request


def _check_names(route: Route, given: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(given.keys() - set(known)):
        there = f"there are {', '.join(known)}" if known else "there are none"
        raise bad_argument(f"{unknown[0][:80]!r} is not known at {route.verb} {route.path}; {there}")


def _target(given: Mapping[str, list[str]], text: str) -> pb.SeriesTarget:
    """Read `NODE`, `NODE/SLOT` of a GPU or `NODE/PORT` of a link."""
    node, slash, rest = _text("targets", text).partition("/")
    scope = given.get("scope", [""])[0]
    if not slash:
        return pb.SeriesTarget(node=node)
    if scope == "link":
        return pb.SeriesTarget(node=node, link=rest)
    if not (rest.isascii() and rest.isdigit() and len(rest) < 6):
        raise bad_argument("targets: give NODE, NODE/SLOT with scope=gpu, or NODE/PORT with scope=link")
    return pb.SeriesTarget(node=node, gpu=int(rest))


def _of_text(field: FieldDescriptor, text: str) -> Any:
    name = public_name(field.name)
    if field.name in TIMES:
        return _time(name, text)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if text not in ("true", "false"):
            raise bad_argument(f"{name}: give true or false")
        return text == "true"
    if field.cpp_type in INTEGERS or field.cpp_type in REALS:
        try:
            number: float = int(text) if field.cpp_type in INTEGERS else float(text)
        except ValueError:
            raise bad_argument(f"{name}: give a number") from None
        return _within(field, name, number)
    return _text(name, text)


def _of_json(field: FieldDescriptor, value: Any) -> Any:
    name = public_name(field.name)
    if field.name in TIMES and isinstance(value, str):
        return _time(name, value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and isinstance(value, bool):
        return value
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and isinstance(value, str):
        return _text(name, value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and field.name not in TIMES
    if number and (field.cpp_type in REALS or (field.cpp_type in INTEGERS and isinstance(value, int))):
        return _within(field, name, value)
    kind = (
        f"a time such as {TIME_FORM}" if field.name in TIMES
        else "true or false" if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL
        else "text" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        else "a whole number" if field.cpp_type in INTEGERS
        else "a number"
    )  # fmt: skip
    raise bad_argument(f"{name}: give {kind}")


def _within(field: FieldDescriptor, name: str, number: float) -> float:
    if field.cpp_type in REALS:
        if not abs(number) < 1e300 or not math.isfinite(number):
            raise bad_argument(f"{name}: the number is too large")
        return number
    low, high = (0, UINT32) if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else (-INT32, INT32)
    if not low <= number < high:
        raise bad_argument(f"{name}: give a number from {low} to {high - 1}")
    return number


def _time(name: str, text: str) -> int:
    """Return the ms of an RFC 3339 time. Its zone is required: a time without one is read differently by each."""
    try:
        if datetime.fromisoformat(text).tzinfo is None or "T" not in text.upper():
            raise ValueError(text)
        found = from_iso(text)
    except (ValueError, OverflowError):
        raise bad_argument(f"{name}: give a time such as {TIME_FORM}") from None
    if found <= 0:
        raise bad_argument(f"{name}: give a time after 1970")
    return found


def _text(name: str, text: str) -> str:
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise bad_argument(f"{name}: it has letters that are no text")
    return text
