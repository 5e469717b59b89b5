"""How far each lane of each agent is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from drover_collector.store import Store, StoreError
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

SPOOLS = 16  # of one node whose offsets are kept in memory
UNKNOWN_SPOOLS = 20_000  # of nodes that are not in the fleet file
REFRESH_S = 3.0  # a handshake waits so long for a store that other collectors write to
NOTHING: Mapping[int, int] = {}
Key = tuple[str, str]  # node, spool id


class LaneOffsets:
    """(node, spool id) -> lane -> the last sequence that is stored. What is forgotten is resent at worst.

    Args:
        known: nodes of the fleet file.
    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(self, store: Store, known: Mapping[str, object]) -> None:
        self._known = known
        self._held: dict[Key, dict[int, int]] = {}
        self._spools: dict[str, list[Key]] = {}  # of each node, oldest first
        self._unknown: OrderedDict[Key, None] = OrderedDict()
        self._unsaved: set[Key] = set()
        self.saved_at = time.monotonic()
        self._store = store
        self._requested: set[Key] = set()
        self._running: asyncio.Task[None] | None = None  # the query under way, and the one after it
        self._next: asyncio.Task[None] | None = None
        for key, held in store.offsets.read().items():
            self._add(key).update(held)

    def get(self, key: Key) -> Mapping[int, int]:
        return self._held.get(key, NOTHING)

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> list[Key]:
        return list(self._held)

    def advance(self, key: Key, lane: pb.Lane.ValueType, seq: int) -> None:
        """Note that all messages up to `seq` are durable or refused."""
        held = self._held.get(key)
        if held is None:
            held = self._add(key)
        if seq > held.get(lane, 0):
            held[lane] = seq
            self._unsaved.add(key)

    async def refresh(self, key: Key) -> None:
        """Read from the store how far another collector has stored this agent's lanes.

        One query at a time serves all agents that wait. None waits longer than REFRESH_S, as events are judged even
        while the store hangs. What is not read in time is resent, and collapses in the store.
        """
        self._requested.add(key)
        if self._next is None:
            self._next = asyncio.create_task(self._refresh(self._running))
        await asyncio.wait({self._next}, timeout=REFRESH_S)

    async def _refresh(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        requested, self._requested = self._requested, set()
        self._running, self._next = self._next, None
        try:
            found = await asyncio.to_thread(self._store.offsets.noted, requested)
        except StoreError as error:
            log.info("Lane offsets of agents cannot be read, so they resend: %s", error)
            return
        for key, noted in found.items():
            held = self._held.get(key)
            if held is None:
                held = self._add(key)
            for lane, seq in noted.items():
                held[lane] = max(seq, held.get(lane, 0))

    def take_unsaved(self) -> dict[Key, dict[int, int]]:
        """Return a copy of the offsets that moved since the last call."""
        self.saved_at = time.monotonic()
        keys, self._unsaved = self._unsaved, set()
        return {key: dict(self._held[key]) for key in keys}

    def give_back(self, keys: Iterable[Key]) -> None:
        """Note that offsets from `take_unsaved` could not be stored."""
        self._unsaved |= self._held.keys() & set(keys)

    def _add(self, key: Key) -> dict[int, int]:
        """Add a spool. Of a node only the newest SPOOLS are kept, and of unknown nodes UNKNOWN_SPOOLS in all."""
        node = key[0]
        spools = self._spools.setdefault(node, [])
        spools.append(key)
        if len(spools) > SPOOLS:
            self._forget(spools[0])
        if node not in self._known:
            self._unknown[key] = None
            if len(self._unknown) > UNKNOWN_SPOOLS:
                self._forget(next(iter(self._unknown)))
        held = self._held[key] = {}
        return held

    def _forget(self, key: Key) -> None:
        self._held.pop(key, None)
        self._unsaved.discard(key)
        self._unknown.pop(key, None)
        spools = self._spools[key[0]]
        spools.remove(key)
        if not spools:
            del self._spools[key[0]]
