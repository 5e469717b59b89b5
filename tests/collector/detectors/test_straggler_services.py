"""Stragglers where replicas have loads of their own, or less is read: late hosts, slow HBM and clocks."""

from __future__ import annotations

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors.straggler import detector as straggler
from testbed.straggler_findings import SLOW, Columns, run


def a_service(number: int, gpu: Columns, node: Columns) -> None:
    """Replicas with loads of their own; that of n01 has more to do at first than later."""
    load = np.full(64, 0.7)
    load[8:16] = 0.75 if number < 40 else 0.68
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        gpu[metric] *= load
    gpu["gpu_util_ratio"][:] = load


def bare(gpu: Columns) -> None:
    """What NVML alone shows of the work."""
    gpu["memory_util_ratio"] = np.round(0.8 * gpu["dram_active_ratio"], 2)
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        del gpu[metric]


@pytest.mark.parametrize("profiled", [True, False], ids=["profiled", "bare"])
def test_a_replica_that_has_less_to_do_is_neither_late_nor_slow(profiled: bool) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        a_service(number, gpu, node)
        if not profiled:
            bare(gpu)

    assert run(change, count=80) == []


@pytest.mark.parametrize("profiled", [True, False], ids=["profiled", "bare"])
def test_a_host_at_rest_that_is_late_is_reported_in_the_same_place(profiled: bool) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 40:
            gpu["gpu_util_ratio"][8:16] -= 0.07
        if not profiled:
            bare(gpu)

    assert {(f.scope, f.node, f.cause) for f in run(change, count=80)} == {("node", "n01", "host")}


@pytest.mark.parametrize("memory", [True, False], ids=["a quarter of the memory's time", "as much as the others"])
def test_who_uses_memory_far_less_than_the_job_has_less_work_and_no_late_host(memory: bool) -> None:
    """A replica of a service, taken for a part of the job, where nobody names jobs and NVML alone is read."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 20:
            gpu["gpu_util_ratio"][8:16] = 0.3
            gpu["dram_active_ratio"][8:16] *= 0.25 if memory else 1.0
        del node["cpu_util_ratio"]
        bare(gpu)

    found = {(f.scope, f.node, f.cause) for f in run(change, count=40)}
    assert found == (set() if memory else {("node", "n01", "host")})


@pytest.mark.parametrize("profiled", [True, False], ids=["profiled", "bare"])
def test_who_works_while_the_others_spin_in_a_dead_collective_is_not_late(profiled: bool) -> None:
    """Replicas of a service behind a switch that died spin at full utilisation, and their hosts rest."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_util_ratio"][:] = 0.45
        if number >= 10:
            for metric, value in (("gpu_util_ratio", 1.0), ("sm_active_ratio", 0.13), ("dram_active_ratio", 0.01)):
                gpu[metric][16:] = value
            gpu["tensor_active_ratio"][16:] = 0.0
            node["cpu_util_ratio"][2:] /= 2
        if not profiled:
            bare(gpu)

    assert run(change, count=40) == []


def test_where_peers_do_not_spin_nobody_waits_for_a_host() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_util_ratio"][:] = 0.7
        if number >= 40:  # requests that ask for other work: as much of it, in less time
            gpu["gpu_util_ratio"][8:16] = 0.63
            node["cpu_util_ratio"][1] = 0.6

    assert run(change, count=80) == []


def test_a_job_that_spins_reads_too_little_to_shows_a_slow_hbm_by() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["dram_active_ratio"][SLOW] *= 1.1  # its stage reads more, while it works
        if number >= 40:
            for metric, value in (("sm_active_ratio", 0.13), ("dram_active_ratio", 0.01), ("tensor_active_ratio", 0.0)):
                gpu[metric][:] = value
            gpu["dram_active_ratio"][SLOW] = 0.0099

    assert run(change, count=80) == []


def test_a_clock_below_all_natural_spread_at_full_power_needs_no_duty() -> None:
    def slow(ratio: float) -> set[str]:
        def change(number: int, gpu: Columns, node: Columns) -> None:
            bare(gpu)
            if number >= 4:
                gpu["sm_clock_mhz"][SLOW] *= ratio
                gpu["clock_event_reasons"][SLOW] = 0x4

        return {f.cause for f in run(change)}

    assert slow(0.75) == {"clock"}
    assert slow(0.82) == set()


@pytest.mark.parametrize(("gpus", "findings"), [(slice(8, 16), 0), (slice(8, 9), 1)], ids=["a whole node", "one GPU"])
def test_hbm_traffic_that_falls_on_a_whole_node_is_its_stages(gpus: slice, findings: int) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 40:
            gpu["dram_active_ratio"][gpus] /= 1.1

    index, state, causes = small_fleet(12), None, set()
    for window, now_ms in play(index, 80, change):
        found, state = straggler.detect(window, state, now_ms)
        causes |= {(f.node, f.cause) for f in found}
    assert causes == ({("n01", "hbm")} if findings else set())
