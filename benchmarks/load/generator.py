"""A process full of streams. Prints a line of JSON every second; ends when its data is acknowledged, or at SIGTERM.

python -m load.generator '{"folder": ..., "address": ..., ...}'     the fields of `Order`
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from drover_proto import telemetry_pb2 as pb
from load.agents import Counts, Pace, Stream
from load.certificates import Authority
from load.fleet import name
from load.messages import Pool

BENCHMARKS = Path(__file__).parents[1]
POOLS = 8
MOST_ACKS = 200  # beyond so many the line of each second does not name them
XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@dataclass(frozen=True, slots=True)
class Order:
    """What one generator process does.

    Attributes:
        folder: holds ca.crt and ca.key. first, count: numbers of its streams; total: of all processes.
        gpus: of each stream. open_s: the streams open evenly within so long, and then run for run_s.
        drain_s: how long it waits for Acks after that.
        failing: numbers of its streams that send an XID 79 of GPU 0 when they are asked to.
    """

    folder: str
    address: str
    first: int
    count: int
    total: int
    gpus: int
    open_s: float
    every_s: float
    ticks: int
    run_s: float
    drain_s: float = 30.0
    failing: tuple[int, ...] = ()


class Generator:
    """The other end: starts the process and keeps its newest line."""

    def __init__(self, order: Order) -> None:
        self.newest: dict[str, Any] = {}
        self.said = threading.Event()
        environment = os.environ | {"PYTHONPATH": f"{BENCHMARKS}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "load.generator", json.dumps(asdict(order))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.newest = json.loads(line)
            self.said.set()
        self.said.set()

    def begin(self, at_s: float) -> None:
        """Once it has `said` that it is ready: its load begins at `at_s` (epoch), when its streams are open."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{at_s}\n")
        self._process.stdin.flush()

    def fail(self, at_s: float, within_s: float) -> None:
        """After `begin`: the events of `failing` are sent evenly from `at_s` (epoch) on, within so many seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{at_s} {within_s}\n")
        self._process.stdin.flush()

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Its last line, once it has ended by itself."""
        code = self._process.wait(timeout_s)
        self._reader.join(10)
        if code or not self.newest:
            raise RuntimeError(f"a generator ended with {code}")
        return self.newest

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is there before the clock runs, as on nodes: telemetry, keys and certificates."""

    pools: list[Pool]
    authority: bytes
    certificates: list[tuple[bytes, bytes]]  # key and certificate of each stream


def prepare(order: Order) -> Prepared:
    authority = Authority.load(Path(order.folder))
    names = [name(n) for n in range(order.first, order.first + order.count)]
    return Prepared(
        [Pool(number, order.gpus) for number in range(min(POOLS, order.count))],
        authority.pem,
        [authority.issue(node, f"drover://agent/{node}") for node in names],
    )


async def generate(order: Order, prepared: Prepared, begin_s: float) -> None:
    pools, end_s = prepared.pools, begin_s + order.run_s
    counts, pace = Counts(), Pace(order.every_s, order.ticks, begin_s, end_s)
    streams = [
        Stream(name(n), n, n / order.total, pools[n % len(pools)], pace, counts)
        for n in range(order.first, order.first + order.count)
    ]
    opening = [begin_s - order.open_s + order.open_s * (n + 0.5) / order.count for n in range(order.count)]
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    tasks = [
        asyncio.create_task(_open(stream, at_s, order.address, prepared.authority, own))
        for stream, at_s, own in zip(streams, opening, prepared.certificates, strict=True)
    ]
    failing = [stream for n, stream in enumerate(streams, order.first) if n in order.failing]
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), failing, tasks), daemon=True).start()
    while not ending.is_set():
        report(streams, counts)
        if time.time() > end_s and (all(s.done for s in streams) or time.time() > end_s + order.drain_s):
            break
        try:
            async with asyncio.timeout(1.0):
                await ending.wait()
        except TimeoutError:
            continue
    report(streams, counts)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=10)


async def _open(stream: Stream, at_s: float, address: str, authority: bytes, own: tuple[bytes, bytes]) -> None:
    await asyncio.sleep(max(0.0, at_s - time.time()))
    await stream.run(address, grpc.ssl_channel_credentials(authority, *own))


def _listen(loop: asyncio.AbstractEventLoop, failing: list[Stream], tasks: list[asyncio.Task[None]]) -> None:
    """Read from stdin when the events are due; stdin ends with who started this process."""
    for line in sys.stdin:
        at_s, within_s = map(float, line.split())
        loop.call_soon_threadsafe(_fail, failing, at_s, within_s, tasks)


def _fail(failing: list[Stream], at_s: float, within_s: float, tasks: list[asyncio.Task[None]]) -> None:
    for n, stream in enumerate(failing):
        event = pb.Event(gpu=0, kind="xid", code="79", message=XID, source="kmsg")
        tasks.append(asyncio.create_task(stream.send_event(event, at_s + within_s * n / len(failing))))


def report(streams: list[Stream], counts: Counts) -> None:
    lags = sorted(stream.lag_s for stream in streams)
    line = asdict(counts) | {
        "at_s": time.time(), "cpu_s": time.process_time(), "lag_max_s": lags[-1], "lag_p50_s": lags[len(lags) // 2],
    }  # fmt: skip
    if counts.events_acked > MOST_ACKS:
        del line["event_acks"]
    print(json.dumps(line), flush=True)


def main(order: Order) -> None:
    prepared = prepare(order)
    gc.freeze()
    gc.set_threshold(100_000, 50, 1_000)  # thousands of agents in one process: theirs are small
    print(json.dumps({"ready": True}), flush=True)
    asyncio.run(generate(order, prepared, float(sys.stdin.readline())))


if __name__ == "__main__":
    main(Order(**json.loads(sys.argv[1])))
