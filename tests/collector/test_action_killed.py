"""kill -9 of a process in the middle of an action: the next one finds what it left, and the node is closed once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 60
# Stands for scontrol and squeue: one node whose state is a file, one job that can be requeued.
SCONTROL = """#!/bin/sh
cd "$(dirname "$0")" || exit 1
case "$*" in
*"show node"*) cat state ;;
update*) echo "$*" >> effects
  echo "NodeName=n1 State=MIXED+DRAIN Weight=1 Reason=${4#reason=} [root@2026-11-22T00:00:00]" > state ;;
requeue*) echo "$*" >> effects; : > jobs ;;
*) cat jobs ;;
esac
"""


@pytest.mark.parametrize("step", ["intended", "acted", "moved"])
def test_killed_at_a_step_it_is_done_once(tmp_path: Path, step: str) -> None:
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text(SCONTROL)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "state").write_text("NodeName=n1 State=MIXED Weight=1\n")
    (tmp_path / "jobs").write_text("17\n")
    command = [sys.executable, str(HERE / "killed_desk.py"), f"chdb://{tmp_path}/store", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    first = subprocess.run([*command, step], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = subprocess.run([*command, ""], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert second.stdout == "done draining\n", second.stderr
    effects = (tmp_path / "effects").read_text().splitlines()
    assert effects == ["update nodename=n1 state=drain reason=drover:inc1: why", "requeue 17"]
