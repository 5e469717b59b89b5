"""Stragglers of pipelines whose ranks say their places: a stage that differs by design is none, a slow GPU in it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import START_MS, play, small_fleet
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.parallel import places_of
from drover_collector.detectors.straggler import detector as straggler
from drover_collector.fleet.index import FleetIndex
from drover_core.jobs.place import RankPlace, by_order, key, pack
from drover_core.model.events import Finding
from testbed.straggler_findings import Columns

DEEP = small_fleet(64)  # 512 GPUs: 16 stages of 4 nodes, so that a stage is 6 % of the job
ORDER = ("tp", "cp", "dp", "pp")
Change = Callable[[int, Columns, Columns], None]


def inventory(index: FleetIndex, stages: int, job: str = "812", **sizes: int) -> Inventory:
    """Of a job with a rank on each GPU, in order, tensor parallel within a node."""
    result, world = Inventory(index), index.gpu_count
    for node in index.nodes:
        facts = {}
        for slot in range(node.gpus):
            rank = index.gpu(node.name, slot)
            assert rank is not None
            axes = by_order(rank, world, {"tp": 8, "pp": stages}, ORDER)
            axes |= {axis: (axes[axis][0], size) for axis, size in sizes.items()}
            facts[key(slot)] = pack(RankPlace(job, rank, world, axes))
        result.update(node.name, facts, START_MS)
    return result


def found(index: FleetIndex, change: Change, places: Inventory | None, count: int = 10) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(index, count, change, inventory=places):
        findings, state = straggler.detect(window, state, now_ms)
        reported += findings
    return reported


def members(findings: list[Finding]) -> set[tuple[str, str | None, int | None]]:
    return {(f.cause, f.node, f.gpu) for f in findings}


def heavier(first: int, last: int) -> Change:
    """These GPUs have more layers: they compute while the others wait, and run a little slower for it."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        others = np.ones(len(gpu["power_w"]), bool)
        others[first:last] = False
        for metric in ("sm_active_ratio", "tensor_active_ratio"):
            gpu[metric][others] /= 1.3
        gpu["sm_clock_mhz"][first:last] *= 0.91

    return change


def loads_data(number: int, gpu: Columns, node: Columns) -> None:
    """The first stage reads the data: its CPUs work, and its GPUs have gaps."""
    gpu["gpu_util_ratio"][:32] -= 0.06
    node["cpu_util_ratio"][:4] *= 2.5


@pytest.mark.parametrize(
    ("what", "change"),
    [("the last stage has the loss", heavier(480, 512)), ("the first stage has the embedding", heavier(0, 32)),
     ("a stage in the middle has a layer more", heavier(224, 256)), ("the first stage loads the data", loads_data)],
)  # fmt: skip
def test_a_stage_that_differs_by_design_is_no_straggler(what: str, change: Change) -> None:
    assert found(DEEP, change, None)  # without places it looks like one
    assert found(DEEP, change, inventory(DEEP, 16)) == []
    wrong = found(DEEP, change, inventory(DEEP, 16, dp=3))  # sizes that are not the job's are not used
    assert members(wrong) == members(found(DEEP, change, None))


def test_an_interleaved_schedule_is_no_straggler() -> None:
    """Stages have several parts of the model each, and are busy at different times; first and last have more."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        stage = np.arange(512) // 32
        busy = np.where((number + stage) % 3 == 0, 1.0, 0.85) * np.where((stage == 0) | (stage == 15), 1.0, 0.9)
        for metric in ("sm_active_ratio", "tensor_active_ratio"):
            gpu[metric] *= busy
        gpu["sm_clock_mhz"] *= np.where(busy == 1.0, 0.93, 1.0)

    assert found(DEEP, change, inventory(DEEP, 16), 20) == []


def slow(gpu: Columns, who: int, by: float = 1.2) -> None:
    """All wait for `who`, whose power is capped."""
    others = np.arange(len(gpu["power_w"])) != who
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        gpu[metric][others] /= by
    gpu["sm_clock_mhz"][who] /= by
    gpu["power_limit_w"][who] = gpu["power_w"][who] = 480
    gpu["clock_event_reasons"][who] = 0x4


def test_the_slow_gpu_of_a_stage_is_found_and_its_place_is_named() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        heavier(480, 512)(number, gpu, node)
        if number >= 4:
            slow(gpu, 493)

    reported = found(DEEP, change, inventory(DEEP, 16))
    assert members(reported) == {("power_cap", "n61", 5)}
    assert "GPU 5 of node n61 (pipeline stage 15 of 16, tensor rank 5, data rank 1) runs" in reported[0].summary
    assert "31 peers of its pipeline stage of job 812" in reported[0].summary
    assert reported[0].waiting_gpus == pytest.approx(0.167 * 511, rel=0.1)  # the whole pipeline waits


def test_a_fast_stage_does_not_hide_its_slow_gpu() -> None:
    """A light stage runs at a higher clock: its slow GPU is as fast as the others of the job."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["sm_clock_mhz"][:256] *= 1.15
        if number >= 4:
            gpu["sm_clock_mhz"][13] /= 1.15
            light = np.arange(512) < 256
            light[13] = False
            for metric in ("sm_active_ratio", "tensor_active_ratio"):
                gpu[metric][light] /= 1.15

    assert ("clock", "n01", 5) not in members(found(DEEP, change, None))
    assert members(found(DEEP, change, inventory(DEEP, 2))) == {("clock", "n01", 5)}


