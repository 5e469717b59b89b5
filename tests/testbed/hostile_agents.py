"""Agents with a good certificate that attack their collector: what they send, and what it costs the collector.

For tests and for `make chaos`: each attack is a function of an address and a certificate, and `Cost` measures.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import hpack

from drover_collector.grpc_h2 import frames
from drover_proto import fleet_pb2, fleet_pb2_grpc
from drover_proto import telemetry_pb2 as pb
from testbed.certificates import Files
from testbed.http2 import GREETING, block, data

PATH = "/drover.telemetry.v1.Telemetry/Stream"
WAIT_S = 300.0
MIB = 2**20
HELLO, BATCH, RECORD, RECORDS = b"\x0a", b"\x12", b"\x1a", b"\x2a"  # tags of AgentMessage
ALL_SETTINGS = frames.FRAME_BYTES // 6  # entries in the longest frame


def varint(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def nested(tag: bytes, body: bytes) -> bytes:
    """A field of protobuf that is a message."""
    return tag + varint(len(body)) + body


def empty_parts(kind: str, size: int) -> bytes:
    """An AgentMessage of about `size` bytes that is nothing but empty messages; parsed they take 30 to 75 times that.

    Args:
        kind: records, blocks, entities, schemas, columns, inventory or capabilities.
    """
    outer, part = {
        "records": (RECORDS, b"\x0a\x02\x12\x00"),
        "blocks": (BATCH, b"\x1a\x00"),
        "entities": (HELLO, b"\x42\x00"),
        "schemas": (HELLO, b"\x4a\x00"),
        "columns": (HELLO, b"\x1a\x00"),
        "inventory": (HELLO, b"\x52\x04\x0a\x00\x12\x00"),
        "capabilities": (HELLO, b"\x5a\x00"),
    }[kind]
    body = part * (size // len(part))
    return nested(outer, nested(b"\x4a", body) if kind == "columns" else body)


class HostileAgent:
    """One connection that sends frames of its own making, over TLS where it has a certificate."""

    def __init__(self, address: str, files: Files | None) -> None:
        host, port = address.rsplit(":", 1)
        self.socket: socket.socket = socket.create_connection((host, int(port)), WAIT_S)
        if files is not None:
            context = ssl.create_default_context(cafile=files.ca)
            context.load_cert_chain(files.cert, files.key)
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.ended: dict[int, dict[str, str]] = {}  # stream -> the headers of its end
        self.reset: dict[int, int] = {}  # stream -> the code of its RST_STREAM
        self.goaway: int | None = None
        self.closed = False
        self._rest, self._decoder = b"", hpack.Decoder()
        self._windows = {0: frames.WINDOW}  # stream -> what it may send; 0: the connection
        self.socket.sendall(GREETING)

    def open(self, stream: int, path: str = PATH) -> None:
        text = block(_path=path, _scheme="https", grpc_encoding="gzip")
        self.send(frames.headers(stream, text, last=False))

    def say(self, stream: int, message: bytes, *, packed: bool = False) -> None:
        """A message of gRPC, compressed, within the windows."""
        self._windows.setdefault(stream, frames.WINDOW)
        body = message if packed else gzip.compress(message, 9, mtime=0)
        whole = b"\x01" + len(body).to_bytes(4) + body
        for at in range(0, len(whole), frames.FRAME_BYTES):
            part = whole[at : at + frames.FRAME_BYTES]
            while min(self._windows[0], self._windows[stream]) < len(part) and not self.closed:
                self.read()
            self._windows[0] -= len(part)
            self._windows[stream] -= len(part)
            self.send(data(part, stream))

    def send(self, sent: bytes) -> None:
        try:
            self.socket.sendall(sent)
        except OSError:
            self.closed = True

    def read(self) -> None:
        """What comes next, at least one byte or the end."""
        try:
            came = self.socket.recv(65_536)
        except ConnectionError:
            came = b""
        self.closed |= not came
        self._rest += came
        while len(self._rest) >= frames.HEAD_BYTES:
            high, low, kind, _, stream = frames.HEAD.unpack_from(self._rest)
            end = frames.HEAD_BYTES + (high << 8 | low)
            if len(self._rest) < end:
                break
            body, self._rest = self._rest[frames.HEAD_BYTES : end], self._rest[end:]
            self._take(kind, stream, body)

    def _take(self, kind: int, stream: int, body: bytes) -> None:
        match kind:
            case frames.WINDOW_UPDATE if stream in self._windows:
                self._windows[stream] += int.from_bytes(body)
            case frames.HEADERS:
                self.ended[stream] = self.ended.get(stream, {}) | dict(self._decoder.decode(body))
            case frames.RST_STREAM:
                self.reset[stream] = int.from_bytes(body)
            case frames.GOAWAY:
                self.goaway = int.from_bytes(body[4:8])

    def until(self, done: Callable[[], bool]) -> None:
        """Read until it is so, or the connection has ended."""
        while not (done() or self.closed):
            self.read()

    def status(self, stream: int) -> str | None:
        """The number of gRPC's status with which a stream ended."""
        return self.ended.get(stream, {}).get("grpc-status")

    def is_reset(self) -> bool:
        """Whether the other end is gone, rather than done with sending; asked by sending it something."""
        try:
            socket.socket.send(self.socket, b"x")  # not TLS's, which has ended
        except OSError:
            return True
        return self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def close(self) -> None:
        self.socket.close()


