"""The real probe service of a node, and its real agent, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# What drover-probe.path does, which starts the service again when it has ended and something lies there.
AGAIN = 'while "$@"; do :; done'
AGENT = (sys.executable, "-m", "drover_agent.main")


@contextlib.contextmanager
def serving(
    root: Path, log: Path, words: Sequence[str] = AGENT, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """The service works off `root`; what it says is in `log`. `words`: another program with the same arguments."""
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", AGAIN, "service", *words, "probe", "--serve", str(root)], stderr=out, stdout=out,
            env={**os.environ, **(env or {})}, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a probe's own process ends with the service
        process.wait()


@contextlib.contextmanager
def reporting(node: str, spool: Path, address: str, log: Path) -> Iterator[None]:
    """The agent of a node without GPUs, with the folder of its probes in `spool`/probes."""
    settings = {
        "node": node, "collectors": f'["{address}"]', "spool.dir": str(spool), "kmsg_enabled": "false",
        "hardware": "none", "steps_socket": "", "batch_s": "1",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with log.open("w") as out:
        process = subprocess.Popen([*AGENT, "run", *words], stderr=out, stdout=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait()
