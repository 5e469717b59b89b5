"""Who speaks for a node: one agent at a time.

An agent is known by its spool and its boot. The same agent on a second stream has lost the first, which is ended at
once. Another one is refused while the first still speaks: two that replaced each other for ever would store half each.
"""

from __future__ import annotations

import time

import grpc
import numpy as np

from drover_collector.ingest.limits import Limits, RateLimitedLogger, Recent
from drover_collector.ingest.schema_registry import Dictionary
from drover_collector.ingest.session import EndError, Session
from drover_collector.ingest.stats import IngestStats

FLAPS, FLAPS_S = 6, 60.0  # so many new streams of one agent in so long are two agents with one spool


class NodeOwnership:
    """The open streams by node. Used in the event loop."""

    def __init__(self, stats: IngestStats, limits: Limits, teller: RateLimitedLogger) -> None:
        self._stats, self._limits, self._teller = stats, limits, teller
        self._sessions: dict[str, Session] = {}
        self._flaps: Recent[str, tuple[float, int]] = Recent(1_000)

    def take(self, session: Session, node: str, spool: str, boot: str) -> None:
        """`session` speaks for `node` from here on.

        Raises:
            EndError: another agent does.
        """
        older = self._sessions.get(node)
        if older is not None and older is not session:
            same = older.identity == (spool, boot)
            silent_s = time.monotonic() - older.heard_s
            if not same and silent_s < self._limits.alive_s and older.end is None:
                self._refuse(older, node, spool, boot)
            self._stats.replaced += 1
            if same:
                self._note_flap(node)
                why = f"a newer stream of the same agent speaks for node {node!r}"
            else:
                self._teller.warn((node, "replaced"), "%s: another agent takes over; the first was silent", node)
                why = f"another agent speaks for node {node!r}; this one was silent for {silent_s:.0f} s"
            older.stop(EndError(grpc.StatusCode.ABORTED, why))
        session.node, session.spool, session.boot = node, spool, boot
        self._sessions[node] = session

    def leave(self, session: Session) -> bool:
        """Whether nobody speaks for its node any more."""
        if self._sessions.get(session.node) is not session:
            return False
        del self._sessions[session.node]
        return True

    def of(self, node: str) -> Session | None:
        """Who speaks for it."""
        return self._sessions.get(node)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def _refuse(self, older: Session, node: str, spool: str, boot: str) -> None:
        text = (
            f"another agent speaks for node {node!r} (spool {older.spool!r}, boot {older.boot!r}; this one has"
            f" {spool!r}, {boot!r}); stop one of the two, or give it a node name of its own"
        )
        self._stats.rejected["second agent"] += 1
        self._stats.rivals[node] = (time.monotonic(), f"Two agents claim to be node {node}; one is refused.")
        self._teller.warn((node, "second agent"), "%s: refused: %s", node, text[:500])
        raise EndError(grpc.StatusCode.ALREADY_EXISTS, text)

    def _note_flap(self, node: str) -> None:
        now = time.monotonic()
        since, count = self._flaps.get(node) or (now, 0)
        since, count = (now, 1) if now - since > FLAPS_S else (since, count + 1)
        self._flaps[node] = (since, count)
        if count >= FLAPS:
            text = f"Streams of node {node} replace each other; do two agents share one spool?"
            self._stats.rivals[node] = (now, text)
            self._teller.warn((node, "flaps"), "%s", text)


class GpuOwnership:
    """Which stream tells of which GPU. A GPU is in one node at a time: another that claims it while its node sends
    samples of it would take it, and its history, away. A card that moves is silent in between."""

    def __init__(self) -> None:
        self._told: dict[int, Session] = {}

    def take(self, session: Session, dictionary: Dictionary) -> None:
        """Marks in `dictionary` what another node is sending; the rest belongs to `session`."""
        for index, row in list(dictionary.rows.items()):
            name = int(dictionary.names[index])
            other = self._told.get(name)
            if other is not None and other.node != session.node and _sends(other, name):
                dictionary.refuse(index, f"{row.key!r} belongs to another node: {other.node!r} reports it now")
            else:
                self._told[name] = session

    def leave(self, session: Session) -> None:
        if session.dictionary is not None:
            for name in session.dictionary.known.tolist():
                if self._told.get(name) is session:
                    del self._told[name]


def _sends(session: Session, name: int) -> bool:
    """Whether samples of this entity came on a stream."""
    dictionary = session.dictionary
    if dictionary is None or session.end is not None:
        return False
    at = np.flatnonzero(dictionary.names == np.uint64(name))
    return bool(dictionary.placed[at].any())
