"""What one agent may take: bounds of memory and delay, and how they are counted.

All of them are far above what an honest agent needs. Who goes beyond one is slowed down, alone: its stream is read
later, so that its data waits in its own spool and nothing is lost.
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
LINES_PER_S, LINES_AT_ONCE = 2.0, 200.0  # log lines about what agents do wrong
ACCOUNTS = 20_000  # of agents without a stream that are remembered
SHARE = 4  # one agent may hold this part of the room that is left


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of memory and delay."""

    flush_s: float = 1.0  # how long telemetry waits for company: four inserts a second cost 2.5 times as much
    flush_bytes: int = 32 << 20  # of one insert; about one second of 100,000 GPUs
    waiting_bytes: int = 128 << 20  # telemetry taken in and not stored, of all agents
    record_bytes: int = 16 << 20  # events, absences and holdings taken in and not stored
    batch_bytes: int = 8 << 20  # of one batch
    retry_s: float = 1.0  # after the store has failed
    backoff_ms: int = 2_000  # what agents are asked to wait when too much waits here
    hello_s: float = 60.0  # a stream that has not said by then who it is ends; agents wait as long for their Welcome
    openings: int = 8  # Hellos that are worked on at a time; the others wait for their turn
    openings_waiting: int = 30_000
    openings_bytes: int = 128 << 20  # of Hellos that wait, and of those that are not there whole; 12,500 are 34 MB
    nameless: int = 16  # streams of one certificate that have not said yet who they are
    # Of the first message of such a stream, but for one of them, whose Hello may be the longest there is: 16 GPUs in 7
    # parts with 128 ports take 44 kB.
    nameless_bytes: int = 256 << 10
    pause_s: float = 30.0  # at most, before an agent that sends too much is read on
    care_s: float = 0.5  # how often all streams are looked after
    judge_s: float = 1.0  # an event that is not stored by then is judged all the same
    alive_s: float = 40.0  # agents send every 30 s at the least; one silent for longer may be replaced by another
    ends_per_s: int = 200  # streams that are asked to come again when the store works again
    hello_bytes: int = 4 << 20  # of one Hello; 16 GPUs take 5 kB
    entities: int = 8_192  # of one Hello, which take 528 kB; 16 GPUs in 7 parts, 64 ports and the node are 200
    fresh_entities: int = 16_384  # of one agent, at once; they come back at `fresh_per_s`
    fresh_per_s: float = 1.0
    unknown_nodes: int = 10_000  # nodes that are not in the fleet file
    seqs_every_s: float = 5.0  # how often lane positions are noted; resends after a crash collapse anyway
    # Of one agent. 16 GPUs in parts with all ports make 0.2 messages and 170 rows a second, an event now and then.
    messages_per_s: float = 500.0
    rows_per_s: float = 20_000.0  # an hour of outage is sent in half a minute
    bytes_per_s: float = 8e6
    events_per_s: float = 200.0
    hellos_per_s: float = 0.5
    hellos: float = 60.0  # at once
    burst_s: float = 20.0  # for so long at double pace


class Recent(Generic[K, V]):
    """A mapping that forgets what was not set for longest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[K, V] = OrderedDict()

    def __setitem__(self, key: K, value: V) -> None:
        self._held[key] = value
        self._held.move_to_end(key)
        if len(self._held) > self._size:
            self._held.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        return self._held.get(key)

    def pop(self, key: K) -> V | None:
        return self._held.pop(key, None)

    def items(self) -> Iterator[tuple[K, V]]:
        """A copy: other threads may read."""
        return iter(self._held.copy().items())


class Bucket:
    """Tokens that come back at `rate`, up to `burst`."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, time.monotonic()

    def take(self, count: float) -> float:
        """Take some, on credit if need be.

        Returns:
            How long to wait until the credit is paid back, seconds.
        """
        left = self.left(time.monotonic()) - count
        self._level = left
        return max(0.0, -left / self._rate)

    def left(self, now_s: float) -> float:
        """How many there are at this time (monotonic)."""
        self._level = min(self._burst, self._level + (now_s - self._at) * self._rate)
        self._at = now_s
        return self._level

    def spend(self, count: float) -> None:
        """Some that are there."""
        self._level -= count

    def may(self, count: float) -> bool:
        """Take some if they are there."""
        self.take(0)
        if self._level < count:
            return False
        self._level -= count
        return True


