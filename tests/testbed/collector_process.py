"""`drover-collector run` as a process of its own."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

START_S = 300


def write(folder: Path, extra: str = "", ingest: str = "127.0.0.1:0", api: str = "127.0.0.1:0") -> Path:
    (folder / "fleet.toml").write_text('name = "test"\n[[nodes]]\nnames = "n[1-2]"\nrack = "r1"\ngpus = 2\n')
    path = folder / "collector.toml"
    path.write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n'
        f'[ingest]\nlisten = "{ingest}"\n[api]\nlisten = "{api}"\n{extra}'
    )
    return path


class Running:
    """A collector process that has said it is ready."""

    def __init__(self, config: Path, files: int | None = None) -> None:
        """`files`: how many it may open."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drover_collector.main", "run", "--config", str(config)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=config.parent,
            preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )  # fmt: skip
        self.errors: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        threading.Thread(target=self.errors.extend, args=(self.process.stderr,), daemon=True).start()
        overdue = threading.Timer(START_S, self.process.kill)
        overdue.start()
        self.ready = self.process.stdout.readline().strip()
        overdue.cancel()
        assert self.ready.startswith("drover-collector is ready: "), self.errors
        self.addresses = dict(part.split(" on ") for part in self.ready.partition(": ")[2].split(", "))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@contextlib.contextmanager
def collector(config: Path, files: int | None = None) -> Iterator[Running]:
    running = Running(config, files)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
