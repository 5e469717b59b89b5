"""Read protobuf's encoding by hand, within a budget. Pure.

Protobuf's own objects would take a hundred bytes for each two of a hostile request. The encoding is that of
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator


class WriteError(ValueError):
    """A request that cannot be used, also not when it comes again; the message says why."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return (value, where it ends).

    Raises:
        WriteError: it is cut off.
    """
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise WriteError("a number is cut off")


def skip(data: bytes, at: int, end: int, tag: int) -> int:
    """Return where the content of a field ends.

    Raises:
        WriteError: it is cut off, or of no known kind.
    """
    kind = tag & 7
    if kind == 0:
        _, at = varint(data, at, end)
    elif kind == 2:
        size, at = varint(data, at, end)
        at += size
    elif kind in (1, 5):
        at += 8 if kind == 1 else 4
    else:
        raise WriteError("it is not the message that is expected here")
    if at > end:
        raise WriteError("the request is cut off")
    return at


class Budget:
    """How many fields all messages of one request may have together."""

    def __init__(self, most: int) -> None:
        self._most, self._left = most, most

    def spend(self, count: int = 1) -> None:
        """
        Raises:
            WriteError: there are more.
        """
        self._left -= count
        if self._left < 0:
            raise WriteError(f"the request has more than {self._most} fields; send less at a time")


def fields(data: bytes, at: int, end: int, budget: Budget) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tag, where the field begins, where its content begins, where it ends) of the message in data[at:end].

    Raises:
        WriteError: it is cut off, or the request has more fields than it may have.
    """
    while at < end:
        budget.spend()
        begin = at
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = varint(data, at, end)
        if tag & 7 == 2:
            size, at = varint(data, at, end)
            stop = at + size
            if stop > end:
                raise WriteError("the request is cut off")
        else:
            stop = skip(data, at, end, tag)
        yield tag, begin, at, stop
        at = stop
