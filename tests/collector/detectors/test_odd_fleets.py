"""All detectors over odd fleets: boards of several kinds, nodes of any size, columns that are not there, GPUs that come
and go, values at the ends of what can be. None raises or accuses what is well; no fault hides behind a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drover_collector.detectors._lib.examples import LAG_MS, START_MS, training_bucket
from drover_collector.engine.engine import Engine
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Finding, Health
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec
from testbed.examples import examples

whole_histories = settings(max_examples=examples(6), suppress_health_check=list(HealthCheck))

SKUS = {"H100": 1.0, "H200": 1.0, "A100": 0.57, "B200": 1.43, "": 1.0}  # power against that of an H100; "": unknown
FAMILIES = {
    "an old driver": ("power_limit_w", "clock_event_reasons", "thermal_margin_c", "row_remap_failed",
                      "row_remap_pending", "remapped_rows_uncorrected"),
    "MIG": ("gpu_util_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"),
    "no NVLink": ("nvlink_active_links",), "no ECC": ("ecc_dram_uncorrected",),
    "no inlet": ("inlet_temp_c",), "no throttling": ("throttle_power_us", "throttle_thermal_sw_us"),
}  # fmt: skip
DEAD = ((), ("power_w", "power_limit_w"), ("gpu_temp_c",))  # what drivers without a sensor read as 0
RANGED = [m for m in BY_NAME.values() if m.scope in (Scope.GPU, Scope.NODE, Scope.LINK)]


@dataclass(frozen=True)
class Odd:
    index: FleetIndex
    missing: dict[str, tuple[str, ...]]  # SKU -> columns that its nodes do not have
    dropped: bool  # a column that nobody has is left out, or there with nothing but NaN
    offsets_s: np.ndarray
    seed: int
    jobs: str
    zeros: dict[str, tuple[str, ...]] = field(default_factory=dict)  # node -> sensors that read 0


@st.composite
def odd_fleets(draw: st.DrawFn) -> Odd:
    kinds = draw(st.lists(st.sampled_from(["H100", "A100", "B200", ""]), min_size=1, max_size=3, unique=True))
    nodes, racks, ports = [], draw(st.booleans()), draw(st.sampled_from([0, 1, 8]))
    for sku in kinds:
        gpus = draw(st.sampled_from([1, 4, 7, 8, 16]))
        for _ in range(draw(st.integers(1, 5))):
            n = len(nodes)
            links = tuple(LinkSpec(f"mlx5_{p}", p) for p in range(min(ports, gpus)))
            place = (f"r{n // 4}", f"l{n // 4}") if racks else ("", "")
            nodes.append(NodeSpec(f"n{n:02d}", *place, "train", sku, gpus, links))
    missing = {
        sku: tuple(m for family in draw(st.sets(st.sampled_from(sorted(FAMILIES)))) for m in FAMILIES[family])
        for sku in kinds
    }
    offsets = draw(st.lists(st.floats(-4.9, 4.9), min_size=len(nodes), max_size=len(nodes)))
    jobs = draw(st.sampled_from(["each SKU", "each node", "none"]))
    seed = draw(st.integers(1000, 1999))
    zeros = {node.name: draw(st.sampled_from(DEAD)) for node in nodes}
    return Odd(FleetIndex(FleetSpec(tuple(nodes))), missing, draw(st.booleans()), np.array(offsets), seed, jobs, zeros)


Change = Callable[[int, dict[str, np.ndarray]], None]


def bucket_of(odd: Odd, number: int, change: Change | None = None) -> Bucket:
    index = odd.index
    skus = np.array([index.skus[code] for code in index.sku])
    of_gpu = skus[index.gpu_node]

    def made(k: int, gpu: dict[str, np.ndarray], node: dict[str, np.ndarray]) -> None:
        scale = np.array([SKUS[sku] for sku in of_gpu])
        core = (gpu["gpu_temp_c"] - 26) * scale
        gpu["power_w"] *= scale
        gpu["power_limit_w"] *= scale
        gpu["gpu_temp_c"], gpu["thermal_margin_c"] = 26 + core, 110 - (26 + core)
        gpu["memory_clock_mhz"] = np.round(2619 * scale)
        gpu["sm_clock_mhz"] *= np.where(of_gpu == "A100", 0.8, 1.0)
        node["clock_offset_s"] = odd.offsets_s.copy()
        if change is not None:
            change(k, gpu)
        names = np.array([spec.name for spec in index.nodes])
        for columns, whose, named in ((gpu, of_gpu, names[index.gpu_node]), (node, skus, names)):
            for name in list(columns):
                columns[name][np.array([name in odd.zeros.get(n, ()) for n in named])] = 0.0
                lacks = np.array([name in odd.missing.get(sku, ()) for sku in whose])
                columns[name][lacks] = np.nan
                if lacks.all() and odd.dropped:
                    del columns[name]

    bucket = training_bucket(index, number, made)
    if odd.jobs == "none":
        return replace(bucket, jobs=np.full(index.gpu_count, -1, np.int32), job_names=())
    codes = index.sku if odd.jobs == "each SKU" else np.arange(index.node_count, dtype=np.int32)
    names = tuple(f"job{code}" for code in range(int(codes.max()) + 1))
    return replace(bucket, jobs=codes[index.gpu_node].astype(np.int32), job_names=names)


def played(odd: Odd, buckets: Iterator[Bucket]) -> tuple[Engine, list[Finding]]:
    engine, reported = Engine(odd.index, Policy.named("nvidia"), START_MS), []
    for bucket in buckets:
        reported += engine.on_bucket(bucket, bucket.end_ms + LAG_MS).findings
    assert engine.errors == {}, engine.errors
    return engine, reported


@whole_histories
@given(odd_fleets(), st.booleans())
def test_a_healthy_odd_fleet_is_accused_of_nothing(odd: Odd, gaps: bool) -> None:
    """GPUs, and whole nodes, are away for a bucket or two: an agent's restart, a reconnect."""
    rng = np.random.default_rng(odd.seed)

    def buckets() -> Iterator[Bucket]:
        away_until = np.zeros(odd.index.gpu_count, int)
        for number in range(40):
            bucket = bucket_of(odd, number)
            if gaps and number % 5 == 4:
                g = int(rng.integers(odd.index.gpu_count))
                away_until[g] = number + int(rng.integers(1, 3))
            away = away_until > number
            for column in bucket.gpu.values():
                column[away] = np.nan
            bucket.gpu_rows[away] = 0
            yield bucket

    engine, reported = played(odd, buckets())
    assert [(f.detector, f.cause, f.node, f.gpu, f.severity) for f in reported] == []
    assert {engine.health_of(node.name)[0] for node in odd.index.nodes} == {Health.HEALTHY}


