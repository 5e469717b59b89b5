"""Drover's programs as processes of their own, for end-to-end tests."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.waiting import wait_until

STOP_S = 300.0
# A channel made before its server listens tries again ever later (1.6 times each): a start of 30 s is seen after 43 s.
SOON = (
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)  # fmt: skip


class Collector(NamedTuple):
    agents: str  # address for agents
    api: str  # address of the Fleet API
    stub: FleetStub


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reachable(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def listens(path: Path) -> bool:
    """Whether something takes connections at this Unix socket: it is a file from `bind` on, before `listen`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        return probe.connect_ex(str(path)) == 0


@contextmanager
def running(
    folder: Path, module: str, *args: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[Path]:
    """`python -m module args` while inside, below the command `prefix`; gives its log. It must not end by itself."""
    log = folder / f"{module}.log"
    with log.open("w") as output:
        command = [*prefix, sys.executable, "-m", module, *args]
        child = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        try:
            yield log
        finally:
            ended = child.poll()
            child.send_signal(signal.SIGTERM)
            child.wait(STOP_S)
            # In the `finally`: what waited for it in vain shows its log too.
            assert ended is None, f"{module} ended by itself with {ended}: {log.read_text()[-2000:]}"


@contextmanager
def collector(folder: Path, fleet_toml: str, store: str = "") -> Iterator[Collector]:
    """A collector with an embedded store in `folder`; `store`: further lines of its settings."""
    agents, api = (f"127.0.0.1:{free_port()}" for _ in range(2))
    (folder / "fleet.toml").write_text(fleet_toml)
    (folder / "collector.toml").write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n{store}\n'
        f'[ingest]\nlisten = "{agents}"\n[api]\nlisten = "{api}"\n'
    )
    with (
        running(folder, "drover_collector.main", "run", "--config", str(folder / "collector.toml")),
        grpc.insecure_channel(api, SOON) as channel,
    ):
        stub = FleetStub(channel)

        def answers() -> bool:
            try:
                return bool(stub.GetStatus(pb.StatusRequest(), timeout=10))
            except grpc.RpcError:
                return False

        wait_until(answers, "the collector answers")
        yield Collector(agents, api, stub)