class AgentAllowance:
    """What one agent has taken. It outlives the stream, so that a new stream is no way to more."""

    __slots__ = ("bytes", "entities", "events", "fresh", "hellos", "inventory", "messages", "rows", "waiting")

    def __init__(self, limits: Limits) -> None:
        def bucket(per_s: float) -> Bucket:
            return Bucket(per_s, per_s * limits.burst_s)

        self.waiting = 0  # bytes taken in and not stored
        self.messages = bucket(limits.messages_per_s)
        self.rows = bucket(limits.rows_per_s)
        self.bytes = bucket(limits.bytes_per_s)
        self.events = bucket(limits.events_per_s)
        self.hellos = Bucket(limits.hellos_per_s, limits.hellos)
        self.fresh = Bucket(limits.fresh_per_s, limits.fresh_entities)
        self.entities: Ids = np.zeros(0, np.uint64)  # of its newest Hello
        self.inventory = b""  # digest of the newest that is stored or about to be

    def take_message(self, size: int, rows: int, events: int) -> float:
        """How long the agent must wait for its next message, seconds."""
        wait_s = max(self.messages.take(1), self.bytes.take(size))
        if rows:
            wait_s = max(wait_s, self.rows.take(rows))
        if events:
            wait_s = max(wait_s, self.events.take(events))
        return wait_s

    def take_at_once(self, size: int, rows: int, now_s: float) -> bool:
        """A message of telemetry, if the agent need not wait for its next one; else nothing is taken."""
        if self.messages.left(now_s) < 1 or self.bytes.left(now_s) < size or self.rows.left(now_s) < rows:
            return False
        self.messages.spend(1)
        self.bytes.spend(size)
        self.rows.spend(rows)
        return True

    def may_have(self, ids: Ids) -> bool:
        """Whether it may have these entities; each that its last Hello did not have is counted."""
        fresh = int(np.count_nonzero(~np.isin(ids, self.entities)))
        if fresh and not self.fresh.may(fresh):
            return False
        self.entities = ids
        return True


class Accounts:
    """Of agents by node; those without a stream are forgotten in the end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[str, AgentAllowance] = {}
        self._left: Recent[str, AgentAllowance] = Recent(ACCOUNTS)

    def open(self, node: str) -> AgentAllowance:
        """For as long as a stream speaks for the node."""
        held = self._open.get(node) or self._left.pop(node) or AgentAllowance(self._limits)
        self._open[node] = held
        return held

    def leave(self, node: str) -> None:
        held = self._open.pop(node, None)
        if held is not None:
            self._left[node] = held

    def __len__(self) -> int:
        return len(self._open) + len(self._left)


class MemoryBudget:
    """Bytes that may wait for the store. One agent may hold a part of what is left, so that many greedy ones leave
    room for the others: whoever waits, waits for its own data."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    def grow(self, account: AgentAllowance, size: int) -> None:
        self.used += size
        account.waiting += size

    def fits(self, account: AgentAllowance) -> bool:
        """Whether this agent may put more in. One message always fits: it is bounded by itself."""
        return self.used < self.size and account.waiting <= (self.size - self.used) // SHARE

    @property
    def filling(self) -> bool:
        """Time to ask agents to hold back."""
        return 2 * self.used >= self.size


class RateLimitedLogger:
    """Logs each thing once, and not too many in a time."""

    def __init__(self, size: int = 20_000) -> None:
        self._told: Recent[tuple[str, str], None] = Recent(size)
        self._lines = Bucket(LINES_PER_S, LINES_AT_ONCE)
        self._left_out = 0

    def warn(self, key: tuple[str, str], text: str, *values: object) -> None:
        if key in self._told:
            return
        self._told[key] = None
        if not self._lines.may(1):
            self._left_out += 1
            return
        if self._left_out:
            log.warning("%d lines about agents were left out: too many at once", self._left_out)
            self._left_out = 0
        log.warning(text, *values)
