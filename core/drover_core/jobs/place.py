"""Where the rank on a GPU stands in its job's parallel groups, as an entry of a node's inventory: `gpu3.place`.

`job=4242 rank=17 world=64 by=arguments tp=1/8 pp=2/8`: AXIS=RANK/SIZE for each axis that is known, ranks from 0. What
it says a user may have written: it is bounded and checked, and changes only with what its own job is compared.

Order of ranks: "tp-cp-ep-dp-pp" in NVIDIA/Megatron-LM, megatron/core/parallel_state.py (initialize_model_parallel and
RankGenerator), the first the fastest; "tp-cp-ep-pp-dp" with --use-tp-pp-dp-mapping (megatron/training). Experts share
the ranks of the other axes, so that `ep` is no factor of the world.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KEY = re.compile(r"gpu(\d{1,3})\.place")
MAX_TEXT = 600
MAX_RANKS = 10_000_000
CLIENT, ARGUMENTS, TITLE = "client", "arguments", "title"
# Axis -> what people call it, in the order in which a sentence names them.
AXES: Mapping[str, str] = {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert", "dp": "data"}
FACTORS = ("tp", "cp", "dp", "pp")  # of the world
_JOB = re.compile(r"[!-~]{0,320}")
_BY: Mapping[str, str] = {
    CLIENT: "its training loop", ARGUMENTS: "its command line", TITLE: "the names of its processes",
}  # fmt: skip


class PlaceError(ValueError):
    """A text that is no place."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """`job`: "" where no scheduler's name of it is known. `axes`: axis -> (rank, size); an axis that is missing is not
    known. `by`: who says so."""

    job: str
    rank: int
    world: int
    axes: Mapping[str, tuple[int, int]]
    by: str = ARGUMENTS

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: size for axis, (_, size) in self.axes.items()}


def key(slot: int) -> str:
    return f"gpu{slot}.place"


def pack(place: RankPlace) -> str:
    axes = " ".join(f"{axis}={place.axes[axis][0]}/{place.axes[axis][1]}" for axis in AXES if axis in place.axes)
    return f"job={place.job} rank={place.rank} world={place.world} by={place.by} {axes}"


def unpack(text: str) -> RankPlace:
    """
    Raises:
        PlaceError: what is wrong with it.
    """
    if len(text) > MAX_TEXT:
        raise PlaceError("it is too long")
    found = dict(part.partition("=")[::2] for part in text.split(" "))
    job, by = found.pop("job", ""), found.pop("by", "")
    if not _JOB.fullmatch(job) or by not in _BY:
        raise PlaceError("its job or who says so is none")
    rank, world = _number(found.pop("rank", "")), _number(found.pop("world", ""))
    axes = {}
    for axis, value in found.items():
        number, slash, size = value.partition("/")
        if axis in AXES and slash:
            axes[axis] = _number(number), _number(size)
    return checked(RankPlace(job, rank, world, axes, by))


def checked(place: RankPlace) -> RankPlace:
    """
    Raises:
        PlaceError: a rank is not below its size, or no axis is known.
    """
    pairs = {"rank": (place.rank, place.world), **place.axes}
    for name, (rank, size) in pairs.items():
        if not 0 <= rank < size <= MAX_RANKS:
            raise PlaceError(f"{name} {rank} of {size} is none")
    if not place.axes:
        raise PlaceError("it names no axis")
    return place


def wrong_sizes(sizes: Mapping[str, int], world: int) -> str:
    """Return why these sizes cannot be those of a job of `world` ranks; "": they can. With `dp` they make up all."""
    factors = {axis: sizes[axis] for axis in FACTORS if axis in sizes}
    product = math.prod(factors.values())
    if product == world or ("dp" not in factors and world % product == 0):
        return ""
    said = " x ".join(f"{AXES[axis]} {size}" for axis, size in factors.items())
    return f"{said} is {product}, and the job has {world} ranks"


def by_order(rank: int, world: int, sizes: Mapping[str, int], order: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the place of a rank on each axis of `order`, the fastest first; sizes that are missing are 1, but `dp`,
    which has what is left.

    Raises:
        PlaceError: the sizes do not fit the world.
    """
    rest = math.prod(size for axis, size in sizes.items() if axis in FACTORS and axis != "dp")
    if rest < 1 or world % rest or not 0 <= rank < world:
        raise PlaceError(f"rank {rank} of {world} does not fit groups of {rest}")
    place, left = {}, rank
    for axis in order:
        size = world // rest if axis == "dp" else sizes.get(axis, 1)
        place[axis] = left % size, size
        left //= size
    return place


def words(places: Iterable[RankPlace]) -> str:
    """Return what some ranks of a job have in common: "pipeline stage 2 of 8, tensor rank 3"; "": nothing."""
    listed = list(places)
    said = []
    for axis, name in AXES.items():
        pairs = {each.axes.get(axis) for each in listed}
        pair = pairs.pop() if len(pairs) == 1 else None
        if pair is not None and pair[1] > 1:
            said.append(f"pipeline stage {pair[0]} of {pair[1]}" if axis == "pp" else f"{name} rank {pair[0]}")
    return ", ".join(said)


def summary(sizes: Mapping[str, int], world: int, by: str) -> str:
    """Return `pipeline 8, tensor 8, data 2 of 128 ranks, by its command line`."""
    said = ", ".join(f"{name} {sizes[axis]}" for axis, name in AXES.items() if axis in sizes)
    return f"{said} of {world} ranks, by {_BY.get(by, by)}"


def _number(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) <= 8):
        raise PlaceError(f"{text[:20]!r} is no number")
    return int(text)
