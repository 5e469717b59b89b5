"""What is done to simulated nodes: which faults a reset and a boot cure, and which they do not."""

from __future__ import annotations

import numpy as np
import pytest

from drover_proto import telemetry_pb2 as pb
from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.operations import (
    BOOT_S,
    LEAVE_S,
    MOVE_S,
    Operations,
)
from drover_simulator.probing import Prober

START_MS = 1_767_225_600_000
SPEC = build_fleet(8, 7)


def running_job(fleet: SimulatedFleet) -> tuple[str, str]:
    """The largest job and its first node."""
    job = max(fleet.jobs, key=lambda j: len(j.members))
    return job.id, job.members[0][0]


def after(seconds: float, fleet: SimulatedFleet) -> None:
    for _ in range(round(seconds)):
        fleet.step(1.0)


def made(kind: str, cause: str, gpu: int | None, severity: float = 1.0) -> tuple[SimulatedFleet, Operations, str]:
    node = running_job(SimulatedFleet(SPEC, 7, [], START_MS))[1]
    fleet = SimulatedFleet(SPEC, 7, [Fault(kind, cause, node, gpu, 5.0, None, severity)], START_MS)
    after(20, fleet)
    return fleet, Operations(fleet), node


def failing(fleet: SimulatedFleet, node: str) -> bool:
    """Whether a deep probe of the node shows that GPU 2 is not as the others."""
    found = Prober(fleet, 7).answer(node, pb.ProbeRequest(id="p", level="deep"))
    if found[-1].end != "done" or found[-1].detail:
        return True
    if any(result.ok is False for result in found):
        return True
    gemm = np.array([r.value for r in found if r.probe == "gemm_bf16"])
    return bool(gemm.min() < 0.93 * np.median(gemm))


@pytest.mark.parametrize(
    ("kind", "cause", "severity", "by_reset", "by_reboot"),
    [
        ("xid", "fallen_off_bus", 1.0, False, True),
        ("xid", "gsp_timeout", 1.0, True, True),
        ("xid", "uncontained_ecc", 1.0, True, True),
        ("liveness", "gpu_lost", 1.0, False, True),
        ("memory", "uncorrectable", 1.0, True, True),
        ("memory", "row_remap_failure", 1.0, False, False),
        ("straggler", "power_cap", 0.28, False, False),
        ("straggler", "clock", 0.3, True, True),
        ("thermal", "cooling", 1.8, False, False),
    ],
)
def test_a_reset_and_a_boot_cure_what_they_do_in_the_field(
    kind: str, cause: str, severity: float, by_reset: bool, by_reboot: bool
) -> None:
    for act, cured in (("reset", by_reset), ("reboot", by_reboot)):
        fleet, operations, node = made(kind, cause, 2, severity)
        operations.close(node)
        after(LEAVE_S + 2, fleet)
        assert failing(fleet, node)
        getattr(operations, act)(node)
        after(BOOT_S + 5, fleet)
        assert failing(fleet, node) is not cured, act
        gpu = int(fleet.hardware.first_gpu[fleet.hardware.number[node]]) + 2
        assert bool(fleet.active) is not cured
        if cause == "row_remap_failure":
            assert fleet.gpu_columns()["row_remap_failed"][gpu] == 1, "the board keeps it"
        elif cured:
            assert np.isfinite(fleet.gpu_columns()["power_w"][gpu])
            assert fleet.gpu_columns()["recovery_action"][gpu] == 0


def test_a_repair_that_comes_after_the_boot_changes_nothing() -> None:
    node = running_job(SimulatedFleet(SPEC, 7, [], START_MS))[1]
    fleet = SimulatedFleet(SPEC, 7, [Fault("xid", "fallen_off_bus", node, 2, 5.0, 60.0)], START_MS)
    after(10, fleet)
    Operations(fleet).reboot(node)
    after(BOOT_S + 40, fleet)
    assert not fleet.active
    assert "gpu_back" not in {event.code for event in fleet.take_events()}


def test_a_node_that_reboots_says_nothing_until_it_is_up() -> None:
    fleet, operations, node = made("xid", "fallen_off_bus", 2)
    operations.reboot(node)
    after(5, fleet)
    assert fleet.silent_nodes() == {node} and not operations.boots
    after(BOOT_S, fleet)
    assert fleet.silent_nodes() == set() and operations.boots == {node: 1}


def test_a_closed_node_loses_its_job_which_goes_on_elsewhere_until_it_is_opened() -> None:
    fleet = SimulatedFleet(SPEC, 7, [], START_MS)
    job, node = running_job(fleet)
    operations = Operations(fleet)
    operations.close(node)
    after(LEAVE_S - 5, fleet)
    assert operations.jobs_on(node) == [job], "it drains"
    after(10, fleet)
    assert operations.jobs_on(node) == []
    after(MOVE_S, fleet)
    again = fleet.jobs[-1]
    assert again.id.startswith(job) and node not in {name for name, _ in again.members}
    assert len(again.members) == len(max(fleet.jobs, key=lambda j: len(j.members)).members) - 8
    operations.open(node)
    assert not fleet.closed


def test_a_node_that_is_opened_in_time_keeps_its_job() -> None:
    fleet = SimulatedFleet(SPEC, 7, [], START_MS)
    job, node = running_job(fleet)
    operations = Operations(fleet)
    operations.close(node)
    after(5, fleet)
    operations.open(node)
    after(LEAVE_S, fleet)
    assert operations.jobs_on(node) == [job]