@whole_histories
@given(odd_fleets())
def test_a_node_that_says_nothing_is_never_shown_as_healthy(odd: Odd) -> None:
    n = odd.seed % odd.index.node_count
    gpus = odd.index.gpu_node == n

    def buckets() -> Iterator[Bucket]:
        for number in range(12):
            bucket = bucket_of(odd, number)
            for columns, which in ((bucket.gpu, gpus), (bucket.node, np.arange(odd.index.node_count) == n)):
                for column in columns.values():
                    column[which] = np.nan
            bucket.gpu_rows[gpus], bucket.node_rows[n] = 0, 0
            yield bucket

    engine, reported = played(odd, buckets())
    assert engine.health_of(odd.index.nodes[n].name)[0] is not Health.HEALTHY
    for slot in range(odd.index.nodes[n].gpus):
        assert engine.health_of(odd.index.nodes[n].name, slot)[0] is not Health.HEALTHY
    assert {f.node for f in reported if f.node is not None} <= {odd.index.nodes[n].name}


@whole_histories
@given(odd_fleets())
def test_no_detector_fails_on_values_at_the_ends_of_their_ranges(odd: Odd) -> None:
    rng = np.random.default_rng(odd.seed)
    counts = {
        Scope.GPU: odd.index.gpu_count, Scope.NODE: odd.index.node_count,
        Scope.LINK: sum(len(node.links) for node in odd.index.nodes),
    }  # fmt: skip

    def buckets() -> Iterator[Bucket]:
        for number in range(25):
            columns: dict[Scope, dict[str, np.ndarray]] = {scope: {} for scope in counts}
            for metric in RANGED:
                if rng.random() < 0.9:
                    ends = np.array([metric.low, metric.high, 0.0, np.nan])
                    columns[metric.scope][metric.name] = ends[rng.integers(4, size=counts[metric.scope])]
            bucket = bucket_of(odd, number)
            yield replace(
                bucket, gpu=columns[Scope.GPU], node=columns[Scope.NODE], link=columns[Scope.LINK],
                gpu_rows=rng.integers(2, size=counts[Scope.GPU]).astype(np.int32),
                node_rows=rng.integers(2, size=counts[Scope.NODE]).astype(np.int32),
            )  # fmt: skip

    with np.errstate(over="ignore"):
        played(odd, buckets())


def _remap(number: int, gpu: dict[str, np.ndarray]) -> None:
    gpu["row_remap_failed"][3] = number >= 15


def _hot(number: int, gpu: dict[str, np.ndarray]) -> None:
    gpu["gpu_temp_c"][3] = 26 + (gpu["gpu_temp_c"][3] - 26) * (1.7 if number >= 15 else 1)


def _capped(number: int, gpu: dict[str, np.ndarray]) -> None:
    if number >= 15:
        for metric, factor in (("sm_clock_mhz", 0.9), ("power_limit_w", 0.85), ("power_w", 0.85)):
            gpu[metric][3] *= factor
        for metric in ("sm_active_ratio", "tensor_active_ratio"):
            gpu[metric][3] *= 1.1


def _lanes(number: int, gpu: dict[str, np.ndarray]) -> None:
    gpu["pcie_width"][3] = 8 if number >= 15 else 16


def _nvlinks(number: int, gpu: dict[str, np.ndarray]) -> None:
    gpu["nvlink_active_links"][3] = 16 if number >= 15 else 18


FAULTS = {"a remap": _remap, "heat": _hot, "a cap": _capped, "lanes": _lanes, "NVLinks": _nvlinks}


@pytest.mark.parametrize("fault", FAULTS)
@settings(whole_histories, max_examples=examples(2))
@given(around=odd_fleets(), gpus=st.sampled_from([4, 7, 8, 16]))
def test_a_fault_does_not_vanish_because_other_boards_are_in_the_fleet(fault: str, around: Odd, gpus: int) -> None:
    ours = tuple(NodeSpec(f"a{n}", "ra", "la", "train", "H200", gpus) for n in range(4))
    others = tuple(node for node in around.index.nodes if node.sku)

    def reported(nodes: tuple[NodeSpec, ...]) -> set[tuple[str, str, str | None, int | None]]:
        index = FleetIndex(FleetSpec(nodes))
        offsets = np.zeros(index.node_count)
        odd = Odd(index, around.missing, around.dropped, offsets, around.seed, "each SKU", around.zeros)
        _, found = played(odd, (bucket_of(odd, number, FAULTS[fault]) for number in range(40)))
        return {(f.detector, f.cause, f.node, f.gpu) for f in found}

    alone = reported(ours)
    assert alone, "the fault is found"
    assert reported(ours + others) == alone
