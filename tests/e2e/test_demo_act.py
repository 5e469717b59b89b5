"""`drover demo --act` as a new user walks it: approve, held for the reboot, rebooted, resumed; a drain by hand.

While it waits it asks the collector itself: a look by the command costs as much as 100 of these.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import pytest

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.demo import Demo, demo
from testbed.waiting import wait_until

NODE, GPU = "r01n03", 2
STEP_S = 400.0
LOOK_S = 1.0
pytestmark = pytest.mark.timeout(1800)


def _stage(of: Demo, node: str) -> str:
    """The health of a node, as `drover nodes` prints it."""
    return next(str(row["health"]) for row in of.lines("nodes") if row["name"] == node)


def _health(fleet: FleetStub, node: str) -> str:
    rows = fleet.ListNodes(pb.ListNodesRequest(contains=node, limit=10), timeout=120).nodes
    return next(row.health for row in rows if row.name == node)


def _reaches(of: Demo, fleet: FleetStub, node: str, stage: str) -> None:
    def there() -> bool:
        assert of.process.poll() is None, of.said
        return _health(fleet, node) == stage

    wait_until(there, f"{node} to be {stage}: {of.said}", STEP_S, LOOK_S)
    assert _stage(of, node) == stage


def _typed(of: Demo, pattern: str) -> str:
    """Type a command that the demo prints."""
    line = of.wait_for(rf"type: drover ({pattern}.*)", STEP_S)[1]
    words = re.findall(r'"[^"]*"|\S+', line.partition(" --collector")[0])
    return of.drover(*(word.strip('"') for word in words))


def test_a_new_user_walks_from_the_fault_to_the_return_and_drains_a_healthy_node(tmp_path: Path) -> None:
    fault = {"kind": "xid", "cause": "fallen_off_bus", "node": NODE, "gpu": GPU, "start_s": 12}
    (tmp_path / "faults.json").write_text(json.dumps({"faults": [fault]}))
    with (
        demo(
            tmp_path, "--act", "--nodes", "8", "--no-dashboard", "--dir", str(tmp_path / "data"),
            "--faults", str(tmp_path / "faults.json"),
        ) as running,
        grpc.insecure_channel(running.api) as channel,
    ):  # fmt: skip
        fleet = FleetStub(channel)
        running.wait_for("Demo scheduler: a stand-in, no real nodes")
        assert "a stand-in, no real nodes" in running.drover("status")

        running.wait_for(rf"Drover asks: drain {NODE}\? XID 79 on GPU {GPU}", STEP_S)
        assert _stage(running, NODE) not in ("draining", "drained"), "nothing is done before the yes"
        _typed(running, "approve")
        _reaches(running, fleet, NODE, "drained")
        running.wait_for(rf"type: drover reboot {NODE}", STEP_S)

        answer = running.drover("resume", NODE, "--why", "it looks well to me", code=None)
        if "probes were asked for" in answer:  # else it was refused
            wait_until(
                lambda: len(_validations(running)) >= 2, f"its second probes: {running.said}", STEP_S, 3 * LOOK_S
            )
        assert _stage(running, NODE) != "healthy", "a GPU of it is lost"

        _typed(running, f"reboot {NODE}")
        wait_until(lambda: _is_back(running, fleet), f"its return: {running.said}", STEP_S, LOOK_S)
        running.wait_for(rf"{NODE} is back in service", STEP_S)
        wait_until(lambda: not _of_xids(fleet), "the end of its incident", STEP_S, LOOK_S)
        assert "xid" not in {row["kind"] for row in running.lines("incidents")}

        _typed(running, "drain")
        by_hand = running.wait_for(r"type: drover drain (\S+)")[1]
        _reaches(running, fleet, by_hand, "drained")
        _typed(running, f"resume {by_hand}")
        _reaches(running, fleet, by_hand, "healthy")
        running.wait_for(rf"{by_hand} is back in service", STEP_S)
        running.interrupt()
        assert "Traceback" not in running.said + (tmp_path / "data/collector.log").read_text()


def _validations(of: Demo) -> list[str]:
    """Lines of finished probes of the node."""
    return [
        line for line in of.drover("explain", NODE).splitlines() if "probes of" in line and "to validate: done" in line
    ]


def _of_xids(fleet: FleetStub) -> list[str]:
    """Its open incidents of XIDs."""
    found = fleet.ListIncidents(pb.ListIncidentsRequest(state="open"), timeout=120).incidents_json
    return [text for text in found if json.loads(text)["kind"] == "xid"]


def _is_back(of: Demo, fleet: FleetStub) -> bool:
    """In service; a resume is asked for where the node waits for one."""
    if _health(fleet, NODE) == "healthy":
        return True
    if _health(fleet, NODE) == "drained":
        of.drover("resume", NODE, "--why", "it was rebooted", code=None)  # it may not be up yet
    return False
