"""A network between agents and a collector that can be cut, slowed, frozen and torn. TLS passes through it unread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass, field

PIECE = 65_536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST


@dataclass
class Weather:
    """How the network is now; each field may be set at any time.

    Attributes:
        refuses: connections are reset at once.
        swallows: new connections are taken and nothing answers.
        delay_s, bytes_per_s: of each direction of each connection; 0: none, no limit.
        tears: a connection is reset somewhere within its next so many bytes; 0: none is.
    """

    refuses: bool = False
    swallows: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    tears: int = 0


@dataclass(eq=False)
class _Pair:
    writers: list[asyncio.StreamWriter]
    frozen: bool = False  # for good: what comes is taken and goes nowhere
    left: int = 0  # bytes until it is torn; 0: it is not


@dataclass
class Proxy:
    """Listens on loopback in a thread of its own."""

    to: tuple[str, int]
    seed: int = 1
    weather: Weather = field(default_factory=Weather)
    torn: int = 0

    def __post_init__(self) -> None:
        self._pairs: set[_Pair] = set()
        self._rng = random.Random(self.seed)
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._meet, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def close(self) -> None:
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    # ---- weather

    def reset(self) -> None:
        """RST to both ends of every open connection."""
        self._each(_tear)

    def freeze(self) -> None:
        """Open connections stay open, and nothing passes on them any more: as after a firewall's restart."""

        def freeze(pair: _Pair) -> None:
            pair.frozen = True

        self._each(freeze)

    def tear(self, within: int) -> None:
        """Connections, open and new, are reset somewhere within so many bytes, amid whatever message that is."""
        self.weather.tears = within

        def arm(pair: _Pair) -> None:
            pair.left = self._rng.randint(1, within) if within else 0

        self._each(arm)

    def _each(self, do: object) -> None:
        done = threading.Event()

        def work() -> None:
            for pair in list(self._pairs):
                do(pair)  # type: ignore[operator]  # one of the three above
            done.set()

        self._loop.call_soon_threadsafe(work)
        done.wait(5)

    # ---- connections

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = _Pair([writer])
        self._pairs.add(pair)
        try:
            if self.weather.refuses:
                return
            if self.weather.swallows:
                while await reader.read(PIECE):
                    pass
                return
            if self.weather.tears:
                pair.left = self._rng.randint(1, self.weather.tears)
            there, back = await asyncio.open_connection(*self.to)
            pair.writers.append(back)
            ways = [asyncio.create_task(self._pass(pair, *way)) for way in ((reader, back), (there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        except OSError:
            pass  # the collector is away
        finally:
            self._pairs.discard(pair)
            _tear(pair)

    async def _pass(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                if self.weather.delay_s:
                    await asyncio.sleep(self.weather.delay_s)
                if self.weather.bytes_per_s:
                    await asyncio.sleep(len(data) / self.weather.bytes_per_s)
                if pair.frozen:
                    continue
                if pair.left:
                    if len(data) >= pair.left:
                        writer.write(data[: pair.left])  # the message's beginning arrives, its end never does
                        self.torn += 1
                        return
                    pair.left -= len(data)
                writer.write(data)
                await writer.drain()


def _tear(pair: _Pair) -> None:
    for writer in pair.writers:
        made: socket.socket | None = writer.get_extra_info("socket")
        if made is not None and made.fileno() >= 0:
            with contextlib.suppress(OSError):
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
