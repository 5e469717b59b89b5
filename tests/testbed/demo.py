"""`drover demo` as a process of its own, with what it has said so far."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from testbed.waiting import wait_until

START_S = 300
COMMAND_S = 300


class Demo:
    """Its log is the file `log`; its temporary files are in `folder`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.log = folder, folder / "demo.log"
        (folder / "tmp").mkdir()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "drover_cli.main", "demo", *words],
                stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder / "tmp")},
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_for(self, pattern: str, limit_s: float = START_S) -> re.Match[str]:
        """The first match in what it says; fails where it ends before, or does not say it."""
        found: list[re.Match[str]] = []

        def there() -> bool:
            found.extend(re.finditer(pattern, self.said))
            assert found or self.process.poll() is None, self.said
            return bool(found)

        wait_until(there, f"the demo to say {pattern!r}", limit_s)
        return found[0]

    @property
    def api(self) -> str:
        return self.wait_for(r"--collector (127\.0\.0\.1:\d+)\n")[1]

    def child(self, module: str) -> psutil.Process:
        return next(p for p in psutil.Process(self.process.pid).children() if module in p.cmdline())

    def drover(self, *words: str, code: int | None = 0) -> str:
        """What a command against its collector prints; `code` None: whatever its exit code is."""
        done = subprocess.run(
            [sys.executable, "-m", "drover_cli.main", *words, "--collector", self.api],
            capture_output=True, text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def lines(self, *words: str) -> list[dict[str, object]]:
        """The objects that a command with --json prints."""
        return [json.loads(line) for line in self.drover(*words, "--json").splitlines()]

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(120)


@contextlib.contextmanager
def demo(folder: Path, *words: str) -> Iterator[Demo]:
    running = Demo(folder, *words)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            for process in [*psutil.Process(running.process.pid).children(recursive=True), running.process]:
                process.kill()
            running.process.wait()
