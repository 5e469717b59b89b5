"""Nodes whose agents report to other collectors of the same store.

A page that is scraped, or a writer of remote_write or OTLP, must not speak for such a node: neither for its values nor
for its GPUs. Each collector notes in the store how far it has stored each agent's lanes; that says who reports.

The notes have the times of the collector that wrote them, and no two clocks need agree: a node's agent reports while
what is noted grows, and has gone when it has not grown for a while by the clock here that is never set.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from drover_collector.store import Store, StoreError
from drover_core.model.scraped import SPOOL

log = logging.getLogger(__name__)

EVERY_S = 5.0  # between two reads
FRESH_MS = 50_000  # agents send every 30 s or more often, and offsets are noted every 5 s
# What was noted so lately, by whatever clock, when a collector reads first: it waits for FRESH_MS to see a change.
RECENT_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class _Noted:
    """How far the lanes of a node's agent are stored, together.

    Attributes:
        since_s: when it was read first. changed: less was read before it.
        less_s: since when less is read; None: it was not, in the newest read.
    """

    reached: int
    since_s: float
    changed: bool
    less_s: float | None = None

    def read_again(self, reached: int, now_s: float) -> _Noted:
        """Return what is noted after a read of no more than before.

        Less may come from a replica that lags: the next read of another would seem to be news of a dead node. Or a
        spool of the past was deleted, and it stays so.
        """
        if reached == self.reached:
            return replace(self, less_s=None)
        less_s = now_s if self.less_s is None else self.less_s
        stays = now_s - less_s >= FRESH_MS / 1000
        return replace(self, reached=reached, less_s=None) if stays else replace(self, less_s=less_s)


class AgentsElsewhere:
    """Event loop only. Reads nothing where there is one collector, or while no page is used here.

    Attributes:
        nodes: as of the newest read. Nodes whose agent reports here are in it too.
    """

    def __init__(self, store: Store, now_ms: Callable[[], int]) -> None:
        self._store, self._now_ms = store, now_ms
        self._is_wanted = False
        self._is_read = False
        self._next_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._noted: dict[str, _Noted] = {}  # by node
        self.nodes: frozenset[str] = frozenset()

    def __contains__(self, node: str) -> bool:
        return node in self.nodes

    @property
    def is_known(self) -> bool:
        """Whether it has been read. The first to ask makes it so, some seconds later."""
        self.ask()
        return self._is_read or not self._store.shared

    def ask(self) -> None:
        """Have it read from now on, where other collectors may write to the store."""
        self._is_wanted = True

    def spoke_ms(self) -> Mapping[str, int]:
        """Return node -> when a newer note of its agent was read last, by the clock here."""
        now_ms, now_s = self._now_ms(), time.monotonic()
        return {
            node: now_ms - round((now_s - noted.since_s) * 1000) for node, noted in self._noted.items() if noted.changed
        }

    def holder(self, entity_id: int, node: str) -> str:
        """Return the other node whose agent reports this GPU to another collector; "": none."""
        if not self.nodes:
            return ""
        registry = self._store.entities.registry
        holder, seen_ms = registry.newest_place(entity_id)
        is_fresh = registry.node_seen_ms(holder) - seen_ms < FRESH_MS  # else the board was moved
        return holder if holder != node and holder in self.nodes and is_fresh else ""

    def tick(self, on_read: Callable[[Set[str]], None]) -> None:
        """Begin to read when that is due, and return at once: a store that hangs must not hold up other checks.

        Args:
            on_read: gets `nodes` after each read.
        """
        is_running = self._reading is not None and not self._reading.done()
        if self._is_wanted and self._store.shared and not is_running and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self._reading = asyncio.create_task(self._read(on_read))

    async def _read(self, on_read: Callable[[Set[str]], None]) -> None:
        try:
            found = await asyncio.to_thread(self._store.offsets.newest_notes, SPOOL)
        except StoreError as error:
            log.info("Which agents report to other collectors cannot be read: %s", error)
            return
        self._note(found)
        self._is_read = True
        on_read(self.nodes)

    def _note(self, found: Mapping[str, tuple[int, int]]) -> None:
        """Take what was read: node -> how far its lanes are, and when that was noted by a clock somewhere."""
        now_ms, now_s = self._now_ms(), time.monotonic()
        noted: dict[str, _Noted] = {}
        for node, (reached, at_ms) in found.items():
            held = self._noted.get(node)
            if held is not None and reached <= held.reached:
                noted[node] = held.read_again(reached, now_s)
            elif self._is_read:
                noted[node] = _Noted(reached, now_s, changed=True)
            else:
                recent = abs(now_ms - at_ms) < RECENT_MS
                noted[node] = _Noted(reached, now_s if recent else -math.inf, changed=False)
        self._noted = noted
        self.nodes = frozenset(node for node, its in noted.items() if now_s - its.since_s < FRESH_MS / 1000)
