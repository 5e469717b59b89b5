"""A real `drover-collector run` on a real store, with mutual TLS, and what it takes: measured from outside."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from load.certificates import VIEWER, Authority
from load.fleet import Shape

START_S, STOP_S = 120.0, 90.0
CALL_S = 60.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MERGES = ("MergeMutate", "MergeTreeBg")  # threads of the engine that merge


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process: CPU seconds since its start, by name of the thread as the kernel has it; resident memory, and what
    of it is no file's: program text may be dropped by the system at any time."""

    cpu_s: float
    by_thread: Mapping[str, float]
    rss_bytes: int
    anonymous_bytes: int
    threads: int
    files: int


class Collector:
    """`address` for agents; `stub` for the Fleet API."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, folder: Path, addresses: Mapping[str, str]) -> None:
        self.process, self.log, self.folder = process, log, folder
        self.address = addresses["agents"]
        authority = Authority.load(folder)
        key, certificate = authority.issue("benchmark", VIEWER)
        self._channel = grpc.secure_channel(
            addresses["api"], grpc.ssl_channel_credentials(authority.pem, key, certificate),
            options=(("grpc.max_receive_message_length", 256 << 20),),
        )  # fmt: skip
        self.stub = FleetStub(self._channel)
        (folder / "viewer.pem").write_bytes(key + certificate)
        self._tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self._tls.load_cert_chain(folder / "viewer.pem")
        self._metrics = addresses["metrics"]

    def status(self) -> pb.Status:
        return self.stub.GetStatus(pb.StatusRequest(), timeout=CALL_S)

    def usage(self) -> Usage:
        """Raises FileNotFoundError when it has ended."""
        return usage_of(self.process.pid)

    def page(self) -> dict[str, float]:
        """The Prometheus page: name with its labels -> value; empty when it does not answer."""
        try:
            with urllib.request.urlopen(
                f"https://{self._metrics}/metrics", timeout=CALL_S, context=self._tls
            ) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        split = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in split}

    def close(self) -> None:
        self._channel.close()


def usage_of(pid: int) -> Usage:
    """Threads that Python starts have the process' name; the first one runs the event loop.

    Raises:
        FileNotFoundError: it has ended.
    """
    root = Path(f"/proc/{pid}")
    rss, of_files = (int(pages) * PAGE for pages in (root / "statm").read_text().split()[1:3])
    by_thread: dict[str, float] = {}
    count = 0
    for task in (root / "task").iterdir():
        try:
            text = (task / "stat").read_text()
        except OSError:
            continue  # the thread has ended meanwhile
        count += 1
        named, _, rest = text.rpartition(")")
        name = "event loop" if task.name == str(pid) else named.partition("(")[2].rstrip("0123456789_-#")
        fields = rest.split()
        by_thread[name] = by_thread.get(name, 0.0) + (int(fields[11]) + int(fields[12])) * TICK_S
    fields = (root / "stat").read_text().rpartition(")")[2].split()
    total = (int(fields[11]) + int(fields[12])) * TICK_S
    by_thread["ended"] = max(0.0, total - sum(by_thread.values()))
    files = len(os.listdir(root / "fd"))  # noqa: PTH208  # only their number
    return Usage(total, by_thread, rss, rss - of_files, count, files)


@contextmanager
def running(folder: Path, shape: Shape, lag_s: float = 7.0, settings: str = "") -> Iterator[Collector]:
    """A collector with an embedded store in `folder` while inside; SIGTERM ends the caller as Ctrl-C does.

    `settings`: further tables of its file.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the collector and generators would live on
    Authority.new().save(folder)
    (folder / "fleet.toml").write_text(shape.toml())
    (folder / "collector.toml").write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n'
        '[ingest]\nlisten = "127.0.0.1:0"\n[api]\nlisten = "127.0.0.1:0"\n[metrics]\nlisten = "127.0.0.1:0"\n'
        f'[tls]\nca = "{folder}/ca.crt"\ncert = "{folder}/collector.crt"\nkey = "{folder}/collector.key"\n'
        f"[detect]\nlag_s = {lag_s}\n{settings}"
    )
    log = folder / "collector.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "drover_collector.main", "run", "--config", str(folder / "collector.toml")],
            stdout=output, stderr=output,
        )  # fmt: skip
        collector = None
        try:
            collector = Collector(process, log, folder, _addresses(process, log))
            yield collector
        finally:
            if collector is not None:
                collector.close()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> Mapping[str, str]:
    """What it listens on, from its line that it is ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text("utf-8", "replace").splitlines():
            if " is ready: " in line:
                parts = [part.rpartition(" on ") for part in line.partition(" is ready: ")[2].split(", ")]
                found = {what.strip(): where.strip() for what, _, where in parts}
                return {"agents": found["agents"], "api": found["Fleet API"], "metrics": found.get("metrics", "")}
        time.sleep(0.05)
    raise RuntimeError(f"the collector did not start: {log.read_text('utf-8', 'replace')[-2000:]}")
