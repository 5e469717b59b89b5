"""Where a chaos run takes place: collector, agents, and what stands around them, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import grpc
from durability.agents import READY
from durability.content import name

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub

ROOT = Path(__file__).resolve().parents[2]
PATHS = (str(ROOT / "benchmarks"), str(ROOT / "tests"))
START_S, CALL_S, DELIVER_S = 180.0, 30.0, 180.0
SOON = (
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)  # fmt: skip
BACKLOG = 3  # records of an agent that may be on their way: it sends one a second, and an event now and then
ROLLED_UP_S = 120.0  # a collector waits a minute for more that is late
JUDGED_MS = 20_000  # a bucket of 10 s, the lag of 2 s, and the time of its work


class Process:
    """A program, its lines of stdout, and its log."""

    def __init__(self, log: Path, *words: str, env: Mapping[str, str] | None = None, ready: str = "") -> None:
        paths = os.pathsep.join(filter(None, (*PATHS, os.environ.get("PYTHONPATH", ""))))
        environment = os.environ | {"GRPC_VERBOSITY": "NONE", "PYTHONPATH": paths} | dict(env or {})
        with log.open("ab") as errors:
            self.child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        self.lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            while ready and ready not in self.line(START_S):
                pass
        except RuntimeError:
            self.child.kill()
            raise

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.put(line)
        self.lines.put("")

    def line(self, seconds: float) -> str:
        """
        Raises:
            RuntimeError: it has ended, or said nothing for so long.
        """
        try:
            line = self.lines.get(timeout=seconds)
        except Empty:
            line = ""
        if not line:
            raise RuntimeError(f"{self.child.args!r}: no line within {seconds:g} s, ended with {self.child.poll()}")
        return line

    def ask(self, **words: Any) -> Any:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(words) + "\n")
        self.child.stdin.flush()
        return json.loads(self.line(CALL_S))

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def stop(self, seconds: float = START_S) -> None:
        """
        Raises:
            RuntimeError: it did not end by itself.
        """
        self.child.terminate()
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"{self.child.args!r} did not end within {seconds:g} s of SIGTERM") from None


@dataclass
class Place:
    """A collector and its agents. `certificates`: folder with ca.pem, NODE.pem, NODE.key, viewer.*; None: plain.

    Attributes:
        main: the collector that should detect.
        collectors: by name; each has its settings in NAME.toml.
        code: where an older release's packages lie, by collector; else this checkout's.
    """

    folder: Path
    nodes: int
    to: tuple[str, ...]  # addresses that agents know
    apis: Mapping[str, str]
    certificates: Path | None = None
    code: dict[str, Path] = field(default_factory=dict)
    collectors: dict[str, Process] = field(default_factory=dict)
    agents: Process | None = None
    restarts: int = 0
    main: str = "c1"

    def __post_init__(self) -> None:
        self.journals = self.folder / "agents"
        self.journals.mkdir(parents=True, exist_ok=True)
        self._channels: dict[str, grpc.Channel] = {}

    # ---- processes

    def start_collector(self, which: str = "c1", module: Sequence[str] = ()) -> None:
        """Returns when it is ready. `module`: another module and its words, in the place of drover_collector.main."""
        words = [sys.executable, "-m", *(module or ("drover_collector.main", "run", "--config"))]
        env = {}
        if which in self.code:
            packages = ("proto", "collector", "agent", "cli")
            env["PYTHONPATH"] = os.pathsep.join(str(self.code[which] / package) for package in packages)
        config = str(self.folder / f"{which}.toml")
        self.collectors[which] = Process(
            self.folder / f"{which}.log", *words, config, env=env, ready="" if module else "is ready"
        )

    def start_agents(self) -> None:
        self.agents = Process(
            self.folder / "agents.log", sys.executable, "-m", "disruption.agents", str(self.journals),
            str(self.certificates or "-"), ",".join(self.to), *(name(number) for number in range(self.nodes)),
            ready=READY,
        )  # fmt: skip

    @property
    def fleet(self) -> Process:
        assert self.agents is not None
        return self.agents

    def supervise(self) -> None:
        """What systemd does: start what has ended."""
        for which, process in list(self.collectors.items()):
            if not process.alive:
                self.restarts += 1
                self.start_collector(which)
        if self.agents is not None and not self.agents.alive:
            self.restarts += 1
            self.start_agents()

    # ---- what is known of it

    def stub(self, which: str = "c1") -> FleetStub:
        if which not in self._channels:
            self._channels[which] = self._channel(self.apis[which])
        return FleetStub(self._channels[which])

    def _channel(self, address: str) -> grpc.Channel:
        if self.certificates is None:
            return grpc.insecure_channel(address, SOON)
        ca, cert, key = (self.certificates / file for file in ("ca.pem", "viewer.pem", "viewer.key"))
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
        return grpc.secure_channel(address, credentials, SOON)

    def forget_channels(self) -> None:
        """Certificates have changed."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def status(self, which: str = "c1") -> pb.Status | None:
        try:
            return self.stub(which).GetStatus(pb.StatusRequest(), timeout=CALL_S)
        except grpc.RpcError:
            return None

    def troubles(self, which: str = "c1") -> list[str]:
        status = self.status(which)
        return list(status.troubles) if status is not None else []

    def pending(self) -> dict[str, int]:
        """Node -> records that nobody has acknowledged."""
        return {node: waits[0] for node, waits in self.fleet.ask(do="pending").items()}

    def well(self, which: str = "") -> str:
        """ "" when nothing waits and detection is on time, else what is not as it should be."""
        if not self.fleet.alive:
            return "the agents are away"
        waiting = {node: records for node, records in self.pending().items() if records > BACKLOG}
        if waiting:
            return f"records wait: {waiting}"
        status = self.status(which or self.main)
        if status is None:
            return "the collector does not answer"
        late_ms = time.time_ns() // 1_000_000 - status.newest_tick_ms
        return f"judged {late_ms / 1000:.0f} s ago" if late_ms > JUDGED_MS else ""

    def wait(self, true: Callable[[], object], seconds: float) -> bool:
        """Whether it became so; a collector that does not answer makes nothing so."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(grpc.RpcError):
                if true():
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    # ---- the end

    def finish(self) -> None:
        """All is delivered, judged and closed."""
        self.fleet.stop(DELIVER_S)
        delivered_ms = time.time_ns() // 1_000_000

        def judged() -> bool:
            status = self.status(next(iter(self.collectors)))
            return status is not None and status.newest_tick_ms >= delivered_ms

        def rolled_up() -> bool:
            """Buckets of late rows, and of rows that were set aside, are computed again."""
            stub = self.stub(next(iter(self.collectors)))
            return stub.GetSystem(pb.SystemRequest(), timeout=CALL_S).store.rollup_marks == 0

        self.wait(judged, 40)
        self.wait(rolled_up, ROLLED_UP_S)
        for process in self.collectors.values():
            process.stop()

    def check(self, store: str, allowed: Sequence[tuple[str, int, int]] = (), others: str = "") -> dict[str, Any]:
        words = [sys.executable, "-m", "disruption.check", store, str(self.journals), str(self.nodes)]
        process = Process(self.folder / "check.log", *words, json.dumps({"allowed": list(allowed), "others": others}))
        found: dict[str, Any] = json.loads(process.line(240))
        process.child.wait(60)
        return found

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for process in (*self.collectors.values(), self.agents):
            if process is not None and process.alive:
                with contextlib.suppress(ProcessLookupError):
                    process.signal(signal.SIGCONT)
                process.kill()
