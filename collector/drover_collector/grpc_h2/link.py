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
from drover_collector.grpc_h2.outgoing import Stream
from drover_collector.grpc_h2.stalled_read import StalledReadWatchdog

log = logging.getLogger(__name__)

READ_BYTES = 65_536
READS = 8  # of one connection in its turn; TLS gives up to 16 KiB at a time
LONG_BYTES = 8_192  # after so much there is more; after less, to look costs as much as a message
MUCH_BYTES = 16_384  # at a look: a message of 10 s and 8 GPUs is 4 kB
SEND_BYTES = 16_384
LINGER_BYTES = 1 << 20  # that are thrown away of one whose end was said: HTTP/2's windows let less be under way
_SHARED = memoryview(bytearray(READ_BYTES))  # for all: who reads into it takes its bytes out at once
_UNWATCHED = StalledReadWatchdog()
AGAIN = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError)


class LinkLostError(Exception):
    """The connection is gone, or has ended; the message says why."""


class Links(Protocol):
    """Who has many of them."""

    def begin(self, link: Link, stream: Stream) -> Call:
        """Serve a new stream."""

    def lost(self, link: Link, why: str) -> None:
        """Close it and forget it; may be told twice."""

    def watch(self, link: Link, events: int) -> None:
        """Which events of epoll it is to be told from now on."""


class Link:
    """
    Attributes:
        writing: calls that wait until what they said is sent. wants: events of epoll.
        quiet, idle: for how many looks of the server nothing has come, and there was no call.
        who: the names in its certificate; "" before the handshake, and without TLS.
        said_end: its end was said, and all of it sent: GOAWAY is lost where the socket is closed with unread data.
    """

    __slots__ = ("_lingered", "_owner", "_read", "_sock", "_watch_reads", "closed", "connection", "fd", "idle", "peer",
                 "quiet", "said_end", "wants", "who", "writing")  # fmt: skip

    def __init__(
        self, sock: socket.socket, address: Any, owner: Links, watch: StalledReadWatchdog = _UNWATCHED
    ) -> None:
        self._sock, self._owner, self._watch_reads = sock, owner, watch
        self._read: Callable[[], Any] = partial(sock.recv_into, _SHARED)
        self.fd, self.peer = sock.fileno(), peer_name(sock.family, address)
        self.connection = Connection()
        self.writing: dict[Call, None] = {}
        self.wants, self.quiet, self.idle, self.closed = select.EPOLLIN, 0, 0, False
        self.who, self.said_end, self._lingered = "", False, 0

    # ---- TLS

    def shake_hands(self, context: ssl.SSLContext | None) -> bool:
        """Go on with the handshake; whether it is through.

        Args:
            context: of one that begins; None: go on with it.
        Raises:
            LinkLostError: it came to nothing.
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
            raise LinkLostError(f"no TLS: {error}") from None
        if self._sock.selected_alpn_protocol() != "h2":
            raise LinkLostError("TLS without HTTP/2")
        self._read = partial(self._sock.read, READ_BYTES, _SHARED)  # what its `recv_into` does in the end
        told: Any = self._sock.getpeercert()
        self.who = " ".join(sorted(str(name) for _, name in told.get("subjectAltName", ()))) if told else ""
        return True

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """As `grpc.ServicerContext` has it."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return {}
        der, told = self._sock.getpeercert(True), self._sock.getpeercert()
        names: Any = told.get("subjectAltName", ()) if told else ()
        return {
            "transport_security_type": [b"ssl"],
            "x509_subject_alternative_name": [str(name).encode() for _, name in names],
            "x509_pem_cert": [ssl.DER_cert_to_PEM_cert(der).encode()] if der else [],
        }

    # ---- bytes

    def ready(self, events: int) -> bool:
        """Whether its peer has much to say, and likely more.

        Raises:
            LinkLostError: the connection is gone, or has ended.
        """
        much = bool(events & ~select.EPOLLOUT) and self._receive() >= MUCH_BYTES
        if self.connection.outgoing or self.connection.broken or self.wants != select.EPOLLIN:
            self.send()
        return much

    def _receive(self) -> int:
        """How many bytes came."""
        self.quiet = came = 0
        watch = self._watch_reads
        for _ in range(READS):
            try:
                watch.reading = (self,)
                size = self._read()
            except AGAIN:
                break
            except (OSError, ValueError) as error:
                raise LinkLostError(str(error)) from None
            finally:
                watch.reading = None
            if not size:
                raise LinkLostError("closed by the peer")
            came += size
            self._take(_SHARED[:size])
            if size < LONG_BYTES or self.connection.outgoing:
                break
        return came

    def _take(self, data: memoryview) -> None:
        stream = self.connection.whole(data)
        if stream is not None:
            if not stream.owner.whole(data[frames.HEAD_BYTES :]):
                stream.buffer += data[frames.HEAD_BYTES :]
                stream.owner.changed()
            return
        for stream in self.connection.receive(bytes(data)):
            if stream.owner is not None:
                stream.owner.changed()
            elif not stream.gone:
                stream.owner = self._owner.begin(self, stream)

    def flush(self) -> None:
        """Send what there is; from a call's task, which need not know that the connection is lost."""
        if not self.closed:
            try:
                self.send()
            except LinkLostError as error:
                asyncio.get_running_loop().call_soon(self._owner.lost, self, str(error))

    def send(self) -> None:
        """
        Raises:
            LinkLostError: the connection is gone, or has ended and all is said.
        """
        connection = self.connection
        out = connection.outgoing
        while out:
            try:
                sent = self._sock.send(out[:SEND_BYTES])
            except AGAIN:
                # Not read on while the peer takes nothing: else what it is to be answered would grow.
                self._watch(select.EPOLLOUT)
                return
            except (OSError, ValueError) as error:
                raise LinkLostError(str(error)) from None
            del out[:sent]
            if not out:
                connection.resume()
        self._watch(select.EPOLLIN)
        for call in list(self.writing):
            call.drained()
        if connection.broken or (connection.leaving and not connection.busy):
            self.said_end = True
            raise LinkLostError(connection.broken or "has left")

    def _watch(self, wants: int) -> None:
        if wants != self.wants:
            self.wants = wants
            self._owner.watch(self, wants)

    def cut(self) -> None:
        log.warning("%s: its connection is ended: key updates of TLS without end; see what it is", self.peer)
        with contextlib.suppress(OSError):  # not SSLSocket's own, which would have the next read see no TLS
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Its calls are cancelled."""
        self.half_close()
        with contextlib.suppress(OSError):
            self._sock.close()

    def half_close(self) -> None:
        """Its calls are cancelled; what its peer still sends can be thrown away, by `linger`."""
        self.closed = True
        for stream in self.connection.lose():
            if stream.owner is not None:
                stream.owner.changed()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)  # TLS ends here: what is read from now on is not decrypted

    def linger(self) -> None:
        """Throw away what came.

        Raises:
            LinkLostError: the peer has closed too, or does not cease to send.
        """
        for _ in range(READS):
            try:
                size = self._sock.recv_into(_SHARED)
            except AGAIN:
                return
            except (OSError, ValueError) as error:
                raise LinkLostError(str(error)) from None
            self._lingered += size
            if not size or self._lingered > LINGER_BYTES:
                raise LinkLostError("has left" if not size else "goes on after its end")


def peer_name(family: int, address: Any) -> str:
    """As gRPC names it: "ipv4:10.0.0.7:43210", "ipv6:%5B::1%5D:43210"."""
    host, port = str(address[0]), address[1]
    if family == socket.AF_INET6 and not host.startswith("::ffff:"):
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"
    return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
