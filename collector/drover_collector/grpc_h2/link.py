"""One TCP connection: TLS, bytes between the socket and `Connection`, and its calls.

The sockets do not block, and TLS works on them directly. asyncio's own TLS keeps two buffers and a protocol for each
connection and copies each byte twice, which costs as much CPU and memory as all of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

from drover_collector.grpc_h2 import frames
from drover_collector.grpc_h2.call import Call
from drover_collector.grpc_h2.connection import Connection
from drover_collector.grpc_h2.send_queue import Stream
from drover_collector.grpc_h2.stalled_read import StalledReadWatchdog

log = logging.getLogger(__name__)

READ_BYTES = 65_536
READS = 8  # of one connection in its turn; TLS returns up to 16 KiB at a time
LONG_BYTES = 8_192  # after so long a read there is likely more; after a shorter one, trying costs as much as a message
MUCH_BYTES = 16_384  # in one turn
SEND_BYTES = 16_384
LINGER_BYTES = 1 << 20  # discarded from a connection that was ended; HTTP/2's windows let less be under way
_READ_BUFFER = memoryview(bytearray(READ_BYTES))  # shared by all: each read is processed before the next
_UNWATCHED = StalledReadWatchdog()
WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError)


class LinkLostError(Exception):
    """The connection is lost, or has ended; the message says why."""


class LinkOwner(Protocol):
    """The server that a link belongs to."""

    def begin_call(self, link: Link, stream: Stream) -> Call:
        """Serve a new stream."""

    def lost(self, link: Link, why: str) -> None:
        """Close and forget the link. May be called twice."""

    def watch(self, link: Link, events: int) -> None:
        """Poll the link for these epoll events from now on."""


class Link:
    """
    Attributes:
        blocked_writers: calls that wait until what they wrote is sent. events: of epoll.
        silent_checks, idle_checks: checks of the server in a row without data, and without a call.
        certificate_names: of the peer; "" before the handshake, and without TLS.
        goaway_sent: the connection was ended, and all of its data sent.
    """

    __slots__ = (
        "_discarded", "_owner", "_read", "_sock", "_watchdog", "blocked_writers", "certificate_names", "closed",
        "connection", "events", "fd", "goaway_sent", "idle_checks", "peer", "silent_checks",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, address: Any, owner: LinkOwner, watchdog: StalledReadWatchdog = _UNWATCHED
    ) -> None:
        self._sock, self._owner, self._watchdog = sock, owner, watchdog
        self._read: Callable[[], Any] = partial(sock.recv_into, _READ_BUFFER)
        self.fd, self.peer = sock.fileno(), peer_name(sock.family, address)
        self.connection = Connection()
        self.blocked_writers: dict[Call, None] = {}
        self.events, self.silent_checks, self.idle_checks, self.closed = select.EPOLLIN, 0, 0, False
        self.certificate_names, self.goaway_sent, self._discarded = "", False, 0

    # ---- TLS

    def continue_handshake(self, context: ssl.SSLContext | None) -> bool:
        """Continue the TLS handshake. Return whether it is complete.

        Args:
            context: given on the first call, None on later ones.
        Raises:
            LinkLostError: it failed.
        """
        try:
            if context is not None:
                self._sock = context.wrap_socket(self._sock, server_side=True, do_handshake_on_connect=False)
            assert isinstance(self._sock, ssl.SSLSocket)
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(select.EPOLLIN)
            return False
        except ssl.SSLWantWriteError:
            self._watch(select.EPOLLOUT)
            return False
        except (OSError, ValueError, AttributeError) as error:  # the last: the peer had left before it began
            raise LinkLostError(f"the TLS handshake failed: {error}") from None
        if self._sock.selected_alpn_protocol() != "h2":
            raise LinkLostError("TLS without HTTP/2 (ALPN)")
        self._read = partial(self._sock.read, READ_BYTES, _READ_BUFFER)  # what its `recv_into` calls
        certificate: Any = self._sock.getpeercert()
        names = certificate.get("subjectAltName", ()) if certificate else ()
        self.certificate_names = " ".join(sorted(str(name) for _, name in names))
        return True

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what `grpc.ServicerContext.auth_context` does."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return {}
        der, certificate = self._sock.getpeercert(True), self._sock.getpeercert()
        names: Any = certificate.get("subjectAltName", ()) if certificate else ()
        return {
            "transport_security_type": [b"ssl"],
            "x509_subject_alternative_name": [str(name).encode() for _, name in names],
            "x509_pem_cert": [ssl.DER_cert_to_PEM_cert(der).encode()] if der else [],
        }

    # ---- bytes

    def handle_events(self, events: int) -> bool:
        """Read and send. Return whether the peer sends much, and likely more.

        Raises:
            LinkLostError: the connection is lost, or has ended.
        """
        much = bool(events & ~select.EPOLLOUT) and self._receive() >= MUCH_BYTES
        if self.connection.queue.buffer or self.connection.error or self.events != select.EPOLLIN:
            self.send()
        return much

    def _receive(self) -> int:
        """Read until nothing is left, or the turn is over. Return the number of bytes."""
        self.silent_checks = total = 0
        watchdog = self._watchdog
        for _ in range(READS):
            try:
                watchdog.reading = (self,)
                size = self._read()
            except WOULD_BLOCK:
                break
            except (OSError, ValueError) as error:
                raise LinkLostError(str(error)) from None
            finally:
                watchdog.reading = None
            if not size:
                raise LinkLostError("closed by the peer")
            total += size
            self._process(_READ_BUFFER[:size])
            if size < LONG_BYTES or self.connection.queue.buffer:
                break
        return total

    def _process(self, data: memoryview) -> None:
        stream = self.connection.accept_single_message(data)
        if stream is not None:
            if not stream.served_by.take_message(data[frames.HEAD_BYTES :]):
                stream.received += data[frames.HEAD_BYTES :]
                stream.served_by.stream_changed()
            return
        for stream in self.connection.receive(bytes(data)):
            if stream.served_by is not None:
                stream.served_by.stream_changed()
            elif not stream.lost:
                stream.served_by = self._owner.begin_call(self, stream)

    def flush(self) -> None:
        """Send what is queued. Never raises: the owner is called soon if the connection is lost."""
        if not self.closed:
            try:
                self.send()
            except LinkLostError as error:
                asyncio.get_running_loop().call_soon(self._owner.lost, self, str(error))

    def send(self) -> None:
        """Send what is queued.

        Raises:
            LinkLostError: the connection is lost, or has ended and all is sent.
        """
        connection = self.connection
        buffer = connection.queue.buffer
        while buffer:
            try:
                sent = self._sock.send(buffer[:SEND_BYTES])
            except WOULD_BLOCK:
                # Not read from while the peer reads nothing: else the responses to it would grow.
                self._watch(select.EPOLLOUT)
                return
            except (OSError, ValueError) as error:
                raise LinkLostError(str(error)) from None
            del buffer[:sent]
            if not buffer:
                connection.queue.resume()
        self._watch(select.EPOLLIN)
        for call in list(self.blocked_writers):
            call.sent()
        if connection.error or (connection.draining and not connection.active_calls):
            self.goaway_sent = True
            raise LinkLostError(connection.error or "drained")

    def _watch(self, events: int) -> None:
        if events != self.events:
            self.events = events
            self._owner.watch(self, events)

    # ---- the end

    def shut_down(self) -> None:
        """End the connection whose read stalls. From the watchdog's thread."""
        log.warning("%s sends TLS key updates without end. Its connection is closed; check that machine.", self.peer)
        with contextlib.suppress(OSError):  # not SSLSocket's own, after which the next read would not be TLS
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Its calls are cancelled."""
        self.half_close()
        with contextlib.suppress(OSError):
            self._sock.close()

    def half_close(self) -> None:
        """Stop sending. Its calls are cancelled; `discard_input` reads what the peer still sends.

        The kernel resets a socket that is closed with unread data, and the peer may then lose the GOAWAY.
        """
        self.closed = True
        for stream in self.connection.abandon():
            if stream.served_by is not None:
                stream.served_by.stream_changed()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)  # TLS ends here: later reads are not decrypted

    def discard_input(self) -> None:
        """Read and discard.

        Raises:
            LinkLostError: the peer has closed too, or sends more than LINGER_BYTES.
        """
        for _ in range(READS):
            try:
                size = self._sock.recv_into(_READ_BUFFER)
            except WOULD_BLOCK:
                return
            except (OSError, ValueError) as error:
                raise LinkLostError(str(error)) from None
            self._discarded += size
            if not size or self._discarded > LINGER_BYTES:
                raise LinkLostError("sends on after its GOAWAY" if size else "closed by the peer")


def peer_name(family: int, address: Any) -> str:
    """Return an address as gRPC writes it: "ipv4:10.0.0.7:43210", "ipv6:%5B::1%5D:43210"."""
    host, port = str(address[0]), address[1]
    if family == socket.AF_INET6 and not host.startswith("::ffff:"):
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"
    return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
