"""OTLP metrics over gRPC, at the listener of the agents: the method Export of OpenTelemetry's MetricsService.

The service is that of open-telemetry/opentelemetry-proto, collector/metrics/v1/metrics_service.proto. Which statuses
make a sender try again is said by https://opentelemetry.io/docs/specs/otlp/#otlpgrpc-response: UNAVAILABLE does,
INVALID_ARGUMENT does not, and RESOURCE_EXHAUSTED does not without RetryInfo. Requests go to the process that also takes
OTLP/HTTP. Gzip and deflate are unpacked there, so that no writer's requests hold up the streams of agents.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import grpc

from drover_collector.auth.authorization import OTLP_EXPORT, REQUEST_S, caller
from drover_collector.grpc_h2 import Handler
from drover_collector.grpc_h2.call import Call
from drover_collector.rest import otlp
from drover_collector.rest.server import WRITES_EACH, WRITES_MOST
from drover_collector.scrape.otlp_in import Answer, Form
from drover_collector.scrape.remote_write import MAX_BODY


class OtlpService:
    """Event loop only."""

    def __init__(self, take: Callable[[Form, bytes], Awaitable[Answer]]) -> None:
        self._take = take
        self._under_way: Counter[str] = Counter()  # by caller

    def methods(self) -> Mapping[str, Handler]:
        """Return path -> handler. Put the gate before it."""
        return {OTLP_EXPORT: self._export}

    async def _export(self, _request: object, call: Call) -> None:
        key = str(caller())
        if self._under_way[key] >= WRITES_EACH or self._under_way.total() >= WRITES_MOST:
            await call.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"too many requests are under way ({WRITES_EACH} for each certificate, {WRITES_MOST} in all); send it"
                " again when some have ended",
            )
        self._under_way[key] += 1
        try:
            await self._answer(call)
        finally:
            self._under_way[key] -= 1
            self._under_way += Counter()  # without those of 0

    async def _answer(self, call: Call) -> None:
        call.max_message_bytes, call.inflates = MAX_BODY, False
        try:
            async with asyncio.timeout(REQUEST_S):
                body = await call.read()
        except TimeoutError:
            await call.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no whole request arrived within {REQUEST_S:g} s of the call"
            )
        if body is grpc.aio.EOF:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        answer = await self._take(Form(is_gzip=call.was_packed), body)
        if answer.status == 503:
            await call.abort(grpc.StatusCode.UNAVAILABLE, answer.text)
        if answer.status != 200:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, answer.text)
        try:
            async with asyncio.timeout(REQUEST_S):
                await call.write(otlp.taken(Form(), answer))
        except TimeoutError:  # its window is closed: it would keep its place for others' requests
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the answer was not taken within {REQUEST_S:g} s")
