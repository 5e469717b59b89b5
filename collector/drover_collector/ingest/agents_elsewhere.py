"""Nodes whose agents report to other collectors of the same store.

A page that is scraped, or a writer of remote_write or OTLP, must not speak for such a node: neither for its values nor
for its GPUs. Each collector notes in the store how far it has stored each agent's lanes; that says who reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Set

from drover_collector.store import Store, StoreError
from drover_core.model.scraped import SPOOL

log = logging.getLogger(__name__)

EVERY_S = 5.0  # between two reads
# Agents send every 30 s or more often, offsets are noted every 5 s, and the clocks of collectors agree to 2 s.
FRESH_MS = 50_000


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
        self.nodes: frozenset[str] = frozenset()

    def __contains__(self, node: str) -> bool:
        return node in self.nodes

    @property
    def is_known(self) -> bool:
        """Whether it has been read. The first to ask makes it so, some seconds later."""
        self._is_wanted = True
        return self._is_read or not self._store.shared

    def holder(self, entity_id: int, node: str) -> str:
        """Return the other node whose agent reports this GPU to another collector; "": none."""
        if not self.nodes:
            return ""
        holder, seen_ms = self._store.entities.registry.newest_place(entity_id)
        is_fresh = self._now_ms() - seen_ms < FRESH_MS  # else the board was moved
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
            self.nodes = await asyncio.to_thread(self._store.offsets.moved_since, self._now_ms() - FRESH_MS, SPOOL)
        except StoreError as error:
            log.info("Which agents report to other collectors cannot be read: %s", error)
            return
        self._is_read = True
        on_read(self.nodes)
