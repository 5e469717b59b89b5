"""Runs probes in a child process, and makes whatever becomes of it a result.

The child is niced, in a session of its own, the first that the kernel's OOM killer takes, bounded in time and memory,
and gone within a second when the node is needed. A hang names the probe and the device: "probe hung: gemm_bf16, GPU 3".
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from drover_agent.probes import PROBES, Level
from drover_agent.probes.base import Result

log = logging.getLogger(__name__)

LOOK_S = 0.2
TERM_S = 0.4  # from SIGTERM to SIGKILL: with LOOK_S, a node is given back within a second
REAP_S = 5.0  # a process that the kernel does not let die (a driver that hangs) is left behind
START_S = 120.0  # importing torch and making CUDA contexts, on a cold disk
SLACK = 4.0  # a probe that says nothing for so many times its own length hangs
SLACK_S = 30.0
NICE = 10
STDERR_BYTES = 2_000  # kept of what the child printed, for a crash


class End(StrEnum):
    DONE = "done"
    STOPPED = "stopped"  # asked to, or the node was needed
    HUNG = "hung"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    MEMORY = "memory"  # took more of the host's memory than it may


@dataclass(frozen=True, slots=True)
class GpuRef:
    slot: int
    uuid: str


@dataclass(frozen=True, slots=True)
class Request:
    """What to run. `gpus` empty: on the CPU. `timeout_s`: of the whole; `memory_bytes`: resident, of all processes."""

    probes: tuple[str, ...]
    gpus: tuple[GpuRef, ...] = ()
    level: Level = Level.QUICK
    timeout_s: float = 300.0
    memory_bytes: int = 16 << 30
    folder: str = ""
    inlet_c: float | None = None
    seed: int = 1
    scale: float = 1.0  # of each probe's length
    group: Mapping[str, Any] | None = None  # base.Group of a collective over several nodes


@dataclass(slots=True)
class Report:
    """What came of it. `detail` says why it did not end as it should, in a sentence."""

    end: End = End.DONE
    detail: str = ""
    results: list[Result] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Runner:
    """One request. `run` blocks; `stop` may be called from any thread.

    Args:
        needed: asked several times a second; a reason when the node is wanted for work, "" when not.
        tell: progress, a line each.
    """

    def __init__(
        self,
        request: Request,
        needed: Callable[[], str] = lambda: "",
        tell: Callable[[str], None] = lambda text: None,  # noqa: ARG005  # the default tells nobody
        command: Sequence[str] = (sys.executable, "-m", "drover_agent.probes.child"),
    ) -> None:
        unknown = [name for name in request.probes if name not in PROBES]
        if unknown:
            raise ValueError(f"no probe is called {unknown[0]}; there are {', '.join(PROBES)}")
        self._request, self._needed, self._tell, self._command = request, needed, tell, command
        self._stop = ""
        self._doing = "starting"
        self._probe = ""

    def stop(self, why: str) -> None:
        self._stop = self._stop or why

    def run(self) -> Report:
        report = Report()
        began = time.monotonic()
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}
        if self._request.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in self._request.gpus)
        child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            _yield_to_all(child.pid)
            self._watch(child, report, began)
        finally:
            _end(child, at_once=report.end in (End.HUNG, End.MEMORY))
            report.seconds = time.monotonic() - began
        return report

    def _watch(self, child: subprocess.Popen[bytes], report: Report, began: float) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        fields = dataclasses.asdict(self._request) | {"level": self._request.level.value}
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its output says why
            child.stdin.write(json.dumps(fields).encode() + b"\n")
            child.stdin.close()
        streams = _Streams(child.stdout, child.stderr)
        heard = began
        while True:
            lines = streams.read(LOOK_S)
            now = time.monotonic()
            if lines:
                heard = now
            for line in lines:
                if self._take(line, report):
                    return
            if streams.ended:
                self._crashed(child, streams.errors, report)
                return
            if reason := self._why_end(child.pid, report, now - began, now - heard):
                report.detail = reason
                return

    def _take(self, line: bytes, report: Report) -> bool:
        """Whether that was the last line."""
        try:
            told = json.loads(line)
            kind = told.pop("kind")
        except (ValueError, KeyError, AttributeError):
            log.warning("the probe's process printed %r", line[:200])
            return False
        if kind == "devices":
            report.devices = told["devices"]
        elif kind == "start":
            self._probe = self._doing = told["probe"]
            self._tell(told["probe"])
        elif kind == "progress":
            self._doing = f"{self._probe}, {told['text']}"
            self._tell(f"  {told['text']}")
        elif kind == "result":
            report.results.append(Result(**told))
        elif kind == "end":
            if told["stopped"]:
                report.end, report.detail = End.STOPPED, self._stop or "it was told to stop"
            return True
        return False

    def _why_end(self, pid: int, report: Report, passed_s: float, silent_s: float) -> str:
        """Sets how it ended, and returns why; "" to go on."""
        if why := self._stop or self._needed():
            report.end = End.STOPPED
            return f"gave way during {self._doing}: {why}"
        if passed_s > self._request.timeout_s:
            report.end = End.TIMEOUT
            return f"took longer than {self._request.timeout_s:g} s, last in {self._doing}"
        if silent_s > self._silence_s():
            report.end = End.HUNG
            return f"probe hung: {self._doing}; nothing came for {silent_s:.0f} s"
        used = _resident(pid)
        if used > self._request.memory_bytes:
            report.end = End.MEMORY
            return f"took {used >> 20} MiB of the host's memory during {self._doing}; it may take" + (
                f" {self._request.memory_bytes >> 20} MiB"
            )
        return ""

    def _silence_s(self) -> float:
        if not self._probe:
            return START_S
        own = PROBES[self._probe].seconds[self._request.level is not Level.QUICK] * self._request.scale
        return SLACK * own + SLACK_S

    def _crashed(self, child: subprocess.Popen[bytes], errors: bytes, report: Report) -> None:
        code = child.wait(REAP_S)
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it printed nothing"]
        report.end = End.CRASHED
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        oom = "; perhaps the kernel was out of memory" if code == -signal.SIGKILL else ""
        report.detail = f"the probe's process {how} during {self._doing}{oom}: {last[0][:300]}"


class _Streams:
    """Lines of stdout, and the end of stderr, without waiting for either."""

    def __init__(self, out: IO[bytes], err: IO[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        for stream in (out, err):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
        self._out = out
        self._rest = self.errors = b""
        self.ended = False

    def read(self, timeout_s: float) -> list[bytes]:
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, 65_536)
            if key.fileobj is not self._out:
                self.errors = (self.errors + data)[-STDERR_BYTES:]
            elif not data:
                self.ended = True
            self._rest += data if key.fileobj is self._out else b""
            if not data:
                self._selector.unregister(key.fileobj)
        *lines, self._rest = self._rest.split(b"\n")
        return lines


def _yield_to_all(pid: int) -> None:
    """Lowest priority; the first that goes when memory is short. Needs no rights: it only gives up some."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    except OSError as error:
        log.warning("the probe's process could not be made to yield: %s", error)


def _resident(leader: int) -> int:
    """Bytes of the child's session: collectives have a process per device."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    total += int((entry / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                continue  # it has ended
    return total


def _end(child: subprocess.Popen[bytes], *, at_once: bool) -> None:
    """Nothing of the session is left, unless the kernel does not let it die."""
    if child.poll() is None and not at_once:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(TERM_S)
        except subprocess.TimeoutExpired:
            log.info("the probe's process does not end by itself; it is killed")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(REAP_S)
    except subprocess.TimeoutExpired:
        log.error("the probe's process %d does not die: it stands in a call into the driver", child.pid)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
