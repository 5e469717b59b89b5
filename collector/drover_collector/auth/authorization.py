"""Authorize every call of both services by the role of its certificate. A method that is not in ROLES is refused.

Without TLS, which the settings allow on loopback only, every local user may do everything: no caller is identified.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import grpc

from drover_collector.auth.identity import (
    Denied,
    Identity,
    IdentityError,
    Peer,
    Role,
    peer_of,
)
from drover_core import x509
from drover_proto import fleet_methods

log = logging.getLogger(__name__)

READERS = frozenset(map(Role, fleet_methods.READERS))
OPERATORS = frozenset(map(Role, fleet_methods.OPERATORS))
OTLP_EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
# Path of each method of all services -> who may call it.
ROLES: Mapping[str, frozenset[Role]] = {
    "/drover.telemetry.v1.Telemetry/Stream": frozenset({Role.AGENT}),
    OTLP_EXPORT: frozenset({Role.WRITER}),
    **{method.path: frozenset(map(Role, method.roles)) for method in fleet_methods.METHODS.values()},
}
PAGE = READERS  # of /metrics
CHECK_S = 2.0  # between checks of open streams
LOGGED = 1000  # refused peers that are named in the log, each once
SHOWN = 3  # certificates that expire soon, by name
# Calls of one certificate whose request is in memory, and calls that wait before theirs is read. A request of 64 KiB
# takes 2 MiB once it is parsed; the console's certificate stands for all its users.
CALLS_EACH, WAITING_EACH = 8, 256
# Calls of all viewers together. A client that reads no answer holds its call until its connection ends, and gRPC has
# app.CALLS_MOST places: the rest is for callers who may act.
VIEWERS_MOST = 384
REQUEST_S = 10.0  # from a call's turn until its request has arrived

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Any], Awaitable[Any]]
Handler = Any  # grpc.RpcMethodHandler: its types know only the synchronous server


class _Open:
    """A call under way.

    Attributes:
        sending: one of its answers is on its way. If the task were cancelled then, gRPC would never end the call and
            its caller would wait forever. It ends itself when that answer has left.
    """

    __slots__ = ("end", "peer", "refusal", "sending", "task")

    def __init__(self, peer: Peer, task: asyncio.Task[Any] | None) -> None:
        self.peer, self.task, self.refusal, self.sending = peer, task, "", False
        self.end: Callable[[str], None] | None = None

    def stop(self, refusal: str) -> None:
        self.refusal = refusal
        if self.end is not None:
            self.end(refusal)
        elif self.task is not None and not self.sending:
            self.task.cancel()


class _Turns:
    """The calls of one certificate that are served or wait."""

    __slots__ = ("asked", "free")

    def __init__(self) -> None:
        self.asked, self.free = 0, asyncio.Semaphore(CALLS_EACH)


_CALL: ContextVar[_Open | None] = ContextVar("_CALL", default=None)


def may_force() -> bool:
    """Return True if the caller of the current call may act past the guard; without TLS every local user may."""
    who = caller()
    return who is None or who.role is Role.ADMIN


def caller() -> Identity | None:
    """Return the caller of the current call; None without a gate or without TLS."""
    call = _CALL.get()
    return None if call is None else call.peer.identity


def when_ended(end: Callable[[str], None]) -> None:
    """When the current call's certificate expires or is denied, call `end` with the reason; do not cancel the task.

    For a call whose answers leave from several tasks: gRPC ends no call while an answer is on its way.
    """
    call = _CALL.get()
    if call is not None:
        call.end = end


class Gate(grpc.aio.ServerInterceptor):
    """Checks each call before both servers. Event loop only, but `troubles` and `refusal` are for any thread."""

    def __init__(
        self,
        *,
        secure: bool,
        denied: Denied | None = None,
        roles: Mapping[str, frozenset[Role]] = ROLES,
        now_s: Callable[[], float] = time.time,
        on_refused: Callable[[str, str, str], None] = lambda _identity, _reason, _text: None,
    ) -> None:
        """`on_refused`: called with each refused peer (identity or "?", reason, text) in any thread, for a moment."""
        self._on_refused = on_refused
        self.denied = denied or Denied(None)
        self.calls: Counter[str] = Counter()  # admitted, by service
        self.refused: Counter[str] = Counter()  # by reason
        self._secure, self._roles, self._now_s = secure, roles, now_s
        self._handlers: dict[str, tuple[Handler, Handler]] = {}  # method -> its handler, and the same behind the gate
        self._open: set[_Open] = set()
        self._turns: dict[tuple[Identity, bool], _Turns] = {}
        self._viewer_calls = 0  # that are served or wait
        self._expiring: dict[Identity, x509.Certificate] = {}
        self._logged: set[tuple[str, str]] = set()
        self._checked_serials: frozenset[int] | None = None  # denied when all open calls were last checked
        self._next_check_s = 0.0  # when the next of their certificates expires, or enters its last days

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not self._secure:
            return handler  # None: gRPC answers that there is no such method
        method = str(handler_call_details.method)
        held = self._handlers.get(method)
        if held is None or held[0] is not handler:  # made once: thousands of streams share it
            held = self._handlers[method] = handler, self._guarded(method, handler)
        return held[1]

    def guarded(self, method: str, behaviour: Behaviour) -> Behaviour:
        """Return the behaviour of a method of the agents' server, behind the gate."""
        return self._answering(method, behaviour) if self._secure else behaviour

    def refusal(self, peer: Peer | None, allowed: frozenset[Role]) -> tuple[str, str] | None:
        """Return (reason, text) why this peer is none of `allowed`, or None if it is."""
        if peer is None:
            return "no certificate", "there is no certificate; this needs " + _names(allowed)
        if ended := self._ended(peer, self.denied.serials()):
            return ended
        if peer.identity.role not in allowed:
            return "wrong role", f"the certificate is for {peer.identity}; this needs {_names(allowed)}"
        return None

    def refusal_of(self, auth_context: Mapping[str, Sequence[bytes]], allowed: frozenset[Role]) -> str:
        """Return why a gRPC peer is none of `allowed`, or "". The refusal is counted and logged."""
        peer, found = self._judge(auth_context, allowed)
        return "" if found is None else self._count(peer, *found)

    async def watch(self) -> None:
        """End open streams whose certificate has expired or is denied, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                self.check_open_calls()
            except Exception:  # a defect must not end this watch
                log.exception("checking open calls failed")

    def check_open_calls(self) -> None:
        serials = self.denied.serials()
        if serials is self._checked_serials and self._now_s() < self._next_check_s:
            return  # nothing can have changed, and there may be thousands
        self._checked_serials, self._next_check_s = serials, math.inf
        for call in list(self._open):
            self._note(call.peer)
            if not call.refusal and (found := self._ended(call.peer, serials)) is not None:
                call.stop(self._count(call.peer, *found))

    def troubles(self) -> list[str]:
        """Return sentences about peers' certificates that expire soon, and about an unreadable list of denied ones."""
        now_s = self._now_s()
        soon = {
            who: certificate
            for who, certificate in list(self._expiring.items())
            if not _expired_long_ago(certificate, now_s)
        }
        found = []
        if soon:
            first = sorted(soon, key=lambda who: soon[who].ends_s)
            named = ", ".join(f"{who} at {x509.format_time(soon[who].ends_s)}" for who in first[:SHOWN])
            more = f" and {len(first) - SHOWN} more" if len(first) > SHOWN else ""
            found.append(
                f"Certificates end within {x509.WARN_DAYS} days, or have ended: {named}{more}: drover certs renew."
            )
        if self.denied.trouble:
            found.append(f"The previous list of denied certificates is in force: {self.denied.trouble}.")
        return found

    def _note(self, peer: Peer) -> None:
        """Remember a certificate that expires soon until its owner shows a newer one, and when to check again."""
        now_s, ends_s = self._now_s(), peer.certificate.ends_s
        for turn_s in (ends_s - x509.WARN_DAYS * x509.DAY_S, ends_s):
            if turn_s >= now_s:
                self._next_check_s = min(self._next_check_s, turn_s)
        if peer.certificate.days_left(now_s) < x509.WARN_DAYS:
            self._expiring[peer.identity] = peer.certificate
        else:
            self._expiring.pop(peer.identity, None)

    def _ended(self, peer: Peer, denied: frozenset[int]) -> tuple[str, str] | None:
        if peer.certificate.serial in denied:
            return "denied", f"the certificate of {peer.identity} with serial {peer.certificate.serial:X} is denied"
        if peer.certificate.ended(self._now_s()):
            return "ended", x509.expiry_text(f"the certificate of {peer.identity}", peer.certificate, self._now_s())
        return None

    def _judge(
        self, auth_context: Mapping[str, Sequence[bytes]], allowed: frozenset[Role]
    ) -> tuple[Peer | None, tuple[str, str] | None]:
        try:
            peer = peer_of(auth_context)
        except IdentityError as error:
            return None, ("no identity", f"{error}; this needs {_names(allowed)}")
        return peer, self.refusal(peer, allowed)

    def _count(self, peer: Peer | None, reason: str, text: str) -> str:
        self.refused[reason] += 1
        key = (str(peer.identity) if peer else "?", reason)
        if key not in self._logged and len(self._logged) < LOGGED:
            self._logged.add(key)
            log.warning("refused: %s", text)
        self._on_refused(key[0], reason, text)
        return text

    async def _admit(self, method: str, context: Context) -> _Open:
        allowed = self._roles.get(method)
        if allowed is None:
            self.refused["no role"] += 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{method}: no role may call this")
        peer, found = self._judge(cast("Mapping[str, Sequence[bytes]]", context.auth_context()), allowed)
        if found is not None or peer is None:
            text = self._count(peer, *(found or ("no certificate", "there is no certificate")))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        self.calls[method.split("/")[1]] += 1
        self._note(peer)
        call = _Open(peer, asyncio.current_task())
        self._open.add(call)
        _CALL.set(call)
        return call

    def _answering(self, method: str, inner: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            call = await self._admit(method, context)
            try:
                return await inner(request, context)
            except asyncio.CancelledError:
                await _abort_if_refused(call, context)
                raise
            finally:
                self._open.discard(call)

        return answer

    def _guarded(self, method: str, handler: Handler) -> Handler:
        """`handler`, of one request, behind the gate.

        It is registered as a stream of requests, because gRPC reads no message of such a call before it is asked to. So
        the role is checked before the request is received, inflated and parsed, into 30 to 30,000 times its size.
        """
        if handler.request_streaming:
            raise TypeError(f"{method}: calls of this server have one request")
        inner = handler.unary_unary or handler.unary_stream
        generates = inspect.isasyncgenfunction(inner)

        async def serve(_: Any, context: Any) -> None:
            call = await self._admit(method, context)
            try:
                async with self._turn(method, call, context):
                    request: Any = await _request(handler.request_deserializer, context)
                    async for item in inner(request, context) if generates else _once(inner(request, context)):
                        call.sending = True
                        await context.write(item)
                        call.sending = False
                        await _abort_if_refused(call, context)
            except asyncio.CancelledError:
                await _abort_if_refused(call, context)
                raise
            except grpc.aio.AbortError as error:
                _drop_frames(error)
                raise
            finally:
                request = None
                self._open.discard(call)

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _turn(self, method: str, call: _Open, context: Context) -> AsyncIterator[None]:
        """Wait for one of the turns of the caller's certificate. Acts have turns of their own."""
        who = call.peer.identity
        key = who, self._roles[method] == OPERATORS  # otherwise a drain would wait behind eight slow questions
        is_viewer = who.role not in OPERATORS
        if is_viewer and self._viewer_calls >= VIEWERS_MOST:
            self.refused["too many calls"] += 1
            text = f"all viewers have {VIEWERS_MOST} calls under way; try again when some have ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        turns = self._turns.setdefault(key, _Turns())
        if turns.asked >= CALLS_EACH + WAITING_EACH:
            self.refused["too many calls"] += 1
            text = f"{who} has {turns.asked} calls under way; try again when some have ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        turns.asked += 1
        self._viewer_calls += is_viewer
        try:
            async with turns.free:
                yield
        finally:
            turns.asked -= 1
            self._viewer_calls -= is_viewer
            if not turns.asked:
                del self._turns[key]


def _drop_frames(error: BaseException | None) -> None:
    """Drop the frames of an error that was answered, and of its causes. They form a reference cycle with it, which
    would keep the request until Python's next collection: a hundred requests of 2 MiB parsed are 200 MiB.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _once(answer: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await answer


async def _request(parse: Callable[[bytes], Any] | None, context: Any) -> Any:
    """Read and parse the request of a call."""
    try:
        async with asyncio.timeout(REQUEST_S):
            raw = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request arrived within {REQUEST_S:g} s of the call")
    if raw is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    if parse is None:
        return raw
    try:
        return parse(raw)
    except Exception:  # noqa: BLE001  # the library may raise anything for hostile bytes
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of fleet.proto")


async def _abort_if_refused(call: _Open, context: Context) -> None:
    """Send the reason to a call that the gate ended; one that its peer left gets none."""
    if call.refusal:
        if call.task is not None:
            call.task.uncancel()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, call.refusal)


def _expired_long_ago(certificate: x509.Certificate, now_s: float) -> bool:
    """Return True if it expired a day ago: its owner may be gone for good."""
    return now_s > certificate.ends_s + x509.DAY_S


def _names(allowed: frozenset[Role]) -> str:
    forms = " or ".join(f"drover://{role}/{'NODE' if role is Role.AGENT else 'NAME'}" for role in sorted(allowed))
    return f"one with a name {forms}"
