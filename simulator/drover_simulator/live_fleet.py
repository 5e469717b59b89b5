"""Run a simulated fleet as live agents in one process: one real agent, spool and gRPC stream per node."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Reading
from drover_agent.spool.disk_thread import DiskThread
from drover_agent.spool.spool import SpoolError
from drover_core.model.events import to_json
from drover_core.model.fleet import FleetError, FleetSpec, load_toml
from drover_proto import telemetry_pb2 as pb
from drover_simulator.faults import demo_faults, load_faults
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.operations import Operations
from drover_simulator.probing import Prober
from drover_simulator.readings import inventory
from drover_simulator.sku import SimulationError
from drover_simulator.stand_in import StandIn, listening

BAD_INPUT = 2
FAILED = 1
PROGRESS_S = 10.0
GOODBYE_S = 5.0
DISK_THREADS = 8  # for the spools of all nodes


class _StoppedError(Exception):
    """An agent ended by itself; the message says which and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--collector", default="127.0.0.1:7301", metavar="HOST:PORT", help="(default 127.0.0.1:7301)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=int, default=32, help="nodes of 8 GPUs (default 32)")
    size.add_argument("--fleet", type=Path, metavar="FILE", help="the nodes of a fleet.toml instead")
    parser.add_argument("--seed", type=int, default=7, help="which units, jobs and faulty GPUs (default 7)")
    parser.add_argument("--faults", default="demo", metavar="demo|none|FILE", help="what to inject (default demo)")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so long (default: on Ctrl-C)")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="append the ground truth, a line as a fault begins")
    parser.add_argument("--spool-dir", type=Path, metavar="DIR", help="a spool per node in there (default: temporary)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between readings, 0.2 to 60 (default 1)")
    parser.add_argument(
        "--scheduler", type=Path, metavar="SOCKET", help="answer as a stand-in for a scheduler on this Unix socket"
    )


def run(args: argparse.Namespace) -> int:
    """Stream until the time is over or a signal arrives. Return 2 for bad input, 1 if an agent failed, else 0."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        _check(args)
        spec = load_toml(args.fleet) if args.fleet else build_fleet(args.nodes, args.seed)
        with _spools(args.spool_dir) as spools, _labels(args.labels) as labels:
            return asyncio.run(_LiveFleet(args, spec, spools, labels).run())
    except (SimulationError, FleetError, SpoolError) as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return BAD_INPUT
    except _StoppedError as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return FAILED


def _check(args: argparse.Namespace) -> None:
    host, _, port = args.collector.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SimulationError(f"--collector {args.collector}: must be HOST:PORT, as in 127.0.0.1:7301")
    if args.nodes < 1:
        raise SimulationError(f"--nodes {args.nodes}: must be at least 1")
    if not 0.2 <= args.interval <= 60:
        raise SimulationError(f"--interval {args.interval:g}: must be from 0.2 to 60 seconds")
    if args.seconds < 0 or args.seed < 0:
        raise SimulationError("--seconds and --seed must not be negative")


@contextlib.contextmanager
def _spools(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="drover-fleet-") as made:
            yield Path(made)
        return
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationError(f"--spool-dir {given}: {error.strerror}; choose a folder that can be written") from None
    yield given


@contextlib.contextmanager
def _labels(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"--labels {path}: {error.strerror}; choose a file that can be written") from None
    with file:
        yield file


class NodeAgent(Agent):
    """An agent whose node can die (`cut_off`: no goodbye is sent), and whose probes `prober` answers."""

    cut_off = False
    prober: Prober | None = None
    _answered: frozenset[str] = frozenset()

    def add_probe_request(self, request: pb.ProbeRequest) -> None:
        if self.prober is None or request.id in self._answered:  # sent again after a reconnect
            return
        self._answered |= {request.id}
        for result in self.prober.answer(self.node, request):
            body = pb.ProbeResult(request_id=request.id, json=to_json(result))
            self.spool.add_record(result.ts_ms, pb.Record(probe_result=body))

    def booted(self, times: int) -> None:
        """Set the boot id of a node that was rebooted `times` times; 0: this machine's."""
        if times:
            self._boot_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self._boot_id} {self.node} {times}"))

    async def _goodbye(self) -> None:
        if not self.cut_off:
            await super()._goodbye()


