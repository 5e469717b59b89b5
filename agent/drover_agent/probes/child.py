"""The process that runs probes, and the only one that imports torch. `runner.py` starts and bounds it.

One request, a JSON line on stdin (`runner.Request`); JSON lines on stdout: {"kind": "devices", "devices": [...]}, then
for each probe {"kind": "start", "probe"}, {"kind": "progress", "text"}, {"kind": "result", ...},
{"kind": "error", "probe", "text"} when it fails as it should not, {"kind": "unmeasured", "probe", "text"} when memory
does not suffice for it, and at the end {"kind": "end", "stopped": bool}. Instead of all that: {"kind": "unfit", "text"}
where this installation cannot use GPUs, {"kind": "unseen", "number"} of a GPU that CUDA does not see.
SIGTERM ends it between two measurements. What libraries print goes to stderr.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from drover_agent.probes import PROBES, Level
from drover_agent.probes.base import Context, Device, Group, Result

PR_SET_PDEATHSIG = 1
BAD_INPUT = 2


class _Stop:
    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, self._request)

    def _request(self, _number: int, _frame: object) -> None:
        self.requested = True


def main() -> int:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    die_with_parent()  # nobody would read what it finds
    stop = _Stop()
    try:
        request = json.loads(sys.stdin.readline())
    except ValueError as error:
        print(f"a probe's request is one JSON line on stdin: {error}", file=sys.stderr)
        return BAD_INPUT
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    import torch

    if request["gpus"]:
        if why := unfit(torch):
            _send(lines, "unfit", text=why)
            return 0
        if (seen := torch.cuda.device_count()) < len(request["gpus"]):  # CUDA's list ends at the first that it lacks
            _send(lines, "unseen", number=seen)
            return 0
    found = devices(torch, request["gpus"], request.get("cpus", 1))
    _send(lines, "devices", devices=[dataclasses.asdict(device) for device in found])
    for name in request["probes"]:
        if stop.requested:
            break
        _send(lines, "start", probe=name)
        context = _context(torch, request, name, found, lines, stop)
        stop.requested |= not _run(context, name, lines)
        if request["gpus"]:
            _give_back(torch)
    _send(lines, "end", stopped=stop.requested)
    return 0


def die_with_parent() -> None:
    """Killed when the process that started it ends, however: nothing may go on holding a GPU."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unfit(torch: Any, uvm: str = "/dev/nvidia-uvm") -> str:
    """Why this torch cannot use GPUs on this node; "" when it may. A fault of the installation, not of a GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} on this node is built without CUDA: install one with it"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "driver" in (text := str(error).splitlines()[0]):  # "The NVIDIA driver on your system is too old ..."
            return f"torch {torch.__version__} needs another driver: {text}"
        if not os.access(uvm, os.R_OK | os.W_OK):
            return f"CUDA cannot be used: {uvm} is not there, or may not be opened: `drover-agent check`"
        raise
    return ""


def _give_back(torch: Any) -> None:
    """The device's memory that torch keeps for later: the next probe counts what is free, and other processes of the
    session (ranks) have none of it."""
    gc.collect()
    torch.cuda.empty_cache()


def devices(torch: Any, gpus: Sequence[Mapping[str, Any]], cpus: int) -> tuple[Device, ...]:
    """The devices under test: the GPUs that CUDA_VISIBLE_DEVICES names, in that order; without any, the CPU."""
    if not gpus:
        return tuple(Device(None if cpus == 1 else number, "cpu", "cpu", 0) for number in range(cpus))
    found = []
    for number, gpu in enumerate(gpus):
        properties = torch.cuda.get_device_properties(number)
        found.append(Device(gpu["slot"], f"cuda:{number}", properties.name, properties.total_memory))
    return tuple(found)


def _context(
    torch: Any,
    request: Mapping[str, Any],
    name: str,
    found: tuple[Device, ...],
    lines: TextIO,
    stop: _Stop,
) -> Context:
    level = Level(request["level"])
    group = request.get("group")
    return Context(
        torch, found, level, PROBES[name].seconds[level is not Level.QUICK] * request.get("scale", 1.0),
        lambda text: _send(lines, "progress", text=text), lambda: stop.requested, request.get("seed", 1),
        request["folder"], request.get("inlet_c"), Group(**group) if group else None, tuple(request["probes"]),
    )  # fmt: skip


def _run(context: Context, name: str, lines: TextIO) -> bool:
    """Run one probe and send its results. Return False if it was asked to stop."""
    probe = PROBES[name]
    try:
        for result in importlib.import_module(f"drover_agent.probes.{probe.module}").run(context, name):
            _send(lines, "result", **_plain(result))
    except InterruptedError:
        return False
    except (
        getattr(context.torch, "OutOfMemoryError", MemoryError),
        MemoryError,
    ) as error:  # of others that use it, not of the device
        text = f"not enough memory: {str(error).splitlines()[0] if str(error) else 'of the host'}"
        _send(lines, "unmeasured", probe=name, text=text)
    except Exception as error:  # noqa: BLE001  # what it did not foresee, a device's error say; the others go on
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        _send(lines, "error", probe=name, text=text)
    return True


def _plain(result: Result) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    found = dataclasses.asdict(result)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def _send(lines: TextIO, kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), file=lines, flush=True)


if __name__ == "__main__":
    sys.exit(main())
