"""What one agent may use: limits of memory and delay, and how they are counted.

All are far above what an honest agent needs. An agent that exceeds one is slowed alone: its stream is read later, so
that its data waits in its own spool and nothing is lost.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from drover_collector.store.records import Ids

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

MESSAGE_BYTES = 17 << 20  # a little over what agents send; 30 s of a 16-GPU node are below 1 MB
LINES_PER_S, LINES_AT_ONCE = 2.0, 200.0  # log lines about agents
ALLOWANCES = 20_000  # of agents without a stream, kept in memory
SHARE = 4  # one agent may hold this part of the memory that is left


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of memory and delay."""

    flush_s: float = 1.0  # telemetry waits so long for more: four inserts a second cost 2.5 times as much
    flush_bytes: int = 32 << 20  # of one insert; about one second of 100,000 GPUs
    waiting_bytes: int = 128 << 20  # telemetry of all agents that is not stored
    record_bytes: int = 16 << 20  # events, absences and holdings that are not stored
    batch_bytes: int = 8 << 20  # of one batch
    retry_s: float = 1.0  # after a write failed
    backoff_ms: int = 2_000  # agents are asked to wait so long while too much is unstored
    hello_s: float = 60.0  # a stream without a handshake ends after this; agents wait as long for their Welcome
    openings: int = 8  # handshakes processed at once; others wait for their turn
    openings_waiting: int = 30_000
    openings_bytes: int = 128 << 20  # of Hellos that wait or are incomplete; 12,500 are 34 MB
    pending_streams: int = 16  # of one certificate without a handshake
    # Of the first message on such a stream. One of them may send the longest Hello allowed: 16 GPUs in 7 parts with
    # 128 ports take 44 kB.
    pending_hello_bytes: int = 256 << 10
    pause_s: float = 30.0  # at most, before an agent that sends too much is read again
    check_s: float = 0.5  # between checks of all streams
    judge_s: float = 1.0  # an event that is not stored by then is judged from memory
    alive_s: float = 40.0  # agents send every 30 s or more often; a silent one may be replaced by another after this
    ends_per_s: int = 200  # streams that are closed to be resent, once the store works again
    hello_bytes: int = 4 << 20  # of one Hello; 16 GPUs take 5 kB
    entities: int = 8_192  # of one Hello, which take 528 kB; 16 GPUs in 7 parts, 64 ports and the node are 200
    fresh_entities: int = 16_384  # new ones of one agent at once; restored at `fresh_per_s`
    fresh_per_s: float = 1.0
    unknown_nodes: int = 10_000  # that report but are not in the fleet file
    seqs_every_s: float = 5.0  # between writes of lane offsets; resends after a crash collapse in the store
    # Of one agent. 16 GPUs in parts with all ports make 0.2 messages and 170 rows a second, and rarely an event.
    messages_per_s: float = 500.0
    rows_per_s: float = 20_000.0  # an hour of outage is sent in half a minute
    bytes_per_s: float = 8e6
    events_per_s: float = 200.0
    hellos_per_s: float = 0.5
    hellos: float = 60.0  # at once
    burst_s: float = 20.0  # at double rate


class RecentlyUsed(Generic[K, V]):
    """A mapping of limited size that drops the key set longest ago."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[K, V] = OrderedDict()

    def __setitem__(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._size:
            self._items.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def pop(self, key: K) -> V | None:
        return self._items.pop(key, None)

    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over a copy: other threads may read."""
        return iter(self._items.copy().items())


