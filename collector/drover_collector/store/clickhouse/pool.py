"""A pool of clients, each used by one thread at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from drover_collector.store.errors import StoreError

CLOSED_S = 1.0  # how often a thread that waits for a client looks if the store was closed, or one was discarded


class Pool:
    """At most `size` clients, made when they are needed. Thread-safe."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._make = make
        self._size = size
        self._free: queue.LifoQueue[Any] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._made = 0
        self._closed = False

    def take(self) -> Any:
        """Return a client, and wait for one if all are in use.

        Raises:
            StoreError: the store is closed.
        """
        client = self._next()
        if self._closed:
            self._free.put(client)
            raise StoreError("the store is closed")
        return client

    def _next(self) -> Any:
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                return self._free.get_nowait()
            with self._lock:
                if self._made < self._size and not self._closed:
                    client = self._make()
                    self._made += 1
                    return client
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=CLOSED_S)
        raise StoreError("the store is closed")

    def give(self, client: Any) -> None:
        """Return a client to the pool."""
        self._free.put(client)

    def discard(self, client: Any) -> None:
        """Close a client that was taken. Another is made when one is needed."""
        with contextlib.suppress(Exception):  # it is of no use either way
            client.close()
        with self._lock:
            self._made -= 1

    def close(self) -> bool:
        """Wait for running statements, and close. Return False if it was closed before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        while self._made:  # fewer, where one is discarded meanwhile
            with contextlib.suppress(queue.Empty):
                self._free.get(timeout=CLOSED_S).close()
                with self._lock:
                    self._made -= 1
        return True
