"""The partition: each millisecond of each held GPU goes to one share, by an order of precedence.

1. repeated    work that a job does again since its last checkpoint
2. ended       a fault ended the job: from the fault to the end, lost on what failed, waiting on the other GPUs
3. measured    a share that a detector measured: hang, straggler, heat; a job that is slower than before, of its work
4. useful      telemetry shows work; for a job that reports steps only while it does
5. stops       a failed GPU or node that does not work: lost
6. restarting  idle GPUs after a fault, until the job works again
7. idle, unknown   what telemetry shows, or does not

At any time at most one claim counts, the first of these. A claim of part of the time leaves the rest to what telemetry
shows. Sums are exact: all edges cut time into segments of whole milliseconds, and a claim takes the difference of a
function that counts from its anchor. So the shares of a segment add up to its length, and two parts of a span add up to
the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.ledger.facts import PPM, SHARES, Activity, Claims, Facts, Share
from drover_collector.ledger.spans import NONE, Axis, Bools, GpuSpans, Ints, Segments

DAY_MS = 86_400_000
BLOCK = 4096  # GPUs


@dataclass(frozen=True, slots=True)
class Ledger:
    """Exact sums in GPU-milliseconds.

    Attributes:
        job, gpu, day: int64 [U], of each row: number of the job, of the GPU, of the UTC day since 1970.
        ms: int64 [U, SHARES]; a row adds up to what the job held of the GPU on that day.
        claim_incident, claim_gpu: int64 [C]; claim_ms: int64 [C, SHARES]: what each incident took from each GPU.
    """

    from_ms: int
    to_ms: int
    job: Ints
    gpu: Ints
    day: Ints
    ms: Ints
    claim_incident: Ints
    claim_gpu: Ints
    claim_ms: Ints


@dataclass(frozen=True, slots=True)
class Layers:
    """Claims by precedence; `stalls`: spans of GPUs whose job reports steps, and reported none there."""

    repeated: Claims
    ended: Claims
    measured: Claims
    stops: Claims
    restarting: Claims
    stalls: GpuSpans


def partition(facts: Facts, layers: Layers, from_ms: int, to_ms: int) -> Ledger:
    """Return the shares of all time that jobs held within [from_ms, to_ms).

    GPUs are worked on in blocks, which bounds the memory: no segment is of two GPUs.
    """
    to_ms = max(from_ms, min(to_ms, facts.until_ms))
    holds = facts.holds.clipped(from_ms, to_ms)
    blocks = np.unique(holds.gpu // BLOCK).tolist() or [0]
    parts = [_block(facts, layers, from_ms, to_ms, block) for block in blocks]

    def joined(name: str) -> Ints:
        found: Ints = np.concatenate([getattr(part, name) for part in parts])
        return found

    rows = np.lexsort((joined("day"), joined("gpu"), joined("job")))
    return Ledger(
        from_ms, to_ms, *(joined(name)[rows] for name in ("job", "gpu", "day", "ms")),
        *(joined(name) for name in ("claim_incident", "claim_gpu", "claim_ms")),
    )  # fmt: skip


def _block(facts: Facts, layers: Layers, from_ms: int, to_ms: int, block: int) -> Ledger:
    """Return the part of the ledger of the GPUs of a block."""
    axis = Axis(from_ms, to_ms)

    def clip(spans: GpuSpans) -> GpuSpans:
        return spans.where(spans.gpu // BLOCK == block).clipped(from_ms, to_ms)

    holds, activity, stalls = cut_by_day(clip(facts.holds)), clip(facts.activity), clip(layers.stalls)
    claims = [
        Claims(layer.claims, clip(layer.spans))
        for layer in (layers.repeated, layers.ended, layers.measured, layers.stops, layers.restarting)
    ]
    pieces = Segments.cut(axis, holds, activity, stalls, *(layer.spans for layer in claims))
    held = pieces.within(holds)
    pieces, held = pieces.where(held != NONE), held[held != NONE]
    seen = pieces.within(activity)
    shown = np.where(seen == NONE, NONE, activity.value[np.maximum(seen, 0)]) if len(activity) else seen
    stalled = pieces.first(stalls) != NONE
    working = (shown == Activity.WORKING) & ~stalled

    ms = np.zeros((len(pieces), SHARES), np.int64)
    # Where each layer may claim. Telemetry that is missing says of no GPU that it restarts.
    anywhere = np.ones(len(pieces), np.bool_)
    pausing = (shown == Activity.IDLE) | (stalled & (shown != NONE))
    where = (anywhere, anywhere, anywhere, ~working, pausing)
    free = anywhere.copy()
    taken = [_take(pieces, layer, free, ms, (open_to, working)) for layer, open_to in zip(claims, where, strict=True)]
    left = pieces.length_ms - ms.sum(axis=1)
    idle = (shown == Activity.IDLE) & ~stalled
    for rows, share in ((working, Share.USEFUL), (idle, Share.IDLE), (~working & ~idle, Share.UNKNOWN)):
        ms[rows, share] += left[rows]
    job = holds.value[held] if len(holds) else held
    (job, gpu, day), sums = _summed((job, pieces.gpu, pieces.from_ms // DAY_MS), ms)
    (incident, claim_gpu), claim_ms = _claimed(pieces, taken)
    return Ledger(from_ms, to_ms, job, gpu, day, sums, incident, claim_gpu, claim_ms)


def cut_by_day(holds: GpuSpans) -> GpuSpans:
    """Return the parts of holds in each UTC day."""
    first, last = holds.from_ms // DAY_MS, (holds.to_ms - 1) // DAY_MS
    counts = last - first + 1
    at = np.repeat(np.arange(len(holds)), counts)
    day = first[at] + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    low, high = np.maximum(holds.from_ms[at], day * DAY_MS), np.minimum(holds.to_ms[at], (day + 1) * DAY_MS)
    return GpuSpans(holds.gpu[at], low, high, holds.value[at])


def _take(
    pieces: Segments, layer: Claims, free: Bools, ms: Ints, where: tuple[Bools, Bools]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Give the layer's claims their part of the segments that are free.

    Args:
        where: the segments that are open to the layer, and those in which telemetry shows work.

    Returns:
        Row, incident, share and ms of each claim.
    """
    if not layer.claims or not len(layer.spans):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, nothing
    number, (open_to, working) = pieces.first(layer.spans), where
    picky = np.array([each.working for each in layer.claims], np.bool_)[np.maximum(number, 0)]
    rows = np.flatnonzero((number != NONE) & open_to & free & (working | ~picky))
    claim = number[rows]
    ppm, anchor, share, incident = (
        np.array([int(getattr(each, name)) for each in layer.claims], np.int64)[claim]
        for name in ("ppm", "anchor_ms", "share", "incident")
    )
    # Each product stays below 2**63: 100 years are 3.2e12 ms, and PPM is 1e6.
    given = (pieces.to_ms[rows] - anchor) * ppm // PPM - (pieces.from_ms[rows] - anchor) * ppm // PPM
    free[rows] = False
    ms[rows, share] += given
    return rows, incident, share, given


def _summed(keys: Sequence[Ints], ms: Ints) -> tuple[list[Ints], Ints]:
    """Return the distinct keys, in order, and the sum of the rows of each."""
    if not len(ms):
        return [np.zeros(0, np.int64) for _ in keys], np.zeros((0, SHARES), np.int64)
    order = np.lexsort(keys[::-1])
    ordered = [key[order] for key in keys]
    change = np.zeros(len(order) - 1, np.bool_)
    for key in ordered:
        change |= key[1:] != key[:-1]
    first = np.flatnonzero(np.append(True, change))
    return [key[first] for key in ordered], np.add.reduceat(ms[order], first, axis=0)


def _claimed(pieces: Segments, taken: Sequence[tuple[Ints, Ints, Ints, Ints]]) -> tuple[list[Ints], Ints]:
    """Return (incident, GPU) of what incidents took, and the sum of each by share."""
    rows, incident, share, given = (np.concatenate([part[at] for part in taken]) for at in range(4))
    table = np.zeros((len(rows), SHARES), np.int64)
    table[np.arange(len(rows)), share] = given
    gpu = pieces.gpu[rows] if len(rows) else rows
    named = incident != NONE
    return _summed((incident[named], gpu[named]), table[named])
