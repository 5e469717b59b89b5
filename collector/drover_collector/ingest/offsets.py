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

SPOOLS = 16  # of one node, whose positions are kept in memory
STRANGERS = 20_000  # spools of nodes that are not in the fleet file
LOOK_S = 3.0  # that a Hello waits for a store that others write to as well
NOTHING: Mapping[int, int] = {}
Key = tuple[str, str]  # node, spool id


class LaneOffsets:
    """(node, spool id) -> lane -> the last sequence that is stored. What is forgotten is sent again at the most.

    Args:
        known: nodes of the fleet file.
    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(self, store: Store, known: Mapping[str, object]) -> None:
        self._known = known
        self._held: dict[Key, dict[int, int]] = {}
        self._spools: dict[str, list[Key]] = {}  # of each node, in the order in which they came
        self._strangers: OrderedDict[Key, None] = OrderedDict()
        self._unsaved: set[Key] = set()  # whose position is not noted yet
        self.saved_at = time.monotonic()
        self._store = store
        self._asked: set[Key] = set()
        self._looking: asyncio.Task[None] | None = None  # the question under way, and the one after it
        self._next: asyncio.Task[None] | None = None
        for key, held in store.offsets.read().items():
            self._begin(key).update(held)

    def of(self, key: Key) -> Mapping[int, int]:
        return self._held.get(key, NOTHING)

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> list[Key]:
        return list(self._held)

    def advance(self, key: Key, lane: pb.Lane.ValueType, seq: int) -> None:
        """Up to `seq` all is durable, or refused."""
        held = self._held.get(key)
        if held is None:
            held = self._begin(key)
        if seq > held.get(lane, 0):
            held[lane] = seq
            self._unsaved.add(key)

    async def look(self, key: Key) -> None:
        """Take in how far another collector of the same store has come with an agent that was there before.

        One question at a time, for all agents that wait; none waits longer than LOOK_S, as events are judged while
        the store hangs. What it does not tell in time is sent again, and collapses.
        """
        self._asked.add(key)
        if self._next is None:
            self._next = asyncio.create_task(self._look(self._looking))
        await asyncio.wait({self._next}, timeout=LOOK_S)

    async def _look(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        asked, self._asked = self._asked, set()
        self._looking, self._next = self._next, None
        try:
            found = await asyncio.to_thread(self._store.offsets.noted, asked)
        except StoreError as error:
            log.info("where agents stand is not known: %s", error)
            return
        for each, noted in found.items():
            held = self._held.get(each)
            if held is None:
                held = self._begin(each)
            for lane, seq in noted.items():
                held[lane] = max(seq, held.get(lane, 0))

    def take_unsaved(self) -> dict[Key, dict[int, int]]:
        """Those that have moved since the last time, as they are."""
        self.saved_at = time.monotonic()
        keys, self._unsaved = self._unsaved, set()
        return {key: dict(self._held[key]) for key in keys}

    def give_back(self, keys: Iterable[Key]) -> None:
        """They could not be noted: again the next time."""
        self._unsaved |= self._held.keys() & set(keys)

    def _begin(self, key: Key) -> dict[int, int]:
        """An agent that makes spool after spool is remembered by its newest ones; so are nodes that nobody knows."""
        node = key[0]
        spools = self._spools.setdefault(node, [])
        spools.append(key)
        if len(spools) > SPOOLS:
            self._forget(spools[0])
        if node not in self._known:
            self._strangers[key] = None
            if len(self._strangers) > STRANGERS:
                self._forget(next(iter(self._strangers)))
        held = self._held[key] = {}
        return held

    def _forget(self, key: Key) -> None:
        self._held.pop(key, None)
        self._unsaved.discard(key)
        self._strangers.pop(key, None)
        spools = self._spools[key[0]]
        spools.remove(key)
        if not spools:
            del self._spools[key[0]]
