"""A collector's ingest on a port of its own, and the other end of its streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from drover_collector.fleet.index import FleetIndex
from drover_collector.grpc_h2 import GrpcServer
from drover_collector.ingest.context import IngestContext, IngestListeners
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.service import IngestService
from drover_collector.store import Store
from drover_core.model.events import Event, ProbeResult
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, block, index_of

LIVE, BACKFILL, EVENTS = pb.LIVE, pb.BACKFILL, pb.EVENTS
QUICK = Limits(judge_s=300, flush_s=0.01, retry_s=0.01)


@dataclass
class Collector:
    """A collector's ingest on a port of its own."""

    store: Store
    limits: Limits = QUICK
    now_ms: int = T0 + 2000
    index: FleetIndex = field(default_factory=index_of)
    events: list[Event] = field(default_factory=list)
    probes: list[ProbeResult] = field(default_factory=list)
    on_probes: Callable[[list[ProbeResult]], None] = lambda _: None

    async def __aenter__(self) -> Collector:
        listeners = IngestListeners(self.events.extend, on_probes=self._probed)
        context = IngestContext(self.store, self.index, listeners, self.limits, lambda: self.now_ms)
        self.ingest = IngestService(context)
        self.server = GrpcServer(self.ingest.methods())
        self.port = self.server.listen("127.0.0.1", 0, None)
        await self.server.start()
        return self

    def _probed(self, results: list[ProbeResult]) -> None:
        self.probes += results
        self.on_probes(results)

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        await self.ingest.close()

    @contextlib.asynccontextmanager
    async def agent(
        self,
        message: pb.Hello | None = None,
        options: Sequence[tuple[str, int]] = (),
        compression: grpc.Compression = grpc.Compression.NoCompression,
    ) -> AsyncIterator[Agent]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            call = channel.stream_stream(
                "/drover.telemetry.v1.Telemetry/Stream", response_deserializer=pb.CollectorMessage.FromString
            )(compression=compression)
            agent = Agent(call)
            if message is not None:
                await agent.send(hello=message)
                await agent.read("welcome")
            yield agent
            call.cancel()


class Agent:
    """The other end of a stream, bytes and all."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.welcome = pb.Welcome()
        self.held: dict[int, int] = {}
        self.rejected: dict[tuple[int, int], str] = {}
        self.backoffs = 0

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.AgentMessage(**fields).SerializeToString())

    async def read(self, kind: str = "") -> pb.CollectorMessage:
        """The next message, or the next of a kind."""
        while True:
            message = await asyncio.wait_for(self.call.read(), 120)
            assert isinstance(message, pb.CollectorMessage), f"{await self.call.code()}: {await self.call.details()}"
            match message.WhichOneof("kind"):
                case "welcome":
                    self.welcome = message.welcome
                    self.held = {h.lane: h.seq for h in message.welcome.held}
                case "ack":
                    self.held = {h.lane: h.seq for h in message.ack.held}
                    self.rejected |= {(r.lane, r.seq): r.reason for r in message.ack.rejected}
                case "backoff":
                    self.backoffs += 1
            if kind in ("", message.WhichOneof("kind")):
                return message

    async def until_held(self, lane: int, seq: int) -> None:
        while self.held.get(lane, 0) < seq:
            await self.read()

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        with contextlib.suppress(grpc.RpcError):  # grpc.aio raises what code and details also say
            while isinstance(await asyncio.wait_for(self.call.read(), 120), pb.CollectorMessage):
                pass
        return await self.call.code(), await self.call.details()


def event(seq: int, ts_ms: int = T0 + 1000, **fields: Any) -> pb.Record:
    shown = {"kind": "xid", "code": "79", "message": "fallen off the bus", "source": "kmsg", "count": 1} | fields
    return pb.Record(seq=seq, event=pb.Event(ts_ms=ts_ms, **shown))


GOOD = block([(T0, 1, (300.0, 50.0)), (T0 + 1000, 1, (310.0, None))])
