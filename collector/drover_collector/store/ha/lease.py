"""The lease of the active collector: one collector at a time may detect and act.

A lease is a sequence of epochs, 1, 2, 3..., each claimed by one collector. To claim an epoch is one atomic step on the
server, in which only one collector succeeds. The holder of the newest epoch holds the lease; the epoch is its fencing
token.

- The holder regularly claims the next epoch. It holds the lease until `ttl_s` after it *began* its last claim.
- Another collector may claim only after it has itself seen the newest epoch unchanged for `ttl_s + margin_s`. If the
  holder has renewed in between, that epoch is taken and the claim fails.

So no clocks are compared. The clocks of two machines must run at the same rate, to within margin / ttl (a half). A
process that was suspended wakes up after its time and must notice before it acts: `holds` costs two readings of the
clock and no query.

The atomic step: on one server, CREATE TABLE of a table named after the epoch; in a cluster, a strict INSERT into a
KeeperMap table. For an embedded store the lock on its folder is the lease.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Protocol

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.errors import StoreError

PREFIX = "drover_lease_"
KEPT = 30  # epochs that are kept, so that a claim based on an old state fails
TABLE = "lease"  # in a cluster
NOBODY = "-"  # holder of the epoch that releases a lease


def clock() -> tuple[float, float]:
    """Return seconds since boot, including sleep, and wall clock. A time is over when it is by either."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), time.time()


class Epochs(Protocol):
    """Where epochs are stored."""

    def newest(self) -> tuple[int, str]:
        """Return the newest epoch and its holder; (0, NOBODY) if there is none."""

    def claim(self, epoch: int, holder: str) -> bool:
        """Return whether this call, and no other, created the epoch."""

    def forget(self, before: int) -> None:
        """Remove epochs below `before`."""


