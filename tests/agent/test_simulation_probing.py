"""Figures of simulated probes: healthy units lie near each other, a fault shows, a job is not disturbed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drover_agent.probes import of_level
from drover_agent.simulation.fault import Fault
from drover_agent.simulation.fleet import SimulatedFleet, build_fleet
from drover_agent.simulation.probing import Prober
from drover_proto import telemetry_pb2 as pb
from drover_proto.events import ProbeResult
from drover_proto.fleet import JobSpec

START_MS = 1_767_225_600_000
NODE, GPU = "r01n01", 3


def fleet(*faults: Fault, jobs: list[JobSpec] | None = None) -> SimulatedFleet:
    made = SimulatedFleet(build_fleet(2, 1001), 1001, list(faults), START_MS, jobs or [])
    for _ in range(30):
        made.step(2.0)
    return made


def answer(of: SimulatedFleet, **request: object) -> list[ProbeResult]:
    return Prober(of, 1001, [(NODE, GPU)]).answer(NODE, pb.ProbeRequest(id="p1", **request))


def figures(found: list[ProbeResult], probe: str) -> list[float]:
    return [r.value for r in found if r.probe == probe and r.value is not None]


def test_all_of_a_level_from_each_gpu_and_pair() -> None:
    found = answer(fleet(), level="quick")
    assert {r.probe for r in found[:-1]} == {p.name for p in of_level("quick")}
    assert (found[-1].id, found[-1].end) == ("p1/end", "done")
    assert len({r.id for r in found}) == len(found)
    assert len(figures(found, "p2p")) == 56 and len(figures(found, "hbm_copy")) == 8
    assert {r.gpu: r.ok for r in found if r.probe == "sdc"} == {g: g != GPU for g in range(8)}
    for probe in ("gemm_bf16", "hbm_copy", "pcie_h2d", "p2p"):
        values = figures(found, probe)
        assert np.std(values) / np.mean(values) < 0.03
    assert 650 < np.mean(figures(found, "gemm_bf16")) < 900
    assert answer(fleet(), level="quick") == found


@pytest.mark.parametrize(
    ("cause", "severity", "probe"), [("hbm", 0.5, "hbm_copy"), ("clock", 0.3, "gemm_bf16"), ("pcie", 0.8, "pcie_h2d")]
)
def test_a_fault_shows_in_its_own_figure(cause: str, severity: float, probe: str) -> None:
    fault = Fault(kind="straggler", cause=cause, start_s=10, end_s=600, node=NODE, gpu=1, severity=severity)
    job = JobSpec("j", START_MS, START_MS + 20_000, tuple((NODE, g) for g in range(8)))
    found = answer(fleet(fault, jobs=[job]), level="quick")
    values = np.array(figures(found, probe))
    assert int(values.argmin()) == 1
    assert values[1] < (1 - 0.5 * severity) * np.median(values)


def test_a_job_is_not_disturbed() -> None:
    job = JobSpec("j", START_MS, None, tuple((NODE, g) for g in range(4)))
    of = fleet(jobs=[job])
    (end,) = answer(of, gpus=[2, 5])
    assert (end.end, end.detail) == ("refused", "GPU 2: held by job j")
    assert {r.gpu for r in answer(of, probes=["sdc"])[:-1]} == {4, 5, 6, 7}
    (end,) = answer(of, probes=["rm"])
    assert end.end == "refused"
    assert replace(end, detail="") == replace(answer(of, gpus=[9])[0], detail="")
