"""Calls of NVML whose buffers are made once: what is asked each second for each GPU.

nvidia-ml-py makes new structs and arrays for each call. Measured on the C stand-in, CPU time of the caller (the
stand-in's own share is in both): a batch of ten field values 56 us by nvidia-ml-py, 16 us here; a temperature 7.2 us
and 4.6 us. A maker here gives a `read(handle)` with buffers of its own, so that each GPU's thread has its own.

All may raise pynvml.NVMLError, also at making: FUNCTION_NOT_FOUND where the driver is older than the function.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from operator import and_
from typing import Any

import pynvml

Raw = float | None  # None: NVML answered that it has no value
Read = Callable[[Any], tuple[Raw, ...]]
Bare = tuple[Callable[..., int], tuple[Any, ...]]

NONE_32 = 2**32 - 1  # NVML_VALUE_NOT_AVAILABLE in the width of the answer
NONE_64 = 2**64 - 1


def function(name: str) -> Callable[..., int]:
    """The library's function, for calls past nvidia-ml-py's wrappers (which look it up in the same way)."""
    found: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
    return found


def u32(value: int) -> Raw:
    return None if value == NONE_32 else value


def u64(value: int) -> Raw:
    return None if value == NONE_64 else value


class Call:
    """One function with its buffer. `ask` is the bare call, `values` what it left: a caller of many in a row takes all
    answers afterwards, for a processor that was idle during a call is slow at first."""

    __slots__ = ("_arguments", "_ask", "values")

    def __init__(self, ask: Callable[..., int], arguments: tuple[Any, ...], values: Callable[[], tuple[Raw, ...]]):
        self._ask, self._arguments, self.values = ask, arguments, values

    def __call__(self, handle: Any) -> tuple[Raw, ...]:
        if code := self._ask(handle, *self._arguments):
            raise pynvml.NVMLError(code)
        return self.values()

    def bare(self, handle: Any) -> Bare:
        """The function and its arguments; it gives NVML's return code."""
        return self._ask, (handle, *self._arguments)


def number(name: str, *arguments: int, wide: bool = False) -> Callable[[], Read]:
    """A function that puts one unsigned number into its last argument; `wide`: of 64 bits."""

    def make() -> Read:
        out = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        none = NONE_64 if wide else NONE_32

        def values() -> tuple[Raw, ...]:
            value = out.value
            return (None if value == none else value,)

        return Call(function(name), (*arguments, ctypes.byref(out)), values)

    return make


def structure(
    name: str,
    fresh: Callable[[], ctypes.Structure],
    layout: str,
    then: Callable[[tuple[Raw, ...]], tuple[Raw, ...]] | None = None,
) -> Callable[[], Read]:
    """A function that fills a struct made by `fresh` (with its version set).

    `layout`: its values in the form of module struct, "=8xQ16xQ" say, of one width. nvidia-ml-py's structs look each
    attribute up in Python. `then` turns them into what is sent.
    """
    none = NONE_64 if "Q" in layout else NONE_32

    def make() -> Read:
        ask, out = function(name), fresh()
        memory = memoryview(out).cast("B")
        taken = struct.Struct(layout).unpack_from

        def values() -> tuple[Raw, ...]:
            found = taken(memory)
            if none in found:
                found = tuple(None if value == none else value for value in found)
            return then(found) if then else found

        return Call(ask, (ctypes.byref(out),), values)

    return make


