"""Children of the demo are ended, however often Ctrl-C is pressed."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from drover_cli.demo.processes import Processes
from testbed.waiting import wait_until

SLOW = """
import os, pathlib, signal, sys
mine = pathlib.Path(sys.argv[0]).stem
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(mine + ".asked").touch(), {again}))
pathlib.Path(mine + ".up").touch()
while True:
    signal.pause()
"""


def _program(folder: Path, name: str, again: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(SLOW.format(again=again)))


def test_a_second_ctrl_c_while_children_end_kills_them_all(tmp_path: Path) -> None:
    _program(tmp_path, "first", "None")  # it does not end when it is asked to
    _program(tmp_path, "second", "os.kill(os.getppid(), signal.SIGINT)")  # a Ctrl-C while it is waited for
    children: list[psutil.Process] = []
    others = set(psutil.Process(os.getpid()).children())  # of other tests in this process
    try:
        with pytest.raises(KeyboardInterrupt, match="the first"), Processes(tmp_path) as processes:
            for name in ("first", "second"):
                processes.start(name, name)
                wait_until(lambda name=name: (tmp_path / f"{name}.up").exists(), f"{name} is up")  # type: ignore[misc]
            children = [child for child in psutil.Process(os.getpid()).children() if child not in others]
            assert len(children) == 2, sys.argv
            raise KeyboardInterrupt("the first")
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        for child in children:
            if child.is_running():
                child.kill()
