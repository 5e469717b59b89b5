"""NVLink and PCIe of GPUs: what is reported, for which GPU, and when it is not."""

from __future__ import annotations

import numpy as np
import pytest

from drover_core.model.events import RecommendedAction
from testbed.link_findings import PORT, Columns, run


@pytest.mark.parametrize(
    ("metric", "value", "cause", "words"),
    [
        ("nvlink_active_links", 17.0, "nvlink_down", "has 17 NVLinks up; the other 63 boards of its kind have 18"),
        ("pcie_width", 8.0, "pcie_narrow", "8 PCIe lanes; the other 63 boards"),
        ("pcie_generation", 3.0, "pcie_narrow", "3 is its PCIe generation; the other 63 boards"),
    ],
)
def test_a_gpu_with_less_link_than_its_kind(metric: str, value: float, cause: str, words: str) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 2:
            gpu[metric][21] = value

    findings = run(gpu=change)
    assert {(f.node, f.gpu, f.cause, f.action) for f in findings} == {("n02", 5, cause, RecommendedAction.PROBE)}
    assert words in findings[0].summary


def test_a_gpu_that_rests_may_lower_its_generation_and_a_tenth_of_a_kind_is_built_so() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_util_ratio"][21], gpu["pcie_generation"][21] = 0.0, 1.0
        gpu["pcie_width"][:8] = 8.0

    assert run(gpu=change) == []


def test_errors_of_nvlinks_and_replays_of_pcie() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_crc_errors"] = np.zeros(64)
        gpu["nvlink_crc_errors"][21] = 1500.0 * number
        gpu["pcie_replays"] = np.zeros(64)
        gpu["pcie_replays"][9] = 10.0 * number  # 60 a minute; 31 are the limit of 16 lanes of generation 5
        gpu["pcie_replays"][10] = 5.0 * number

    findings = run(gpu=change)
    assert {(f.node, f.gpu, f.cause, f.action) for f in findings} == {
        ("n02", 5, "nvlink_errors", RecommendedAction.PROBE), ("n01", 1, "pcie_replays", RecommendedAction.ADVISE),
    }  # fmt: skip


def test_counters_that_are_read_each_30_s_are_reported_as_those_of_each_10_s() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_crc_errors"] = np.where((number + np.arange(64)) % 3 == 0, 0.0, np.nan)
        gpu["nvlink_crc_errors"][21] += 1500.0 * number
        gpu["nvlink_crc_errors"][30] += 900.0 * number  # 90 a second; 100 are the limit

    findings = run(gpu=change, count=12)
    assert {(f.node, f.gpu, f.cause) for f in findings} == {("n02", 5, "nvlink_errors")}
    assert {f.evidence[0].value for f in findings} == {150.0}


def test_what_most_gpus_of_a_node_show_is_reported_once_of_the_node() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_active_links"][16 : 16 + (2 if number < 6 else 8)] = 12.0

    findings = run(gpu=change, nodes=12)
    assert {(f.scope, f.node, f.gpu) for f in findings} == {("gpu", "n02", 0), ("gpu", "n02", 1), ("node", "n02", None)}
    assert findings[-1].summary.startswith("8 of 8 GPUs show it: GPU 0 of node n02 has 12 NVLinks up")
    assert len(findings) == 2 * 6 + 2, "two GPUs until the others follow, then one finding a bucket"


@pytest.mark.parametrize(("nodes", "broken"), [(1, 1), (1, 2), (2, 2), (4, 8)])
def test_a_small_fleet_is_not_blind_for_its_gpus(nodes: int, broken: int) -> None:
    """Two of a node, or the whole of one node of several, which counts errors."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["pcie_width"][:broken] = 4.0
        gpu["nvlink_crc_errors"] = np.zeros(8 * nodes)
        gpu["nvlink_crc_errors"][:broken] = 1500.0 * number

    findings = run(gpu=change, nodes=nodes)
    assert {f.cause for f in findings} == {"nvlink_errors"} | ({"pcie_narrow"} if broken <= 2 else set())
    assert {f.node for f in findings} == {"n00"}


@pytest.mark.parametrize("broken", [3, 4, 8])
def test_what_many_of_a_lone_node_show_is_its_design(broken: int) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_active_links"][:broken] = 12.0

    assert run(gpu=change, nodes=1) == []


def test_a_few_errors_within_seconds_are_no_rate() -> None:
    """Of counters whose limit is some a minute."""

    def link(number: int, link: Columns) -> None:
        link["local_integrity_errors"] = np.zeros(64)
        link["local_integrity_errors"][PORT] = number >= 1
        link["link_error_recoveries"] = np.zeros(64)
        link["link_error_recoveries"][PORT] = 3.0 * (number >= 1)

    def gpu(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_recoveries"], gpu["pcie_replays"] = np.zeros(64), np.zeros(64)
        gpu["nvlink_recoveries"][21] = 2.0 * (number >= 1)
        gpu["pcie_replays"][21] = 28.0 * (number >= 1)

    assert run(link, gpu) == []


def test_a_node_that_loses_all_its_nvlinks_is_reported_once() -> None:
    """Its switch failed. All other nodes have theirs."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["nvlink_active_links"][16:24] = 0.0

    findings = run(gpu=change, count=10)
    assert {(f.scope, f.node, f.cause, f.action) for f in findings} == {
        ("node", "n02", "nvlink_down", RecommendedAction.PROBE)
    }


def test_a_node_that_never_had_nvlinks_is_built_so() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_active_links"][16:24] = 0.0

    assert run(gpu=change, count=10) == []


def test_a_bit_error_rate_over_the_limit_of_dcgm() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["nvlink_effective_ber"] = np.full(64, 1e-15)
        gpu["nvlink_effective_ber"][9] = 1e-12  # the limit itself
        gpu["nvlink_effective_ber"][21] = 3e-12

    findings = run(gpu=change)
    assert {(f.node, f.gpu, f.cause, f.action) for f in findings} == {("n02", 5, "nvlink_ber", RecommendedAction.PROBE)}
    assert "bit error rate of 3.0e-12; 1e-12 is the limit" in findings[0].summary


@pytest.mark.parametrize(("state", "after"), [(1, 30), (2, 30), (4, 30)])
def test_gpus_that_the_fabric_does_not_know(state: int, after: int) -> None:
    """From five minutes on: after a boot the fabric manager needs some."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["fabric_state"] = np.full(64, 3.0)
        gpu["fabric_state"][16:24] = state

    assert run(gpu=change, count=after - 1) == []
    findings = run(gpu=change, count=after)
    assert {(f.scope, f.node, f.cause) for f in findings} == {("node", "n02", "fabric")}
    assert "nvidia-fabricmanager" in findings[0].advice


@pytest.mark.parametrize("state", [0, 1, 2, 3])
def test_without_a_fabric_nothing_is_missed(state: int) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["fabric_state"] = np.full(64, float(state))

    assert run(gpu=change, count=40) == []
