"""A scheduler of the operator's own behind a program, and what a node that is out costs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from drover_collector.actions.base import ActError, AwayError, ForeignError, LaterError, Service
from drover_collector.actions.command import CommandActuator
from drover_collector.actions.node_outage import HOUR_MS, gpu_hours_lost
from drover_collector.actions.settings import CommandConfig
from drover_core.model.events import Act, Health, NodeOutage
from testbed.desks import action_of

PROGRAM = """#!/bin/sh
# A scheduler whose whole state is the answer to `observe`; ACT.json is what an act makes of it.
cd "$(dirname "$0")"
read -r request
echo "$request" >> requests
act=$(echo "$request" | sed 's/.*"act": "\\([a-z]*\\)".*/\\1/')
[ "$act" = observe ] && exec cat state.json
[ -f status ] && echo "no: $act" >&2 && exit "$(cat status)"
[ -f "$act.json" ] && cp "$act.json" state.json
echo '{"detail": "so be it"}'
"""
IN = {"service": "in"}
OURS = {"service": "draining", "reason": "drover:i1: xid", "by": "drover", "jobs": ["17"]}
DOWN = {"service": "down", "reason": "died"}


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / "scheduler"
        path.write_text(PROGRAM)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.actuator = CommandActuator(CommandConfig(program=(str(path),), timeout_s=10))

    def has(self, name: str, answer: object) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(answer))

    def do(self, act: Act, mark: str = "i1") -> str:
        return self.actuator.do(action_of(act, "n1", mark, why="xid"), lambda: None).detail

    def acts(self) -> list[str]:
        return [json.loads(line)["act"] for line in (self.folder / "requests").read_text().splitlines()]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    made = Program(tmp_path)
    made.has("state", IN)
    made.has("drain", OURS)
    made.has("resume", IN)
    return made


def test_a_drain_is_looked_at_before_and_after_and_a_resume_too(program: Program) -> None:
    assert program.do(Act.DRAIN) == "so be it"
    assert program.acts() == ["observe", "drain", "observe"]
    assert program.do(Act.DRAIN) == "drained already, with reason 'drover:i1: xid'"
    assert program.acts()[3:] == ["observe"], "it was not asked to drain again"
    state = program.actuator.observe("n1")
    assert (state.service, state.mark, state.jobs) == (Service.DRAINING, "i1", ("17",))
    assert program.do(Act.RESUME) == "so be it"
    assert program.do(Act.RESUME) == "in service already"
    assert program.acts()[-2:] == ["observe", "observe"], "nothing was asked for any more"
    request = json.loads((program.folder / "requests").read_text().splitlines()[1])
    assert (request["id"], request["node"], request["mark"], request["reason"]) == ("a1", "n1", "i1", "drover:i1: xid")


@pytest.mark.parametrize("act", [Act.DRAIN, Act.ISOLATE, Act.RESUME])
def test_a_drain_of_somebody_else_is_left_unchanged(program: Program, act: Act) -> None:
    program.has("state", {"service": "drained", "reason": "new cables", "by": "ann"})
    with pytest.raises(ForeignError, match=r"drained by ann \(new cables\): left unchanged"):
        program.do(act)
    assert program.acts() == ["observe"]


def test_a_drain_for_another_incident_is_not_undone(program: Program) -> None:
    program.has("state", OURS)
    with pytest.raises(ForeignError):
        program.do(Act.RESUME, "i2")


def test_a_drain_of_a_node_that_a_person_drained_is_done_and_keeps_that_persons_mark(program: Program) -> None:
    program.has("state", {"service": "drained", "reason": "drover:hand: new cables"})
    assert program.do(Act.DRAIN) == "drained already for another incident, with reason 'drover:hand: new cables'"
    assert program.acts() == ["observe"], "the program would write this incident's mark over it, or refuse"


@pytest.mark.parametrize(
    ("act", "before", "after"),
    [
        (Act.DRAIN, IN, IN),
        (Act.DRAIN, IN, {"service": "drained", "reason": "no mark"}),
        (Act.RESUME, OURS, OURS),
        (Act.RESUME, OURS, DOWN),
        (Act.RESUME, DOWN, DOWN),
    ],
)
def test_what_the_scheduler_does_not_show_is_not_done(
    program: Program, act: Act, before: object, after: object
) -> None:
    program.has("state", before)
    program.has(act.value, after)
    with pytest.raises(LaterError, match="the command said 'so be it', and the node is"):
        program.do(act)


def test_the_exit_status_says_whether_it_is_tried_again(program: Program) -> None:
    (program.folder / "status").write_text("75")
    with pytest.raises(LaterError, match="asks to be tried again: no: drain"):
        program.do(Act.DRAIN)
    (program.folder / "status").write_text("3")
    with pytest.raises(ActError, match="ended with 3: no: drain") as failed:
        program.do(Act.DRAIN)
    assert not isinstance(failed.value, LaterError)


@pytest.mark.parametrize("answer", ["well", "[]", "{}", '{"service": "asleep"}', '{"service": "in", "jobs": 3}'])
def test_an_answer_that_is_none_is_reported(program: Program, answer: str) -> None:
    (program.folder / "state.json").write_text(answer)
    with pytest.raises(ActError, match="is not as docs"):
        program.do(Act.DRAIN)


def test_a_program_that_hangs_or_is_missing(tmp_path: Path) -> None:
    drain = action_of(Act.DRAIN)
    with pytest.raises(AwayError, match=r"did not end within 0\.2 s"):
        CommandActuator(CommandConfig(program=("/bin/sleep", "60"), timeout_s=0.2)).do(drain, lambda: None)
    with pytest.raises(ActError, match="cannot be started: No such file"):
        CommandActuator(CommandConfig(program=(f"{tmp_path}/none",))).do(drain, lambda: None)


def test_gpu_hours_are_lost_from_when_a_node_is_empty_until_it_is_back() -> None:
    stages = (Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR, Health.HEALTHY)
    history = [NodeOutage("n1", stage, hour * HOUR_MS, "i1", "", "drover", 0) for hour, stage in enumerate(stages)]
    assert gpu_hours_lost(history, 8, 100 * HOUR_MS) == 3 * 8, "an hour each of drained, validating, repair"
    assert gpu_hours_lost(history[:4], 8, 10 * HOUR_MS) == (2 + 7) * 8, "still in repair"
    assert gpu_hours_lost(history[:1], 8, 10 * HOUR_MS) == 0, "its jobs work on"
    assert gpu_hours_lost([], 8, 10 * HOUR_MS) == 0
    assert gpu_hours_lost(history[:2], 8, 0) == 0, "a clock that went back"