# nvmlFieldValue_t: fieldId, scopeId, timestamp, latencyUsec, valueType, nvmlReturn, value (a union of 8 bytes).
_FIELD = struct.Struct("=IIqqIiQ")
_UINT = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT  # most fields are of this type, or of one of the next two
_ULONGS = (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG)
_OTHERS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: struct.Struct("=d"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: struct.Struct("=q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: struct.Struct("=i4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: struct.Struct("=H6x"),
}


class FieldBatch:
    """Field values asked in one call, always the same ones: those of the GPU first, then those of its links."""

    def __init__(self, asked: Sequence[tuple[int, int]], of_gpu: int | None = None) -> None:
        """`asked`: (field number, scope), the scope being the number of a link or 0; `of_gpu`: how many of them are of
        no link, all unless given."""
        self._ask = function("nvmlDeviceGetFieldValues")
        self._count = len(asked)
        self._fields = (pynvml.c_nvmlFieldValue_t * self._count)()
        for place, (number_, scope) in enumerate(asked):
            self._fields[place].fieldId, self._fields[place].scopeId = number_, scope
        self._at = ctypes.byref(self._fields)
        first = self._count if of_gpu is None else of_gpu
        whole = memoryview(self._fields).cast("B")
        self._gpu, self._links = whole[: first * _FIELD.size], whole[first * _FIELD.size :]
        self._codes = struct.Struct("=" + first * "28xi8x")
        self._answers = struct.Struct("=" + first * "24xI4xQ")
        self._kinds: tuple[int, ...] = ()  # types of the GPU's fields at the last call
        self._masks: tuple[int, ...] | None = None  # of their values; None: not all of them are unsigned
        self._words = struct.Struct("=" + (self._count - first) * "24xIiQ")
        self._seen: tuple[int, ...] = ()
        self._found: list[tuple[int, Raw]] = []

    def read(self, handle: Any) -> None:
        """
        Raises:
            NVMLError: none was answered.
        """
        if code := self._ask(handle, self._count, self._at):
            raise pynvml.NVMLError(code)

    def bare(self, handle: Any) -> Bare:
        """See Call."""
        return self._ask, (handle, self._count, self._at)

    @property
    def good(self) -> bool:
        """Whether each field of the GPU itself was answered."""
        return not any(self._codes.unpack(self._gpu))

    def values(self) -> list[tuple[int, Raw]]:
        """What the last call left of the GPU: (return code, value) of each field, in the order asked; a value means
        nothing unless its code is 0."""
        return [_answer(kind, code, word) for _, _, _, _, kind, code, word in _FIELD.iter_unpack(self._gpu)]

    def numbers(self) -> list[Raw]:
        """The values alone, where each field is `good`."""
        found = self._answers.unpack(self._gpu)
        kinds, words = found[::2], found[1::2]
        if kinds != self._kinds:
            self._kinds = kinds
            widths = {_UINT: NONE_32, **dict.fromkeys(_ULONGS, NONE_64)}
            self._masks = tuple(widths[kind] for kind in kinds) if widths.keys() >= set(kinds) else None
        if self._masks is None:
            return [value for _, value in self.values()]
        values: list[Raw] = list(map(and_, words, self._masks))
        if NONE_32 in values or NONE_64 in values:
            return [value for _, value in self.values()]
        return values

    def link_values(self) -> list[tuple[int, Raw]]:
        """The same of its links; the same list as before while all of them answer the same, as they do for days."""
        words = self._words.unpack(self._links)
        if words != self._seen:
            self._seen = words
            parts = iter(words)
            self._found = [_answer(kind, code, word) for kind, code, word in zip(parts, parts, parts, strict=True)]
        return self._found


def _answer(kind: int, code: int, word: int) -> tuple[int, Raw]:
    """(return code, value) of one field."""
    if code:
        return code, None
    if kind == _UINT:
        return 0, u32(word & NONE_32)
    if kind in _ULONGS:
        return 0, u64(word)
    if other := _OTHERS.get(kind):
        return 0, other.unpack(word.to_bytes(8, "little"))[0]
    return pynvml.NVML_ERROR_NOT_SUPPORTED, None  # a type that came after this version


class ProcessList:
    """The processes of a GPU or MIG instance, in one call where nvidia-ml-py makes two: room is kept for them."""

    def __init__(self, *names: str) -> None:
        """`names`: the function, then older ones with the same struct."""
        self._ask = self._first_of(names)
        self._make_room(64)

    @staticmethod
    def _first_of(names: Sequence[str]) -> Callable[..., int]:
        for name in names[:-1]:
            try:
                return function(name)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise
        return function(names[-1])

    def _make_room(self, count: int) -> None:
        self._room = count
        self._found = (pynvml.c_nvmlProcessInfo_v2_t * count)()
        self._count = ctypes.c_uint()

    def read(self, handle: Any) -> list[int]:
        """Their ids."""
        for _ in range(3):  # processes may start while it is read
            self._count.value = self._room
            code = self._ask(handle, ctypes.byref(self._count), self._found)
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            self._make_room(2 * max(self._count.value, self._room))
        if code:
            raise pynvml.NVMLError(code)
        return [self._found[place].pid for place in range(self._count.value)]
