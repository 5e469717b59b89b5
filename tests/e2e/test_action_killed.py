"""kill -9 of a real collector at each step of an action's life, with a program as its scheduler: after the next start
it is done once, or reported as not done. On a real Slurm: test_slurm_actions.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from testbed.killing import Killed

# A scheduler whose nodes are folders. `effects` has a line for each change; `kill_at` names the call in which it kills
# the collector, its parent: before it has done anything of it, or after all of it and before it answers.
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")" || exit 1
read -r request
field() { echo "$request" | sed -n "s/.*\\"$1\\": \\"\\([^\\"]*\\)\\".*/\\1/p"; }
act=$(field act); node=$(field node); id=$(field id)
die() { [ -f kill_at ] && [ "$(cat kill_at)" = "program $act $1" ] && kill -9 $PPID && exec sleep 0.2; }
mkdir -p "nodes/$node"; cd "nodes/$node" || exit 1
if [ "$act" = observe ]; then
  echo observe >> ../../calls
  cd ../..; die "$(wc -l < calls)"; cd "nodes/$node" || exit 1
  if [ -f reason ]; then echo "{\\"service\\": \\"drained\\", \\"reason\\": \\"$(cat reason)\\", \\"jobs\\": []}"
  else echo '{"service": "in"}'; fi
  exit
fi
(cd ../..; die before)
if [ "$(cat "done-$act" 2>/dev/null)" != "$id" ]; then
  case $act in drain | isolate) field reason > reason ;; resume) rm -f reason ;; esac
  echo "$id" > "done-$act"
  echo "$act $node" >> ../../effects
fi
(cd ../..; die after)
echo '{"detail": "so be it"}'
"""
# A drain that the policy has decided on, at each thing that is kept of it: before the first and after each. Between two
# of them nothing is kept, and what is asked of the scheduler there is asked again.
DRAIN = (
    "write_decisions act before", "write_decisions act after", "write_actions intended after", "program drain before",
    "program drain after", "write_duties draining after", "write_actions done after",
)  # fmt: skip
ISOLATE = ("program isolate after",)
ADVISE = ("program advise after",)
RESUME = ("program resume after", "write_duties healthy after")
RESET = ("write_actions intended after",)
REBOOT = ("program reboot after",)
POINTS = [
    (act, point)
    for act, points in {
        "drain": DRAIN, "isolate": ISOLATE, "advise": ADVISE, "resume": RESUME, "reset": RESET, "reboot": REBOOT,
    }.items()
    for point in points
]  # fmt: skip
BY_HAND = ("resume", "reset", "reboot")


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    program = tmp_path / "scheduler"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    nodes = {f"n{number}": act for number, (act, _) in enumerate(POINTS)} | {"n99": "by_hand"}
    own = "".join(f'{act}_command = ["{program}"]\n' for act in ("reset", "reboot"))
    with Killed(tmp_path, nodes, f'{own}[act.command]\nprogram = ["{program}"]\n') as made:
        yield made


def test_killed_at_any_point_it_is_done_once_or_reported_as_undone(killed: Killed) -> None:
    for number, (act, point) in enumerate(POINTS):
        node = f"n{number}"
        if act == "resume":
            assert killed.ask("drain", node).state == "done"
        (killed.folder / "calls").write_text("")
        killed.dies(point, partial(killed.ask, act, node) if act in BY_HAND else partial(killed.fault, node))
        killed.start()
        ended = killed.ended(node, act)
        assert effects(killed, act, node) == 1, point
        if act == "reboot":  # its program ran: it is not run again
            assert (ended.state, "nobody knows whether it was done" in ended.detail) == ("failed", True), point
            continue
        assert ended.state == "done", point
        if act not in ("advise", "reset"):
            assert killed.stage(node) in (("healthy",) if act == "resume" else ("draining", "drained")), point
    assert killed.starts == len(POINTS) + 1
    # What a person asks for and was not stored: the caller has got an error, and nothing is done.
    killed.dies("write_actions intended before", lambda: killed.ask("drain", "n99"))
    killed.start()
    assert killed.actions("n99", "drain") == []
    assert effects(killed, "drain", "n99") == 0


def effects(killed: Killed, act: str, node: str) -> int:
    found = killed.folder / "effects"
    return found.read_text().splitlines().count(f"{act} {node}") if found.exists() else 0
