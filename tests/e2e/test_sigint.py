"""Programs that a script's `&` starts have SIGINT ignored: they set their own handlers, and SIGINT ends them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from testbed.collector_process import write
from testbed.waiting import wait_until

START_S = 300
STOP_S = 300
# 130, or by the signal itself: Python ends so if the signal comes while it runs generated code, such as a dataclass's
# methods, also where KeyboardInterrupt is caught.
INTERRUPTED = (130, -signal.SIGINT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collector(folder: Path) -> list[str]:
    return ["drover_collector.main", "run", "--config", str(write(folder))]


def _agent(folder: Path) -> list[str]:
    words = (
        f'collectors=["127.0.0.1:{_free_port()}"]',
        "hardware=simulated",
        "kmsg_enabled=false",
        f"spool.dir={folder}/spool",
    )
    return ["drover_agent.main", "run", *(word for pair in words for word in ("--set", pair))]


def _fleet(folder: Path) -> list[str]:
    at = f"127.0.0.1:{_free_port()}"
    return [
        "drover_agent.main",
        "fleet",
        "--collector",
        at,
        "--nodes",
        "1",
        "--faults",
        "none",
        "--spool-dir",
        f"{folder}/spools",
    ]


def _dashboard(_folder: Path) -> list[str]:
    return ["drover_dashboard.main", "--collector", f"127.0.0.1:{_free_port()}", "--port", str(_free_port())]


def _demo(folder: Path) -> list[str]:
    return ["drover_cli.main", "demo", "--nodes", "8", "--no-dashboard", "--dir", f"{folder}/demo"]


@pytest.mark.parametrize(
    ("program", "ready"),
    [
        (_collector, "is ready:"),
        (_agent, None),
        (_fleet, "1 simulated nodes"),
        (_dashboard, "console on"),
        (_demo, "command line:"),
    ],
)
def test_it_ends_by_sigint_where_it_was_started_with_sigint_ignored(
    tmp_path: Path, program: Callable[[Path], list[str]], ready: str | None
) -> None:
    log = tmp_path / "said.log"
    with log.open("wb") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", *program(tmp_path)], stdout=said, stderr=subprocess.STDOUT, preexec_fn=_ignored
        )
    try:
        wait_until(
            lambda: child.poll() is not None or (ready in log.read_text() if ready else _obeys(child.pid)),
            limit_s=START_S,
        )
        assert child.poll() is None, log.read_text()
        child.send_signal(signal.SIGINT)
        assert child.wait(STOP_S) in (0, *INTERRUPTED), log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        if child.poll() is None:
            for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
                process.kill()
            child.wait()


def _obeys(pid: int) -> bool:
    """Whether a process catches SIGINT."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    return False
