"""What so many boards of one kind show at once that it says nothing of each: told once, and no board is drained for it.

A field that a driver reads wrongly, a counter of another unit: a fleet of incidents would hide the one that is real,
and cost a tick minutes. What stood well before the others came stays an incident of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.steady import Ints, boards
from drover_collector.detectors._lib.texts import listing
from drover_collector.detectors._lib.window import Window
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

# Ours. Real faults of this kind hit one board in thousands a day; batches of bad boards are a few percent.
SHARE = 0.1  # of the boards of one kind
LEAST = 32  # boards, of
NODES = 4  # nodes at least: all GPUs of a node can break together
BEFORE_MS = 600_000  # what stood so long before is a fault of its own; younger incidents are taken in


@dataclass(frozen=True, slots=True)
class Many:
    """Boards of one kind that show the same: their numbers, of how many, since when."""

    gpus: Ints
    total: int
    since_ms: int


@dataclass(slots=True)
class SharedCondition:
    """`since_ms`: cause -> since when each GPU shows it, [G], 0: it does not. `begun_ms`: (cause, kind of board) ->
    since when too many show it."""

    since_ms: dict[str, Ints] = field(default_factory=dict)
    begun_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    now: dict[str, list[Many]] = field(default_factory=dict)

    def split(self, window: Window, cause: str, flags: Bools, onset_ms: int) -> tuple[Bools, Ints]:
        """Those that are told each, bool [G], and since when each shows it; the others: `together`."""
        before = self.since_ms.get(cause)
        self.now.pop(cause, None)
        if not flags.any():
            self.since_ms.pop(cause, None)
            self.begun_ms = {key: ms for key, ms in self.begun_ms.items() if key[0] != cause}
            return flags, np.zeros(len(flags), np.int64)
        if before is None or len(before) != len(flags):
            before = np.zeros(len(flags), np.int64)
        self.since_ms[cause] = since = np.where(flags, np.where(before > 0, before, onset_ms), 0)
        if np.count_nonzero(flags) < LEAST and not self.begun_ms:
            return flags, since
        return self._apart(window, cause, flags, since), since

    def together(self, cause: str) -> Sequence[Many]:
        """What the newest `split` of this cause kept back, by kind of board."""
        return self.now.get(cause, ())

    def _apart(self, window: Window, cause: str, flags: Bools, since: Ints) -> Bools:
        nodes = window.index.gpu_node
        kinds = (boards(window) + 1)[nodes]
        sizes, have = np.bincount(kinds), np.bincount(kinds[flags], minlength=int(kinds.max()) + 1)
        alone = flags.copy()
        for kind in np.flatnonzero(have).tolist():
            key = (cause, kind)
            mine = flags & (kinds == kind)
            least = max(LEAST, SHARE * sizes[kind]) / (2 if key in self.begun_ms else 1)  # no to and fro at the limit
            if have[kind] < least or len(np.unique(nodes[mine])) < NODES:
                self.begun_ms.pop(key, None)
                continue
            begun = self.begun_ms.setdefault(key, int(np.median(since[mine])))
            mine &= since > begun - BEFORE_MS
            alone &= ~mine
            gpus = np.flatnonzero(mine)
            if len(gpus):
                self.now.setdefault(cause, []).append(Many(gpus, int(sizes[kind]), begun))
        return alone


def common_finding(
    window: Window, detector: str, kind: IncidentKind, cause: str, metric: str, many: Many, now_ms: int, advice: str
) -> Finding:
    """One finding for all of them, on their nodes."""
    index = window.index
    names = [index.nodes[n].name for n in np.unique(index.gpu_node[many.gpus]).tolist()]
    text = f"{len(many.gpus)} of {many.total} GPUs of one kind, on {listing(names)}"
    return Finding(
        detector, kind, f"{cause}_common", "rack", None, None, tuple((name, None) for name in names), now_ms,
        min(many.since_ms, now_ms), Severity.WARNING, 0.6, RecommendedAction.ADVISE,
        f"{len(many.gpus)} of {many.total} GPUs of one kind show {metric} at once, on {len(names)} nodes.", advice,
        (Evidence(text, metric, float(len(many.gpus)), None, None, many.total, many.since_ms, window.newest.end_ms),),
    )  # fmt: skip
