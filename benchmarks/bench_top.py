"""`drover top` on a terminal of 120 columns and 40 lines: CPU, how soon a key is answered, at 8 and at 100,000 GPUs.

The collector is played (`console/replayed.py`). A pseudo terminal is typed at as a person would: lists, up and down,
a filter, into a node and back. `key_ms`: from a key to the first byte of the screen that it changes. Prints one JSON
line.

    python benchmarks/bench_top.py [--seconds 20]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("2", "\x1b[B", "\x1b[B", "\r", "\x1b", "3", "j", "j", "\r", "\x1b", "2", "/", "r", "\r", "1")
SETTLE_S = 1.2  # between two keys


def screen_of(terminal: int, wait_s: float) -> bytes:
    ready, _, _ = select.select([terminal], [], [], wait_s)
    return os.read(terminal, 65536) if ready else b""


def drain(terminal: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        screen_of(terminal, left)


def session(address: str, seconds: float) -> dict[str, Any]:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "drover_cli.main", "top", "--collector", address]
    began = time.monotonic()
    child = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=os.environ | {"TERM": "xterm"})
    first = b""
    while b"hall" not in first:
        first += screen_of(outer, 30)
    first_s = time.monotonic() - began
    drain(outer, 2)
    process = psutil.Process(child.pid)
    before, at = process.cpu_times(), time.monotonic()
    drain(outer, seconds)
    after = process.cpu_times()
    cores = (after.user + after.system - before.user - before.system) / (time.monotonic() - at)
    took = []
    for key in KEYS:
        began = time.monotonic()
        os.write(outer, key.encode())
        if screen_of(outer, 5):
            took.append((time.monotonic() - began) * 1000)
        drain(outer, SETTLE_S)
    os.write(outer, b"q")
    drain(outer, 0.5)
    memory = process.memory_info().rss if child.poll() is None else 0
    code = child.wait(10)
    return {
        "first_screen_s": round(first_s, 2), "cores": round(cores, 3), "key_ms": round(statistics.median(took)),
        "key_most_ms": round(max(took)), "keys": len(took), "exit": code, "rss_mb": round(memory / 1e6),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    load, found = os.getloadavg()[0], {}
    path = os.environ | {"PYTHONPATH": os.pathsep.join([f"{ROOT}/benchmarks", os.environ.get("PYTHONPATH", "")])}
    for nodes in (1, 12_500):
        command = [sys.executable, "-m", "console.replayed", "--clusters", "1", "--nodes", str(nodes)]
        collector = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path)
        try:
            assert collector.stdout is not None
            found[f"{nodes * 8}_gpus"] = session(json.loads(collector.stdout.readline())["c00"], given.seconds)
        finally:
            collector.terminate()
            collector.wait(30)
    print(json.dumps({"benchmark": "top", "load_before": round(load, 1), **found}), flush=True)


if __name__ == "__main__":
    main()
