"""Accept connections, run their handshakes, serve their calls, and end those that are stale."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drover_collector.grpc_h2.call import SHUTDOWN, Call, Handler
from drover_collector.grpc_h2.connection import CertificateBudget
from drover_collector.grpc_h2.link import Link, LinkLostError
from drover_collector.grpc_h2.poller import Poller
from drover_collector.grpc_h2.send_queue import Stream
from drover_collector.grpc_h2.stalled_read import QUEUE_BYTES, StalledReadWatchdog

log = logging.getLogger(__name__)

READS_PER_POLL = 64  # connections that are read before other work has its turn
HANDSHAKES_PER_POLL = 4  # the same for handshakes, a millisecond each
MAX_HANDSHAKES = 4_096  # under way, each up to 46 KiB; then the oldest is closed
MAX_LINGERING, LINGER_S = 256, 2.0  # connections that were ended and still receive their GOAWAY
ACCEPTS_PER_CALL = 32
BACKLOG = 65_535  # the kernel has its own limit
RETRY_ACCEPT_S = 1.0  # after no file could be opened
CANCEL_S = 5.0  # for cancelled calls to end
# Every connection is checked so often. Other times are counted in checks, so that a pause of this process does not
# count as silence of its peers.
CHECK_S = 5.0
HANDSHAKE_CHECKS = 24  # for TLS, and then for a first stream
IDLE_CHECKS = 120  # of a connection without streams
SILENT_CHECKS = 12  # then a ping is sent: a peer that lost power does not close its connection
ANSWER_CHECKS = 4  # for the answer to the ping
STALE_CHECKS = 8  # of silence, after which a new connection with the same certificate may take the place
MAKES_ROOM = "makes room for a new connection"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    message_bytes: int = 4 << 20  # of one message, also once it is decompressed; a handler may change it for its call
    connections: int | None = None  # at most; a new one then replaces the oldest handshake
    connections_per_certificate: int = 8  # most clients need one, plus those that their network has cut


@dataclass(frozen=True, slots=True)
class _Pollers:
    """The connections by what they wait for.

    New handshakes do not wait behind those under way. With one poller, thousands that arrive together would all begin
    before the first is complete.
    """

    new: Poller
    handshaking: Poller
    open: Poller
    lingering: Poller  # ended by us; their input is discarded

    def before_end(self) -> tuple[Poller, Poller, Poller]:
        return self.new, self.handshaking, self.open

    def count(self) -> int:
        return sum(len(poller.links) for poller in (*self.before_end(), self.lingering))


class _CertificateTable:
    """The open connections and the budget of each certificate."""

    def __init__(self, max_links: int) -> None:
        self._max_links = max_links
        self._links: dict[str, dict[Link, None]] = {}  # names in a certificate -> its connections, oldest first
        self._budgets: dict[str, CertificateBudget] = {}

    def surplus(self, link: Link) -> Link | None:
        """Return the connection that must make room before `link` is added; None: there is room."""
        others = self._links.get(link.certificate_names, {})
        if len(others) < self._max_links:
            return None
        budget = self._budgets[link.certificate_names]
        if not budget.crowded:
            text = "%s has %d connections at once; each new one closes one. Check whether its key is used elsewhere."
            log.warning(text, link.certificate_names, len(others))
            budget.crowded = True
        return _least_useful(others)

    def add(self, link: Link) -> None:
        self._links.setdefault(link.certificate_names, {})[link] = None
        link.connection.certificate_budget = self._budgets.setdefault(link.certificate_names, CertificateBudget())

    def remove(self, link: Link) -> None:
        links = self._links.get(link.certificate_names, {})
        links.pop(link, None)
        if not links:
            self._links.pop(link.certificate_names, None)

    def refill(self) -> None:
        """Refill the budgets. Forget certificates without a connection."""
        for names, budget in list(self._budgets.items()):
            budget.refill()
            if names not in self._links:
                del self._budgets[names]


class _FinishedCall:
    """Serves a stream whose call has ended while its last bytes wait for the peer."""

    def stream_changed(self) -> None: ...

    def take_message(self, _: memoryview) -> bool:
        return False


_FINISHED_CALL = _FinishedCall()


class GrpcServer:
    """Used in one event loop: `listen`, `start`, then `stop`.

    Args:
        methods: path -> its handler, a coroutine function whose second argument is a `Call`.
    """

    def __init__(self, methods: Mapping[str, Handler], options: ServerOptions | None = None) -> None:
        self._methods, self._options = methods, options or ServerOptions()
        self._listening: list[socket.socket] = []
        self._contexts: Callable[[], ssl.SSLContext] | None = None
        self._pollers: _Pollers | None = None  # while it runs
        self._certificates = _CertificateTable(self._options.connections_per_certificate)
        self._calls: set[asyncio.Task[None]] = set()
        self._checker: asyncio.Task[None] | None = None
        self._watchdog = StalledReadWatchdog()
        self._logged_full = False

    def listen(self, host: str, port: int, contexts: Callable[[], ssl.SSLContext] | None) -> int:
        """Bind an address. Connections wait until `start`.

        Args:
            host: a name or an address; 0.0.0.0 and :: both mean all addresses of IPv4 and IPv6.
            contexts: returns the TLS context of a new connection; None: no TLS.
        Returns:
            The port; 0 became a free one.
        Raises:
            OSError: the address cannot be bound.
        """
        self._contexts = contexts
        failed: OSError | None = None
        for family, address in _addresses(host, port):
            both = family == socket.AF_INET6 and address == "::"
            try:
                sock = socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
            except OSError as error:  # such as localhost, where one of two families is off
                failed = error
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)  # inherited by accepted connections
            self._listening.append(sock)
            port = int(sock.getsockname()[1])
        if failed is not None and (failed.errno == errno.EADDRINUSE or not self._listening):
            self._stop_listening()
            raise failed
        return port

    async def start(self) -> None:
        self._pollers = _Pollers(
            new=Poller(HANDSHAKES_PER_POLL, self._begin_handshake, self.lost, pausing=False),
            handshaking=Poller(HANDSHAKES_PER_POLL, self._continue_handshake, self.lost, pausing=False),
            open=Poller(READS_PER_POLL, Link.handle_events, self.lost, pausing=True),
            lingering=Poller(READS_PER_POLL, _discard_input, self._stop_lingering, pausing=False),
        )
        if self._contexts is not None:
            self._watchdog.start()
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.add_reader(sock.fileno(), self._accept, sock)
        self._checker = loop.create_task(self._check_forever())

    async def stop(self, grace_s: float | None) -> None:
        """Accept no new connections; cancel the calls that have not ended after `grace_s`."""
        pollers = self._pollers
        if pollers is None:
            self._stop_listening()
            return
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock.fileno())
        self._stop_listening()
        for link in [*pollers.new.links.values(), *pollers.handshaking.links.values()]:
            self.lost(link, SHUTDOWN)
        for link in list(pollers.open.links.values()):
            link.connection.drain()
            link.flush()
        if self._calls and grace_s:
            await asyncio.wait(self._calls, timeout=grace_s)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CANCEL_S)
        if self._checker is not None:
            self._checker.cancel()
        for link in list(pollers.open.links.values()):
            self.lost(link, SHUTDOWN)
        for link in list(pollers.lingering.links.values()):
            self._stop_lingering(link, SHUTDOWN)
        for poller in (*pollers.before_end(), pollers.lingering):
            poller.close()
        self._watchdog.stop()
        self._pollers = None

    # ---- for links

    def begin_call(self, link: Link, stream: Stream) -> Call:
        call = Call(link, stream, self._options.message_bytes)
        task = call.start(self._methods.get(stream.request.path))
        self._calls.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._calls.discard(task)
            call.finish()
            stream.served_by = _FINISHED_CALL
            link.connection.active_calls -= 1
            if link.connection.draining:
                link.flush()

        task.add_done_callback(done)
        return call

    def lost(self, link: Link, why: str) -> None:
        if link.closed:
            return
        if self._pollers is not None:
            for poller in self._pollers.before_end():
                poller.remove(link)
        self._certificates.remove(link)
        log.debug("%s: %s", link.peer, why)
        if link.goaway_sent and self._pollers is not None:
            self._linger(link, self._pollers.lingering)
        else:
            link.close()

    def watch(self, link: Link, events: int) -> None:
        if self._pollers is not None:
            for poller in self._pollers.before_end():
                poller.watch(link, events)

    # ---- the end of a connection

    def _linger(self, link: Link, lingering: Poller) -> None:
        """Close the link after its peer has: see `Link.half_close`."""
        if len(lingering.links) >= MAX_LINGERING:
            self._stop_lingering(next(iter(lingering.links.values())), MAKES_ROOM)
        link.half_close()
        lingering.add(link)
        asyncio.get_running_loop().call_later(LINGER_S, self._stop_lingering, link, "does not close its connection")

    def _stop_lingering(self, link: Link, why: str) -> None:
        """Close a link that lingers. May be called twice."""
        lingering = None if self._pollers is None else self._pollers.lingering
        if lingering is not None and lingering.links.get(link.fd) is link:
            lingering.remove(link)
            link.close()
            log.debug("%s: %s", link.peer, why)

    # ---- the beginning of a connection

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_CALL):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._pause_accepting(listening, str(error))
                return
            if not self._make_room():
                sock.close()
                continue
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # a peer that has left already is found to be lost
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(sock, address, self, self._watchdog)
            if self._contexts is None:
                self._open(link)
            else:
                self._running().new.add(link)

    def _make_room(self) -> bool:
        """Close a connection that has not begun or has ended if there are too many. Return False if there is none."""
        pollers, limit = self._running(), self._options.connections
        if limit is None or pollers.count() < limit:
            return True
        waiting = pollers.new.links or pollers.handshaking.links
        if pollers.lingering.links:
            self._stop_lingering(next(iter(pollers.lingering.links.values())), MAKES_ROOM)
        elif waiting:
            self.lost(next(iter(waiting.values())), MAKES_ROOM)
        else:
            self._log_full(f"{limit} connections are open")
            return False
        return True

    def _pause_accepting(self, sock: socket.socket, why: str) -> None:
        """Leave connections in the kernel's queue: there are no files, or there is no memory."""
        self._log_full(why)
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock.fileno())

        def resume() -> None:
            if sock in self._listening:
                loop.add_reader(sock.fileno(), self._accept, sock)

        loop.call_later(RETRY_ACCEPT_S, resume)

    def _log_full(self, why: str) -> None:
        if not self._logged_full:
            log.error(
                "New connections are not accepted: %s. Raise the limit of open files (LimitNOFILE in the unit).", why
            )
            self._logged_full = True

    def _begin_handshake(self, link: Link, _: int) -> bool:
        pollers = self._running()
        assert self._contexts is not None
        if len(pollers.handshaking.links) >= MAX_HANDSHAKES:
            self.lost(next(iter(pollers.handshaking.links.values())), MAKES_ROOM)
        pollers.new.remove(link)
        pollers.handshaking.add(link)
        return self._continue_handshake(link, 0, self._contexts())

    def _continue_handshake(self, link: Link, _: int, context: ssl.SSLContext | None = None) -> bool:
        if link.continue_handshake(context):
            self._running().handshaking.remove(link)
            self._open(link)
        return False

    def _open(self, link: Link) -> None:
        if link.certificate_names:
            if surplus := self._certificates.surplus(link):
                self.lost(surplus, "makes room for another connection of its certificate")
            self._certificates.add(link)
        self._running().open.add(link)
        link.idle_checks = 0
        link.flush()

    # ---- checks

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._logged_full = False
            self._certificates.refill()
            pollers = self._running()
            checks = (pollers.new, _check_handshake), (pollers.handshaking, _check_handshake), (pollers.open, _check)
            for poller, check in checks:
                for link in list(poller.links.values()):
                    try:
                        check(link)
                    except LinkLostError as error:
                        self.lost(link, str(error))
                    except Exception:  # a defect costs one connection
                        log.exception("%s: the connection cannot be checked", link.peer)
                        self.lost(link, "a defect of the server")

    def _running(self) -> _Pollers:
        assert self._pollers is not None
        return self._pollers

    def _stop_listening(self) -> None:
        for sock in self._listening:
            with contextlib.suppress(OSError):
                sock.close()
        self._listening.clear()


