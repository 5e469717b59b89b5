"""The gRPC server for agents: who they are, what they may send, and what they are told.

Bad input is refused in the Ack with its reason, counted, logged once per node and reason, and ends no stream. Memory is
bounded: a stream is not read on while too much waits for the store, and its agent is asked to hold back.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from drover_collector import identity
from drover_collector.config import IngestConfig
from drover_collector.decode import Refusal, read_hello
from drover_collector.fleet_index import FleetIndex
from drover_collector.ingest_session import EndError, Session, Waiting, lane_seqs
from drover_collector.ingest_stats import IngestStats
from drover_collector.ingest_writers import Limits, Writers
from drover_collector.records import Taken, take_record
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from drover_proto.events import Event

__all__ = ["Ingest", "IngestStats", "Limits"]

log = logging.getLogger(__name__)

PROTOCOL = 1
MAX_NAME = 253  # of a host
MAX_VERSION = 64
MAX_IGNORED = 1000  # unknown metrics that are named in logs, in the Welcome and in Status


class Ingest:
    """The Telemetry service. `register` it with a server; `close` it after the server's stop.

    Args:
        on_events: is told of events that are stored, each once, from the event loop; returns at once.
    """

    def __init__(
        self,
        store: Store,
        index: FleetIndex,
        config: IngestConfig,
        on_events: Callable[[list[Event]], None],
        *,
        limits: Limits | None = None,
        denied: identity.Denied | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """
        Raises:
            StoreError: the store cannot be read.
        """
        self.stats = IngestStats()
        self._store, self._index, self._config = store, index, config
        self._limits = limits or Limits()
        self._denied = denied or identity.Denied(None)
        self._now_ms = now_ms
        self._writers = Writers(store, self.stats, self._limits, now_ms, self._refuse, on_events)
        self._sessions: dict[str, Session] = {}
        self._inventories: dict[str, dict[str, str]] = {}
        self._logged: set[tuple[str, str]] = set()  # (node, reason)

    def register(self, server: grpc.aio.Server) -> None:
        """Serve agents there. Messages come as bytes, so that one that cannot be parsed does not end its stream."""
        handler: grpc.RpcMethodHandler[bytes, pb.CollectorMessage] = grpc.stream_stream_rpc_method_handler(
            self._stream, request_deserializer=None, response_serializer=pb.CollectorMessage.SerializeToString
        )
        service = pb.DESCRIPTOR.services_by_name["Telemetry"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Stream": handler}),))

    async def close(self) -> None:
        """Stores what was taken in, and where each lane stands. A store that fails now loses nothing: agents resend."""
        await self._writers.close()

    # ---- streams

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> None:
        """One agent, until it leaves, is replaced by a newer stream of its node, or may not speak for it."""
        session = Session(context)
        self.stats.connected += 1
        session.reader = asyncio.create_task(self._read(session, messages))
        sender = asyncio.create_task(session.send_acks())
        watcher = asyncio.create_task(self._watch(session))
        greeting = asyncio.get_running_loop().call_later(self._limits.hello_s, session.miss_hello, self._limits.hello_s)
        try:
            await asyncio.wait({session.reader, sender}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done() and not sender.cancelled():
                sender.result()  # it ends by an error only
            if session.end is not None or session.reader.cancelled():
                raise session.end or EndError(grpc.StatusCode.ABORTED, "the collector ended the stream")
            session.reader.result()
            await session.settled()  # the agent may have said its last, and wait for the Ack
        except EndError as error:
            await context.abort(error.code, str(error))
        finally:
            greeting.cancel()
            session.reader.cancel()
            sender.cancel()
            watcher.cancel()
            self.stats.connected -= 1
            if self._sessions.get(session.node) is session:
                del self._sessions[session.node]

    async def _read(self, session: Session, messages: AsyncIterator[bytes]) -> None:
        async for raw in messages:
            try:
                message = pb.AgentMessage.FromString(raw)
            except DecodeError:
                self._refuse(session, pb.LANE_UNSPECIFIED, 0, Refusal("junk", "a message that is none of ours"))
                continue
            if session.node:
                self.stats.last_seen[session.node] = self._now_ms()
            match message.WhichOneof("kind"):
                case "hello":
                    await self._hello(session, message.hello, len(raw))
                case "batch":
                    self._batch(session, message.batch, len(raw))
                case "record":
                    self._record(session, message.record, len(raw))
                case kind:
                    self.stats.skipped[kind or "unknown"] += 1  # from a newer agent
            if not self._writers.room.is_set():
                await self._hold_back(session)

    async def _hello(self, session: Session, hello: pb.Hello, size: int) -> None:
        """Who it is, what its numbers mean; answers with what is held of it."""
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
        self._may_speak(session, hello.node)
        if session.node and session.node != hello.node:
            session.dictionary = None
            session.no_dictionary = Refusal(
                "another node", f"data for node {hello.node!r} on the stream of {session.node!r}; use one stream a node"
            )
            return
        unknown = hello.node not in self._index.node_number and hello.node not in self.stats.unknown_nodes
        if unknown and len(self.stats.unknown_nodes) >= self._limits.unknown_nodes:
            raise EndError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"fleet.toml has no node {hello.node!r}, nor {self._limits.unknown_nodes} others that report; add it",
            )
        now_ms = self._now_ms()
        if not session.node:
            self._take_over(session, hello.node)
        session.spool, session.hello_ms, session.clock_offset_ms = hello.spool_id, hello.ts_ms, now_ms - hello.ts_ms
        session.dictionary = read_hello(hello)
        session.hello_bytes = size
        self._note_hello(session, hello, now_ms)
        inventory = dict(hello.inventory)
        if inventory and self._inventories.get(hello.node) != inventory:
            self._inventories[hello.node] = inventory
            self._writers.put_inventory(hello.node, now_ms, inventory)
        held = self._writers.held.get(session.key, {})
        welcome = pb.Welcome(
            held=lane_seqs(held),
            ts_ms=self._now_ms(),
            collector=socket.gethostname(),
            protocol=PROTOCOL,
            ignored=sorted(set(session.dictionary.ignored))[:MAX_IGNORED],
        )
        await session.send(pb.CollectorMessage(welcome=welcome))

    def _may_speak(self, session: Session, node: str) -> None:
        try:
            certificate = session.context.auth_context()
            refusal = identity.refusal(identity.peer(certificate), node) or self._denied.refusal(certificate)
        except identity.IdentityError as error:
            refusal = str(error)
        if refusal is not None:
            self._count(node, Refusal("not allowed", refusal))
            raise EndError(grpc.StatusCode.PERMISSION_DENIED, refusal)

    async def _watch(self, session: Session) -> None:
        """Ends an open stream whose certificate comes to be denied."""
        while True:
            await asyncio.sleep(self._limits.denied_every_s)
            refusal = self._denied.refusal(session.context.auth_context())
            if refusal is not None:
                self._count(session.node, Refusal("not allowed", refusal))
                session.stop(EndError(grpc.StatusCode.PERMISSION_DENIED, refusal))
                return

    def _take_over(self, session: Session, node: str) -> None:
        """The newer stream of a node wins: the older may be the half-open rest of a lost connection."""
        older = self._sessions.get(node)
        if older is not None:
            self.stats.replaced += 1
            log.warning("%s: a second stream has come; the older one is ended", node)
            why = f"a newer stream speaks for node {node!r}; are two agents running on it?"
            older.stop(EndError(grpc.StatusCode.ABORTED, why))
        session.node = node
        self._sessions[node] = session

    def _note_hello(self, session: Session, hello: pb.Hello, now_ms: int) -> None:
        stats, node = self.stats, hello.node
        stats.last_seen[node] = now_ms
        stats.agent_versions[node] = hello.agent_version[:MAX_VERSION]
        if node not in self._index.node_number and node not in stats.unknown_nodes:
            stats.unknown_nodes = stats.unknown_nodes | {node}
            log.warning("%s reports, but fleet.toml does not have it; its data is kept, not judged: add it there", node)
        assert session.dictionary is not None
        fresh = sorted(set(session.dictionary.ignored) - stats.unknown_metrics)
        for name in fresh[: max(0, MAX_IGNORED - len(stats.unknown_metrics))]:
            stats.unknown_metrics = stats.unknown_metrics | {name}
            log.warning("%s: metric %r is not known here and is left out; update the collector", node, name)

    def _batch(self, session: Session, batch: pb.Batch, size: int) -> None:
        refusal: Refusal | None = None
        if batch.lane not in (pb.LIVE, pb.BACKFILL):
            refusal = Refusal("bad lane", f"a batch on lane {batch.lane}; LIVE and BACKFILL are right")
        elif session.dictionary is None:
            refusal = session.no_dictionary
        elif size > self._limits.batch_bytes:
            refusal = Refusal("oversize", f"a batch of {size} bytes; up to {self._limits.batch_bytes} are right")
        taken = None
        if refusal is None and session.dictionary is not None:
            taken = session.dictionary, batch
        elif refusal is not None:
            self._refuse(session, batch.lane, batch.seq, refusal)
        if taken is not None:
            size, session.hello_bytes = size + session.hello_bytes, 0  # what waits holds its dictionary too
        self._writers.put(Waiting(session, session.key, batch.lane, batch.seq, size, batch=taken))

    def _record(self, session: Session, record: pb.Record, size: int) -> None:
        taken: Taken | Refusal | None = None  # None: a resend of what is held
        if session.dictionary is None:
            taken = session.no_dictionary
        elif record.seq > self._writers.held.get(session.key, {}).get(pb.EVENTS, 0):
            taken = take_record(
                record, session.node, session.spool, self._now_ms(), session.hello_ms, session.clock_offset_ms
            )
        if isinstance(taken, Refusal):
            self._refuse(session, pb.EVENTS, record.seq, taken)
            taken = None
        self._writers.put(Waiting(session, session.key, pb.EVENTS, record.seq, size, record=taken))

    async def _hold_back(self, session: Session) -> None:
        reason = self.stats.trouble or "the collector has more to store than it can"
        self.stats.backoffs += 1
        await session.send(
            pb.CollectorMessage(backoff=pb.Backoff(wait_ms=self._limits.backoff_ms, reason=reason[:200]))
        )
        await self._writers.room.wait()

    # ---- counts

    def _refuse(self, session: Session, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        self._count(session.node or "an agent before its Hello", refusal)
        if lane != pb.LANE_UNSPECIFIED:  # else there is nothing that the agent could drop
            session.refuse(lane, seq, refusal)

    def _count(self, node: str, refusal: Refusal) -> None:
        self.stats.rejected[refusal.code] += 1
        if (node, refusal.code) not in self._logged:
            self._logged.add((node, refusal.code))
            log.warning("%s: refused: %s", node, refusal.text[:500])


def _is_name(text: str) -> bool:
    """Of a node or spool: it becomes part of ids, which are split at slashes, and of lines that people read."""
    return 0 < len(text) <= MAX_NAME and text.isprintable() and not set(text) & {"/", " "}
