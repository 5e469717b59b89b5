"""PyTorch's flight recorder: what each rank enqueued, and where it stands.

Formats: the pickle of torch/csrc/distributed/c10d/FlightRecorder (its reader:
torch/distributed/flight_recorder/components/loader.py and types.py, version 2.10) and the JSON of
`_dump_fr_trace_json`. A rank is the number at the end of the file's name, as PyTorch writes it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from drover_core.jobs import plain_pickle
from drover_core.jobs.lines import RANK_LIMIT

MAX_ENTRIES = 200_000
MAX_RANKS = 200_000
MAX_VALUES = 4_000_000  # sizes and types in a dump: a pickle of 400 kB can share one list 200,000 times
MAX_NESTED = 4_000_000  # lists and objects in a JSON dump
MAX_SIZES = 64  # of one operation; 8 are compared
_RANK = re.compile(r"(?<!\d)(\d{1,6})(?:\.(?:json|pickle|pkl|bin|trace))?$")
_SAFE = re.compile(r"[^\w.:>< -]")

Sizes = tuple[tuple[int, ...], ...]


class DumpError(ValueError):
    """A dump that cannot be used."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective, or one send or recv, of one rank."""

    group: str
    sequence: int
    kind: str  # all_reduce, barrier, ...; without the backend
    sent: Sizes = ()
    received: Sizes = ()
    types: tuple[str, ...] = ()
    point: bool = False  # send or recv
    completed: bool = False
    retired: bool = False
    created_ns: int = 0
    where: str = ""  # file and line of the program


@dataclass(slots=True)
class Dump:
    """What one rank recorded."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name -> the ranks in it
    source: str = ""
    values: int = 0  # sizes, types and ranks in it


def looks_like_dump(head: bytes) -> bool:
    """Whether a file is a flight recorder's dump: its first bytes say so."""
    if head[:1] == b"\x80":
        return b"pg_config" in head[:4096] or b"entries" in head[:4096]
    return head.lstrip()[:1] == b"{" and b'"entries"' in head[:4096] and b"\n{" not in head[:4096]


def rank_of(name: str) -> int | None:
    match = _RANK.search(name)
    return int(match[1]) if match else None


def read_dump(name: str, data: bytes, most: int = plain_pickle.MAX_OPERATIONS) -> Dump:
    """Return what a dump holds.

    Args:
        most: operations of a pickle, or values of a JSON dump; each may take 100 bytes of memory.

    Raises:
        DumpError: it is empty, damaged, not plain data, or its name has no rank.
    """
    rank = rank_of(name)
    if rank is None:
        raise DumpError("its name does not end with a rank")
    if not data:
        raise DumpError("it is empty: the rank ended while it wrote")
    if data[:1] != b"\x80" and data.count(b"{") + data.count(b"[") > MAX_NESTED:
        raise DumpError(f"it has more than {MAX_NESTED:,} lists and objects")
    if data[:1] != b"\x80" and sum(data.count(mark) for mark in (b"{", b"[", b",")) > most:
        raise DumpError(f"it has more than {most:,} values")
    try:
        found = plain_pickle.load(data, most) if data[:1] == b"\x80" else json.loads(data)
    except plain_pickle.PickleError as error:
        raise DumpError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise DumpError(f"it is no JSON ({type(error).__name__})") from None
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise DumpError("it has no entries")
    try:
        return _dump(rank, name, found)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"it is damaged ({type(error).__name__})") from None


def _dump(rank: int, name: str, found: dict[Any, Any]) -> Dump:
    dump = Dump(rank, source=name)
    dump.groups = _groups(found.get("pg_config"))
    values = 0
    for entry in found["entries"][-MAX_ENTRIES:]:
        if isinstance(entry, dict) and (operation := _operation(entry)):
            values += len(operation.types) + sum(map(len, operation.sent)) + sum(map(len, operation.received))
            if values > MAX_VALUES:
                raise DumpError(f"it expands to more than {MAX_VALUES:,} sizes")
            dump.operations.append(operation)
    dump.values = values + sum(map(len, dump.groups.values()))
    return dump


def _groups(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group. Gloo's only group has an empty name."""
    found: dict[str, tuple[int, ...]] = {}
    count = 0
    for key, each in config.items() if isinstance(config, dict) else ():
        if not isinstance(each, dict) or not isinstance(ranks := each.get("ranks"), str | list):
            continue
        numbers = re.findall(r"\d{1,6}", ranks[: 8 * MAX_RANKS]) if isinstance(ranks, str) else ranks[:MAX_RANKS]
        members = tuple(n for each in numbers if (n := _rank_number(each)) is not None)
        count += len(members)
        if count > MAX_VALUES:
            raise DumpError(f"its groups have more than {MAX_VALUES:,} ranks")
        found[_word(each.get("name", key))] = members
    return found


def _rank_number(value: Any) -> int | None:
    """Return a rank; None: it is none, or no job has so many."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 6 else None
    return value if type(value) is int and 0 <= value < RANK_LIMIT else None


def _word(value: Any) -> str:
    return _SAFE.sub(" ", value[:80]) if isinstance(value, str) else ""


def _number(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and abs(value) < 1 << 64 else 0


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(
        tuple(_number(n) for n in each[:16]) if isinstance(each, list | tuple) else (_number(each),)
        for each in value[:MAX_SIZES]
    )


def _operation(entry: dict[Any, Any]) -> Operation | None:
    name = _word(entry.get("profiling_name"))
    group = entry.get("process_group")
    if not name or not isinstance(group, list | tuple) or not group:
        return None
    point = entry.get("is_p2p") is True
    types = entry.get("input_dtypes")
    frames = entry.get("frames")
    return Operation(
        group=_word(group[0]),
        sequence=_number(entry.get("p2p_seq_id" if point else "collective_seq_id")),
        kind=name.partition(":")[2] or name,
        sent=_sizes(entry.get("input_sizes")),
        received=_sizes(entry.get("output_sizes")),
        types=tuple(_word(t) for t in types[:16]) if isinstance(types, list | tuple) else (),
        point=point,
        completed=entry.get("state") == "completed",
        retired=entry.get("retired") is True,
        created_ns=_number(entry.get("time_created_ns")),
        where=_where(frames) if isinstance(frames, list | tuple) else "",
    )


def _where(frames: list[Any] | tuple[Any, ...]) -> str:
    """Return the first frame that is not PyTorch's own."""
    for frame in frames[:64]:
        path = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(path, str) and "/torch/" not in path:
            return f"{_word(path.rpartition('/')[2])}:{_number(frame.get('line'))}"
    return ""