def test_faults_of_nodes_are_still_found_within_a_stage() -> None:
    def late_host(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["gpu_util_ratio"][8:16] -= 0.06
            node["cpu_util_ratio"][1] *= 2.5

    def hot(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            for metric in ("sm_active_ratio", "tensor_active_ratio"):
                gpu[metric][:8] /= 1.2
                gpu[metric][16:] /= 1.2
            gpu["sm_clock_mhz"][8:16] /= 1.2
            gpu["clock_event_reasons"][8:16] = 0x20

    for change, cause in ((late_host, "host"), (hot, "thermal")):
        reported = found(DEEP, change, inventory(DEEP, 16))
        assert members(reported) == {(cause, "n01", None)}
        assert "(8 of its 8 GPUs; pipeline stage 0 of 16, data rank 1)" in reported[0].summary


def test_stages_on_few_nodes_are_compared_with_the_job_but_are_no_stragglers() -> None:
    """32 stages of 2 nodes: too few to compare within a stage alone."""
    assert found(DEEP, heavier(496, 512), None)
    assert found(DEEP, heavier(496, 512), inventory(DEEP, 32)) == []

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            slow(gpu, 13)

    without, reported = found(DEEP, change, None), found(DEEP, change, inventory(DEEP, 32))
    assert members(reported) == members(without) == {("power_cap", "n01", 5)}
    assert "(pipeline stage 0 of 32, tensor rank 5, data rank 1)" in reported[0].summary
    assert "511 peers of job 812 have" in reported[0].summary
    assert [f.evidence for f in reported] == [f.evidence for f in without]


def test_places_that_come_later_begin_the_comparison_again() -> None:
    places, state, reported = inventory(DEEP, 16), None, []
    for number, (window, now_ms) in enumerate(play(DEEP, 20, heavier(480, 512))):
        if number >= 2:  # before the settling time is over
            window = dataclasses.replace(window, inventory=places)
        findings, state = straggler.detect(window, state, now_ms)
        reported += findings
    assert reported == []


def test_what_ranks_say_must_fit_together() -> None:
    def place(rank: int, job: str = "7", **axes: tuple[int, int]) -> RankPlace:
        return RankPlace(job, rank, 4, axes or {"pp": (rank // 2, 2), "tp": (rank % 2, 2)})

    good = {g: place(g) for g in range(4)}
    assert places_of("7", range(4), good) is not None
    assert places_of("8", range(4), good) is None  # of the job before
    assert places_of("7", range(4), {}) is None
    said = places_of("7", range(4), good)
    assert said is not None and (said.trouble, said.places) == ("", good)
    assert said.text == "pipeline 2, tensor 2 of 4 ranks, by its command line"
    for bad, why in (
        ({g: good[g] for g in range(3)}, "1 of its 4 GPUs have no rank"),
        (good | {3: place(2)}, "rank 2 is on two GPUs"),
        (good | {3: place(3, pp=(0, 4))}, "different sizes"),
        ({g: place(g, pp=(g % 2, 2), tp=(0, 3)) for g in range(4)}, "tensor 3 x pipeline 2 is 6"),
        ({g: place(g, pp=(0, 2), tp=(g % 2, 2)) for g in range(4)}, "same place on the axis pp"),
    ):
        said = places_of("7", range(4), bad)
        assert said is not None and why in said.trouble and not said.places
