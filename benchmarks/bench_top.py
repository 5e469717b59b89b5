"""`drover top` on a terminal of 120 columns and 40 lines: CPU, how soon a key is answered, at 8 and at 100,000 GPUs.

The collector is played (`console/replayed.py`). A pseudo terminal is typed at as a person would: lists, up and down,
a filter, into a node and back. `key_ms`: from a key to the first byte of the screen that it changes; `refresh_s`: from
one picture to the next while nobody types. Prints one JSON line.

With --page it writes docs/evidence/top.md and what the terminal got next to it, as asciicast files of version 2
(https://docs.asciinema.org/manual/asciicast/v2/): `asciinema play docs/evidence/top-8.cast` shows them again.

    python benchmarks/bench_top.py [--seconds 20] [--page]
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
COLUMNS, LINES = 120, 40
FLEETS = (1, 12_500)  # nodes of 8 GPUs
KEYS = ("2", "\x1b[B", "\x1b[B", "\r", "\x1b", "3", "j", "j", "\r", "\x1b", "2", "/", "r", "\r", "1")
NAMED = {"\x1b[B": "Down", "\r": "Enter", "\x1b": "Esc"}
SETTLE_S = 1.2  # between two keys
APART_S = 0.2  # two writes with less between them are of one picture


@dataclass
class Terminal:
    """The outer end of a pseudo terminal, and all that it got: (seconds since it began, "o" or "i", text)."""

    outer: int
    began: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, str]] = field(default_factory=list)

    def read(self, wait_s: float) -> bytes:
        ready, _, _ = select.select([self.outer], [], [], wait_s)
        got = os.read(self.outer, 65536) if ready else b""
        if got:
            self._note("o", got)
        return got

    def drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def press(self, key: str) -> float:
        """Return the ms from a key to the first byte that answers it; 0: none did."""
        began = time.monotonic()
        self._note("i", key.encode())
        os.write(self.outer, key.encode())
        return (time.monotonic() - began) * 1000 if self.read(5) else 0.0

    def pictures(self, from_s: float, to_s: float) -> list[float]:
        """Return when pictures began, seconds."""
        times = [at for at, kind, _ in self.events if kind == "o" and from_s <= at < to_s]
        return [at for at, before in zip(times, [-1.0, *times], strict=False) if at - before > APART_S]

    def cast(self, title: str) -> str:
        head = {"version": 2, "width": COLUMNS, "height": LINES, "title": title, "env": {"TERM": "xterm"}}
        return "\n".join(map(json.dumps, [head, *self.events])) + "\n"

    def _note(self, kind: str, got: bytes) -> None:
        self.events.append((round(time.monotonic() - self.began, 3), kind, got.decode("utf-8", "replace")))


def session(address: str, seconds: float) -> tuple[dict[str, Any], Terminal]:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "drover_cli.main", "top", "--collector", address]
    child = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=os.environ | {"TERM": "xterm"})
    terminal, first = Terminal(outer), b""
    while b"hall" not in first:
        first += terminal.read(1)
        if child.poll() is not None:
            raise SystemExit(f"drover top ended: {first.decode('utf-8', 'replace')}")
    first_s = terminal.events[-1][0]
    terminal.drain(2)
    process = psutil.Process(child.pid)
    before, at = process.cpu_times(), time.monotonic()
    quiet = at - terminal.began
    terminal.drain(seconds)
    after = process.cpu_times()
    cores = (after.user + after.system - before.user - before.system) / (time.monotonic() - at)
    pictures = terminal.pictures(quiet, quiet + seconds)
    apart = [later - earlier for earlier, later in itertools.pairwise(pictures)]
    took = []
    for key in KEYS:
        if ms := terminal.press(key):
            took.append(ms)
        terminal.drain(SETTLE_S)
    memory = process.memory_info().rss
    terminal.press("q")
    code = child.wait(10)
    os.close(inner)
    os.close(outer)
    return {
        "first_screen_s": round(first_s, 2), "cores": round(cores, 3), "refresh_s": round(statistics.median(apart), 2),
        "key_ms": round(statistics.median(took)), "key_most_ms": round(max(took)), "keys": len(took), "exit": code,
        "rss_mb": round(memory / 1e6),
    }, terminal  # fmt: skip


def one_frame(address: str) -> str:
    """Return what a terminal of this width shows first, without colours."""
    command = [sys.executable, "-m", "drover_cli.main", "top", "--once", "--collector", address]
    plain = os.environ | {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "NO_COLOR": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=plain, timeout=60).stdout
    return "\n".join(line.rstrip() for line in shown.splitlines())


def page_of(found: dict[int, dict[str, Any]], frame: str, seconds: float, load: float) -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    small, large = (found[nodes] for nodes in FLEETS)
    rows = (
        ("first screen, the start of Python included", "{first_screen_s} s"),
        (f"CPU while nobody types, over {seconds:g} s", "{cores} cores"),
        ("from one picture to the next", "{refresh_s} s"),
        (f"from a key to the screen, median of {small['keys']}", "{key_ms} ms ({key_most_ms} at most)"),
        ("memory", "{rss_mb} MB"),
    )
    keys = ", ".join(f"`{NAMED.get(key, key)}`" for key in KEYS)
    lines = [
        "# drover top: what it costs, and a recording",
        "",
        "<!-- written by benchmarks/bench_top.py --page -->",
        "",
        f"{time.strftime('%d %B %Y', time.gmtime())}, commit {commit}: a terminal of {COLUMNS} columns and {LINES}",
        f"lines against a played collector, {os.cpu_count()} cores, load {load:.1f} before.",
        "",
        "| | 8 GPUs | 100,000 GPUs |",
        "| --- | --- | --- |",
        *(f"| {what} | {form.format(**small)} | {form.format(**large)} |" for what, form in rows),
        "",
        "The keys, 1.2 s apart:",
        f"{keys}.",
        "",
        "Recorded sessions: [8 GPUs](top-8.cast), [100,000 GPUs](top-100000.cast); `asciinema play FILE`",
        "shows one. The first picture at 8 GPUs:",
        "",
        "```",
        frame,
        "```",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--page", action="store_true", help="write docs/evidence/top.md and the recordings")
    given = parser.parse_args()
    load, frame = os.getloadavg()[0], ""
    found: dict[int, dict[str, Any]] = {}
    path = os.environ | {"PYTHONPATH": os.pathsep.join([f"{ROOT}/benchmarks", os.environ.get("PYTHONPATH", "")])}
    for nodes in FLEETS:
        command = [sys.executable, "-m", "console.replayed", "--clusters", "1", "--nodes", str(nodes)]
        collector = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path)
        try:
            assert collector.stdout is not None
            address = json.loads(collector.stdout.readline())["c00"]
            found[nodes], terminal = session(address, given.seconds)
            frame = frame or one_frame(address)
            if given.page:
                title = f"drover top, {nodes * 8:,} GPUs"
                (EVIDENCE / f"top-{nodes * 8}.cast").write_text(terminal.cast(title), "utf-8")
        finally:
            collector.terminate()
            collector.wait(30)
    if given.page:
        (EVIDENCE / "top.md").write_text(page_of(found, frame, given.seconds, load), "utf-8")
    print(
        json.dumps(
            {"benchmark": "top", "load_before": round(load, 1)} | {f"{n * 8}_gpus": each for n, each in found.items()}
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
