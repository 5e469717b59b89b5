"""The demo's stand-in for a scheduler: idempotent, bound by marks, and open about what it is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.operations import BOOT_S, LEAVE_S, Operations
from drover_simulator.sku import SimulationError
from drover_simulator.stand_in import StandIn, listening

START_MS = 1_767_225_600_000
NODE = "r01n01"


def made() -> tuple[SimulatedFleet, StandIn]:
    fleet = SimulatedFleet(build_fleet(8, 7), 7, [], START_MS)
    return fleet, StandIn(fleet, Operations(fleet))


def ask(of: StandIn, act: str, mark: str = "m1", node: str = NODE) -> tuple[int, Any]:
    request = {"version": 1, "act": act, "node": node, "mark": mark, "reason": f"drover:{mark}: why", "by": "alice"}
    answer = of.answer(request)
    return answer["status"], answer["said"]


def service(of: StandIn, node: str = NODE) -> str:
    status, said = ask(of, "observe", node=node)
    assert status == 0
    return str(said["service"])


def test_a_node_drains_is_drained_and_comes_back() -> None:
    fleet, of = made()
    assert service(of) == "in"
    for _ in range(2):  # the same again changes nothing
        status, said = ask(of, "drain")
        assert status == 0 and "a stand-in, no real nodes" in said["detail"]
    assert service(of) == "draining"
    fleet.step(LEAVE_S + 1)
    fleet.step(1)
    assert ask(of, "observe") == (0, {"service": "drained", "reason": "drover:m1: why", "by": "alice", "jobs": []})
    for _ in range(2):
        assert ask(of, "resume")[0] == 0
    assert service(of) == "in"


def test_what_carries_another_mark_is_left_alone() -> None:
    _, of = made()
    ask(of, "isolate", "m1")
    for act in ("drain", "isolate", "resume"):
        status, said = ask(of, act, "m2")
        assert status != 0 and "drover:m1: why" in said
    assert service(of) in ("draining", "drained")


def test_a_node_that_boots_is_down_until_it_is_up() -> None:
    fleet, of = made()
    assert ask(of, "reboot")[0] == 0
    fleet.step(1)
    assert service(of) == "down"
    fleet.step(BOOT_S + 1)
    fleet.step(1)
    assert service(of) == "in"


@pytest.mark.parametrize(("act", "node"), [("explode", NODE), ("drain", "strange"), ("observe", "strange")])
def test_what_it_does_not_know_is_refused(act: str, node: str) -> None:
    _, of = made()
    status, said = ask(of, act, node=node)
    assert status != 0 and isinstance(said, str)


def test_the_program_of_the_demo_asks_it_over_a_socket(tmp_path: Path) -> None:
    _, of = made()
    command = [sys.executable, "-m", "drover_cli.demo.scheduler", str(tmp_path / "s")]

    async def call(act: str, node: str = NODE) -> tuple[int, str, str]:
        body = json.dumps({"act": act, "node": node, "mark": "m", "reason": "drover:m: x", "by": "b"})
        done = await asyncio.to_thread(
            subprocess.run, command, input=body, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout, done.stderr

    async def scenario() -> None:
        assert (await call("observe"))[0] == 75, "nobody is there: try again"
        async with listening(of, tmp_path / "s"):
            assert json.loads((await call("observe"))[1])["service"] == "in"
            assert "no new jobs" in json.loads((await call("drain"))[1])["detail"]
            code, said, _ = await call("reboot")
            assert code == 0 and said.startswith("demo scheduler (a stand-in, no real nodes): ")
            code, _, error = await call("drain", "strange")
            assert code == 1 and "'strange' is not a node of this simulation" in error

    asyncio.run(scenario())


def test_a_socket_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(made()[1], tmp_path / "nowhere" / "s"):
            pass

    with pytest.raises(SimulationError, match="--scheduler"):
        asyncio.run(scenario())
