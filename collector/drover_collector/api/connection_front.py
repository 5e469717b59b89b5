"""The Fleet API's port: it bounds the connections, and passes their bytes on to gRPC, which listens on a socket file.

gRPC accepts every connection and cannot give a place to another. Unbounded, anonymous connections take all files of the
process; bounded (`grpc.max_allowed_incoming_connections`), they keep operators out. Here, when all places are taken, a
new connection replaces the oldest one that has sent nothing, or else one that has shown no certificate yet, of the
address that has most of these.
TLS passes through unchanged: certificates, roles and calls are checked by gRPC and the gate (decision 31).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

from drover_collector.auth.connection_limit import ConnectionLimit

log = logging.getLogger(__name__)

ACCEPT_MOST = 16  # in one turn of the event loop
BACKLOG = 1024
FULL_S = 1.0  # before the next try when no file can be opened
HANDSHAKE_S = 10.0  # gRPC ends a connection without a certificate by then; one that sends nothing ends too
MARGIN_S = 2.0
CHECK_S = 1.0
CLOSE_S = 10.0  # for a peer to take the last bytes
# gRPC sends at most twice (a request to repeat the hello, its own hello) before it has seen a certificate.
ANSWERS = 3
BUFFER_BYTES = 65_536


class _Side(asyncio.Protocol):
    """One of the two ends of a connection. What comes in goes out at the other."""

    def __init__(self, passage: _Passage, *, inner: bool) -> None:
        self.other: _Side | None = None
        self._passage, self._inner = passage, inner
        self._early = bytearray()  # received before the other end was connected
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(BUFFER_BYTES)

    def meet(self, other: _Side) -> None:
        self.other = other
        if self._early:
            other.write(self._early)
            self._early = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._passage.spoke(self._inner)
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._passage.lost()

    def close(self) -> None:
        """Close once the last bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> bool:
        """Drop the connection. Return True if there was one."""
        if self._transport is not None:
            self._transport.abort()
        return self._transport is not None


class _Passage:
    """A connection, joined to one to gRPC once it has sent something.

    Attributes:
        task: joins it; None: it has sent nothing yet. ended_s: when one end was lost; 0: both are connected.
    """

    def __init__(self, front: Front, sock: socket.socket, address: str, now_s: float) -> None:
        self.address, self.since_s = address, now_s
        self.ended_s = 0.0
        self._front, self._sock = front, sock
        self._asked, self._answers = False, 0
        self._sides: list[_Side] = []
        self.task: asyncio.Task[None] | None = None

    async def join(self, path: str) -> None:
        """Connect to gRPC and join the two connections."""
        loop = asyncio.get_running_loop()
        outer, inner = _Side(self, inner=False), _Side(self, inner=True)
        try:
            await loop.create_unix_connection(lambda: inner, path)
            await loop.connect_accepted_socket(lambda: outer, self._sock)
        except (OSError, asyncio.CancelledError) as error:
            log.debug("a connection of %s: %s", self.address, error)
            inner.abort()
            if not outer.abort():
                self._sock.close()
            self._front.forget(self)
            return
        self._sides = [outer, inner]
        outer.meet(inner)
        inner.meet(outer)
        if self.ended_s:  # gRPC has left meanwhile
            outer.close()

    def spoke(self, inner: bool) -> None:
        if not inner:
            self._asked = True
        elif self._asked:
            self._asked = False
            self._answers += 1
            if self._answers == ANSWERS:
                self._front.settle(self)

    def lost(self) -> None:
        """One end is lost: close the other once it has sent what it has."""
        if self.ended_s:
            self._front.forget(self)
            return
        self.ended_s = asyncio.get_running_loop().time()
        self._front.end(self)
        for side in self._sides:
            side.close()

    def cut(self) -> None:
        """Close both ends now, whatever they have yet to send."""
        if self.task is None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
        elif not self._sides:
            self.task.cancel()  # it closes what is open
        for side in self._sides:
            side.abort()
        self._front.forget(self)


