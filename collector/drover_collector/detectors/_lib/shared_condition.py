"""Report once what many boards of one kind show at the same time, without draining any of them.

The cause is then a field that a driver reads wrongly or a counter in another unit. An incident for each board would
hide the real one. A condition that began well before the others stays an incident of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints, boards
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.texts import listing
from drover_collector.detectors._lib.window import Window
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

# Drover's own limits. Real faults of this kind hit one board in thousands a day; bad batches are a few percent.
SHARE = 0.1  # of the boards of one kind
LEAST = 32  # boards
NODES = 4  # all GPUs of one node can break together
BEFORE_MS = 600_000  # a condition that is older than the others by this much is a separate fault


@dataclass(frozen=True, slots=True)
class AffectedBoards:
    """Boards of one kind that show the same condition. `total`: how many boards of that kind the fleet has."""

    gpus: Ints
    total: int
    since_ms: int


@dataclass(slots=True)
class SharedCondition:
    """Conditions that many boards share.

    Attributes:
        since_ms: cause -> start of each GPU's condition, int64 [G]; 0: not affected.
        begun_ms: (cause, kind of board) -> time from which too many boards were affected.
    """

    since_ms: dict[str, Ints] = field(default_factory=dict)
    begun_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    now: dict[str, list[AffectedBoards]] = field(default_factory=dict)

    def split(self, window: Window, cause: str, flags: Bools, onset_ms: int) -> tuple[Bools, Ints]:
        """Return the GPUs to report one by one, bool [G], and the start of each GPU's condition, int64 [G].

        `shared` returns the others.
        """
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
        return self._single(window, cause, flags, since), since

    def shared(self, cause: str) -> Sequence[AffectedBoards]:
        """Return the boards that the newest `split` of this cause left out, by kind of board."""
        return self.now.get(cause, ())

    def _single(self, window: Window, cause: str, flags: Bools, since: Ints) -> Bools:
        nodes = window.index.gpu_node
        kinds = (boards(window) + 1)[nodes]
        sizes, have = np.bincount(kinds), np.bincount(kinds[flags], minlength=int(kinds.max()) + 1)
        alone = flags.copy()
        for kind in np.flatnonzero(have).tolist():
            key = (cause, kind)
            mine = flags & (kinds == kind)
            least = max(LEAST, SHARE * sizes[kind]) / (2 if key in self.begun_ms else 1)  # hysteresis
            if have[kind] < least or len(np.unique(nodes[mine])) < NODES:
                self.begun_ms.pop(key, None)
                continue
            begun = self.begun_ms.setdefault(key, int(np.median(since[mine])))
            mine &= since > begun - BEFORE_MS
            alone &= ~mine
            gpus = np.flatnonzero(mine)
            if len(gpus):
                self.now.setdefault(cause, []).append(AffectedBoards(gpus, int(sizes[kind]), begun))
        return alone


def common_finding(
    window: Window,
    detector: str,
    kind: IncidentKind,
    cause: str,
    metric: str,
    many: AffectedBoards,
    now_ms: int,
    advice: str,
) -> Finding:
    """Return one finding for all affected boards, with their nodes as members."""
    index = window.index
    names = [index.nodes[n].name for n in np.unique(index.gpu_node[many.gpus]).tolist()]
    text = f"{len(many.gpus)} of {many.total} GPUs of one kind, on {listing(names)}"
    return Finding(
        detector, kind, f"{cause}_common", "rack", None, None, tuple((name, None) for name in names), now_ms,
        min(many.since_ms, now_ms), Severity.WARNING, 0.6, RecommendedAction.ADVISE,
        f"{len(many.gpus)} of {many.total} GPUs of one kind show {metric} at once, on {len(names)} nodes.", advice,
        (Evidence(text, metric, float(len(many.gpus)), None, None, many.total, many.since_ms, window.newest.end_ms),),
    )  # fmt: skip
