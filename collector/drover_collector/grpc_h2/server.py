"""A server for thousands of agents, each with one long stream: gRPC over HTTP/2 with as little as that needs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Mapping

from drover_collector.grpc_h2.call import Behaviour, Call
from drover_collector.grpc_h2.connection import Share
from drover_collector.grpc_h2.link import Link, LinkLostError
from drover_collector.grpc_h2.outgoing import Stream
from drover_collector.grpc_h2.poller import Poller
from drover_collector.grpc_h2.stalled_read import QUEUE_BYTES, StalledReadWatchdog

log = logging.getLogger(__name__)

READ_MOST = 64  # connections that are read before other work has its turn
SHAKE_MOST = 4  # handshakes likewise: about a millisecond each
SHAKING_MOST = 4_096  # handshakes under way, each of up to 46 KiB; then the oldest makes room
EACH_MOST = 8  # connections of one certificate: an agent has one, and some that its network has cut
STALE_LOOKS = 8  # an agent says something every 30 s at the least
LINGER_MOST, LINGER_S = 256, 2.0  # connections that have been ended and may read why
ACCEPT_MOST = 32
BACKLOG = 65_535  # the kernel has a bound of its own
FULL_S = 1.0  # no more files can be opened: before the next try
CLOSE_S = 5.0  # for calls to end that were cancelled
CARE_S = 5.0  # between looks at all connections; the rest is counted in looks, so that a pause of ours is no silence
HANDSHAKE_LOOKS = 24  # for TLS, and then for a first stream
IDLE_LOOKS = 120  # of a connection whose streams have ended
QUIET_LOOKS = 12  # a peer that lost its power never says so: it is asked,
ANSWER_LOOKS = 4  # and has so long to answer


class _Served:
    """Owns streams whose calls have ended, though their last words may still wait for the peer."""

    def changed(self) -> None: ...

    def whole(self, _: memoryview) -> bool:
        return False


_SERVED = _Served()


class AgentServer:
    """Used in one event loop: `listen`, `start`, then `stop`.

    Args:
        methods: path -> what serves it, a coroutine that is given a `Call` as its second argument.
        most: connections at once, when that is bounded; who comes then takes the place of the oldest handshake.
    """

    def __init__(self, methods: Mapping[str, Behaviour], most: int | None = None) -> None:
        self._methods, self._most = methods, most
        self._listening: list[socket.socket] = []
        self._contexts: Callable[[], ssl.SSLContext] | None = None
        # Connections that have said nothing yet, whose handshake has begun, and that are through with it. Handshakes
        # go on beside beginnings, or thousands that come at once would all begin before the first is through.
        self._new: Poller | None = None
        self._shaking: Poller | None = None
        self._open: Poller | None = None
        self._lingering: Poller | None = None  # ended by us; not read any more
        self._of: dict[str, dict[Link, None]] = {}  # names in a certificate -> its connections, oldest first
        self._shares: dict[str, Share] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._carer: asyncio.Task[None] | None = None
        self._reads = StalledReadWatchdog()
        self._told_full = False

    def listen(self, host: str, port: int, contexts: Callable[[], ssl.SSLContext] | None) -> int:
        """Take the address; connections wait until `start`.

        Args:
            host: a name or an address; one that stands for all addresses stands for those of IPv4 and IPv6.
            contexts: gives the context of a connection that begins its handshake; None: no TLS.
        Returns:
            The port, which 0 has become.
        Raises:
            OSError: it cannot be listened on.
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
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)  # of each that is accepted
            self._listening.append(sock)
            port = int(sock.getsockname()[1])
        if failed is not None and (failed.errno == errno.EADDRINUSE or not self._listening):
            self._stop_listening()
            raise failed
        return port

    async def start(self) -> None:
        self._open = Poller(READ_MOST, Link.ready, self.lost, pausing=True)
        self._new = Poller(SHAKE_MOST, self._begin_handshake, self.lost, pausing=False)
        self._shaking = Poller(SHAKE_MOST, self._shake, self.lost, pausing=False)
        self._lingering = Poller(READ_MOST, _linger, self._gone, pausing=False)
        if self._contexts is not None:
            self._reads.start()
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.add_reader(sock.fileno(), self._accept, sock)
        self._carer = loop.create_task(self._care())

    async def stop(self, grace_s: float | None) -> None:
        """Take nobody new; end what has not ended by itself after so many seconds."""
        if self._open is None or self._shaking is None or self._new is None or self._lingering is None:
            self._stop_listening()
            return
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock.fileno())
        self._stop_listening()
        for link in [*self._new.links.values(), *self._shaking.links.values()]:
            self.lost(link, "the collector stops")
        for link in list(self._open.links.values()):
            link.connection.leave()
            link.flush()
        if self._calls and grace_s:
            await asyncio.wait(self._calls, timeout=grace_s)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_S)
        if self._carer is not None:
            self._carer.cancel()
        for link in list(self._open.links.values()):
            self.lost(link, "the collector stops")
        for link in list(self._lingering.links.values()):
            self._gone(link, "the collector stops")
        for poller in (self._new, self._shaking, self._open, self._lingering):
            poller.close()
        self._reads.stop()
        self._new = self._shaking = self._open = self._lingering = None

    # ---- for links

    def begin(self, link: Link, stream: Stream) -> Call:
        call = Call(link, stream)
        behaviour = self._methods.get(stream.request.path)
        call.task = asyncio.get_running_loop().create_task(call.serve(behaviour))
        self._calls.add(call.task)

        def done(task: asyncio.Task[None]) -> None:
            self._calls.discard(task)
            call.task, stream.owner = None, _SERVED  # no ring is left, which only a garbage collection would find
            link.connection.busy -= 1
            if link.connection.leaving:
                link.flush()

        call.task.add_done_callback(done)
        return call

    def lost(self, link: Link, why: str) -> None:
        if not link.closed:
            for poller in (self._new, self._shaking, self._open):
                if poller is not None:
                    poller.remove(link)
            self._forget(link)
            log.debug("%s: %s", link.peer, why)
            if link.said_end and self._lingering is not None:
                self._linger(link, self._lingering)
            else:
                link.close()

    def _linger(self, link: Link, lingering: Poller) -> None:
        """Close it once its peer has: with unread data, the kernel would have it forget what we said last."""
        if len(lingering.links) >= LINGER_MOST:
            self._gone(next(iter(lingering.links.values())), "others need its place")
        link.half_close()
        lingering.add(link)
        asyncio.get_running_loop().call_later(LINGER_S, self._gone, link, "does not leave")

    def _gone(self, link: Link, why: str) -> None:
        """One that lingered; may be told twice."""
        if self._lingering is not None and self._lingering.links.get(link.fd) is link:
            self._lingering.remove(link)
            link.close()
            log.debug("%s: %s", link.peer, why)

    def _forget(self, link: Link) -> None:
        links = self._of.get(link.who, {})
        links.pop(link, None)
        if not links:
            self._of.pop(link.who, None)

    def watch(self, link: Link, events: int) -> None:
        for poller in (self._new, self._shaking, self._open):
            if poller is not None:
                poller.watch(link, events)

    # ---- connections

    def _accept(self, sock: socket.socket) -> None:
        assert self._open is not None and self._shaking is not None and self._new is not None
        assert self._lingering is not None
        for _ in range(ACCEPT_MOST):
            try:
                own, address = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._full(sock, str(error))
                return
            new, shaking, lingering = self._new.links, self._shaking.links, self._lingering.links
            count = len(self._open.links) + len(shaking) + len(new) + len(lingering)
            if self._most is not None and count >= self._most:
                if lingering:
                    self._gone(next(iter(lingering.values())), "others need its place")
                elif not (new or shaking):
                    self._tell_full(f"{self._most} connections are open")
                    own.close()
                    continue
                else:
                    self.lost(next(iter((new or shaking).values())), "others need its place")
            own.setblocking(False)
            with contextlib.suppress(OSError):  # one that has left again is found to be lost
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(own, address, self, self._reads)
            if self._contexts is None:
                self._welcome(link)
            else:
                self._new.add(link)

    def _full(self, sock: socket.socket, why: str) -> None:
        """No files, or no memory: agents wait in the kernel's queue."""
        self._tell_full(why)
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock.fileno())

        def go_on() -> None:
            if sock in self._listening:
                loop.add_reader(sock.fileno(), self._accept, sock)

        loop.call_later(FULL_S, go_on)

    def _tell_full(self, why: str) -> None:
        if not self._told_full:
            log.error("no more agents can connect: %s; raise the limit of open files (LimitNOFILE in the unit)", why)
            self._told_full = True

    def _begin_handshake(self, link: Link, _: int) -> bool:
        assert self._new is not None and self._shaking is not None and self._contexts is not None
        if len(self._shaking.links) >= SHAKING_MOST:
            self.lost(next(iter(self._shaking.links.values())), "others need its place")
        self._new.remove(link)
        self._shaking.add(link)
        return self._shake(link, 0, self._contexts())

    def _shake(self, link: Link, _: int, context: ssl.SSLContext | None = None) -> bool:
        assert self._shaking is not None
        if link.shake_hands(context):
            self._shaking.remove(link)
            self._welcome(link)
        return False

    def _welcome(self, link: Link) -> None:
        assert self._open is not None
        if link.who:
            self._share(link)
        self._open.add(link)
        link.idle = 0
        link.flush()

    def _share(self, link: Link) -> None:
        """All connections of a certificate have one budget, and so many places."""
        share = self._shares.setdefault(link.who, Share())
        others = self._of.setdefault(link.who, {})
        if len(others) >= EACH_MOST:
            if not share.crowded:
                log.warning("%s: %d connections at once; one makes room for each new one", link.who, len(others))
                share.crowded = True
            self.lost(_least(others), "another connection of its certificate needs its place")
            others = self._of.setdefault(link.who, {})
        others[link] = None
        link.connection.share = share

    def _relax(self) -> None:
        for who, share in list(self._shares.items()):
            share.relax()
            if who not in self._of:
                del self._shares[who]

    async def _care(self) -> None:
        while True:
            await asyncio.sleep(CARE_S)
            assert self._open is not None and self._shaking is not None and self._new is not None
            self._told_full = False
            self._relax()
            looks = (self._new, _look_at_handshake), (self._shaking, _look_at_handshake), (self._open, _look_at)
            for poller, look in looks:
                for link in list(poller.links.values()):
                    try:
                        look(link)
                    except LinkLostError as error:
                        self.lost(link, str(error))
                    except Exception:  # a defect of ours costs one connection
                        log.exception("looking after %s", link.peer)
                        self.lost(link, "a defect")

    def _stop_listening(self) -> None:
        for sock in self._listening:
            with contextlib.suppress(OSError):
                sock.close()
        self._listening.clear()


def _least(links: dict[Link, None]) -> Link:
    """Which of a certificate's connections makes room: the one that says nothing for longest, as one does whose
    network was cut; where all speak, the newest, so that none takes the place of an agent at work."""
    quietest = max(links, key=lambda link: link.quiet)
    return quietest if quietest.quiet >= STALE_LOOKS else next(reversed(links))


def _linger(link: Link, _: int) -> bool:
    link.linger()
    return False


def _look_at_handshake(link: Link) -> None:
    link.idle += 1
    if link.idle > HANDSHAKE_LOOKS:
        raise LinkLostError("its handshake takes too long")


def _look_at(link: Link) -> None:
    connection = link.connection
    connection.relax()
    link.idle = 0 if connection.busy else link.idle + 1
    link.quiet += 1
    if link.quiet > QUIET_LOOKS + ANSWER_LOOKS:
        raise LinkLostError("says nothing, and does not answer")
    if link.quiet == QUIET_LOOKS:
        connection.ping()
    if link.idle > (IDLE_LOOKS if connection.begun else HANDSHAKE_LOOKS):
        connection.leave()
    if connection.outgoing:
        link.send()


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    if host in ("0.0.0.0", "::"):  # noqa: S104  # what the settings say
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # the same
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
