"""`drover demo --act` as a new user walks it: approve, held for the reboot, rebooted, resumed; a drain by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from testbed.demo import Demo, demo
from testbed.waiting import wait_until

NODE, GPU = "r01n03", 2
STEP_S = 180.0
LOOK_S = 1.0  # between two commands: each starts a process
pytestmark = pytest.mark.timeout(900)


def _stage(of: Demo, node: str) -> str:
    """The health of a node, as `drover nodes` prints it."""
    return next(str(row["health"]) for row in of.lines("nodes") if row["name"] == node)


def _reaches(of: Demo, node: str, *stages: str) -> None:
    def there() -> bool:
        assert of.process.poll() is None, of.said
        return _stage(of, node) in stages

    wait_until(there, f"{node} to be {' or '.join(stages)}: {of.said}", STEP_S, LOOK_S)


def _typed(of: Demo, pattern: str) -> str:
    """Type a command that the demo prints."""
    line = of.wait_for(rf"type: drover ({pattern}.*)", STEP_S)[1]
    words = re.findall(r'"[^"]*"|\S+', line.partition(" --collector")[0])
    return of.drover(*(word.strip('"') for word in words))


def test_a_new_user_walks_from_the_fault_to_the_return_and_drains_a_healthy_node(tmp_path: Path) -> None:
    fault = {"kind": "xid", "cause": "fallen_off_bus", "node": NODE, "gpu": GPU, "start_s": 12}
    (tmp_path / "faults.json").write_text(json.dumps({"faults": [fault]}))
    with demo(
        tmp_path, "--act", "--nodes", "8", "--no-dashboard", "--dir", str(tmp_path / "data"),
        "--faults", str(tmp_path / "faults.json"),
    ) as running:  # fmt: skip
        running.wait_for("Demo scheduler: a stand-in, no real nodes")
        assert "a stand-in, no real nodes" in running.drover("status")

        running.wait_for(rf"Drover asks: drain {NODE}\? XID 79 on GPU {GPU}", STEP_S)
        assert _stage(running, NODE) not in ("draining", "drained"), "nothing is done before the yes"
        _typed(running, "approve")
        _reaches(running, NODE, "drained")
        running.wait_for(rf"type: drover reboot {NODE}", STEP_S)

        answer = running.drover("resume", NODE, "--why", "it looks well to me", code=None)
        if "probes were asked for" in answer:  # else it was refused
            wait_until(lambda: len(_validations(running)) >= 2, f"its second probes: {running.said}", STEP_S, LOOK_S)
        assert _stage(running, NODE) != "healthy", "a GPU of it is lost"

        _typed(running, f"reboot {NODE}")
        wait_until(lambda: _is_back(running), f"its return: {running.said}", STEP_S, LOOK_S)
        running.wait_for(rf"{NODE} is back in service", STEP_S)
        wait_until(
            lambda: not [row for row in running.lines("incidents") if row["kind"] == "xid"],
            "the end of its incident", STEP_S, LOOK_S,
        )  # fmt: skip

        _typed(running, "drain")
        by_hand = running.wait_for(r"type: drover drain (\S+)")[1]
        _reaches(running, by_hand, "drained")
        _typed(running, f"resume {by_hand}")
        _reaches(running, by_hand, "healthy")
        running.wait_for(rf"{by_hand} is back in service", STEP_S)
        running.interrupt()
        assert "Traceback" not in running.said + (tmp_path / "data/collector.log").read_text()


def _validations(of: Demo) -> list[str]:
    """Lines of finished probes of the node."""
    return [
        line for line in of.drover("explain", NODE).splitlines() if "probes of" in line and "to validate: done" in line
    ]


def _is_back(of: Demo) -> bool:
    """In service; a resume is asked for where the node waits for one."""
    if _stage(of, NODE) == "healthy":
        return True
    if _stage(of, NODE) == "drained":
        of.drover("resume", NODE, "--why", "it was rebooted", code=None)  # it may not be up yet
    return False
