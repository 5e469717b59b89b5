"""A small collector for tests of the agent: the real protocol over real gRPC; keeps what it takes in memory."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from drover_core.metrics.catalog import BY_ID
from drover_proto import telemetry_pb2 as pb
from drover_proto import telemetry_pb2_grpc as rpc
from drover_proto.blocks import record_struct

_started: list[TelemetryServer] = []


def play(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario and stop the servers it started, also when it fails: grpc hangs over servers left behind."""

    async def whole() -> None:
        try:
            await scenario
        finally:
            for server in list(_started):
                await server.stop()

    asyncio.run(whole())


LANES = (pb.EVENTS, pb.LIVE, pb.BACKFILL)


@dataclass
class TelemetryServer(rpc.TelemetryServicer):
    """Knobs: what it refuses, when it drops the connection, what it answers instead of a Welcome."""

    refuse: Callable[[int, int], str] = lambda lane, seq: ""  # a reason, or "" to take it
    drop_after: int | None = None  # messages until the connection is dropped, once
    drop_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    welcomes: bool = True
    acks: bool = True
    instead_of_welcome: pb.CollectorMessage | None = None
    before_welcome: list[pb.CollectorMessage] = field(default_factory=list)  # the Welcome follows
    together: bool = False  # takes several records in a message
    messages: list[str] = field(default_factory=list)  # their kinds, as they came
    after_welcome: list[pb.CollectorMessage] = field(default_factory=list)
    clock_ahead_ms: int = 0
    hellos: list[pb.Hello] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)  # (lane, seq) as they arrived
    held: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    events: dict[tuple[str, int], pb.Event] = field(default_factory=dict)
    absences: list[pb.Absence] = field(default_factory=list)
    holdings: list[pb.Holding] = field(default_factory=list)
    rows: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)  # (entity key, ts) -> values
    probe_results: dict[tuple[str, int], pb.ProbeResult] = field(default_factory=dict)
    repeated_rows: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each batch: its oldest and newest row
    broken: list[str] = field(default_factory=list)  # breaches of the protocol by the agent
    port: int = 0
    streams: int = 0
    _server: Any = None

    async def start(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> str:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        rpc.add_TelemetryServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        add = self._server.add_insecure_port
        self.port = self._server.add_secure_port(address, credentials) if credentials else add(address)
        await self._server.start()
        _started.append(self)
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        _started.remove(self)
        await self._server.stop(None)

    async def Stream(  # type: ignore[override]  # the generated signature covers sync servers too
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Any
    ) -> AsyncIterator[pb.CollectorMessage]:
        self.streams += 1
        hello = pb.Hello()
        async for message in request_iterator:
            kind = message.WhichOneof("kind")
            self.messages.append(kind)
            if kind == "hello":
                first = not hello.node
                hello = message.hello
                self.hellos.append(hello)
                if self.instead_of_welcome is not None:
                    yield self.instead_of_welcome
                    return
                if not self.welcomes:
                    continue
                for early in self.before_welcome if first else ():
                    yield early
                welcome = pb.Welcome(
                    held=self._held(hello), ts_ms=self._now_ms(), collector="test", protocol=1, records=self.together
                )
                yield pb.CollectorMessage(welcome=welcome)
                if first:
                    for extra in self.after_welcome:
                        yield extra
                continue
            if not hello.node:
                self.broken.append(f"{kind} before Hello")
            if self.drop_after is not None:
                self.drop_after -= 1
                if self.drop_after < 0:
                    self.drop_after = None
                    await context.abort(self.drop_code, "dropped by the test")
            if kind == "records" and not self.together:
                self.broken.append("records in a message, which Welcome did not allow")
            records = [message.record] if kind == "record" else list(message.records.records)
            rejected = []
            for sent in records or [message.batch]:
                lane, seq = (pb.EVENTS if records else message.batch.lane), sent.seq
                self.order.append((lane, seq))
                if not self.acks:
                    continue
                if reason := self.refuse(lane, seq):
                    rejected.append(pb.Rejection(lane=lane, seq=seq, reason=reason))
                elif seq > self.held[hello.spool_id, lane]:
                    if isinstance(sent, pb.Record):
                        self._take_record(hello, sent)
                    else:
                        self._take_batch(hello, sent)
                self.held[hello.spool_id, lane] = max(self.held[hello.spool_id, lane], seq)
            if self.acks:
                yield pb.CollectorMessage(ack=pb.Ack(held=self._held(hello), rejected=rejected, ts_ms=self._now_ms()))

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.clock_ahead_ms

    def _held(self, hello: pb.Hello) -> list[pb.LaneSeq]:
        return [pb.LaneSeq(lane=lane, seq=self.held[hello.spool_id, lane]) for lane in LANES]

    def _take_record(self, hello: pb.Hello, record: pb.Record) -> None:
        kind = record.WhichOneof("body")
        if kind == "event":
            self.events[hello.spool_id, record.seq] = record.event
        elif kind == "absence":
            self.absences.append(record.absence)
        elif kind == "holding":
            self.holdings.append(record.holding)
        elif kind == "probe_result":
            self.probe_results[hello.spool_id, record.seq] = record.probe_result
        else:
            self.broken.append(f"record {record.seq} has nothing in it")

    def _take_batch(self, hello: pb.Hello, batch: pb.Batch) -> None:
        schemas = {schema.id: schema for schema in hello.schemas}
        keys = {entity.index: entity.key for entity in hello.entities}
        times: list[int] = []
        for block in batch.blocks:
            if block.schema not in schemas:
                self.broken.append(f"batch {batch.seq} has schema {block.schema}, which Hello did not name")
                continue
            times += self._take_block(block, schemas[block.schema], keys)
        if times:
            self.spans.append((min(times), max(times)))

    def _take_block(self, block: pb.Block, schema: pb.Schema, keys: dict[int, str]) -> list[int]:
        times = []
        row = record_struct(column.type for column in schema.columns)
        width = (len(schema.columns) + 7) // 8
        for number, found in enumerate(struct.iter_unpack(row.format, block.body)):
            bits = int.from_bytes(block.presence[number * width : (number + 1) * width], "little")
            ts_ms, entity, *stored = found
            values = {
                column.name: BY_ID[column.metric].decode(value)
                for i, (column, value) in enumerate(zip(schema.columns, stored, strict=True))
                if bits >> i & 1
            }
            if entity not in keys:
                self.broken.append(f"row of entity {entity}, which Hello did not name")
                continue
            self.repeated_rows += (keys[entity], ts_ms) in self.rows
            self.rows[keys[entity], ts_ms] = values
            times.append(ts_ms)
        return times

    def codes(self) -> list[str]:
        """Codes of the events, in order of their sequence."""
        return [event.code for _, event in sorted(self.events.items())]