class _LiveFleet:
    def __init__(self, args: argparse.Namespace, spec: FleetSpec, spools: Path, labels: TextIO | None) -> None:
        if args.faults == "none":
            faults = []
        elif args.faults == "demo":
            faults = demo_faults(spec, args.seed)
        else:
            faults = load_faults(Path(args.faults), spec)
        self._args, self._spools, self._labels = args, spools, labels
        self._fleet = SimulatedFleet(spec, args.seed, faults, time.time_ns() // 1_000_000)
        self._prober = Prober(self._fleet, args.seed)
        self._operations = Operations(self._fleet)
        self._agents: dict[str, NodeAgent] = {}
        self._disks = [DiskThread() for _ in range(DISK_THREADS)]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cutting: set[asyncio.Task[None]] = set()
        self._written = 0
        self._rows = 0
        self._busy_s = 0.0

    async def run(self) -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        spec = self._fleet.spec
        self._say(f"{len(spec.nodes)} simulated nodes, {spec.gpu_count} GPUs, towards {self._args.collector}")
        async with contextlib.AsyncExitStack() as stack:
            if self._args.scheduler is not None:
                await stack.enter_async_context(listening(StandIn(self._fleet, self._operations), self._args.scheduler))
            stack.push_async_callback(self._end)
            await self._tick(stop)
        self._say(f"ended after {self._fleet.now_s:.0f} s")
        return 0

    async def _tick(self, stop: asyncio.Event) -> None:
        """Step with the wall clock; make up for late ticks with one longer step."""
        interval: float = self._args.interval
        started = time.monotonic() - self._fleet.now_s
        progress = PROGRESS_S
        while not stop.is_set():
            late = time.monotonic() - started - self._fleet.now_s
            ticks = max(1, int(late / interval))
            wait = started + self._fleet.now_s + ticks * interval - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(0.0, wait))
                return
            begun = time.process_time()
            self._fleet.step(ticks * interval)
            self._deliver(self._fleet.readings())
            self._write_labels()
            self._busy_s = time.process_time() - begun
            if self._fleet.now_s >= progress:
                progress += PROGRESS_S
                self._report()
            if 0 < self._args.seconds <= self._fleet.now_s:
                return

    def _deliver(self, readings: dict[str, Reading]) -> None:
        """Give each node's reading to its agent. Cut off agents of silent nodes; start agents of returned nodes."""
        for name, task in list(self._tasks.items()):
            if task.done() and not task.cancelled():
                raise _StoppedError(f"the agent of {name} ended: {task.exception() or 'without an error'}")
            if name not in readings:
                down = self._fleet.hardware.number[name] not in self._fleet.booting
                self._agents.pop(name).cut_off = down  # before a reboot the agent is stopped, and sends a goodbye
                cut = self._tasks.pop(name)
                cut.cancel()
                self._cutting.add(cut)
        self._cutting = {task for task in self._cutting if not task.done()}
        now_ms = self._fleet.now_ms
        for name, reading in readings.items():
            if name not in self._agents:
                self._start(name)
            self._agents[name].accept(now_ms, reading)
            self._rows += len(reading.rows)

    def _start(self, name: str) -> None:
        config = AgentConfig(
            node=name,
            collectors=(self._args.collector,),
            interval_s=self._args.interval,
            hardware="simulated",
            kmsg_enabled=False,
            spool=SpoolConfig(dir=str(self._spools / name)),
        )
        facts = inventory(self._fleet.hardware, self._fleet.hardware.number[name])
        disk = self._disks[self._fleet.hardware.number[name] % DISK_THREADS]
        agent = self._agents[name] = NodeAgent(config, name, facts, disk=disk)
        agent.prober = self._prober
        agent.booted(self._operations.boots.get(name, 0))
        self._tasks[name] = asyncio.create_task(self._agents[name].run(), name=name)

    def _write_labels(self) -> None:
        fresh = self._fleet.labels[self._written :]
        self._written += len(fresh)
        for label in fresh:
            if self._labels is not None:
                self._labels.write(json.dumps(label.to_dict()) + "\n")
                self._labels.flush()
        for fault in self._fleet.skipped:
            self._say(f"{fault.kind}/{fault.cause} on {fault.node} did not happen: no job ran there")
        self._fleet.skipped.clear()

    def _report(self) -> None:
        connected = sum(agent.connected_to is not None for agent in self._agents.values())
        silent = len(self._fleet.silent_nodes())
        self._say(
            f"{self._fleet.now_s:.0f} s: {connected} of {len(self._fleet.spec.nodes)} nodes connected"
            + (f", {silent} silent" if silent else "")
            + f", {self._rows:,} rows, {self._written} faults begun, {self._busy_s * 1e3:.0f} ms of CPU for a step"
        )

    async def _end(self) -> None:
        tasks = [*self._tasks.values(), *self._cutting]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GOODBYE_S)

    def _say(self, text: str) -> None:
        print(f"fleet: {text}", file=sys.stderr, flush=True)