class TokenBucket:
    """Tokens that return at `rate` a second, up to `burst`."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, time.monotonic()

    def take(self, count: float) -> float:
        """Take tokens, on credit if need be. Return after how many seconds the credit is paid back."""
        left = self.left(time.monotonic()) - count
        self._level = left
        return max(0.0, -left / self._rate)

    def left(self, now_s: float) -> float:
        """Return how many there are at this time (monotonic)."""
        self._level = min(self._burst, self._level + (now_s - self._at) * self._rate)
        self._at = now_s
        return self._level

    def spend(self, count: float) -> None:
        """Take tokens that `left` has shown to be there."""
        self._level -= count

    def take_if_available(self, count: float) -> bool:
        self.take(0)
        if self._level < count:
            return False
        self._level -= count
        return True


class AgentAllowance:
    """What one agent has used. It outlives the stream, so that a new stream gains nothing."""

    __slots__ = ("bytes", "entities", "events", "fresh", "hellos", "inventory", "messages", "rows", "waiting")

    def __init__(self, limits: Limits) -> None:
        def bucket(per_s: float) -> TokenBucket:
            return TokenBucket(per_s, per_s * limits.burst_s)

        self.waiting = 0  # bytes received and not stored
        self.messages = bucket(limits.messages_per_s)
        self.rows = bucket(limits.rows_per_s)
        self.bytes = bucket(limits.bytes_per_s)
        self.events = bucket(limits.events_per_s)
        self.hellos = TokenBucket(limits.hellos_per_s, limits.hellos)
        self.fresh = TokenBucket(limits.fresh_per_s, limits.fresh_entities)
        self.entities: Ids = np.zeros(0, np.uint64)  # of its newest Hello
        self.inventory = b""  # digest of the newest that is stored or waits to be

    def take_message(self, size: int, rows: int, events: int) -> float:
        """Count a message. Return how long the agent must wait for its next one, seconds."""
        wait_s = max(self.messages.take(1), self.bytes.take(size))
        if rows:
            wait_s = max(wait_s, self.rows.take(rows))
        if events:
            wait_s = max(wait_s, self.events.take(events))
        return wait_s

    def take_if_free(self, size: int, rows: int, now_s: float) -> bool:
        """Count a message of telemetry if the agent need not wait after it. Return whether it was counted."""
        if self.messages.left(now_s) < 1 or self.bytes.left(now_s) < size or self.rows.left(now_s) < rows:
            return False
        self.messages.spend(1)
        self.bytes.spend(size)
        self.rows.spend(rows)
        return True

    def register_entities(self, ids: Ids) -> bool:
        """Count the entities that the last Hello did not have. Return False if they exceed the limit."""
        fresh = int(np.count_nonzero(~np.isin(ids, self.entities)))
        if fresh and not self.fresh.take_if_available(fresh):
            return False
        self.entities = ids
        return True


class AllowanceTable:
    """The allowance of each node. Those of nodes without a stream are dropped eventually."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._active: dict[str, AgentAllowance] = {}
        self._inactive: RecentlyUsed[str, AgentAllowance] = RecentlyUsed(ALLOWANCES)

    def activate(self, node: str) -> AgentAllowance:
        """Return the node's allowance; it stays until `deactivate`."""
        found = self._active.get(node) or self._inactive.pop(node) or AgentAllowance(self._limits)
        self._active[node] = found
        return found

    def deactivate(self, node: str) -> None:
        found = self._active.pop(node, None)
        if found is not None:
            self._inactive[node] = found

    def __len__(self) -> int:
        return len(self._active) + len(self._inactive)


class MemoryBudget:
    """Bytes that may wait for the store.

    One agent may hold a part of what is left, so that many greedy agents leave room for others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    def grow(self, account: AgentAllowance, size: int) -> None:
        self.used += size
        account.waiting += size

    def fits(self, account: AgentAllowance) -> bool:
        """Return whether this agent may add a message. The size of one message has its own limit."""
        return self.used < self.size and account.waiting <= (self.size - self.used) // SHARE

    @property
    def filling(self) -> bool:
        """Whether agents should be asked to wait."""
        return 2 * self.used >= self.size


class RateLimitedLogger:
    """Logs each key once, and not too many lines at a time."""

    def __init__(self, size: int = 20_000) -> None:
        self._logged: RecentlyUsed[tuple[str, str], None] = RecentlyUsed(size)
        self._lines = TokenBucket(LINES_PER_S, LINES_AT_ONCE)
        self._left_out = 0

    def warning(self, key: tuple[str, str], text: str, *values: object) -> None:
        if key in self._logged:
            return
        self._logged[key] = None
        if not self._lines.take_if_available(1):
            self._left_out += 1
            return
        if self._left_out:
            log.warning("%d lines about agents were left out: too many at once", self._left_out)
            self._left_out = 0
        log.warning(text, *values)
