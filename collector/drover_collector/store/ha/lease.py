"""Who may detect and act: a lease, of which one collector at a time is the holder.

A lease is a row of epochs, 1, 2, 3..., each claimed by one collector: to claim an epoch is one atomic step of the
server, which one of several succeeds with. The newest epoch's holder is the holder, and the epoch its fencing token.

- The holder claims the next epoch every so often. It counts as holder until `ttl_s` after it *began* its last claim.
- Another may claim only after it has itself seen the newest epoch unchanged for `ttl_s + margin_s`. If the holder has
  renewed meanwhile, that epoch is taken and the claim fails.

So no two clocks are compared: what is assumed is that the clocks of two machines run at the same rate, to within
margin / ttl (a half). A process that was stopped wakes up with its time over and must find that out before it acts,
which is what `holds` is for: it costs two readings of the clock and asks nobody.

The atomic step: on one server, CREATE TABLE of a table named after the epoch; in a cluster an INSERT into a KeeperMap
table, strict, which Keeper decides. In the embedded form the lock on the store's folder is the lease.
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
KEPT = 30  # epochs that stay, so that a claim made on an old picture meets them
TABLE = "lease"  # of the cluster form
NOBODY = "-"  # holder of an epoch with which a lease was given back


def clock() -> tuple[float, float]:
    """(seconds since boot with those asleep, wall clock); a time has passed when it has by either."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), time.time()


class Epochs(Protocol):
    def newest(self) -> tuple[int, str]:
        """(epoch, holder) of the newest; (0, NOBODY) when there is none."""

    def claim(self, epoch: int, holder: str) -> bool:
        """Whether this call, and no other, made the epoch."""

    def forget(self, before: int) -> None:
        """Remove epochs below `before`."""


class TableEpochs:
    """Epochs as tables of one server, which makes each name once."""

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
                f"CREATE TABLE {PREFIX}{epoch} (epoch UInt64) ENGINE = Null COMMENT '{_word(holder)}'"
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
    """Epochs as keys in ClickHouse Keeper, by a KeeperMap table."""

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
                f" VALUES ({epoch}, '{_word(holder)}')"
            )
        except StoreError as error:
            if "Node exists" in str(error):
                return False
            raise
        return True

    def forget(self, before: int) -> None:
        self._clients.command(f"DELETE FROM {TABLE} WHERE epoch < {before}")


class Lease:
    """Thread-safe. `step` is to be called about every `every_s`; `holds` before each effect."""

    def __init__(
        self,
        epochs: Epochs,
        holder: str,
        ttl_s: float,
        *,
        clock: Callable[[], tuple[float, float]] = clock,
    ) -> None:
        self.ttl_s, self.margin_s, self.every_s = ttl_s, ttl_s / 2, ttl_s / 5
        self.holder = _word(holder)
        self._epochs = epochs
        self._clock = clock
        self._lock = threading.Lock()
        self._epoch = 0  # ours; 0: we are not the holder
        self._since = (0.0, 0.0)  # before the claim of it began
        self._seen = (-1, "")  # the newest that another holds
        self._seen_at = (0.0, 0.0)  # after it was read first
        self._forgotten = 0

    @property
    def token(self) -> int:
        """The epoch that this process claimed last; 0: none."""
        return self._epoch

    def holds(self) -> bool:
        """Whether this process is the holder at this moment."""
        return self.left_s() > 0

    def left_s(self) -> float:
        """How much longer this process is the holder if it does not renew; 0: it is not."""
        since = self._since
        return max(0.0, self.ttl_s - self._passed(since)) if self._epoch > 0 else 0.0

    def step(self) -> bool:
        """Renew the lease, or take it where its time is over.

        Returns:
            Whether this process is the holder.
        Raises:
            StoreError: the store does not answer; `holds` tells whether the time goes on.
        """
        with self._lock:
            if self._epoch and not self.holds():
                self._epoch = 0  # another may have it by now
            return self._renew() if self._epoch else self._look()

    def release(self) -> None:
        """Let another take over at once.

        Raises:
            StoreError: the store does not answer: it takes over when the time is over.
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
            self._epoch = epoch  # a claim of ours whose answer was lost; its time counts from the one before
            return self._renew()
        if epoch - self._forgotten > 2 * KEPT:
            self._epochs.forget(epoch - KEPT)
            self._forgotten = epoch - KEPT
        return self.holds()

    def _look(self) -> bool:
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
        """By the clock that says more: one's own time is over early rather than late."""
        return max(now - then for now, then in zip(self._clock(), since, strict=True))

    def _passed_slowest(self, since: tuple[float, float]) -> float:
        """Since boot: another's time is over late rather than early."""
        return self._clock()[0] - since[0]


class FileLease:
    """The embedded form: the lock on the store's folder, which the operating system gives back with the process."""

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
        """The store's closing gives the lock back."""


def _word(text: str) -> str:
    """Safe within quotes."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", text)
