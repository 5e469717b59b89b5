"""Which of many connections have something, in portions: an epoll of our own within the event loop's.

asyncio's own readers would cost a handle, a key and a callback for each connection and each message, and it would look
after all that are ready before anything else has its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Callable

from drover_collector.grpc_h2.link import Link, LinkLostError

log = logging.getLogger(__name__)

# Between two looks: as much as it takes to find many connections ready. A message costs a third less among fifty than
# among twelve; nothing that agents tell, nor their Hello, is spoiled by 0.2 s.
PAUSE_S, PAUSE_PER_LINK_S = 0.2, 800e-6
HURRIED = 4  # times shorter while one has much to say, as after an outage: it says a window, then waits for us
LEAST_PAUSE_S = 0.001  # a shorter one costs more than it saves


class Poller:
    """
    Args:
        most: how many links have their turn before other work of the event loop has.
        serve: what is done with one that is ready, and its events; whether it has much to say; may raise LinkLostError.
        lost: is told of one that is gone.
        pausing: after a look, leave some time for others to become ready: a look costs as much as a message.
    """

    def __init__(
        self, most: int, serve: Callable[[Link, int], bool], lost: Callable[[Link, str], None], *, pausing: bool
    ) -> None:
        self._most, self._serve, self._lost, self._pausing = most, serve, lost, pausing
        self._epoll = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._waits = False  # the event loop tells when there is something
        self._hurries = False  # the look before found one that has much to say
        self._closed = False
        self.links: dict[int, Link] = {}  # oldest first
        self._wait()

    def add(self, link: Link) -> None:
        link.wants = select.EPOLLIN
        self._epoll.register(link.fd, link.wants)
        self.links[link.fd] = link

    def watch(self, link: Link, events: int) -> None:
        if self.links.get(link.fd) is link:
            self._epoll.modify(link.fd, events)

    def remove(self, link: Link) -> None:
        if self.links.get(link.fd) is link:
            del self.links[link.fd]
            with contextlib.suppress(OSError):  # TLS that could not begin has closed the socket, which took it out
                self._epoll.unregister(link.fd)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._loop.add_reader(self._epoll.fileno(), self._look)

    def _again(self, found: int) -> None:
        """When to look next."""
        pause_s = min(PAUSE_S, PAUSE_PER_LINK_S * len(self.links)) if self._pausing and found < self._most else 0.0
        if self._hurries:
            pause_s, self._hurries = pause_s / HURRIED, False
        if not found or (found < self._most and pause_s < LEAST_PAUSE_S):
            self._wait()
            return
        if self._waits:
            self._waits = False
            self._loop.remove_reader(self._epoll.fileno())
        self._loop.call_later(pause_s, self._look)

    def _look(self) -> None:
        if self._closed:
            return
        ready = self._epoll.poll(0, self._most)
        self._again(len(ready))
        for fd, events in ready:
            link = self.links.get(fd)
            if link is None:
                continue  # gone since
            try:
                self._hurries |= self._serve(link, events)
            except LinkLostError as error:
                self._lost(link, str(error))
            except Exception:  # a defect of ours costs one connection
                log.exception("the connection of %s failed", link.peer)
                self._lost(link, "a defect")