# ---- attacks


def bombs_before_hello(address: str, files: Files | None, message: bytes, streams: int = 16) -> dict[int, str | None]:
    """Each of many streams of one connection begins with this message. stream -> the status with which it ended."""
    agent = HostileAgent(address, files)
    numbers = range(1, 2 * streams, 2)
    packed = gzip.compress(message, 9, mtime=0)
    for number in numbers:
        agent.open(number)
        agent.say(number, packed, packed=True)
    agent.until(lambda: all(agent.status(number) is not None for number in numbers))
    agent.close()
    return {number: agent.status(number) for number in numbers}


def bombs_after_hello(address: str, files: Files | None, hello: pb.Hello, message: bytes, count: int) -> str | None:
    """A welcomed agent sends this message again and again, then ends its stream. The status it gets."""
    agent = HostileAgent(address, files)
    agent.open(1)
    agent.say(1, pb.AgentMessage(hello=hello).SerializeToString())
    packed = gzip.compress(message, 9, mtime=0)
    for _ in range(count):
        agent.say(1, packed, packed=True)
    agent.send(data(b"", flags=frames.END_STREAM))
    agent.until(lambda: agent.status(1) is not None)
    agent.close()
    return agent.status(1)


def loose(message: bytes, size: int = 60_000) -> bytes:
    """A message with random bytes behind it, in a field that nobody knows: so it is compressed less tightly."""
    return message + nested(b"\x7a", random.Random(size).randbytes(size))


def settings_flood(address: str, files: Files | None, streams: int = 100, seconds: float = 5.0) -> HostileAgent:
    """The longest SETTINGS, again and again, on a connection with as many streams as it may have."""
    agent = HostileAgent(address, files)
    for number in range(1, 2 * streams, 2):
        agent.open(number, "/nothing")
    body = (b"\x00\x04" + (65_536).to_bytes(4) + b"\x00\x04" + (65_535).to_bytes(4)) * (ALL_SETTINGS // 2)
    flood = frames.head(frames.SETTINGS, 0, 0, len(body)) + body
    agent.socket.settimeout(0.0)
    waits, until_s = b"", time.monotonic() + seconds
    while time.monotonic() < until_s and not agent.closed and agent.goaway is None:
        waits = waits or flood
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            try:
                waits = waits[agent.socket.send(waits) :]
            except OSError as error:
                if isinstance(error, (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)):
                    time.sleep(0.002)
                else:
                    agent.closed = True
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            agent.read()
    agent.socket.settimeout(WAIT_S)
    return agent


def settings_floods(address: str, files: Files | None, connections: int = 64, seconds: float = 5.0) -> list[int | None]:
    """The same on many connections of one certificate. The code of each one's GOAWAY."""
    codes: list[int | None] = []

    def flood() -> None:
        agent = None
        with contextlib.suppress(OSError):
            agent = settings_flood(address, files, seconds=seconds)
            agent.close()
        codes.append(agent.goaway if agent else None)

    threads = [threading.Thread(target=flood) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


# ---- what it costs


@dataclass
class Cost:
    """What an attack cost a collector.

    Attributes:
        grown_mib: the highest resident memory, less what it was before. slowest_s: of the answers of GetStatus.
        answers: how many came meanwhile.
    """

    grown_mib: float = 0.0
    slowest_s: float = 0.0
    answers: int = 0


@contextlib.contextmanager
def measured(pid: int, api: str, viewer: Files | None) -> Iterator[Cost]:
    """Measure a collector's process until the end of the block."""
    cost, over = Cost(), threading.Event()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest counts from now on
    before = memory_mib(pid, "VmRSS")
    with _channel(api, viewer) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        stub.GetStatus(fleet_pb2.StatusRequest(), timeout=WAIT_S)  # the connection's making does not count

        def ask() -> None:
            while not over.is_set():
                began_s = time.monotonic()
                stub.GetStatus(fleet_pb2.StatusRequest(), timeout=WAIT_S)
                cost.slowest_s, cost.answers = max(cost.slowest_s, time.monotonic() - began_s), cost.answers + 1
                over.wait(0.05)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield cost
        finally:
            over.set()
            asking.join()
            cost.grown_mib = memory_mib(pid, "VmHWM") - before


def _channel(api: str, viewer: Files | None) -> grpc.Channel:
    return grpc.insecure_channel(api) if viewer is None else grpc.secure_channel(api, viewer.credentials)


def memory_mib(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) / 1024
    raise LookupError(name)