def _least_useful(links: dict[Link, None]) -> Link:
    """Return the connection that has been silent for longest, as one does whose network was cut. If all are active,
    return the newest, so that none replaces a client at work."""
    most_silent = max(links, key=lambda link: link.silent_checks)
    return most_silent if most_silent.silent_checks >= STALE_CHECKS else next(reversed(links))


def _discard_input(link: Link, _: int) -> bool:
    link.discard_input()
    return False


def _check_handshake(link: Link) -> None:
    link.idle_checks += 1
    if link.idle_checks > HANDSHAKE_CHECKS:
        raise LinkLostError("the handshake takes too long")


def _check(link: Link) -> None:
    connection = link.connection
    connection.refill_budget()
    link.idle_checks = 0 if connection.active_calls else link.idle_checks + 1
    link.silent_checks += 1
    if link.silent_checks > SILENT_CHECKS + ANSWER_CHECKS:
        raise LinkLostError("silent, and does not answer a ping")
    if link.silent_checks == SILENT_CHECKS:
        connection.ping()
    if link.idle_checks > (IDLE_CHECKS if connection.had_streams else HANDSHAKE_CHECKS):
        connection.drain()
    if connection.queue.buffer:
        link.send()


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    if host in ("0.0.0.0", "::"):  # noqa: S104  # the address that the settings name
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # the same
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
