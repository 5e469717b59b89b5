"""Runs probes in a child process, and makes whatever becomes of it a result.

The child is niced, in a session of its own, the first that the kernel's OOM killer takes, bounded in time and memory,
and gone within a second when the node is needed. A hang names the probe and the device: "probe hung: gemm_bf16, GPU 3".
Whatever the child prints is taken for no more than text: a line that is none of the protocol is logged and passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from drover_agent.probes import PROBES, Level, Probe
from drover_agent.probes.base import Device, Result
from drover_agent.probes.exchange import read_object
from drover_agent.probes.processes import REAP_S, Streams, end_all, members, private_bytes, yield_to_all
from drover_agent.probes.scratch import scratch
from drover_core.model.events import from_dict

log = logging.getLogger(__name__)

CHILD = (sys.executable, "-m", "drover_agent.probes.child")
LOOK_S = 0.05
MEMORY_LOOK_S = 0.5  # walking /proc costs milliseconds on a large node
START_S = 120.0  # importing torch and making CUDA contexts, on a cold disk
SLACK = 4.0  # a probe that says nothing for so many times its own length hangs
SLACK_S = 30.0
MAX_RESULTS = 10_000
TEXT = 2_000  # characters kept of a text that the child gave
_CUDA = re.compile(r"\bcuda:(\d+)")
# Settings of the caller that would change what is measured. CUDA_MPS: NVIDIA's docs on MPS: without a daemon
# behind its pipe folder a process computes by itself; through one it would start a server that holds the GPU.
FALSIFY = (
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)  # fmt: skip


class End(StrEnum):
    DONE = "done"
    STOPPED = "stopped"  # asked to, or the node was needed
    HUNG = "hung"
    CRASHED = "crashed"
    LOST = "lost"  # the driver no longer answers for the GPU
    TIMEOUT = "timeout"
    MEMORY = "memory"  # took more of the host's memory than it may, or the kernel had none left
    REFUSED = "refused"  # this node's set-up cannot run any probe: says nothing of a device

    @property
    def bad(self) -> bool:
        """Whether it speaks against the device, and not only against this run."""
        return self in (End.HUNG, End.CRASHED, End.LOST)


@dataclass(frozen=True, slots=True)
class GpuRef:
    slot: int
    uuid: str


@dataclass(frozen=True, slots=True)
class Request:
    """What to run.

    Attributes:
        gpus: in the order in which the child sees them; none: on the CPU, as if it were `cpus` devices.
        timeout_s: of the whole.
        memory_bytes: of the host, private to the processes of the child's session (file mappings do not count).
    """

    probes: tuple[str, ...]
    gpus: tuple[GpuRef, ...] = ()
    cpus: int = 1
    level: Level = Level.QUICK
    timeout_s: float = 300.0
    memory_bytes: int = 32 << 30  # NCCL's processes take 1 to 2 GB each
    folder: str = ""
    shared: str = ""  # a folder of storage that nodes share; "": none
    inlet_c: float | None = None
    seed: int = 1
    scale: float = 1.0  # of each probe's length
    group: Mapping[str, Any] | None = None  # base.Group of a collective over several nodes


@dataclass(slots=True)
class Report:
    """The result of a run. `detail` says why it did not end as it should, in a sentence; `probe` and `gpu`: in what.

    `tries`: how often that was run, each time with the same end. `stuck`: its process could not be killed. `silent`: it
    was ended since the driver did not say who holds its GPUs.
    """

    end: End = End.DONE
    detail: str = ""
    probe: str = ""
    gpu: int | None = None
    tries: int = 1
    stuck: bool = False
    silent: bool = False
    results: list[Result] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    seconds: float = 0.0


class Runner:
    """One request. `run` blocks; `stop` may be called from any thread.

    Args:
        needed: asked several times a second with the id of the child's session; a reason when the node is wanted for
            work, "" when not. Must return at once.
        show_progress: takes a line each time. command: another program than CHILD, which speaks as it does.
    """

    def __init__(
        self,
        request: Request,
        needed: Callable[[int], str] = lambda session: "",  # noqa: ARG005  # the default never needs it
        show_progress: Callable[[str], None] = lambda text: None,  # noqa: ARG005  # the default shows nothing
        command: Sequence[str] = (),
    ) -> None:
        unknown = [name for name in request.probes if name not in PROBES]
        if unknown:
            raise ValueError(f"no probe is called {unknown[0]}; there are {', '.join(PROBES)}")
        self._request, self._needed, self._show_progress, self._command = (
            request,
            needed,
            show_progress,
            command or CHILD,
        )
        self._stop = ""
        self._doing = "its start"
        self._probe = ""
        self._gpu: int | None = None
        self._memory_look = 0.0

    def stop(self, why: str) -> None:
        self._stop = self._stop or why

    def run(self) -> Report:
        try:
            with scratch(self._request.folder) as folder:
                return self._run(folder)
        except OSError as error:
            why = f"no folder to work in: {error.filename}: {error.strerror}; name one that can be written (--folder)"
            return Report(End.REFUSED, why)

    def _run(self, folder: Path) -> Report:
        report = Report()
        began = time.monotonic()
        environment = {key: value for key, value in os.environ.items() if key not in FALSIFY}
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
        environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "no-mps")
        # Empty: a run on the CPU touches no GPU.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in self._request.gpus)
        if self._request.group is None:  # else NCCL and gloo take the network's, which the service's unit shuts off
            environment |= {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
        child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield_to_all(child.pid)
            self._watch(child, report, began, folder)
        finally:
            report.stuck = not end_all(child, at_once=report.end in (End.HUNG, End.MEMORY))
            report.seconds = time.monotonic() - began
        return report

    def _watch(self, child: subprocess.Popen[bytes], report: Report, began: float, folder: Path) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        fields = dataclasses.asdict(self._request) | {"level": self._request.level.value, "folder": str(folder)}
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its output says why
            child.stdin.write(json.dumps(fields).encode() + b"\n")
            child.stdin.close()
        streams = Streams(child.stdout, child.stderr)
        last_line = began
        while True:
            dead = child.poll() is not None  # before the read: then all that it said is in the pipe
            lines = streams.read(LOOK_S)
            now = time.monotonic()
            if lines:
                last_line = now
            for line in lines:
                if self._take(line, report):
                    return
            if streams.ended or (dead and not lines):
                self._crashed(child, streams.errors, report)
                report.probe, report.gpu = self._probe, self._gpu
                return
            if reason := self._why_end(child.pid, report, now - began, now - last_line):
                report.detail, report.probe, report.gpu = reason, self._probe, self._gpu
                return

    def _take(self, line: bytes, report: Report) -> bool:
        """Whether that was the last line."""
        try:
            message = read_object(line)
            kind = message.pop("kind")
            return self._obey(kind, message, report)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("the probe's process printed %r", line[:200])
            return False

    def _obey(self, kind: object, message: dict[str, Any], report: Report) -> bool:
        """Act on a message. Raises KeyError, TypeError or ValueError: the child's protocol has no such message."""
        if kind == "devices":
            report.devices = [from_dict(Device, device) for device in message["devices"]]
        elif kind == "start":
            PROBES[message["probe"]]
            self._probe = self._doing = message["probe"]
            self._gpu = None
            self._show_progress(message["probe"])
        elif kind == "progress":
            text = str(message["text"])
            if found := _CUDA.search(text):
                self._gpu = self._slot(found[1])
            text = self._named(text)
            self._doing = f"{self._probe}, {text}"
            self._show_progress(f"  {text}")
        elif kind == "result" and len(report.results) < MAX_RESULTS:
            report.results.append(self._result(message))
        elif kind == "error":
            self._failed(PROBES[message["probe"]], self._named(str(message["text"])), report)
        elif kind == "unmeasured":
            probe, text = PROBES[message["probe"]], self._named(str(message["text"]))
            report.results.append(Result(probe.name, self._gpu, None, probe.unit, text))
        elif kind == "unfit":
            report.end, report.detail = End.REFUSED, self._named(str(message["text"]))
            return True
        elif kind == "unseen":
            report.gpu = self._slot(str(int(message["number"])))
            report.end, report.detail = End.CRASHED, f"CUDA does not see GPU {report.gpu}, which the driver lists"
            return True
        elif kind == "end":
            if message["stopped"]:
                report.end, report.detail = End.STOPPED, self._stop or "it was asked to stop"
                report.probe, report.gpu = self._probe, self._gpu
            return True
        return False

    def _failed(self, probe: Probe, text: str, report: Report) -> None:
        """One probe of several; the first one names the run."""
        report.results.append(Result(probe.name, self._gpu, None, probe.unit, f"failed: {text}"))
        if report.end is End.DONE:
            report.end, report.detail = End.CRASHED, f"failed in {self._doing}: {text}"
            report.probe, report.gpu = probe.name, self._gpu

    def _result(self, message: dict[str, Any]) -> Result:
        result = from_dict(Result, message)
        return dataclasses.replace(result, detail=self._named(result.detail))

    def _named(self, text: str) -> str:
        """With GPUs called by their slots, which the child's numbers are not."""
        return _CUDA.sub(lambda match: f"GPU {self._slot(match[1])}", text)[:TEXT]

    def _slot(self, number: str) -> int | None:
        return self._request.gpus[int(number)].slot if int(number) < len(self._request.gpus) else None

    def _why_end(self, pid: int, report: Report, passed_s: float, silent_s: float) -> str:
        """Sets how it ended, and returns why; "" to go on."""
        if why := self._stop or self._needed(pid):
            report.end = End.STOPPED
            return f"gave way during {self._doing}: {why}"
        if passed_s > self._request.timeout_s:
            report.end = End.TIMEOUT
            return f"took longer than {self._request.timeout_s:g} s, last in {self._doing}"
        if silent_s > self._silence_s():
            report.end = End.HUNG
            return f"probe hung: {self._doing}; nothing came for {silent_s:.0f} s"
        used = self._used(pid, passed_s)
        if used > self._request.memory_bytes:
            report.end = End.MEMORY
            return f"took {used >> 20} MiB of the host's memory during {self._doing}; it may take" + (
                f" {self._request.memory_bytes >> 20} MiB"
            )
        return ""

    def _used(self, pid: int, passed_s: float) -> int:
        if passed_s < self._memory_look:
            return 0
        self._memory_look = passed_s + MEMORY_LOOK_S
        return sum(private_bytes(member) for member in members(pid))

    def _silence_s(self) -> float:
        if not self._probe:
            return START_S
        own = PROBES[self._probe].seconds[self._request.level is not Level.QUICK] * self._request.scale
        return SLACK * own + SLACK_S

    def _crashed(self, child: subprocess.Popen[bytes], errors: bytes, report: Report) -> None:
        try:
            code = child.wait(REAP_S)
        except subprocess.TimeoutExpired:
            report.end = End.HUNG
            report.detail = f"probe hung: {self._doing}; its process closed its output and does not end"
            return
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it printed nothing"]
        # Nothing of a device's kills so: the OOM killer does, or a person. No word against what was under test.
        report.end = End.MEMORY if code == -signal.SIGKILL else End.CRASHED
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        oom = "; perhaps the kernel was out of memory" if code == -signal.SIGKILL else ""
        report.detail = f"the probe's process {how} during {self._doing}{oom}: {last[0][:300]}"
