"""Findings that only repeat what is stored: a condition that lasts is found again with each bucket."""

from __future__ import annotations

from collections.abc import Sequence, Set

from drover_core.model.events import Finding

STORED_AGAIN_MS = 300_000  # as open incidents are

_Key = tuple[object, ...]


class Repeats:
    """Says which findings to store: new ones, changed ones, and each again after `STORED_AGAIN_MS`.

    A lasting condition would else fill the store with time alone: 20 silent nodes and 30 pending row remaps made
    173 million rows in 400 days. Remembers what was stored within that time and nothing else.
    """

    def __init__(self) -> None:
        self._stored: dict[_Key, tuple[int, _Key]] = {}  # what it is about -> when it was stored, and what it said

    def new(self, findings: Sequence[Finding], watched: Set[str] = frozenset()) -> list[Finding]:
        """Return those to store.

        Args:
            watched: nodes of which every finding counts, such as those being validated.
        """
        return [f for f in findings if not self._repeats(f, watched)]

    def note(self, findings: Sequence[Finding]) -> None:
        """Remember that these are stored now."""
        newest_ms = max((f.ts_ms for f in findings), default=0)
        for finding in findings:
            self._stored[_about(finding)] = finding.ts_ms, _said(finding)
        if findings:
            self._stored = {k: v for k, v in self._stored.items() if abs(newest_ms - v[0]) < STORED_AGAIN_MS}

    def _repeats(self, finding: Finding, watched: Set[str]) -> bool:
        at_ms, said = self._stored.get(_about(finding), (0, None))
        # A clock that was set back makes an old row of a later time: then it is stored again.
        fresh = 0 <= finding.ts_ms - at_ms < STORED_AGAIN_MS
        return fresh and said == _said(finding) and watched.isdisjoint(node for node, _ in finding.members)


def _about(finding: Finding) -> _Key:
    return (
        finding.detector, finding.kind, finding.cause, finding.scope, finding.node, finding.gpu, finding.job,
        finding.members,
    )  # fmt: skip


def _said(finding: Finding) -> _Key:
    """What makes a difference to an incident; values and sentences change with each bucket."""
    return finding.severity, finding.action, round(finding.confidence, 1), finding.cleared
