"""Hold together nodes whose pages fell silent at about the same time.

A new version of an exporter, a certificate, a firewall or a network is then the cause, and not so many nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

NAME = "liveness"

# Our own limits. Drivers hang and nodes die one by one, and an upgrade takes the exporters of a fleet down in turn.
TOGETHER = 8  # nodes; half of them once they are one finding
APART_MS = 600_000  # a silence that began so long after the one before it is another's

SUFFIX = "_common"
TOGETHER_TEXTS: Mapping[str, tuple[str, str]] = {
    "pages_silent": (
        "The exporters of {count} nodes do not answer, since about the same time; whether the nodes are up is not"
        " known.",
        "Check the network from the collector to these exporters first, then what changed on all of these nodes: their"
        " exporters, certificates, firewalls, the list of targets.",
    ),
    "gpu_page_silent": (
        "The pages of the GPUs of {count} nodes cannot be read, since about the same time; their other pages can."
        " Whether the GPUs work is not known.",
        "Check first what changed on all of these nodes: the exporter of the GPUs, its certificate, a firewall, the"
        " driver. Run nvidia-smi or amd-smi on one of them, with a timeout.",
    ),
}


@dataclass(slots=True)
class PagesTogether:
    """Of one cause.

    Attributes:
        since_ms: number of a node whose page is silent -> since when.
        members: those that are one finding.
    """

    since_ms: dict[int, int] = field(default_factory=dict)
    members: frozenset[int] = frozenset()

    def resume(self, numbers: Iterable[int], since_ms: int) -> None:
        """Take up an open finding of a former run."""
        self.members = frozenset(numbers)
        self.since_ms |= dict.fromkeys(self.members, since_ms)

    def end(self, over: Bools) -> None:
        """Leave out nodes whose page is read again. `over`: bool [N]."""
        self.since_ms = {n: since for n, since in self.since_ms.items() if not over[n]}
        self.members &= self.since_ms.keys()

    def update(self, found: Mapping[int, int], over: Bools) -> None:
        """Take up what was found now.

        Args:
            found: as `since_ms`. over: bool [N], the page is read again.
        """
        self.end(over)
        self.since_ms = {**found, **self.since_ms}
        members = self.members
        if len(members) < TOGETHER / 2:
            members = frozenset()
        for group in self._groups():
            if len(group) >= TOGETHER or group & members:
                members |= group
        self.members = members

    def _groups(self) -> list[set[int]]:
        """Return the nodes in groups that fell silent within APART_MS of each other, one after the other."""
        groups: list[set[int]] = []
        last_ms = None
        for n, since_ms in sorted(self.since_ms.items(), key=lambda entry: entry[1]):
            if last_ms is None or since_ms - last_ms > APART_MS:
                groups.append(set())
            groups[-1].add(n)
            last_ms = since_ms
        return groups

    def finding(self, window: Window, cause: str, now_ms: int) -> Finding | None:
        """Return the finding for the members together; None: there are none."""
        if not self.members:
            return None
        names = [window.index.nodes[n].name for n in sorted(self.members)]
        since_ms = min(self.since_ms[n] for n in self.members)
        summary, advice = TOGETHER_TEXTS[cause]
        return Finding(
            NAME, IncidentKind.LIVENESS, cause + SUFFIX, "rack", None, None, tuple((name, None) for name in names),
            now_ms, since_ms, Severity.WARNING, 0.6, RecommendedAction.ADVISE, summary.format(count=len(names)), advice,
            (Evidence(f"not read: the pages of {listing(names)}", from_ms=since_ms),),
        )  # fmt: skip