class Front:
    """Used in one event loop: `listen`, `start`, then `stop`.

    Args:
        most: connections at once.
        on_crowded: called for each that had to make room.
    """

    def __init__(self, most: int, on_crowded: Callable[[], None] = lambda: None) -> None:
        self._most, self._on_crowded = most, on_crowded
        self._path = ""
        self._listening: list[socket.socket] = []
        # Those that have sent nothing, that have shown no certificate yet, and that have.
        self._silent: ConnectionLimit[_Passage] = ConnectionLimit()
        self._new: ConnectionLimit[_Passage] = ConnectionLimit()
        self._settled: ConnectionLimit[_Passage] = ConnectionLimit()
        self._ending: dict[_Passage, None] = {}
        self._watch: asyncio.Task[None] | None = None
        self._warned = False

    def listen(self, host: str, port: int) -> int:
        """Take the address; connections wait until `start`.

        Returns:
            The port, also where `port` is 0.
        Raises:
            OSError: it cannot be listened on.
        """
        failed: OSError | None = None
        for family, address in _addresses(host, port):
            both = family == socket.AF_INET6 and address == "::"
            try:
                sock = socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
            except OSError as error:  # such as localhost, where one of two families is off
                failed = error
                continue
            sock.setblocking(False)
            self._listening.append(sock)
            port = int(sock.getsockname()[1])
        if failed is not None and (failed.errno == errno.EADDRINUSE or not self._listening):
            for sock in self._listening:
                sock.close()
            self._listening.clear()
            raise failed
        return port

    async def start(self, path: str) -> None:
        """Accept connections. `path`: the socket file on which gRPC listens."""
        self._path = path
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.add_reader(sock.fileno(), self._accept, sock)
        self._watch = loop.create_task(self._run_watch())

    def close(self) -> None:
        """Accept no new connection. Open ones continue until gRPC ends them."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()

    async def stop(self) -> None:
        """Close all connections, after gRPC has stopped."""
        self.close()
        if self._watch is not None:
            self._watch.cancel()
        for group in (self._silent, self._new, self._settled):
            while (passage := group.spare()) is not None:
                passage.cut()
        for passage in list(self._ending):
            passage.cut()

    # ---- for passages

    def settle(self, passage: _Passage) -> None:
        """Count it as one with a certificate: gRPC has answered it long or often enough."""
        if passage in self._new:
            self._new.leave(passage)
            self._settled.join(passage, passage.address)

    def end(self, passage: _Passage) -> None:
        self.forget(passage)
        self._ending[passage] = None

    def forget(self, passage: _Passage) -> None:
        for group in (self._silent, self._new, self._settled):
            group.leave(passage)
        self._ending.pop(passage, None)

    # ---- connections

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPT_MOST):
            try:
                own, address = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._full(sock, error)
                return
            if len(self._silent) + len(self._new) + len(self._settled) + len(self._ending) >= self._most:
                self._make_room()
            own.setblocking(False)
            with contextlib.suppress(OSError):  # one that has left again is found to be lost
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            passage = _Passage(self, own, str(address[0]), loop.time())
            self._silent.join(passage, passage.address)
            loop.add_reader(own.fileno(), self._begin, own, passage)

    def _begin(self, own: socket.socket, passage: _Passage) -> None:
        """Handle the first bytes, or the end, of a connection."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(own.fileno())
        try:
            left = not own.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            left = False
        except OSError:
            left = True
        if left:
            passage.cut()
            return
        self._silent.leave(passage)
        self._new.join(passage, passage.address)
        passage.task = loop.create_task(passage.join(self._path))

    def _make_room(self) -> None:
        if self._ending:
            next(iter(self._ending)).cut()
            return
        spare = self._silent.spare() or self._new.spare() or self._settled.spare()
        if spare is not None:
            spare.cut()
            self._on_crowded()
            if not self._warned:
                self._warned = True
                log.warning(
                    "%d connections to the Fleet API are open: the oldest without a certificate make room; most are"
                    " from %s", self._most, spare.address,
                )  # fmt: skip

    def _full(self, sock: socket.socket, error: OSError) -> None:
        """Pause accepting: no file or memory is left. New connections wait in the kernel's queue."""
        log.error("the Fleet API accepts no connection for %g s: %s", FULL_S, error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock.fileno())

        def resume() -> None:
            if sock in self._listening:
                loop.add_reader(sock.fileno(), self._accept, sock)

        loop.call_later(FULL_S, resume)

    async def _run_watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                self._close_overdue(loop.time())
            except Exception:  # a defect must not end this watch
                log.exception("checking connections to the Fleet API failed")

    def _close_overdue(self, now_s: float) -> None:
        if not (self._silent or self._new):
            self._warned = False
        for passage in [each for each in self._ending if now_s - each.ended_s > CLOSE_S]:
            passage.cut()
        for passage in self._silent.all():
            if now_s - passage.since_s > HANDSHAKE_S:
                passage.cut()
        for passage in self._new.all():
            if now_s - passage.since_s > 2 * HANDSHAKE_S + MARGIN_S:  # gRPC has let it in
                self.settle(passage)


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    if host in ("0.0.0.0", "::"):  # noqa: S104  # what the settings say
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # the same
    found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
