"""Figures of simulated probes: healthy units lie near each other, a fault shows, a job is not disturbed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drover_agent.probes import of_level
from drover_core.model.events import ProbeResult
from drover_core.model.fleet import JobSpec
from drover_proto import telemetry_pb2 as pb
from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.probing import Prober

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


@pytest.mark.parametrize(
    ("kind", "cause", "said"),
    [
        ("xid", "fallen_off_bus", "GPU is lost"),
        ("xid", "gsp_timeout", "GPU is lost"),
        ("liveness", "gpu_lost", "GPU is lost"),
        ("xid", "uncontained_ecc", "requires reset"),
    ],
)
def test_a_gpu_that_the_driver_cannot_use_is_left_out(kind: str, cause: str, said: str) -> None:
    job = JobSpec("j", START_MS, START_MS + 20_000, tuple((NODE, g) for g in range(8)))
    of = fleet(Fault(kind, cause, NODE, 1, 10.0, None), jobs=[job])
    found = answer(of, level="quick")
    assert {r.gpu for r in found[:-1] if r.gpu is not None} == set(range(8)) - {1}
    assert found[-1].end == "done" and "left out: GPU 1" in found[-1].detail and said in found[-1].detail
    (end,) = answer(of, gpus=[1])
    assert end.end == "refused" and said in end.detail


def test_a_node_whose_driver_hangs_cannot_be_probed() -> None:
    (end,) = answer(fleet(Fault("liveness", "driver_hung", NODE, None, 10.0, None)), level="quick")
    assert end.end == "refused" and "driver" in end.detail


def test_a_capped_gpu_is_slow_by_its_cap_also_when_its_job_is_over() -> None:
    job = JobSpec("j", START_MS, START_MS + 30_000, tuple((NODE, g) for g in range(8)))
    of = fleet(Fault("straggler", "power_cap", NODE, 1, 10.0, None, 0.28), jobs=[job])
    values = np.array(figures(answer(of, level="quick"), "gemm_bf16"))
    assert int(values.argmin()) == 1
    assert 0.5 * np.median(values) < values[1] < 0.85 * np.median(values)
    limit_w = of.gpu_columns()["power_limit_w"][1]
    assert 250 < limit_w < 650, "the cap that its job met"


def test_a_gpu_that_is_badly_cooled_throttles_in_its_probe() -> None:
    of = fleet(Fault("thermal", "cooling", NODE, 1, 0.0, None, 1.8), jobs=[
        JobSpec("j", START_MS, START_MS + 5_000, tuple((NODE, g) for g in range(8)))
    ])  # fmt: skip
    values = np.array(figures(answer(of, level="quick"), "gemm_bf16"))
    assert int(values.argmin()) == 1
    assert values[1] < 0.9 * np.median(values)
    soak = np.array(figures(answer(of, probes=["soak"]), "soak"))
    assert soak[1] > 2 * np.median(soak)


@pytest.mark.parametrize("cause", ["row_remap_failure", "uncorrectable"])
def test_a_row_that_is_not_remapped_fails_the_memory_pattern(cause: str) -> None:
    job = JobSpec("j", START_MS, START_MS + 20_000, tuple((NODE, g) for g in range(8)))
    of = fleet(Fault("memory", cause, NODE, 1, 10.0, None), jobs=[job])
    found = Prober(of, 1001).answer(NODE, pb.ProbeRequest(id="p2", level="deep"))
    assert {r.gpu: r.ok for r in found if r.probe == "memory_pattern"} == {g: g != 1 for g in range(8)}
    assert {r.gpu: r.ok for r in found if r.probe == "sdc"} == dict.fromkeys(range(8), True)


def test_what_a_simulated_board_lacks_has_no_figure() -> None:
    found = [each for each in answer(fleet(), probes=["gemm_fp4"]) if each.probe == "gemm_fp4"]
    assert found
    assert {(each.value, each.ok) for each in found} == {(None, None)}
    assert all(each.detail.startswith("unsupported") for each in found)
