"""Read a pickle of plain data, and nothing else: no class, function or object can come out of it, so none can run.

PyTorch writes its flight recorder as a pickle. Python's unpickler calls what the file names; a dump of a job is a file
that its user could write. This reader knows the operations that lists, dicts, tuples, texts, numbers, booleans and None
are made of (pickletools describes them) and refuses every other.
"""

from __future__ import annotations

import pickletools
from typing import Any

MAX_OPERATIONS = 8_000_000
_MARK = object()
_VALUES = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING",
        "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    }
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}


class PickleError(ValueError):
    """A pickle that is no plain data, or damaged."""


def load(data: bytes, most: int = MAX_OPERATIONS) -> Any:
    """Return the value of a pickle of at most so many operations. Each may take 100 bytes of memory.

    Raises:
        PickleError: it holds anything but plain data, or is damaged.
    """
    machine = _Machine()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count > most:
                raise PickleError(f"more than {most} operations")
            if operation.name == "STOP":
                return machine.result()
            machine.step(operation.name, argument)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise PickleError(f"it is damaged ({type(error).__name__})") from None
    raise PickleError("it has no end")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise PickleError("it is damaged (the stack at its end)")
        return self._stack[0]

    def step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._build(name)

    def _build(self, name: str) -> None:
        stack = self._stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            if len(stack) < size:
                raise PickleError("it is damaged (a tuple)")
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name == "LIST":
            stack.append(self._to_mark())
        elif name == "DICT":
            stack.append(_pairs({}, self._to_mark()))
        elif name == "APPEND":
            value = stack.pop()
            self._list().append(value)
        elif name == "APPENDS":
            values = self._to_mark()
            self._list().extend(values)
        elif name == "SETITEM":
            values = [stack.pop(-2), stack.pop()]
            _pairs(self._dict(), values)
        elif name == "SETITEMS":
            values = self._to_mark()
            _pairs(self._dict(), values)
        else:
            raise PickleError(f"it is not plain data: operation {name}")

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("it is damaged (nothing to remember)")
        return self._stack[-1]

    def _list(self) -> list[Any]:
        if not isinstance(top := self._top(), list):
            raise PickleError("it is damaged (no list to add to)")
        return top

    def _dict(self) -> dict[Any, Any]:
        if not isinstance(top := self._top(), dict):
            raise PickleError("it is damaged (no dict to add to)")
        return top

    def _to_mark(self) -> list[Any]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                values = self._stack[at + 1 :]
                del self._stack[at:]
                return values
        raise PickleError("it is damaged (no mark)")


def _pairs(into: dict[Any, Any], values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2:
        raise PickleError("it is damaged (a key without a value)")
    for key, value in zip(values[::2], values[1::2], strict=True):
        if not isinstance(key, str | int | float | bool | None):
            raise PickleError("it is not plain data: a key that is no text and no number")
        into[key] = value
    return into
