"""The handshake: check an agent's Hello, read its schemas and entities, and answer with the Welcome."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Generator, Sequence, Set

import grpc

from drover_collector.auth import identity
from drover_collector.auth.authorization import caller
from drover_collector.ingest.agents_elsewhere import AgentsElsewhere
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.limits import AllowanceTable, TokenBucket
from drover_collector.ingest.ownership import GpuOwnership, NodeOwnership
from drover_collector.ingest.schema_registry import Refusal, SchemaRegistry, reading_hello
from drover_collector.ingest.session import Session, StreamClosed, boot_s, lane_seqs
from drover_collector.ingest.telemetry_writer import TelemetryWriter
from drover_collector.store import StoreError
from drover_collector.store.records import EntityRow, Ids
from drover_core.model.kinds import BOOT_ID
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

PROTOCOL = 1
MAX_NAME = 253  # of a host
MAX_VERSION = 64
MAX_IGNORED = 1000  # unknown metrics that are named in logs, in the Welcome and in Status
MAX_INVENTORY = 65_536  # characters of a Hello's inventory
FORGET_EVERY_S = 1.0  # between two looks for unknown nodes that have gone


class HandshakeHandler:
    """Welcomes agents. Event loop only."""

    def __init__(self, context: IngestContext, writer: TelemetryWriter) -> None:
        self._context, self._writer = context, writer
        self.elsewhere = AgentsElsewhere(context.store, context.now_ms)
        self.nodes, self.gpus = NodeOwnership(context, self.elsewhere), GpuOwnership(context, self.elsewhere)
        self._allowances = AllowanceTable(context.limits)
        self._placing: asyncio.Task[None] | None = None
        self._forget_s = 0.0  # when unknown nodes may be forgotten again
        # Of nodes that are not in the fleet file, together.
        self._fresh_entities = TokenBucket(context.limits.fresh_per_s, 4 * context.limits.fresh_entities)

    def welcomed(self, node: str) -> Session | None:
        """Return the stream that reports for a node and has its Welcome."""
        session = self.nodes.owner_of(node)
        return session if session is not None and session.welcomed and session.closed is None else None

    def all_welcomed(self) -> list[Session]:
        """Return the streams that report for their nodes and have their Welcome."""
        return [session for session in self.nodes.owners() if session.welcomed and session.closed is None]

    def release(self, session: Session) -> None:
        """Forget a stream that has ended."""
        self.gpus.release(session)
        if self.nodes.release(session):
            self._allowances.deactivate(session.node)

    def tick(self) -> None:
        """Look which agents report to other collectors, when that is due, and close their nodes' pages here."""
        self.elsewhere.tick(self._prefer_agents)
        self.gpus.reopen_freed()

    def _prefer_agents(self, nodes: Set[str]) -> None:
        """Use nothing of pages here that the agents of these nodes report to other collectors."""
        self.nodes.close_scraped(nodes)
        if places := self.gpus.give_back(nodes):
            self._placing = asyncio.create_task(self._place(places))

    async def _place(self, places: Sequence[EntityRow]) -> None:
        try:
            await asyncio.to_thread(self._context.store.entities.write, places)
        except StoreError as error:
            log.warning("%d GPUs stay where pages named them, until their agents connect again: %s", len(places), error)

    async def handle(self, session: Session, hello: pb.Hello, size: int) -> None:
        """Make the session the owner of its node, and answer with the Welcome.

        Raises:
            StreamClosed: the Hello is invalid, not allowed, or beyond a limit.
        """
        self._check(hello, size)
        self._authorize(session, hello.node)
        if session.node and session.node != hello.node:
            session.registry = None
            text = f"data for node {hello.node!r} on the stream of {session.node!r}; use one stream for each node"
            session.no_registry = Refusal("another node", text)
            return
        self._admit(session, hello.node)
        now_ms = self._context.now_ms()
        self.nodes.claim(session, hello.node, hello.spool_id, hello.boot_id[:MAX_NAME])
        session.account = self._allowances.activate(hello.node)
        if wait_s := session.account.hellos.take(1):
            self._context.stats.slowed += 1
            await asyncio.sleep(min(wait_s, self._context.limits.pause_s))
        registry = await self._read(hello)
        # A round of pages is one batch. Who names one of its GPUs elsewhere must not hide all of the node.
        registry.is_lenient = session.scraped
        self._check_entities(session, registry.known)
        self.gpus.release(session)  # a later Hello may have fewer
        self.gpus.claim(session, registry)
        # A Hello that waited for its turn does not count its wait as a difference of clocks.
        received_ms = now_ms if session.welcomed else session.opening.hello_ms or now_ms
        session.clock.offset_ms = received_ms - hello.ts_ms
        session.clock.up_ms, session.clock.up_s = hello.up_ms, boot_s() - max(0, now_ms - received_ms) / 1000
        session.registry = registry
        session.opening.hello_bytes = size
        self._note(registry, hello, now_ms)
        self._store_inventory(session, _with_boot(hello), now_ms)
        if self._context.store.shared:  # the agent may have been connected to another collector
            await self._writer.offsets.refresh(session.key)
        # The agent's clock now. Events from the wait are late, which does not make the clock suspect.
        session.clock.hello_ms = hello.ts_ms + max(0, self._context.now_ms() - received_ms)
        await self._welcome(session, registry)

    async def _read(self, hello: pb.Hello) -> SchemaRegistry:
        """Read a Hello in portions. Other tasks run in between."""
        near, gpu_id = self._context.index.near(hello.node), self._context.store.entities.gpu_id
        reading: Generator[None, None, SchemaRegistry] = reading_hello(hello, lambda key: gpu_id(key, hello.node, near))
        while True:
            try:
                next(reading)
            except StopIteration as done:
                registry: SchemaRegistry = done.value
                return registry
            await asyncio.sleep(0)

    async def _welcome(self, session: Session, registry: SchemaRegistry) -> None:
        welcome = pb.Welcome(
            held=lane_seqs(self._writer.offsets.get(session.key)),
            ts_ms=self._context.now_ms(),
            collector=socket.gethostname(),
            protocol=PROTOCOL,
            ignored=sorted(set(registry.ignored))[:MAX_IGNORED],
            records=True,
        )
        await session.send(pb.CollectorMessage(welcome=welcome))
        session.welcomed = True

    # ---- checks

    def _check(self, hello: pb.Hello, size: int) -> None:
        limits, invalid = self._context.limits, grpc.StatusCode.INVALID_ARGUMENT
        if size > limits.hello_bytes:
            raise StreamClosed(invalid, f"a Hello of {size} bytes; at most {limits.hello_bytes} are allowed")
        if hello.protocol != PROTOCOL:
            text = f"this collector speaks protocol {PROTOCOL}, the agent {hello.protocol}; update the older"
            raise StreamClosed(grpc.StatusCode.FAILED_PRECONDITION, text)
        if not (_is_name(hello.node) and _is_name(hello.spool_id)):
            text = (
                f"node name {hello.node!r} or spool id {hello.spool_id!r} is invalid: 1 to {MAX_NAME} printable"
                " characters without spaces and slashes"
            )
            raise StreamClosed(invalid, text)
        if len(hello.entities) > limits.entities:
            text = f"a Hello with {len(hello.entities)} entities; at most {limits.entities} are allowed"
            raise StreamClosed(invalid, text)

    def _authorize(self, session: Session, node: str) -> None:
        try:
            refusal = identity.refusal(caller() or identity.peer(session.stream.call.auth_context()), node)
        except identity.IdentityError as error:
            refusal = str(error)
        if refusal is not None:
            self._context.count_refusal(node, Refusal("not allowed", refusal))
            raise StreamClosed(grpc.StatusCode.PERMISSION_DENIED, refusal)

    def _admit(self, session: Session, node: str) -> None:
        """Accept nodes that are not in the fleet file too, up to a limit. Pages leave half of it to agents."""
        stats, limit = self._context.stats, self._context.limits.unknown_nodes
        limit = limit // 2 if session.scraped else limit
        if node in self._context.index.node_number or node in stats.unknown_nodes:
            return
        if len(stats.unknown_nodes) >= limit:
            self._forget_unknown_nodes(at_once=not session.scraped)
        if len(stats.unknown_nodes) >= limit:
            stats.rejected["unknown node"] += 1
            text = f"fleet.toml has neither node {node!r} nor {limit} others that report; add it"
            raise StreamClosed(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    def _forget_unknown_nodes(self, at_once: bool) -> None:
        """Forget unknown nodes without a stream.

        Not with each refusal of a page: a writer that names many nodes is refused thousands of times a second.
        """
        if not at_once and time.monotonic() < self._forget_s:
            return
        self._forget_s = time.monotonic() + FORGET_EVERY_S
        stats = self._context.stats
        present = {session.node for session in self.nodes.owners()}
        gone = stats.unknown_nodes - present
        stats.unknown_nodes -= gone
        self.nodes.by_agents -= gone
        for node in gone:
            stats.last_seen.pop(node, None)
            stats.agent_versions.pop(node, None)

    def _check_entities(self, session: Session, ids: Ids) -> None:
        """Limit new entities, which would fill memory and store: hardware changes seldom."""
        accepted = session.account.register_entities(ids)
        if accepted and session.node not in self._context.index.node_number:
            accepted = self._fresh_entities.take_if_available(len(ids))
        if not accepted:
            node, limit = session.node, self._context.limits.fresh_entities
            text = f"node {node} registers new GPUs, links and workloads too fast (limit {limit}); come again later"
            self._context.count_refusal(node, Refusal("too many entities", text))
            raise StreamClosed(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    def _note(self, registry: SchemaRegistry, hello: pb.Hello, now_ms: int) -> None:
        stats, node = self._context.stats, hello.node
        stats.last_seen[node] = now_ms
        stats.agent_versions[node] = hello.agent_version[:MAX_VERSION]
        if node not in self._context.index.node_number and node not in stats.unknown_nodes:
            stats.unknown_nodes = stats.unknown_nodes | {node}
            text = "%s reports, but is not in fleet.toml; its data is stored, not judged: add it there"
            self._context.logger.warning((node, "unknown"), text, node)
        fresh = sorted(set(registry.ignored) - stats.unknown_metrics)
        for name in fresh[: max(0, MAX_IGNORED - len(stats.unknown_metrics))]:
            stats.unknown_metrics = stats.unknown_metrics | {name}
            text = "%s: metric %r is unknown and not stored; update the collector"
            self._context.logger.warning(("metric", name), text, node, name)

    def _store_inventory(self, session: Session, inventory: dict[str, str], now_ms: int) -> None:
        if not inventory:
            return
        if sum(len(key) + len(value) for key, value in inventory.items()) > MAX_INVENTORY:
            text = f"an inventory of more than {MAX_INVENTORY} characters; it is not stored"
            self._context.count_refusal(session.node, Refusal("oversize", text))
            return
        digest = hashlib.blake2b(repr(sorted(inventory.items())).encode(), digest_size=16).digest()
        if session.account.inventory != digest:
            session.account.inventory = digest
            self._writer.put_inventory(session.node, now_ms, inventory)


def _with_boot(hello: pb.Hello) -> dict[str, str]:
    """Return the inventory plus the boot id: a return to service may require a newer boot."""
    found = dict(hello.inventory)
    if hello.boot_id:
        found[BOOT_ID] = hello.boot_id[:MAX_NAME]
    return found


def _is_name(text: str) -> bool:
    """Return whether text may name a node or spool: it becomes part of ids, which are split at slashes, and of logs."""
    return 0 < len(text) <= MAX_NAME and text.isprintable() and not set(text) & {"/", " "}
