"""Who may call what. One gate before every method of both services: a method that is not in ROLES is refused.

Without TLS, which the settings allow on loopback only, every local user may do all: there is nobody to tell apart.
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
# Path of each method of both services -> who may call it.
ROLES: Mapping[str, frozenset[Role]] = {
    "/drover.telemetry.v1.Telemetry/Stream": frozenset({Role.AGENT}),
    **{method.path: frozenset(map(Role, method.roles)) for method in fleet_methods.METHODS.values()},
}
PAGE = READERS  # of /metrics
LOOK_S = 2.0  # how often open streams are looked at
LOGGED = 1000  # refused peers that are named in the log, each once
SHOWN = 3
# Calls of one certificate whose request is read and held, and calls that wait for their turn before it is read. A
# request of 64 KiB takes 2 MiB once it is parsed; the console's certificate stands for all who sit before it.
CALLS_EACH, WAITING_EACH = 8, 256
# Calls of all viewers together: who takes no answer holds its call until its connection ends, and gRPC has places for
# main.CALLS_MOST calls. The others are left to who may act.
VIEWERS_MOST = 384
HEAR_S = 10.0  # from a call's turn until its request is here

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Any], Awaitable[Any]]
Handler = Any  # grpc.RpcMethodHandler: its types know only the synchronous server


class _Open:
    """A call under way.

    Attributes:
        sending: one of its answers is on its way. Cancelled then, gRPC never ends the call: who asked would wait for
            good. It ends itself when that answer has left.
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
    """Of one certificate: its calls that are served or wait."""

    __slots__ = ("asked", "free")

    def __init__(self) -> None:
        self.asked, self.free = 0, asyncio.Semaphore(CALLS_EACH)


_CALL: ContextVar[_Open | None] = ContextVar("_CALL", default=None)


def may_force() -> bool:
    """From within a call: whether its caller may act past the guard; without TLS every local user may."""
    who = caller()
    return who is None or who.role is Role.ADMIN


def caller() -> Identity | None:
    """From within a call: who calls; None where there is no gate, or no TLS."""
    call = _CALL.get()
    return None if call is None else call.peer.identity


def when_ended(end: Callable[[str], None]) -> None:
    """From within a call: how it ends when its certificate does, with the reason; else its task is cancelled.

    For a call whose answers leave from several tasks: gRPC ends none while an answer is on its way.
    """
    call = _CALL.get()
    if call is not None:
        call.end = end


