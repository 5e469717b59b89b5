"""A Hello: who the agent is, whether it may speak, what its numbers mean; and the Welcome it gets."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable, Generator
from typing import Any

import grpc

from drover_collector.auth import identity
from drover_collector.auth.authorization import caller
from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.limits import (
    Accounts,
    Bucket,
    Limits,
    RateLimitedLogger,
)
from drover_collector.ingest.ownership import GpuOwnership, NodeOwnership
from drover_collector.ingest.schema_registry import Dictionary, Refusal, reading_hello
from drover_collector.ingest.session import (
    EndError,
    Session,
    boot_s,
    lane_seqs,
)
from drover_collector.ingest.stats import IngestStats
from drover_collector.ingest.telemetry_writer import TelemetryWriter
from drover_core.model.kinds import BOOT_ID
from drover_proto import telemetry_pb2 as pb

PROTOCOL = 1
MAX_NAME = 253  # of a host
MAX_VERSION = 64
MAX_IGNORED = 1000  # unknown metrics that are named in logs, in the Welcome and in Status
MAX_INVENTORY = 65_536  # bytes that are stored of a Hello's inventory


class HandshakeHandler:
    """Who speaks for which node. Used in the event loop.

    Args:
        count: notes something refused of a node.
        shared: other collectors write to the same store, and the agent may come from one of them.
    """

    def __init__(
        self,
        index: FleetIndex,
        stats: IngestStats,
        limits: Limits,
        now_ms: Callable[[], int],
        teller: RateLimitedLogger,
        writers: TelemetryWriter,
        count: Callable[[str, Refusal], None],
        shared: bool,
        gpu_id: Callable[[str, str, str], int],
    ) -> None:
        self._index, self._stats, self._limits, self._now_ms, self._teller = index, stats, limits, now_ms, teller
        self._writers, self._count, self._shared, self._gpu_id = writers, count, shared, gpu_id
        self._claims = NodeOwnership(stats, limits, teller)
        self._things = GpuOwnership()
        self._accounts = Accounts(limits)
        self._strangers = Bucket(limits.fresh_per_s, 4 * limits.fresh_entities)

    def stream(self, node: str) -> Session | None:
        """The stream that speaks for a node and has its Welcome."""
        session = self._claims.of(node)
        return session if session is not None and session.welcomed and session.end is None else None

    def leave(self, session: Session) -> None:
        """Its stream has ended."""
        self._things.leave(session)
        if self._claims.leave(session):
            self._accounts.leave(session.node)

    async def take(self, session: Session, hello: pb.Hello, size: int) -> None:
        """Who it is, what its numbers mean; answers with what is held of it."""
        self._check(hello, size)
        self._may_speak(session, hello.node)
        if session.node and session.node != hello.node:
            session.dictionary = None
            session.no_dictionary = Refusal(
                "another node", f"data for node {hello.node!r} on the stream of {session.node!r}; use one stream a node"
            )
            return
        self._admit(hello.node)
        now_ms = self._now_ms()
        self._claims.take(session, hello.node, hello.spool_id, hello.boot_id[:MAX_NAME])
        session.account = self._accounts.open(hello.node)
        if wait_s := session.account.hellos.take(1):
            self._stats.slowed += 1
            await asyncio.sleep(min(wait_s, self._limits.pause_s))
        near = self._index.near(hello.node)
        dictionary = await _in_turns(reading_hello(hello, lambda key: self._gpu_id(key, hello.node, near)))
        self._check_entities(session, dictionary.known)
        self._things.leave(session)  # it may not have all that it had before
        self._things.take(session, dictionary)
        came_ms = now_ms if session.welcomed else session.hello_came_ms or now_ms  # not what it waited for its turn
        session.clock_offset_ms = came_ms - hello.ts_ms
        session.up_ms, session.up_s = hello.up_ms, boot_s() - max(0, now_ms - came_ms) / 1000
        session.dictionary = dictionary
        session.hello_bytes = size
        self._note(session, hello, now_ms)
        self._note_inventory(session, _with_boot(hello), now_ms)
        if self._shared:
            await self._writers.positions.look(session.key)
        # The agent's clock now: what it told while it waited for its turn came late, and is of no wrong clock.
        session.hello_ms = hello.ts_ms + max(0, self._now_ms() - came_ms)
        welcome = pb.Welcome(
            held=lane_seqs(self._writers.positions.of(session.key)),
            ts_ms=self._now_ms(),
            collector=socket.gethostname(),
            protocol=PROTOCOL,
            ignored=sorted(set(dictionary.ignored))[:MAX_IGNORED],
            records=True,
        )
        await session.send(pb.CollectorMessage(welcome=welcome))
        session.welcomed = True

    def _check(self, hello: pb.Hello, size: int) -> None:
        if size > self._limits.hello_bytes:
            raise EndError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a Hello of {size} bytes; up to {self._limits.hello_bytes} are right",
            )
        if hello.protocol != PROTOCOL:
            raise EndError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this collector speaks protocol {PROTOCOL}, the agent {hello.protocol}; update the older",
            )
        if not (_is_name(hello.node) and _is_name(hello.spool_id)):
            raise EndError(
                grpc.StatusCode.INVALID_ARGUMENT, f"{hello.node!r} with spool {hello.spool_id!r} is no node of ours"
            )
        if len(hello.entities) > self._limits.entities:
            raise EndError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a Hello with {len(hello.entities)} entities; up to {self._limits.entities} are right",
            )

    def _may_speak(self, session: Session, node: str) -> None:
        try:
            refusal = identity.refusal(caller() or identity.peer(session.context.auth_context()), node)
        except identity.IdentityError as error:
            refusal = str(error)
        if refusal is not None:
            self._count(node, Refusal("not allowed", refusal))
            raise EndError(grpc.StatusCode.PERMISSION_DENIED, refusal)

    def _admit(self, node: str) -> None:
        """A node that the fleet file does not have is taken too, but not too many of them."""
        stats = self._stats
        if node in self._index.node_number or node in stats.unknown_nodes:
            return
        if len(stats.unknown_nodes) >= self._limits.unknown_nodes and not self._forget_strangers():
            self._stats.rejected["unknown node"] += 1
            raise EndError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"fleet.toml has no node {node!r}, nor {self._limits.unknown_nodes} others that report; add it",
            )

    def _forget_strangers(self) -> bool:
        """Of unknown nodes, those without a stream. Whether there were any."""
        stats = self._stats
        present = {session.node for session in self._claims.all()}
        gone = stats.unknown_nodes - present
        stats.unknown_nodes -= gone
        for node in gone:
            stats.last_seen.pop(node, None)
            stats.agent_versions.pop(node, None)
        return bool(gone)

    def _check_entities(self, session: Session, ids: Any) -> None:
        """What a node is made of changes seldom: one that tells thing after thing would fill memory and store."""
        account = session.account
        may = account.may_have(ids)
        if may and session.node not in self._index.node_number:
            may = self._strangers.may(len(ids))
        if not may:
            self._count(session.node, Refusal("too many entities", f"node {session.node!r} tells thing after thing"))
            raise EndError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"node {session.node!r} has told of too many different GPUs, links and workloads; come again later",
            )

    def _note(self, session: Session, hello: pb.Hello, now_ms: int) -> None:
        stats, node = self._stats, hello.node
        stats.last_seen[node] = now_ms
        stats.agent_versions[node] = hello.agent_version[:MAX_VERSION]
        if node not in self._index.node_number and node not in stats.unknown_nodes:
            stats.unknown_nodes = stats.unknown_nodes | {node}
            text = "%s reports, but fleet.toml does not have it; its data is kept, not judged: add it there"
            self._teller.warn((node, "unknown"), text, node)
        assert session.dictionary is not None
        fresh = sorted(set(session.dictionary.ignored) - stats.unknown_metrics)
        for name in fresh[: max(0, MAX_IGNORED - len(stats.unknown_metrics))]:
            stats.unknown_metrics = stats.unknown_metrics | {name}
            text = "%s: metric %r is not known here and is left out; update the collector"
            self._teller.warn(("metric", name), text, node, name)

    def _note_inventory(self, session: Session, inventory: dict[str, str], now_ms: int) -> None:
        if not inventory:
            return
        if sum(len(key) + len(value) for key, value in inventory.items()) > MAX_INVENTORY:
            text = f"an inventory of more than {MAX_INVENTORY} characters; it is not stored"
            self._count(session.node, Refusal("oversize", text))
            return
        digest = hashlib.blake2b(repr(sorted(inventory.items())).encode(), digest_size=16).digest()
        if session.account.inventory != digest:
            session.account.inventory = digest
            self._writers.put_inventory(session.node, now_ms, inventory)


async def _in_turns(reading: Generator[None, None, Dictionary]) -> Dictionary:
    """Others have their turns meanwhile."""
    while True:
        try:
            next(reading)
        except StopIteration as done:
            found: Dictionary = done.value
            return found
        await asyncio.sleep(0)


def _with_boot(hello: pb.Hello) -> dict[str, str]:
    """Its inventory with the boot it runs in: a return to service may need a newer one."""
    found = dict(hello.inventory)
    if hello.boot_id:
        found[BOOT_ID] = hello.boot_id[:MAX_NAME]
    return found


def _is_name(text: str) -> bool:
    """Of a node or spool: it becomes part of ids, which are split at slashes, and of lines that people read."""
    return 0 < len(text) <= MAX_NAME and text.isprintable() and not set(text) & {"/", " "}
