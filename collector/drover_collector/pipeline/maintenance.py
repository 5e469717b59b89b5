"""What the store needs from time to time, in a thread: room on its disk, what is too old deleted, memory given back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

from drover_collector.config import StoreConfig
from drover_collector.pipeline.expiry import ClockGuardedExpiry
from drover_collector.process import memory
from drover_collector.store import Store, StoreError
from drover_collector.store.durability.backup import remove_partial

log = logging.getLogger(__name__)

PASS_S = 30.0  # at 5 million samples/s less than 100 MB come in meanwhile
TRIMS = 3  # in that time: as often as buckets are judged


class Maintenance:
    """Passes until cancelled, while `active()`: of several collectors one drops.

    Args:
        troubles: has a sentence under "maintenance" while passes fail, and one under "expiry"
            (see `ClockGuardedExpiry`).
        votes, nodes: see `ClockGuardedExpiry`.
    Attributes:
        passes: made so far. dropped: partitions that went for room since the start. failures: passes that failed.
        expiring: what goes by age.
    """

    def __init__(
        self,
        store: Store,
        config: StoreConfig,
        active: Callable[[], bool] = lambda: True,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        troubles: MutableMapping[str, str] | None = None,
        votes: Callable[[], tuple[int, int]] | None = None,
        nodes: int = 0,
    ) -> None:
        self._store, self._config, self._active, self._now_ms = store, config, active, now_ms
        self._troubles = {} if troubles is None else troubles
        self.expiring = ClockGuardedExpiry(store, votes, nodes, self._troubles)
        self.passes = self.dropped = self.failures = 0

    async def run(self) -> None:
        await asyncio.to_thread(self.tidy_backups)
        while True:
            if self._active():
                await asyncio.to_thread(self.once)
            await asyncio.to_thread(self.give_back)
            for _ in range(TRIMS - 1):
                await asyncio.sleep(PASS_S / TRIMS)
                await asyncio.to_thread(memory.trim)
            await asyncio.sleep(PASS_S / TRIMS)

    def tidy_backups(self) -> None:
        """Remove the backups that a killed collector left half made: they take the room of samples."""
        for path in remove_partial(Path(self._config.backup_folder)):
            log.warning("%s was removed: a backup that was not finished", path)

    def once(self) -> None:
        """One pass. What fails is logged and tried again with the next."""
        try:
            now_ms, config = self._now_ms(), self._config
            doubt = self.expiring.doubt(now_ms)
            self.dropped += len(
                self._store.retention.make_room(now_ms, config.keep_free_bytes, config.max_bytes, trusted=not doubt)
            )
            self.expiring.once(now_ms, doubt)
        except StoreError as error:
            log.warning("maintenance of the store: %s", error)
            self._failed(str(error))
        except Exception as error:  # the disk would run full if a defect ended the passes
            log.exception("maintenance of the store")
            self._failed(f"{type(error).__name__}, see the log")
        else:
            self._troubles.pop("maintenance", None)
        self.passes += 1

    def give_back(self) -> None:
        """Memory that was freed: after bursts of data the C library's heap and the engine's would keep it."""
        try:
            memory.give_back()
            self._store.release_memory()
        except StoreError as error:
            log.warning("memory of the store: %s", error)
        except Exception:  # the disk would run full if a defect ended the passes
            log.exception("memory of the store")

    def _failed(self, why: str) -> None:
        self.failures += 1
        self._troubles["maintenance"] = f"No room can be made in the store, whose disk may run full: {why}."