class Gate(grpc.aio.ServerInterceptor):
    """Stands before both servers. Used in their event loop; `troubles` and `refusal` from any thread."""

    def __init__(
        self,
        *,
        secure: bool,
        denied: Denied | None = None,
        roles: Mapping[str, frozenset[Role]] = ROLES,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.denied = denied or Denied(None)
        self.calls: Counter[str] = Counter()  # admitted, by service
        self.refused: Counter[str] = Counter()  # by reason
        self._secure, self._roles, self._now_s = secure, roles, now_s
        self._behind: dict[str, tuple[Handler, Handler]] = {}  # method -> its handler, and the same behind the gate
        self._open: set[_Open] = set()
        self._turns: dict[tuple[Identity, bool], _Turns] = {}
        self._of_viewers = 0  # calls that are served or wait
        self._soon: dict[Identity, x509.Certificate] = {}
        self._logged: set[tuple[str, str]] = set()
        self._looked_for: frozenset[int] | None = None  # denied serials when all open calls were looked at
        self._again_s = 0.0  # when the next of their certificates ends, or ends soon

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not self._secure:
            return handler  # None: gRPC says that there is no such method
        method = str(handler_call_details.method)
        held = self._behind.get(method)
        if held is None or held[0] is not handler:  # made once: thousands of streams share it
            held = self._behind[method] = handler, self._guarded(method, handler)
        return held[1]

    def guarded(self, method: str, behaviour: Behaviour) -> Behaviour:
        """What serves a method of the agents' server, behind the gate."""
        return self._answering(method, behaviour) if self._secure else behaviour

    def refusal(self, peer: Peer | None, allowed: frozenset[Role]) -> tuple[str, str] | None:
        """(reason, text) why this peer may not have what `allowed` may, or None when it may."""
        if peer is None:
            return "no certificate", "there is no certificate; this needs " + _names(allowed)
        if ended := self._ended(peer, self.denied.serials()):
            return ended
        if peer.identity.role not in allowed:
            return "wrong role", f"the certificate is for {peer.identity}; this needs {_names(allowed)}"
        return None

    def refusal_of(self, auth_context: Mapping[str, Sequence[bytes]], allowed: frozenset[Role]) -> str:
        """The same of a gRPC peer: the text, or "". Counted and logged."""
        peer, found = self._judge(auth_context, allowed)
        return "" if found is None else self._count(peer, *found)

    async def watch(self) -> None:
        """Ends open streams whose certificate has ended or come to be denied, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:  # a defect of ours must not end this watch
                log.exception("looking after open calls")

    def look(self) -> None:
        serials = self.denied.serials()
        if serials is self._looked_for and self._now_s() < self._again_s:
            return  # nothing can have changed, and there may be thousands
        self._looked_for, self._again_s = serials, math.inf
        for call in list(self._open):
            self._note(call.peer)
            if not call.refusal and (found := self._ended(call.peer, serials)) is not None:
                call.stop(self._count(call.peer, *found))

    def troubles(self) -> list[str]:
        """Certificates of peers that are here and end soon, and a list of denied ones that cannot be read."""
        now_s = self._now_s()
        soon = {who: certificate for who, certificate in list(self._soon.items()) if not _long_ago(certificate, now_s)}
        found = []
        if soon:
            first = sorted(soon, key=lambda who: soon[who].ends_s)
            named = ", ".join(f"{who} at {x509.format_time(soon[who].ends_s)}" for who in first[:SHOWN])
            more = f" and {len(first) - SHOWN} more" if len(first) > SHOWN else ""
            found.append(
                f"Certificates end within {x509.WARN_DAYS} days, or have ended: {named}{more}: drover certs renew."
            )
        if self.denied.trouble:
            found.append(f"The list of denied certificates as it was before is in force: {self.denied.trouble}.")
        return found

    def _note(self, peer: Peer) -> None:
        """Remember a certificate that ends soon until its owner comes with a newer one; and when to look again."""
        now_s, ends_s = self._now_s(), peer.certificate.ends_s
        for turn_s in (ends_s - x509.WARN_DAYS * x509.DAY_S, ends_s):
            if turn_s >= now_s:
                self._again_s = min(self._again_s, turn_s)
        if peer.certificate.days_left(now_s) < x509.WARN_DAYS:
            self._soon[peer.identity] = peer.certificate
        else:
            self._soon.pop(peer.identity, None)

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
                await _told(call, context)
                raise
            finally:
                self._open.discard(call)

        return answer

    def _guarded(self, method: str, handler: Handler) -> Handler:
        """`handler`, of one request, behind the gate.

        Made as one of a stream of requests: of such a call gRPC reads no message before it is asked to. So the role is
        looked at before the request is received, inflated and parsed, which takes 30 times its size, or 30,000 times.
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
                        await _told(call, context)
            except asyncio.CancelledError:
                await _told(call, context)
                raise
            except grpc.aio.AbortError as error:
                _let_go(error)
                raise
            finally:
                request = None
                self._open.discard(call)

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _turn(self, method: str, call: _Open, context: Context) -> AsyncIterator[None]:
        """One of the turns of the caller's certificate; acts have turns apart from questions."""
        who = call.peer.identity
        key = who, self._roles[method] == OPERATORS  # or a drain would wait behind eight slow questions
        of_viewer = who.role not in OPERATORS
        if of_viewer and self._of_viewers >= VIEWERS_MOST:
            self.refused["too many calls"] += 1
            text = f"all viewers have {VIEWERS_MOST} calls under way; try again when some of them have ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        turns = self._turns.setdefault(key, _Turns())
        if turns.asked >= CALLS_EACH + WAITING_EACH:
            self.refused["too many calls"] += 1
            text = f"{who} has {turns.asked} calls under way; try again when some of them have ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        turns.asked += 1
        self._of_viewers += of_viewer
        try:
            async with turns.free:
                yield
        finally:
            turns.asked -= 1
            self._of_viewers -= of_viewer
            if not turns.asked:
                del self._turns[key]


def _let_go(error: BaseException | None) -> None:
    """Of the frames of an error, its causes too, that has become an answer: they form a ring with it, which would hold
    the request until Python looks for rings. A hundred requests that were parsed to 2 MiB each would be 200 MiB.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _once(answer: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await answer


async def _request(parse: Callable[[bytes], Any] | None, context: Any) -> Any:
    """The one request of a call."""
    try:
        async with asyncio.timeout(HEAR_S):
            raw = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {HEAR_S:g} s of the call")
    if raw is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    if parse is None:
        return raw
    try:
        return parse(raw)
    except Exception:  # noqa: BLE001  # of hostile bytes the library may raise anything
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of fleet.proto")


async def _told(call: _Open, context: Context) -> None:
    """A call that we ended is told why; one that its peer left is not."""
    if call.refusal:
        if call.task is not None:
            call.task.uncancel()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, call.refusal)


def _long_ago(certificate: x509.Certificate, now_s: float) -> bool:
    """Its owner has not come back for a day: it may be gone for good."""
    return now_s > certificate.ends_s + x509.DAY_S


def _names(allowed: frozenset[Role]) -> str:
    forms = " or ".join(f"drover://{role}/{'NODE' if role is Role.AGENT else 'NAME'}" for role in sorted(allowed))
    return f"one with a name {forms}"
