"""The process that runs probes, and the only one that imports torch. `runner.py` starts and bounds it.

stdin: one JSON line, the request (`runner.Request`). stdout: JSON lines, in this order:

    {"kind": "devices", "devices": [...]}
    for each probe:
        {"kind": "start", "probe"}
        {"kind": "progress", "text"}, {"kind": "result", ...}   any number of both
        at most one of these, if the probe did not finish:
            {"kind": "error", "probe", "text"}        it raised an unexpected error
            {"kind": "unmeasured", "probe", "text"}   there was not enough memory
    {"kind": "end", "stopped": bool}

Or one line alone: {"kind": "unfit", "text"}, this installation cannot use GPUs; {"kind": "unseen", "number"}, the place
in the request of the first GPU that CUDA does not see. SIGTERM ends the process between two measurements. What
libraries print goes to stderr.
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
    die_with_parent()
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
        # CUDA's list ends before the first GPU that it cannot use.
        if (seen := torch.cuda.device_count()) < len(request["gpus"]):
            _send(lines, "unseen", number=seen)
            return 0
    found = devices(torch, request["gpus"], request.get("cpus", 1))
    _send(lines, "devices", devices=[dataclasses.asdict(device) for device in found])
    for name in request["probes"]:
        if stop.requested:
            break
        _send(lines, "start", probe=name)
        context = _context(torch, request, name, found, lines, stop)
        if not _run(context, name, lines):
            stop.requested = True
        if request["gpus"]:
            _free_cached_memory(torch)
    _send(lines, "end", stopped=stop.requested)
    return 0


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: no probe may hold a GPU that nobody waits for."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unfit(torch: Any, uvm: str = "/dev/nvidia-uvm") -> str:
    """Return why this torch cannot use the node's GPUs, "" if it can: a fault of the installation, not of a GPU."""
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


def _free_cached_memory(torch: Any) -> None:
    """Free the device memory that torch caches: the next probe measures what is free, and other ranks need it."""
    gc.collect()
    torch.cuda.empty_cache()


def devices(torch: Any, gpus: Sequence[Mapping[str, Any]], cpus: int) -> tuple[Device, ...]:
    """Return the devices under test: the GPUs of CUDA_VISIBLE_DEVICES, in its order; the CPU if there are none."""
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
        torch=torch,
        devices=found,
        level=level,
        seconds=PROBES[name].seconds[level is not Level.QUICK] * request.get("scale", 1.0),
        show_progress=lambda text: _send(lines, "progress", text=text),
        stopping=lambda: stop.requested,
        seed=request.get("seed", 1),
        folder=request["folder"],
        shared=request.get("shared", ""),
        inlet_c=request.get("inlet_c"),
        group=Group(**group) if group else None,
        names=tuple(request["probes"]),
    )


def _run(context: Context, name: str, lines: TextIO) -> bool:
    """Run one probe and send its results. Return False if it was asked to stop."""
    probe = PROBES[name]
    try:
        for result in importlib.import_module(f"drover_agent.probes.{probe.module}").run(context, name):
            _send(lines, "result", **_plain(result))
    except InterruptedError:
        return False
    except (getattr(context.torch, "OutOfMemoryError", MemoryError), MemoryError) as error:
        # Other processes probably hold the memory, so this says nothing against the device.
        text = f"not enough memory: {str(error).splitlines()[0] if str(error) else 'of the host'}"
        _send(lines, "unmeasured", probe=name, text=text)
    except Exception as error:  # noqa: BLE001  # such as an error of the device; the other probes go on
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        _send(lines, "error", probe=name, text=text)
    return True


def _plain(result: Result) -> dict[str, Any]:
    """Return the fields of a result, with None for NaN and infinity, which JSON does not have."""
    found = dataclasses.asdict(result)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def _send(lines: TextIO, kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), file=lines, flush=True)


if __name__ == "__main__":
    sys.exit(main())
