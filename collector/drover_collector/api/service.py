"""The Fleet service, for the console and the command line. Worker threads answer, each call within a deadline."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from drover_collector.api.methods import METHODS, Call, Rpc
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.api.system import SystemWatch
from drover_collector.auth import authorization
from drover_collector.auth.identity import Identity, Role
from drover_collector.store import StoreError
from drover_proto.fleet_methods import BACKUP, EXPORT, SERVICE

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

READ_THREADS = 4
ACT_THREADS = 4  # a drain does not wait for four slow questions of viewers
BACKUPS = 2  # one works; the second is refused
EXPORTS = 1  # at a time: one reads the whole store


class FleetApi:
    """Serves the methods of the table. The gate in front of the server checks who may call."""

    def __init__(self, facts: ApiSnapshot) -> None:
        self._facts = facts
        self._read_threads = ThreadPoolExecutor(READ_THREADS, "api")
        self._act_threads = ThreadPoolExecutor(ACT_THREADS, "act")
        self._export_thread = ThreadPoolExecutor(EXPORTS, "export")
        self._backup_threads = ThreadPoolExecutor(BACKUPS, "backup")
        self._exporting = asyncio.Semaphore(EXPORTS)
        self._system = SystemWatch(facts)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add a handler for each method of the table to `server`."""
        handlers = {name: self._handler(rpc) for name, rpc in METHODS.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def close(self) -> None:
        """Wait for the calls under way, which may read the store."""
        self._read_threads.shutdown(cancel_futures=True)
        self._act_threads.shutdown(cancel_futures=True)
        self._export_thread.shutdown(cancel_futures=True)
        self._facts.store.backups.stop()
        self._backup_threads.shutdown(cancel_futures=True)

    def submit(self, rpc: Rpc[Any, Any], request: Any, caller: Identity | None) -> Future[Any]:
        """Answer on the threads that answer gRPC. The caller is authorized already; None: there is no TLS.

        Raises:
            RuntimeError: it is closed.
        """
        call = Call(self._facts, self._system, request, caller, caller is None or caller.role is Role.ADMIN)

        def answer() -> Any:
            with self._facts.store.limited(rpc.method.limit_s):
                return rpc.answer(call)

        return (self._act_threads if rpc.method.acts else self._read_threads).submit(answer)

    def _handler(self, rpc: Rpc[Any, Any]) -> Any:
        method, serve = rpc.method, {EXPORT: self._export, BACKUP: self._backup}.get(rpc.method, self._answer)
        make = grpc.unary_stream_rpc_method_handler if method is EXPORT else grpc.unary_unary_rpc_method_handler
        behaviour = functools.partial(serve, rpc)
        return make(behaviour, method.request.FromString, method.reply.SerializeToString)

    def _call(self, request: Any) -> Call[Any]:
        """Return what the function of a method needs. On the event loop: a worker thread does not know the caller."""
        return Call(self._facts, self._system, request, authorization.caller(), authorization.may_force())

    async def _answer(self, rpc: Rpc[Any, Any], request: Any, context: Context) -> Any:
        seconds, call = _limit_s(rpc, context), self._call(request)

        def answer() -> Any:
            with self._facts.store.limited(seconds):  # or a slow query would keep a thread and the store from others
                return rpc.answer(call)

        threads = self._act_threads if rpc.method.acts else self._read_threads
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(threads, answer)
        except Exception as error:  # noqa: BLE001  # the caller gets a status and one line for every kind of error
            await _abort(context, error)

    async def _export(self, rpc: Rpc[Any, Any], request: Any, context: Context) -> AsyncIterator[Any]:
        if self._exporting.locked():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another export is under way; try again later")
        async with self._exporting:
            chunks = rpc.answer(self._call(request))
            next_chunk = functools.partial(next, chunks, None)
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(_limit_s(rpc, context)):
                    while (chunk := await loop.run_in_executor(self._export_thread, next_chunk)) is not None:
                        yield chunk
            except Exception as error:  # noqa: BLE001  # as for the other calls
                await _abort(context, error)
            finally:
                await loop.run_in_executor(self._export_thread, chunks.close)

    async def _backup(self, rpc: Rpc[Any, Any], request: Any, context: Context) -> Any:
        """Make the backup. It goes on to its end when the caller has left."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._backup_threads, rpc.answer, self._call(request))
        except Exception as error:  # noqa: BLE001  # as for the other calls
            await _abort(context, error)


def _limit_s(rpc: Rpc[Any, Any], context: Context) -> float:
    """Return the shorter of the method's limit and the caller's deadline."""
    remaining = context.time_remaining()
    return rpc.method.limit_s if remaining is None else min(rpc.method.limit_s, remaining)


async def _abort(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, RefusalError):
        await context.abort(error.code, str(error))
    if isinstance(error, StoreError):
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot answer: {error}")
    if isinstance(error, TimeoutError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "this took too long; ask for less, or try again")
    log.exception("a request failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "this failed inside the collector; its log says how")
