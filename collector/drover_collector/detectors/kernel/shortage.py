"""Find nodes that run out of room on their root disk or of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import Evidence, IncidentKind, RecommendedAction, Severity

# node-mixin warns at 5 % of a file system for 30 minutes (NodeFilesystemAlmostOutOfSpace).
ROOT_FULL, ROOT_HELD_MS = 0.95, 1_800_000
# Azure lets kubelet's memory.available be no lower than 2 % where it is a share; kubelet's own default is 100 MiB.
MEMORY_LOW, MEMORY_HELD_MS = 0.02, 120_000
KNOWN_MS = 120_000  # a value holds this long: a board may be asked once a minute only


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a node may run out of.

    Attributes:
        held_ms: how long it must be so. severity: where few nodes show it; many at once are information.
    """

    kind: IncidentKind
    cause: str
    metric: str
    limit: float
    held_ms: int
    severity: Severity
    action: RecommendedAction
    text: str
    advice: str


ROOT = Shortage(
    IncidentKind.RISK, "root_full", "root_used_ratio", ROOT_FULL, ROOT_HELD_MS, Severity.WARNING,
    RecommendedAction.ADVISE, "the root disk is {:.0%} full",
    "Find what fills it (du -xh / | sort -h) and delete it. Jobs that write to it fail when it is full.",
)  # fmt: skip
MEMORY = Shortage(
    IncidentKind.RISK, "memory_low", "memory_available_bytes", MEMORY_LOW, MEMORY_HELD_MS, Severity.INFO,
    RecommendedAction.NONE, "{:.1%} of the host's memory is left",
    "Look at what its processes hold (ps aux --sort=-rss). The kernel kills one of them when nothing is left.",
)  # fmt: skip


@dataclass(slots=True)
class Held:
    """A condition of each node and since when it holds.

    Attributes:
        value: newest known, NaN after KNOWN_MS without one; float64 [N]. seen_ms: when it was read.
        since_ms: NaN where the condition does not hold; float64 [N].
    """

    value: Floats = field(default_factory=lambda: np.zeros(0))
    seen_ms: Floats = field(default_factory=lambda: np.zeros(0))
    since_ms: Floats = field(default_factory=lambda: np.zeros(0))

    def read(self, window: Window, now: Floats) -> None:
        """Take the newest bucket's values; `now`: float64 [N], NaN where absent."""
        if len(self.value) != len(now):
            self.value, self.seen_ms, self.since_ms = (np.full(len(now), np.nan) for _ in range(3))
        known = ~np.isnan(now)
        self.value = np.where(known, now, self.value)
        self.seen_ms = np.where(known, window.newest.end_ms, self.seen_ms)
        self.value[window.newest.end_ms - self.seen_ms > KNOWN_MS] = np.nan

    def hold(self, window: Window, flags: Bools, held_ms: Floats | int) -> Bools:
        """Return the nodes whose `flags` have been set for `held_ms`, by readings at both ends; bool [N]."""
        begun = np.where(np.isnan(self.since_ms), window.newest.start_ms, self.since_ms)
        self.since_ms = np.where(flags, begun, np.nan)
        return np.asarray(self.seen_ms - self.since_ms >= held_ms)


@dataclass(slots=True)
class Shortages:
    """State of this file."""

    root: Held = field(default_factory=Held)
    memory: Held = field(default_factory=Held)

    def short(self, window: Window) -> list[tuple[Shortage, Bools, Held]]:
        """Return what runs out at which nodes, bool [N]."""
        node, unread = window.newest.node, np.full(window.index.node_count, np.nan)
        self.root.read(window, node.get(ROOT.metric, unread))
        full = self.root.hold(window, self.root.value >= ROOT.limit, ROOT.held_ms)
        left, total = node.get(MEMORY.metric, unread), node.get("memory_total_bytes", unread)
        with np.errstate(invalid="ignore", divide="ignore"):
            self.memory.read(window, np.where(total > 0, left / total, np.nan))
        low = self.memory.hold(window, self.memory.value < MEMORY.limit, MEMORY.held_ms)
        return [(ROOT, full, self.root), (MEMORY, low, self.memory)]


def evidence(shortage: Shortage, held: Held, n: int, to_ms: int) -> Evidence:
    """Return what shows that node `n` runs short."""
    value, since_ms = float(held.value[n]), int(held.since_ms[n])
    return Evidence(shortage.text.format(value), shortage.metric, value, shortage.limit, None, None, since_ms, to_ms)