class TableEpochs:
    """Epochs as tables of one server, which creates each name once."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def newest(self) -> tuple[int, str]:
        found = self._clients.rows(
            f"SELECT toUInt64OrZero(substring(name, {len(PREFIX) + 1})) AS epoch, comment FROM system.tables"
            f" WHERE database = currentDatabase() AND startsWith(name, '{PREFIX}') ORDER BY epoch DESC LIMIT 1"
        )
        return (int(found[0]["epoch"]), found[0]["comment"]) if found else (0, NOBODY)

    def claim(self, epoch: int, holder: str) -> bool:
        try:
            self._clients.command(
                f"CREATE TABLE {PREFIX}{epoch} (epoch UInt64) ENGINE = Null COMMENT '{_safe(holder)}'"
            )
        except StoreError as error:
            if "TABLE_ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def forget(self, before: int) -> None:
        found = self._clients.rows(
            "SELECT name FROM system.tables WHERE database = currentDatabase()"
            f" AND startsWith(name, '{PREFIX}') AND toUInt64OrZero(substring(name, {len(PREFIX) + 1})) < {before}"
        )
        for row in found:
            self._clients.command(f"DROP TABLE IF EXISTS {row['name']} SYNC")


class KeeperEpochs:
    """Epochs as keys in ClickHouse Keeper, through a KeeperMap table."""

    def __init__(self, clients: Clients, database: str, on_cluster: str = "") -> None:
        self._clients = clients
        clients.command(self.ddl(database, on_cluster))

    @staticmethod
    def ddl(database: str, on_cluster: str = "") -> str:
        return (
            f"CREATE TABLE IF NOT EXISTS `{database}`.{TABLE}{on_cluster} (epoch UInt64, holder String)"
            f" ENGINE = KeeperMap('/drover/{database}/{TABLE}') PRIMARY KEY epoch"
        )

    def newest(self) -> tuple[int, str]:
        found = self._clients.rows(f"SELECT epoch, holder FROM {TABLE} ORDER BY epoch DESC LIMIT 1")
        return (int(found[0]["epoch"]), found[0]["holder"]) if found else (0, NOBODY)

    def claim(self, epoch: int, holder: str) -> bool:
        try:
            self._clients.command(
                f"INSERT INTO {TABLE} (epoch, holder) SETTINGS keeper_map_strict_mode = 1"
                f" VALUES ({epoch}, '{_safe(holder)}')"
            )
        except StoreError as error:
            if "Node exists" in str(error):
                return False
            raise
        return True

    def forget(self, before: int) -> None:
        self._clients.command(f"DELETE FROM {TABLE} WHERE epoch < {before}")


class Lease:
    """The lease. Thread-safe. Call `step` about every `every_s`, and `holds` before each effect."""

    def __init__(
        self,
        epochs: Epochs,
        holder: str,
        ttl_s: float,
        *,
        clock: Callable[[], tuple[float, float]] = clock,
    ) -> None:
        self.ttl_s, self.margin_s, self.every_s = ttl_s, ttl_s / 2, ttl_s / 5
        self.holder = _safe(holder)
        self._epochs = epochs
        self._clock = clock
        self._lock = threading.Lock()
        self._epoch = 0  # the epoch that this process holds; 0: none
        self._since = (0.0, 0.0)  # before its claim began
        self._seen = (-1, "")  # the newest epoch of another holder
        self._seen_at = (0.0, 0.0)  # after it was first read
        self._forgotten = 0

    @property
    def token(self) -> int:
        """The epoch that this process holds; 0: none."""
        return self._epoch

    def holds(self) -> bool:
        """Return whether this process holds the lease now."""
        return self.left_s() > 0

    def left_s(self) -> float:
        """Return how much longer this process holds the lease without renewal; 0: it does not."""
        since = self._since
        return max(0.0, self.ttl_s - self._passed(since)) if self._epoch > 0 else 0.0

    def step(self) -> bool:
        """Renew the lease, or take it if its time is over.

        Returns:
            Whether this process holds the lease.
        Raises:
            StoreError: the store does not answer; `holds` is still right.
        """
        with self._lock:
            if self._epoch and not self.holds():
                self._epoch = 0  # another may have it by now
            return self._renew() if self._epoch else self._try_to_take()

    def release(self) -> None:
        """Let another take over at once.

        Raises:
            StoreError: the store does not answer; another takes over when the time is over.
        """
        with self._lock:
            mine, self._epoch = self._epoch, 0
            if mine:
                self._epochs.claim(mine + 1, NOBODY)

    def _renew(self) -> bool:
        epoch = self._epoch + 1
        if not self._claim(epoch):
            if self._epochs.newest() != (epoch, self.holder):
                self._epoch = 0
                return False
            self._epoch = epoch  # our own claim whose answer was lost; its time counts from the claim before
            return self._renew()
        if epoch - self._forgotten > 2 * KEPT:
            self._epochs.forget(epoch - KEPT)
            self._forgotten = epoch - KEPT
        return self.holds()

    def _try_to_take(self) -> bool:
        newest = self._epochs.newest()
        if newest != self._seen:
            self._seen, self._seen_at = newest, self._clock()
        epoch, holder = newest
        if holder not in (NOBODY, self.holder) and self._passed_slowest(self._seen_at) < self.ttl_s + self.margin_s:
            return False
        if not self._claim(epoch + 1) or self._epochs.newest() != (epoch + 1, self.holder):
            self._epoch = 0
            return False
        return self.holds()

    def _claim(self, epoch: int) -> bool:
        began = self._clock()
        if not self._epochs.claim(epoch, self.holder):
            return False
        self._since, self._epoch = began, epoch
        return True

    def _passed(self, since: tuple[float, float]) -> float:
        """Return the time passed by the faster clock: the own time is over early rather than late."""
        return max(now - then for now, then in zip(self._clock(), since, strict=True))

    def _passed_slowest(self, since: tuple[float, float]) -> float:
        """Return the time passed since boot: another's time is over late rather than early."""
        return self._clock()[0] - since[0]


class FileLease:
    """The lease of an embedded store: the lock on its folder, which ends with the process."""

    ttl_s = every_s = margin_s = 3600.0
    token = 1
    holder = "embedded"

    def holds(self) -> bool:
        return True

    def left_s(self) -> float:
        return self.ttl_s

    def step(self) -> bool:
        return True

    def release(self) -> None:
        """Do nothing: closing the store releases the lock."""


def _safe(text: str) -> str:
    """Return the text without characters that are unsafe within quotes."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", text)
