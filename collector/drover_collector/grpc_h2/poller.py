"""Find which of many connections have data, a portion at a time: an epoll of our own within the event loop's.

asyncio's readers would cost a handle, a key and a callback for each connection and each message, and would serve all
that are ready before other work has its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Callable

from drover_collector.grpc_h2.link import Link, LinkLostError

log = logging.getLogger(__name__)

# Between two polls: long enough to find many connections ready. A message costs a third less among fifty than among
# twelve, and 0.2 s is a short delay on a stream that stays open for days.
PAUSE_S, PAUSE_PER_LINK_S = 0.2, 800e-6
BUSY_FACTOR = 4  # shorter while a connection sends much: it sends one window, then waits until that is read
MIN_PAUSE_S = 0.001  # a shorter one costs more than it saves


class Poller:
    """
    Args:
        per_poll: links served before other work of the event loop has its turn.
        serve: serves a link that is ready, given its events; returns whether it sends much; may raise LinkLostError.
        lost: called for a link that is lost.
        pausing: pause after a poll so that others become ready: a poll costs as much as a message.
    """

    def __init__(
        self, per_poll: int, serve: Callable[[Link, int], bool], lost: Callable[[Link, str], None], *, pausing: bool
    ) -> None:
        self._per_poll, self._serve, self._lost, self._pausing = per_poll, serve, lost, pausing
        self._epoll = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._waiting = False  # the event loop calls when a link is ready
        self._busy = False  # a link sent much in the last poll
        self._closed = False
        self.links: dict[int, Link] = {}  # oldest first
        self._wait()

    def add(self, link: Link) -> None:
        link.events = select.EPOLLIN
        self._epoll.register(link.fd, link.events)
        self.links[link.fd] = link

    def watch(self, link: Link, events: int) -> None:
        if self.links.get(link.fd) is link:
            self._epoll.modify(link.fd, events)

    def remove(self, link: Link) -> None:
        if self.links.get(link.fd) is link:
            del self.links[link.fd]
            with contextlib.suppress(OSError):  # a failed start of TLS has closed the socket, which unregistered it
                self._epoll.unregister(link.fd)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._loop.add_reader(self._epoll.fileno(), self._poll)

    def _schedule(self, found: int) -> None:
        """Schedule the next poll."""
        pause_s = min(PAUSE_S, PAUSE_PER_LINK_S * len(self.links)) if self._pausing and found < self._per_poll else 0.0
        if self._busy:
            pause_s, self._busy = pause_s / BUSY_FACTOR, False
        if not found or (found < self._per_poll and pause_s < MIN_PAUSE_S):
            self._wait()
            return
        if self._waiting:
            self._waiting = False
            self._loop.remove_reader(self._epoll.fileno())
        self._loop.call_later(pause_s, self._poll)

    def _poll(self) -> None:
        if self._closed:
            return
        ready = self._epoll.poll(0, self._per_poll)
        self._schedule(len(ready))
        for fd, events in ready:
            link = self.links.get(fd)
            if link is None:
                continue  # lost since
            try:
                self._busy |= self._serve(link, events)
            except LinkLostError as error:
                self._lost(link, str(error))
            except Exception:  # a defect costs one connection
                log.exception("%s: the connection failed", link.peer)
                self._lost(link, "a defect of the server")
