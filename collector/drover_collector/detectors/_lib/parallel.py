"""Where the GPUs of a job stand in its parallel groups, if all its ranks say so and what they say fits together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.robust import Groups
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Ints
from drover_core.jobs.place import RankPlace, summary, words, wrong_sizes

Places = Mapping[int, RankPlace]  # by the number of the GPU


@dataclass(frozen=True, slots=True)
class JobPlaces:
    """What the ranks of one job say.

    Attributes:
        places: of its GPUs; empty where they are not used.
        text: the sizes, for people.
        trouble: why they are not used; "": they are.
    """

    places: Places = field(default_factory=dict)
    text: str = ""
    trouble: str = ""


def places_of(job: str, gpus: Sequence[int], known: Places) -> JobPlaces | None:
    """Return where the GPUs of a job stand; None: nobody says."""
    found = {g: place for g in gpus if (place := known.get(g)) is not None and place.job in ("", job)}
    if not found:
        return None
    listed = list(found.values())
    first = listed[0]
    text = summary(first.sizes, first.world, first.by)
    ranks: dict[int, int] = {}
    trouble = ""
    if len(found) < len(gpus):
        trouble = f"{len(gpus) - len(found)} of its {len(gpus)} GPUs have no rank that says it"
    elif any((each.sizes, each.world) != (first.sizes, first.world) for each in listed):
        trouble = "its ranks name different sizes"
    elif not (trouble := wrong_sizes(first.sizes, first.world)):
        for g, place in found.items():
            if ranks.setdefault(place.rank, g) != g:
                trouble = f"rank {place.rank} is on two GPUs"
                break
        else:
            trouble = _uneven(listed)
    return JobPlaces({} if trouble else found, text, trouble)


def _uneven(listed: Sequence[RankPlace]) -> str:
    """Return why ranks and axes do not fit: of a whole job each rank of an axis has the same number of GPUs."""
    if len(listed) != listed[0].world:  # some of its nodes are not this fleet's
        return ""
    for axis, size in listed[0].sizes.items():
        counts = np.bincount([each.axes[axis][0] for each in listed], minlength=size)
        if len(set(counts.tolist())) > 1:
            return f"{counts.min()} to {counts.max()} ranks say the same place on the axis {axis}"
    return ""


@dataclass(slots=True)
class Stages:
    """The pipeline stage of each GPU, kept while neither jobs nor places change.

    Attributes:
        stage: int32 [G]; -1: not known, or its job is no pipeline.
        places: of the GPUs of jobs whose ranks all say so.
    """

    stage: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    places: dict[int, RankPlace] = field(default_factory=dict)
    _mark: tuple[int, tuple[str, ...], bytes] | None = None

    def update(self, window: Window) -> None:
        jobs, inventory = window.newest.jobs, window.inventory
        if inventory is None or not inventory.places:
            if len(self.stage) != len(jobs) or self.places:
                self.stage, self.places, self._mark = np.full(len(jobs), -1, np.int32), {}, None
            return
        mark = inventory.places_version, window.newest.job_names, jobs.tobytes()
        if mark == self._mark:
            return
        self._mark, self.places, self.stage = mark, {}, np.full(len(jobs), -1, np.int32)
        order = np.argsort(jobs, kind="stable")
        order = order[jobs[order] >= 0]
        for gpus in np.split(order, np.flatnonzero(np.diff(jobs[order])) + 1) if len(order) else ():
            found = places_of(window.newest.job_names[int(jobs[gpus[0]])], gpus.tolist(), inventory.places)
            self.places |= found.places if found is not None else {}
        for g, place in self.places.items():
            if place.axes.get("pp", (0, 1))[1] > 1:
                self.stage[g] = place.axes["pp"][0]

    def words(self, gpus: Iterable[int]) -> str:
        """Return what the places of some GPUs have in common, in words; "": nothing, or one is not known."""
        found = [self.places.get(g) for g in gpus]
        known = [place for place in found if place is not None]
        return words(known) if known and len(known) == len(found) else ""


def by_stage(groups: Groups, stage: Ints, nodes: Ints, least: int, least_nodes: int) -> Groups:
    """Return the groups with each pipeline stage as a group of its own, int64 [G].

    Only where every stage of a group has so many GPUs, and so many nodes: else a fault of a whole node would be taken
    for what the stage is.
    """
    staged = np.flatnonzero((groups >= 0) & (stage >= 0))
    if not len(staged):
        return groups
    result, following = groups.copy(), int(groups.max()) + 1
    for group in np.unique(groups[staged]).tolist():
        inside = np.flatnonzero(groups == group)
        parts = [inside[stage[inside] == number] for number in np.unique(stage[inside]).tolist()]
        if (stage[inside] < 0).any() or len(parts) < 2:
            continue
        if any(len(part) < least or len(np.unique(nodes[part])) < least_nodes for part in parts):
            continue
        for part in parts:
            result[part] = following
            following += 1
    return result
