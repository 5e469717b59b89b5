"""Why a stream ended, if the collector ends it while its agent writes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from drover_agent.uplink import close_reason as call_end
from drover_agent.uplink.close_reason import GRPC_OWN, CloseReason

LARGE = bytes(2 << 20)  # more than any window: it is being written when the answer comes


class Ends(grpc.GenericRpcHandler):
    """Reads nothing, and refuses once something has come."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        del handler_call_details
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _: Any, context: Any) -> None:
        await context.read()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")


def test_the_collector_s_reason_is_known_though_a_write_failed() -> None:
    async def call_it() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        server.add_generic_rpc_handlers((Ends(),))
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(10):
                call = channel.stream_stream("/e")()
                end = CloseReason(call)
                await call.write(b"x")
                with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):  # most often of GRPC_OWN
                    while True:
                        await call.write(LARGE)
                assert await end.text() == "permission denied: not you"
        await server.stop(None)

    asyncio.run(call_it())


class Call:
    """As much of a call of grpc.aio."""

    def __init__(self) -> None:
        self.status = grpc.StatusCode.OK, ""

    def add_done_callback(self, callback: Any) -> None:
        self.callback = callback

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        return self.status[1]

    def end(self, code: grpc.StatusCode, details: str) -> None:
        self.status = code, details
        self.callback(self)


def test_a_reason_may_come_behind_the_error_of_a_write_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        call = Call()
        end = CloseReason(call)
        call.end(grpc.StatusCode.INTERNAL, GRPC_OWN)
        asked = asyncio.create_task(end.text())
        await asyncio.sleep(0)
        assert not asked.done()
        call.end(grpc.StatusCode.UNAVAILABLE, "")
        call.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        assert await asked == "unavailable: the collector ended the stream"
        monkeypatch.setattr(call_end, "LATE_S", 0.01)
        assert await CloseReason(Call()).text() == "the stream broke during a write"

    asyncio.run(ask())
