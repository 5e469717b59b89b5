"""`drover-agent gate --deep`: quick probes after a job, for Slurm's Epilog.

A failed Epilog drains its node, so this never fails. It asks the node's probe service, as a collector would, and waits
for a few seconds. The result goes to the collector like any other: judged there, and acted on through the guard.

What still runs at the end of the budget gives way to the next job: the probe service ends a probe when another process
opens its GPU. NVIDIA's driver lists its GPUs in /proc/driver/nvidia/gpus ("The /proc filesystem interface" of the
driver's README); they are counted there because a sick driver may not return from a call.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path

from drover_agent.probes.exchange import AFTER_JOB

POLL_S = 0.1
PROBED = "probed: the result goes to the collector"
SPOOL = "/var/lib/drover/agent"


def after_job(seconds: float, spool: str = SPOOL, proc_root: str = "/proc") -> str:
    """Ask for quick probes and wait for their end; return what became of it, a sentence.

    Raises:
        OSError: the request cannot be written.
    """
    deadline_s = time.monotonic() + seconds
    gpus = Path(proc_root, "driver/nvidia/gpus")
    count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    if not count:
        return f"not probed: no NVIDIA GPU here ({gpus} has none)"
    root = Path(spool, "probes")
    waiting, taken, results = (root / name for name in ("requests", "taken", "results"))
    if not waiting.is_dir():
        return f"not probed: there is no {waiting}; is drover-agent running, with drover-probe.path enabled?"
    id_ = f"{AFTER_JOB}{secrets.token_hex(8)}"
    name = f"{id_}.json"
    _put(waiting, name, {"id": id_, "level": "quick", "asked_ms": time.time_ns() // 1_000_000})
    begun = False
    while time.monotonic() < deadline_s:
        if (results / name).exists():
            return _said(results / name)
        if (taken / name).exists():
            begun = True
        elif begun and not (waiting / name).exists():
            return PROBED  # the agent has it already
        time.sleep(POLL_S)
    try:
        (waiting / name).unlink()
    except FileNotFoundError:
        return f"probes still run after {seconds:g} s; they give way to a job, and the result goes to the collector"
    return f"not probed: no probe service took the request within {seconds:g} s; is drover-probe.path enabled?"


def _said(result: Path) -> str:
    """Return what a result says; the agent may take it meanwhile."""
    try:
        found = json.loads(result.read_bytes())
        return f"not probed: {found['detail']}" if found["end"] == "refused" else PROBED
    except (OSError, ValueError, TypeError, KeyError):
        return PROBED


def _put(folder: Path, name: str, content: dict[str, object]) -> None:
    """Write a request that is whole or not there, as the folder's owner: the service may be another user."""
    owner, new = folder.stat(), folder / f"{name}.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(content).encode())
        if os.geteuid() == 0:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)
    new.rename(folder / name)
