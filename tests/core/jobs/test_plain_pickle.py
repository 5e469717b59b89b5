# ruff: noqa: E501  # logs as they are written
"""A pickle of plain data is read; anything that could run is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_core.jobs.plain_pickle import PickleError, load

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_comes_back(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/drover-was-here",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_that_a_file_names_is_called_or_imported(protocol: int) -> None:
    with pytest.raises(PickleError, match="not plain data"):
        load(pickle.dumps({"entries": [Evil()]}, protocol))


@pytest.mark.parametrize(
    "value", [{1, 2}, frozenset({1}), ValueError("x"), PickleError, print, complex(1, 2), bytearray(b"x")]
)
def test_objects_are_refused(value: object) -> None:
    with pytest.raises(PickleError):
        load(pickle.dumps(value))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80", b"\x80\x04", b"\x80\x04.", b"(.", b"\x80\x04K\x01K\x02.", b"e.", b"\x85.", b"]K\x01K\x02e.", b"}K\x01s.",
        b"K\x01K\x02a.", b"h\x05.", b"q\x00.", b"\x80\x04]\x94(K\x01", b"\x8a\xff\x01.", b"B\xff\xff\xff\x7fabc.", b"}(K\x01u.",
        b"}(]K\x01u.", b"cos\nsystem\n.", b"\x82\x01.", b"P1\n.", b"I" + b"9" * 5000 + b"\n.",
    ],
)  # fmt: skip
def test_damage_is_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(PickleError):
        load(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_that_error(data: bytes) -> None:
    with contextlib.suppress(PickleError):
        load(b"\x80\x04" + data)


def test_a_place_in_the_memo_costs_no_room() -> None:
    """Python's unpickler makes room for all places below it: 32 GiB here."""
    assert load(b"\x80\x04]r\xff\xff\xff\xff.") == []


def test_no_operation_that_builds_objects_is_known() -> None:
    built = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4",
             "PERSID", "BINPERSID", "NEXT_BUFFER", "EMPTY_SET", "FROZENSET", "ADDITEMS", "BYTEARRAY8"}  # fmt: skip
    assert built < {operation.name for operation in pickletools.opcodes}
    from drover_core.jobs import plain_pickle

    known = plain_pickle._VALUES | set(plain_pickle._CONSTANTS) | set(plain_pickle._EMPTY)
    assert not built & known
