"""Attacks on a running collector's Fleet API and metrics page, and what they cost it.

An attack runs while `Watch` looks at the collector's memory and asks GetStatus again and again as an operator does.
The tests and `make chaos` share this. Keep the collector in a `cage`: one such attack took 23 GiB of a machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from drover_collector.grpc_h2 import frames
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.certificates import Files
from testbed.hostile_agents import HostileAgent
from testbed.http2 import block

SERIES = "/drover.fleet.v1.Fleet/QuerySeries"
STATUS = "/drover.fleet.v1.Fleet/GetStatus"
CGROUPS = Path("/sys/fs/cgroup")
STATUS_S = 120.0  # what GetStatus may take before it counts as not answered
MIB = 1 << 20


def empty_targets(size: int) -> bytes:
    """A SeriesRequest of empty targets, two bytes each, that parse to 33 times that; gzip makes a thousandth of it."""
    return bytes([pb.SeriesRequest.TARGETS_FIELD_NUMBER << 3 | 2, 0]) * (size // 2)


@dataclass
class Cost:
    """
    Attributes:
        grown_mib: how far the collector's resident memory rose over what it was before. slowest_s: of GetStatus.
        failed: why GetStatus was not answered, each time.
    """

    grown_mib: float = 0.0
    slowest_s: float = 0.0
    answered: int = 0
    failed: list[str] = field(default_factory=list)

    def row(self) -> str:
        return f"+{self.grown_mib:.0f} MiB, slowest GetStatus {self.slowest_s:.2f} s of {self.answered}"


@dataclass
class Pinned:
    """`calls`: how many were sent. `agents`: the connections."""

    calls: int
    agents: list[HostileAgent]


def resident(pid: int) -> int:
    """Bytes; 0: the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def threads_of(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


def channel(target: str, files: Files | None) -> grpc.Channel:
    """A connection of its own: gRPC else shares one among all channels to an address. None: without TLS."""
    apart = (("grpc.use_local_subchannel_pool", 1),)
    if files is None:
        return grpc.insecure_channel(target, apart)
    return grpc.secure_channel(target, files.credentials, apart)


@contextlib.contextmanager
def watch(pid: int, target: str, operator: Files | None, *, reconnect: bool = False) -> Iterator[Cost]:
    """Until the block ends.

    Args:
        reconnect: each GetStatus over a connection of its own, as the command line's; else over one, as the console's.
    """
    cost, ended, before = Cost(), threading.Event(), resident(pid)

    def look() -> None:
        while not ended.wait(0.02):
            cost.grown_mib = max(cost.grown_mib, (resident(pid) - before) / MIB)

    def ask() -> None:
        held = channel(target, operator)
        while not ended.wait(0.1):
            began_s = time.monotonic()
            try:
                FleetStub(held).GetStatus(pb.StatusRequest(), timeout=STATUS_S, wait_for_ready=True)
                cost.answered += 1
            except grpc.RpcError as error:
                cost.failed.append(f"{error.code().name}: {error.details()}")
            cost.slowest_s = max(cost.slowest_s, time.monotonic() - began_s)
            if reconnect:
                held.close()
                held = channel(target, operator)
        held.close()

    threads = [threading.Thread(target=work, daemon=True) for work in (look, ask)]
    for thread in threads:
        thread.start()
    try:
        yield cost
        deadline_s = time.monotonic() + STATUS_S
        while not cost.answered and not cost.failed and time.monotonic() < deadline_s:
            time.sleep(0.05)
    finally:
        ended.set()
        for thread in threads:
            thread.join(STATUS_S + 5)


def flood(
    target: str, attacker: Files, body: bytes, *, connections: int, calls: int, rounds: int, timeout_s: float = 300.0
) -> Counter[str]:
    """Call QuerySeries with the gzipped body, `calls` at a time on each connection; the answers' codes, counted."""
    codes: Counter[str] = Counter()
    lock = threading.Lock()

    def attack() -> None:
        with channel(target, attacker) as made:
            call = made.unary_unary(SERIES)
            for _ in range(rounds):
                sent = [call.future(body, timeout=timeout_s, compression=grpc.Compression.Gzip) for _ in range(calls)]
                for each in sent:
                    with lock:
                        codes[each.code().name] += 1

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * rounds + 10)
    return codes


@contextlib.contextmanager
def pinned_calls(
    target: str, attackers: Sequence[Files], connections: int, calls: int, *, narrow: bool = True
) -> Iterator[Pinned]:
    """Calls of GetStatus whose answers nobody takes: their streams' windows are 0, and nothing is read.

    Args:
        narrow: the kernel takes next to nothing either.
    """
    held: list[HostileAgent] = []
    sent = 0
    request = frames.head(frames.DATA, frames.END_STREAM, 0, 5) + bytes(5)
    try:
        for number in range(connections):
            made = HostileAgent(target, attackers[number % len(attackers)])
            held.append(made)
            if narrow:
                made.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_304)
            made.send(frames.settings_ack() + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
            for stream in range(1, 2 * calls, 2):
                call = frames.headers(stream, block(_path=STATUS, _scheme="https"), last=False)
                made.send(call + request[:5] + stream.to_bytes(4) + request[9:])
                sent += not made.closed
        yield Pinned(sent, held)
    finally:
        for made in held:
            made.close()


@contextlib.contextmanager
def idle_connections(host: str, port: int, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections of nobody: without a certificate, and without a word but `says`. Those that are refused count too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1_000
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            made = socket.socket()
            made.setblocking(False)  # as one whose backlog is full would wait for good
            made.connect_ex((host, port))
            held.append(made)
            if says:
                with contextlib.suppress(OSError):
                    made.send(says)
        yield held
    finally:
        for made in held:
            made.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def cage(pid: int, mib: int = 3_072) -> Iterator[str]:
    """Keep a process in a memory cgroup; where none can be made, under a limit of its address space. Yields which."""
    name = f"drover-test-{os.getpid()}-{pid}"
    for folder, limit in ((CGROUPS / "memory" / name, "memory.limit_in_bytes"), (CGROUPS / name, "memory.max")):
        if not folder.parent.is_dir():
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(mib * MIB))
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield f"cgroup of {mib} MiB"
        finally:
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(str(pid))  # it cannot be removed while one is in it
            with contextlib.suppress(OSError):
                folder.rmdir()
        return
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + mib * MIB, size + mib * MIB))
    yield f"{mib} MiB more of address space"
