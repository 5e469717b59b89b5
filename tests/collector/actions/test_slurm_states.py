"""Which states of Slurm count as out of service, in the words of scontrol and of slurmrestd."""

from __future__ import annotations

import pytest

from drover_collector.actions.base import Service
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import parse
from drover_collector.actions.slurm.slurmrestd import _node
from testbed.slurm_stand_in import SlurmStandIn

GETS_JOBS = ("IDLE", "MIXED", "ALLOCATED", "IDLE+RESERVED", "IDLE+PLANNED", "MIXED+COMPLETING", "IDLE+CLOUD",
             "ALLOCATED+REBOOT_REQUESTED", "IDLE+DYNAMIC_NORM", "IDLE*", "MIXED+POWERING_UP")  # fmt: skip
GETS_NONE = ("DOWN", "DOWN*", "IDLE+FAIL", "ALLOCATED+FAIL", "ERROR", "FUTURE", "UNKNOWN", "IDLE+MAINT",
             "IDLE+MAINTENANCE+RESERVED", "MIXED+MAINT", "IDLE+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN", "IDLE+POWER",
             "IDLE+POWERING_DOWN", "IDLE+POWER_DOWN", "IDLE+INVALID_REG", "IDLE+BLOCKED",
             "IDLE+REBOOT_ISSUED")  # fmt: skip


def services(state: str) -> set[Service]:
    """What the actuator makes of it, by scontrol's line and by slurmrestd's entry."""
    (shown,) = parse(f"NodeName=n0 Arch=x86_64 CoresPerSocket=1 State={state} Weight=1\n")
    parsed = _node({"name": "n0", "state": state.rstrip("*").split("+"), "weight": 1})
    found = set()
    for node in (shown, parsed):
        slurm = SlurmStandIn("n0")
        slurm.held["n0"] = node
        actuator = SlurmActuator(slurm, 10_000)
        found.add(actuator.observe("n0").service)
        assert (actuator.survey(["n0"]).closed == {"n0"}) == (actuator.observe("n0").service is not Service.IN)
    return found


@pytest.mark.parametrize("state", GETS_JOBS)
def test_a_node_that_gets_jobs_is_in_service(state: str) -> None:
    assert services(state) == {Service.IN}


@pytest.mark.parametrize("state", GETS_NONE)
def test_a_node_that_gets_none_counts_as_out_for_the_caps(state: str) -> None:
    assert services(state) == {Service.DOWN}


def test_a_drain_comes_before_all_of_them() -> None:
    assert services("IDLE+DRAIN+MAINT") == {Service.DRAINED}
    assert services("MIXED+DRAIN+MAINT") == {Service.DRAINING}
