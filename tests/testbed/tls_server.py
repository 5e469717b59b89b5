"""A collector's server under mutual TLS, and who asks it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

from drover_collector.auth.authorization import OTLP_EXPORT, Gate, may_force
from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer
from drover_core import x509
from drover_proto import fleet_pb2, telemetry_pb2
from testbed.certificates import Files

STREAM = "/drover.telemetry.v1.Telemetry/Stream"
STATUS = "/drover.fleet.v1.Fleet/GetStatus"
EXPORT = "/drover.fleet.v1.Fleet/Export"
OF_AGENTS_SERVER = (STREAM, OTLP_EXPORT)
WAIT_S = 120


def methods() -> dict[str, Any]:
    """Path -> descriptor of every method of all services."""
    services = [
        telemetry_pb2.DESCRIPTOR.services_by_name["Telemetry"], fleet_pb2.DESCRIPTOR.services_by_name["Fleet"],
        metrics_service_pb2.DESCRIPTOR.services_by_name["MetricsService"],
    ]  # fmt: skip
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


class Server:
    """Every method of all services behind the gate; each answers with what it was asked."""

    def __init__(self, files: Files, **gate: Any) -> None:
        self.tls = ServerTls(*files.paths)
        self.gate = Gate(secure=True, **gate)
        self.ended, self.answering = asyncio.Event(), asyncio.Event()
        self.forced: list[bool] = []  # of each unary call: whether it might have been by force

    async def __aenter__(self) -> Server:
        self.server = grpc.aio.server(interceptors=(self.gate,))
        self.agents = GrpcServer({path: self.gate.guarded(path, self._stream) for path in OF_AGENTS_SERVER})
        self.agents_port = self.agents.listen("localhost", 0, self.tls.contexts("ingest.listen"))
        await self.agents.start()
        by_service: dict[str, dict[str, Any]] = {}
        for path, method in methods().items():
            if path in OF_AGENTS_SERVER:
                continue
            _, service, name = path.split("/")
            by_service.setdefault(service, {})[name] = self._handler(method)
        for service, handlers in by_service.items():
            self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.port = self.server.add_secure_port("localhost:0", self.tls.credentials("api.listen"))
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        await self.agents.stop(0)

    async def _stream(self, _: Any, context: Any) -> None:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)
        finally:
            self.ended.set()

    def _handler(self, method: Any) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            self.forced.append(may_force())
            return request

        async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
            self.answering.set()
            yield request
            await asyncio.Event().wait()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(generate)
        return grpc.unary_unary_rpc_method_handler(unary)

    def channel(
        self, files: Files | None, credentials: grpc.ChannelCredentials | None = None, path: str = STATUS
    ) -> Any:
        options = (("grpc.use_local_subchannel_pool", 1),)
        chosen = credentials or (files.credentials if files else None)
        target = f"localhost:{self.agents_port if path in OF_AGENTS_SERVER else self.port}"
        return (
            grpc.aio.secure_channel(target, chosen, options) if chosen else grpc.aio.insecure_channel(target, options)
        )

    async def ask(self, path: str, files: Files | None, credentials: grpc.ChannelCredentials | None = None) -> str:
        """ "" when a call is answered, else `CODE: details`."""
        method = methods()[path]
        async with self.channel(files, credentials, path) as channel:
            try:
                if method.client_streaming:
                    call = channel.stream_stream(path)()
                    await call.write(b"x")  # also who is refused gets so far
                    answer = await asyncio.wait_for(call.read(), WAIT_S)
                elif method.server_streaming:
                    answer = await asyncio.wait_for(channel.unary_stream(path)(b"x").read(), WAIT_S)
                else:
                    answer = await channel.unary_unary(path)(b"x", timeout=WAIT_S)
                if answer == b"x":
                    return ""
                return f"{(await call.code()).name}: {await call.details()}"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"

    async def certificate(self) -> int:
        """Serial number of what a new connection is shown, by both servers."""

        def look(port: int) -> int:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection(("localhost", port), WAIT_S) as plain,
                context.wrap_socket(plain) as secure,
            ):
                return x509.parse(secure.getpeercert(True) or b"").serial

        found = {await asyncio.to_thread(look, port) for port in (self.port, self.agents_port)}
        assert len(found) == 1
        return found.pop()


@contextlib.asynccontextmanager
async def open_stream(server: Server, files: Files) -> AsyncIterator[Any]:
    async with server.channel(files, path=STREAM) as channel:
        call = channel.stream_stream(STREAM)()
        await echo(call)
        yield call


async def echo(call: Any) -> None:
    await call.write(b"x")
    assert await asyncio.wait_for(call.read(), WAIT_S) == b"x"
