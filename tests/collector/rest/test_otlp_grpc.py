"""OTLP over gRPC at the agents' listener: the official stub sends, and gets what the protocol says it should."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from drover_collector.auth.authorization import OTLP_EXPORT, Gate
from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer, frames, messages
from drover_collector.rest import otlp_grpc
from drover_collector.rest.otlp_grpc import OtlpService
from drover_collector.scrape.otlp import unpacked
from drover_collector.scrape.otlp_in import Answer, Form
from drover_collector.scrape.remote_write import MAX_BODY
from testbed import http2
from testbed.certificates import Fleet
from testbed.otlp_messages import Points, request

WANTED = request([Points("hw.power", [])], 1, {"host.name": "n1"})


class Taker:
    def __init__(self) -> None:
        self.answer, self.got, self.go_on = Answer(200), list[tuple[Form, bytes]](), asyncio.Event()
        self.go_on.set()
        self.all_here = asyncio.Event()  # as many as one caller may have under way

    async def __call__(self, form: Form, body: bytes) -> Answer:
        self.got.append((form, body))
        if len(self.got) == otlp_grpc.WRITES_EACH:
            self.all_here.set()
        await self.go_on.wait()
        return self.answer


class Served:
    def __init__(self, taker: Taker, stub: Any, port: int) -> None:
        self.taker, self.stub, self.port = taker, stub, port

    async def send(self, message: ExportMetricsServiceRequest = WANTED, **more: Any) -> ExportMetricsPartialSuccess:
        return (await self.stub.Export(message, timeout=120, **more)).partial_success

    async def refusal(self, message: ExportMetricsServiceRequest = WANTED) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.send(message)
        return raised.value.code(), raised.value.details() or ""


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    taker = Taker()
    server = GrpcServer(OtlpService(taker).methods())
    port = server.listen("127.0.0.1", 0, None)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(taker, MetricsServiceStub(channel), port)
    finally:
        await server.stop(0)


def run(scenario: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with served() as parts:
            await scenario(parts)

    asyncio.run(whole())


def test_a_success_is_empty_and_a_partial_one_says_what_was_not_used() -> None:
    async def scenario(parts: Served) -> None:
        assert await parts.send() == ExportMetricsPartialSuccess()
        parts.taker.answer = Answer(200, "7 points too old", 300)
        partial = await parts.send()
        assert (partial.rejected_data_points, partial.error_message) == (300, "7 points too old")
        parts.taker.answer = Answer(200, "none is used")  # a warning: nothing was rejected
        partial = await parts.send()
        assert (partial.rejected_data_points, partial.error_message) == (0, "none is used")

    run(scenario)


def test_gzip_is_passed_on_packed_so_that_agents_do_not_wait_for_it() -> None:
    async def scenario(parts: Served) -> None:
        message = request([Points("hw.power" * 100, [])], 1, {})  # gRPC leaves what gzip does not shorten
        await parts.send(message)
        await parts.send(message, compression=grpc.Compression.Gzip)
        (plain, body), (packed, small) = parts.taker.got
        assert (plain, body) == (Form(), message.SerializeToString())
        assert (packed, gzip.decompress(small)) == (Form(is_gzip=True), body)

    run(scenario)


def test_deflate_which_grpc_offers_is_unpacked_as_gzip_is() -> None:
    async def scenario(parts: Served) -> None:
        message = request([Points("hw.power" * 100, [])], 1, {})
        await parts.send(message, compression=grpc.Compression.Deflate)
        ((form, packed),) = parts.taker.got
        assert packed[:1] == b"\x78"  # of zlib
        assert unpacked(packed, form.is_gzip) == message.SerializeToString()

    run(scenario)


def test_a_peer_that_never_takes_its_answer_does_not_keep_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_grpc, "REQUEST_S", 0.2)
    greeting = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
    body = messages.wrap(WANTED.SerializeToString())

    async def scenario(parts: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", parts.port)
        numbers = range(1, 2 * otlp_grpc.WRITES_EACH, 2)
        calls = (http2.opened(n, _path=OTLP_EXPORT) + http2.data(body, n, frames.END_STREAM) for n in numbers)
        writer.write(greeting + b"".join(calls))
        await asyncio.wait_for(parts.taker.all_here.wait(), 120)
        async with asyncio.timeout(120):
            while b"was not taken" not in await reader.read(65_536):
                pass
            await asyncio.sleep(0.1)
            await parts.send()
        writer.close()

    run(scenario)


def test_what_can_never_be_taken_is_not_to_be_sent_again_and_what_is_busy_is() -> None:
    async def scenario(parts: Served) -> None:
        parts.taker.answer = Answer(400, "the request is cut off")
        assert await parts.refusal() == (grpc.StatusCode.INVALID_ARGUMENT, "the request is cut off")
        parts.taker.answer = Answer(503, "busy; send it again")
        assert await parts.refusal() == (grpc.StatusCode.UNAVAILABLE, "busy; send it again")

    run(scenario)


def test_a_request_that_is_too_long_is_refused_unread() -> None:
    async def scenario(parts: Served) -> None:
        code, _ = await parts.refusal(request([Points("x" * MAX_BODY, [])], 1, {}))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not parts.taker.got
        await parts.send()

    run(scenario)


def test_what_is_above_the_limit_of_requests_under_way_is_to_be_sent_again() -> None:
    async def scenario(parts: Served) -> None:
        parts.taker.go_on.clear()
        waiting = [asyncio.create_task(parts.send()) for _ in range(otlp_grpc.WRITES_EACH)]
        await asyncio.wait_for(parts.taker.all_here.wait(), 120)
        code, why = await parts.refusal()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "under way" in why
        parts.taker.go_on.set()
        await asyncio.gather(*waiting)
        await parts.send()

    run(scenario)


def test_a_certificate_of_the_role_writer_sends_and_no_other(tmp_path: Path) -> None:
    fleet, taker = Fleet(tmp_path), Taker()

    async def scenario() -> None:
        gate = Gate(secure=True)
        methods = {path: gate.guarded(path, handler) for path, handler in OtlpService(taker).methods().items()}
        server = GrpcServer(methods)
        port = server.listen("localhost", 0, ServerTls(*fleet.issue("collector", "c1").paths).contexts("ingest.listen"))
        await server.start()
        try:
            for role, name in (("writer", "otelcol1"), ("admin", "a"), ("agent", "n1")):
                credentials = fleet.issue(role, name).credentials
                async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                    parts = Served(taker, MetricsServiceStub(channel), port)
                    if role == "writer":
                        await parts.send()
                        continue
                    code, why = await parts.refusal()
                    assert (code, "writer" in why) == (grpc.StatusCode.PERMISSION_DENIED, True)
        finally:
            await server.stop(0)

    asyncio.run(scenario())
    assert len(taker.got) == 1
