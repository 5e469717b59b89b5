"""Child processes of the demo: started together, watched, ended together."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from drover_cli.errors import CliError

STOP_S = 20.0


class ChildError(Exception):
    """A child ended that should run; the message carries the end of its log, and `name` whose it is ("": none's)."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


_reserved: list[socket.socket] = []  # open as long as this program runs


def _reserve(port: int) -> bool:
    """Whether no other demo has chosen this port: its collector listens there some seconds later only."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0drover-demo-{port}")  # abstract: it ends with this program
    except OSError:
        name.close()
        return False
    _reserved.append(name)
    return True


def free_port(preferred: int) -> int:
    """`preferred` where it is free on loopback and no other demo has chosen it, else any free port."""
    for port in (preferred, 0):
        if port and not _reserve(port):
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed listener's TIME_WAIT is no obstacle
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CliError("no free port on 127.0.0.1; end something that listens there")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait inside: between a child's start and its entry in our list it would be nobody's child."""
    came: list[int] = []
    before = {s: signal.signal(s, lambda number, _: came.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


class Processes:
    """Starts `python -m MODULE ...` children with a log file each; ends all of them, newest first, on leaving."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *args: str) -> None:
        with self.log(name).open("ab") as log, _signals_held():
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C reaches us alone; we end the children in order
            )

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def check(self) -> None:
        """Raise ChildError when a child is gone."""
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                tail = self.log(name).read_text("utf-8", "replace").strip().splitlines()[-8:]
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                last = "\n  ".join(["its last lines:", *tail]) if tail else "it had said nothing"
                raise ChildError(f"the {name} {how}; {last}", name)

    def runs(self, name: str) -> bool:
        return name in self._children and self._children[name].poll() is None

    def stop(self, name: str) -> None:
        child = self._children[name]
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        del self._children[name]

    def _kill(self, _number: int, _frame: object) -> None:
        for child in self._children.values():
            child.kill()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Another Ctrl-C kills them at once. Were it raised here, those that still run would outlive us.
        before = {s: signal.signal(s, self._kill) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in reversed(list(self._children)):
                self.stop(name)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
