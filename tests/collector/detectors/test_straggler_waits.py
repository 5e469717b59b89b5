"""A late host without a gap in utilisation, and NVLinks that carry less: reported; other work is not."""

from __future__ import annotations

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors.straggler import detector as straggler
from drover_core.model.events import Finding, Incident

Columns = dict[str, np.ndarray]
NODE, SLOW = np.arange(8, 16), 13  # n01 and its GPU 5
FROM = 20
WORK = ("tensor_active_ratio", "dram_active_ratio", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")


def run(change, nodes: int = 4, count: int = 44) -> list[Finding]:
    def with_nvlink(number: int, gpu: Columns, node: Columns) -> None:
        noise = np.random.default_rng(number).normal(0, 0.01, 8 * nodes)
        for way in ("tx", "rx"):
            gpu[f"nvlink_{way}_bytes_per_s"] = 2e10 * (1 + noise)
        if number >= FROM:
            change(gpu)

    state, found = None, []
    for window, now_ms in play(small_fleet(nodes), count, with_nvlink):
        findings, state = straggler.detect(window, state, now_ms)
        found += findings
    return found


def slower(gpu: Columns, by: float = 0.15) -> None:
    """Give all GPUs less work a second; those that wait spin in NCCL's kernels on some SMs."""
    for metric in WORK:
        gpu[metric] *= 1 - by
    gpu["sm_active_ratio"] *= 1 - 0.8 * by


def test_a_node_whose_sms_rest_while_its_job_waits_has_a_late_host() -> None:
    def late(gpu: Columns) -> None:
        slower(gpu)
        gpu["sm_active_ratio"][NODE] *= 0.97

    found = run(late)
    assert {(f.scope, f.node, f.cause) for f in found} == {("node", "n01", "host")}
    assert found[0].ts_ms - found[0].since_ms <= 180_000
    assert found[-1].waiting_gpus > 1 and "has its SMs active for" in found[-1].summary
    assert any("its node's busy time" in fact.text for fact in found[-1].evidence)


def _rests_alone(gpu: Columns) -> None:
    gpu["sm_active_ratio"][NODE] *= 0.97


def _less_work(gpu: Columns) -> None:
    slower(gpu)
    for metric in (*WORK, "sm_active_ratio"):
        gpu[metric][NODE] *= 0.8


def _more_tensor_work(gpu: Columns) -> None:
    slower(gpu)
    gpu["tensor_active_ratio"][NODE] *= 1.04


def _two_nodes(gpu: Columns) -> None:
    slower(gpu)
    gpu["sm_active_ratio"][8:24] *= 0.97


def _six_gpus(gpu: Columns) -> None:
    slower(gpu)
    gpu["sm_active_ratio"][8:13] *= 0.97


@pytest.mark.parametrize("change", [_rests_alone, _less_work, _more_tensor_work, _two_nodes, _six_gpus])
def test_a_node_with_other_work_has_no_late_host(change) -> None:
    assert run(change) == []


def test_of_two_nodes_nobody_says_which_one_waits() -> None:
    def late(gpu: Columns) -> None:
        slower(gpu)
        gpu["sm_active_ratio"][NODE] *= 0.97

    assert run(late, nodes=2) == []


def _less_nvlink(gpu: Columns, gpus: int | list[int] = SLOW) -> None:
    for way in ("tx", "rx"):
        gpu[f"nvlink_{way}_bytes_per_s"][gpus] *= 0.5


def test_a_gpu_whose_nvlinks_carry_less_while_its_job_waits() -> None:
    def slow(gpu: Columns) -> None:
        slower(gpu)
        _less_nvlink(gpu)

    found = run(slow)
    assert {(f.scope, f.node, f.gpu, f.cause) for f in found} == {("gpu", "n01", 5, "nvlink")}
    assert "carry less than before" in found[-1].summary and "sends over NVLink at" in found[-1].summary


def _expert(gpu: Columns) -> None:
    slower(gpu)
    for metric in (*WORK, "sm_active_ratio"):
        gpu[metric][SLOW] *= 0.5


def _nvlink_alone(gpu: Columns) -> None:
    _less_nvlink(gpu)


def _half_of_all(gpu: Columns) -> None:
    slower(gpu)
    _less_nvlink(gpu, list(range(0, 32, 2)))


@pytest.mark.parametrize("change", [_expert, _nvlink_alone, _half_of_all])
def test_other_traffic_over_nvlink_is_no_fault(change) -> None:
    assert [f for f in run(change) if f.cause == "nvlink"] == []


def _incident(f: Finding) -> Incident:
    return Incident(
        "i1", f.kind, f.cause, f.scope, f.node, f.gpu, f.members, f.ts_ms, f.since_ms, None, f.severity, f.confidence,
        f.action, f.summary, f.advice, detectors=("straggler",), job=f.job, snapshots={"straggler": f.snapshot},
    )  # fmt: skip


@pytest.mark.parametrize("cause", ["host", "nvlink"])
def test_it_is_still_found_after_the_collector_started_again(cause: str) -> None:
    """The state of a start knows the usual values of what is open, and that its job became slower."""

    def slow(gpu: Columns) -> None:
        slower(gpu)
        if cause == "host":
            gpu["sm_active_ratio"][NODE] *= 0.97
        else:
            _less_nvlink(gpu)

    def always(number: int, gpu: Columns, node: Columns) -> None:
        for way in ("tx", "rx"):
            gpu[f"nvlink_{way}_bytes_per_s"] = np.full(32, 2e10)
        slow(gpu)

    before = run(slow)[-1]
    state = straggler.restored([_incident(before)])
    found = []
    for window, now_ms in play(small_fleet(4), 20, always):
        findings, state = straggler.detect(window, state, now_ms)
        found += findings
    assert {(f.node, f.cause) for f in found} == {("n01", cause)}
