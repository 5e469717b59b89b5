"""The agents of `bench_cpu`: each sends its telemetry to a collector and to VictoriaMetrics at the same moments."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from remote_write import Blocks, RemoteWrite, series_labels

from drover_agent.uplink.stream import OPTIONS
from drover_core.metrics.catalog import Scope, of_scope
from drover_core.model.fleet import FleetSpec
from drover_proto import telemetry_pb2 as pb
from drover_simulator.fleet import SimulatedFleet

METHOD = "/drover.telemetry.v1.Telemetry/Stream"
GPUS = 8
MODEL = "NVIDIA H100 80GB HBM3"
START_S = 60.0


class BenchError(Exception):
    """The run is worth nothing."""


def telemetry(spec: FleetSpec, ticks: int) -> tuple[Blocks, np.ndarray[Any, Any], SimulatedFleet]:
    """(values of all ticks, present bool [gpus, metrics], the fleet). A healthy fleet: what is absent stays so."""
    fleet = SimulatedFleet(spec, 7, [], time.time_ns() // 1_000_000)
    metrics = of_scope(Scope.GPU)
    fleet.step(1.0)
    fleet.step(1.0)
    held = [fleet.gpu_columns()[m.name].copy() for m in metrics]
    present = ~np.isnan(np.stack(held, axis=1))
    blocks = Blocks(metrics, ticks, GPUS, present)
    for tick in range(ticks):
        fleet.step(1.0)
        now = fleet.gpu_columns()
        held = [np.where(np.isnan(now[m.name]), old, now[m.name]) for m, old in zip(metrics, held, strict=True)]
        blocks.put(tick, held)
    return blocks, present, fleet


@dataclass(slots=True)
class Load:
    """What all agents do now: messages of `seconds` each; counts what was sent."""

    blocks: Blocks
    started_s: float  # wall clock of tick 0
    seconds: int = 1
    grouped: bool = False  # remote write: a message's samples of a series under its labels once
    samples: int = 0  # accepted by both
    messages: int = 0
    posted_bytes: int = 0  # bodies of remote write, compressed
    late: int = 0  # messages that left more than a second after their time
    stopped: bool = False
    failures: list[str] = field(default_factory=list)


class Agent:
    """One node's connections to both servers."""

    def __init__(self, number: int, name: str, load: Load, present: np.ndarray[Any, Any], share: float) -> None:
        self.name, self._number, self._load, self._share = name, number, load, share
        own = slice(number * GPUS, (number + 1) * GPUS)
        self._mask = present[own]  # [gpus, metrics]
        self._labels = [
            series_labels(metric, name, gpu, MODEL)
            for gpu in range(GPUS)
            for column, metric in enumerate(load.blocks.metrics)
            if self._mask[gpu, column]
        ]
        self._own = own
        self._requests: dict[int, RemoteWrite] = {}
        self._seq = 0
        self.held = 0
        self.accepted = 0  # messages, by both
        self.writer: asyncio.StreamWriter | None = None

    async def connect(
        self, collector: str, credentials: grpc.ChannelCredentials, victoria: int, tls: ssl.SSLContext
    ) -> None:
        self.channel = grpc.aio.secure_channel(collector, credentials, OPTIONS)  # as agents have it, and Gzip too
        method: grpc.aio.StreamStreamMultiCallable[bytes, pb.CollectorMessage] = self.channel.stream_stream(
            METHOD, response_deserializer=pb.CollectorMessage.FromString
        )
        self.call = method(compression=grpc.Compression.Gzip)
        now_ms = time.time_ns() // 1_000_000
        await self.call.write(self._load.blocks.hello(self.name, f"bench-{now_ms}", now_ms, MODEL))
        answer = await asyncio.wait_for(self.call.read(), START_S)
        if not isinstance(answer, pb.CollectorMessage):
            raise BenchError(f"{self.name}: {await self.call.code()} {await self.call.details()}")
        self._victoria = victoria, tls

    async def report_jobs(self, jobs: Sequence[tuple[int, str, int]]) -> None:
        """(slot, job, since ms): what the straggler detector goes by."""
        for seq, (slot, job, since_ms) in enumerate(jobs, 1):
            record = pb.Record(seq=seq, holding=pb.Holding(gpu=slot, job=job, from_ms=since_ms))
            await self.call.write(pb.AgentMessage(record=record).SerializeToString())

    async def listen(self) -> None:
        while isinstance(message := await self.call.read(), pb.CollectorMessage):
            if message.WhichOneof("kind") == "ack":
                self.held = max([self.held, *(h.seq for h in message.ack.held if h.lane == pb.LIVE)])
                self._load.failures += [f"{self.name}: {r.reason}" for r in message.ack.rejected]
            elif message.WhichOneof("kind") == "backoff":
                self._load.failures.append(f"{self.name}: backoff: {message.backoff.reason}")

    @property
    def all_held(self) -> bool:
        return self.held >= self._seq

    async def run(self) -> None:
        """Messages at this agent's own moments until the load is stopped."""
        load = self._load
        while not load.stopped:
            length = load.seconds
            elapsed = time.time() - load.started_s
            turn = int(elapsed / length - self._share) + 1
            due = (turn + self._share) * length
            await asyncio.sleep(max(0.0, due - elapsed))
            if load.stopped or load.seconds != length:
                continue
            if time.time() - load.started_s - due > 1:
                load.late += 1
            first = int(due) - length
            if first < 0:
                continue
            ts_ms = [int((load.started_s + first + k) * 1000) for k in range(length)]
            await self._send(first % (len(load.blocks.rows) - length), ts_ms)

    async def _send(self, first: int, ts_ms: Sequence[int]) -> None:
        self._seq += 1
        await self.call.write(self._load.blocks.batch(self._number, self._seq, first, ts_ms))
        grouped = len(ts_ms) if self._load.grouped else 1
        request = self._requests.get(grouped)
        if request is None:
            request = self._requests[grouped] = RemoteWrite(self._labels, grouped)
        values = self._load.blocks.values[first : first + len(ts_ms), self._own][:, self._mask].T
        body = request.message(ts_ms, values)
        head = (
            "POST /api/v1/write HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
            "Content-Encoding: snappy\r\nX-Prometheus-Remote-Write-Version: 0.1.0\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        if self.writer is None:  # as late as this: it closes what brings no request within five seconds
            port, tls = self._victoria
            self.reader, self.writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=tls, server_hostname="localhost"
            )
        self.writer.write(head.encode() + body)
        try:
            answer = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), START_S)
        except (OSError, EOFError, TimeoutError) as error:
            raise BenchError(f"{self.name}: VictoriaMetrics does not answer: {error!r}") from None
        if not answer.startswith(b"HTTP/1.1 204"):
            self._load.failures.append(f"{self.name}: VictoriaMetrics: {answer[:100]!r}")
        self._load.samples += values.size
        self._load.messages += 1
        self._load.posted_bytes += len(body)
        self.accepted += 1

    async def close(self) -> None:
        self.call.cancel()
        if self.writer is not None:
            self.writer.close()
        await self.channel.close()
