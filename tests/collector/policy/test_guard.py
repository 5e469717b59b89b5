"""The guard's caps: how much may be out of service at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import pytest

from drover_collector.detectors._lib.examples import small_fleet
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.guard import (
    Census,
    GuardLimits,
    Pace,
    hold,
    may_resume,
)
from drover_core.model.events import Health, NodeOutage
from drover_core.model.fleet import FleetSpec, NodeSpec

INDEX = small_fleet(40, per_rack=4)
LIMITS = GuardLimits()
WIDE = GuardLimits(fleet_ratio=1, pool_ratio=1, rack_ratio=1, leaf_ratio=1, job_ratio=1, per_hour=0)


def held(
    node: str, out: Iterable[str] = (), healthy: int = 40, known: int = 40,
    jobs: Mapping[str, set[str]] | None = None, limits: GuardLimits = LIMITS, index: FleetIndex = INDEX,
) -> str | None:  # fmt: skip
    return hold(node, jobs or {}, Census(index, out, healthy, known), limits)


def test_one_node_of_a_healthy_fleet_may_go() -> None:
    assert held("n00") is None


def test_the_fleets_share() -> None:
    out = {"n00", "n04", "n08"}
    assert held("n12", out) is None
    assert "5 of 40 nodes of the fleet" in str(held("n16", {*out, "n12"}))


def test_the_racks_share() -> None:
    assert held("n01", {"n00"}) is None
    assert "rack r00" in str(held("n02", {"n00", "n01"}))
    assert held("n05", {"n00", "n01"}) is None


def test_the_jobs_share() -> None:
    jobs = {"812": {f"n{n:02d}" for n in range(8)}}
    assert held("n04", {"n00"}, jobs=jobs) is None
    assert "job 812" in str(held("n06", {"n00", "n04"}, jobs=jobs))


@pytest.mark.parametrize("group", ["fleet", "pool", "rack", "leaf", "job"])
def test_a_count_limits_each_group_too(group: str) -> None:
    nodes = tuple(NodeSpec(f"n{n}", "r1", "l1", "p1", "sku", 8) for n in range(6))
    index, limits = FleetIndex(FleetSpec(nodes)), dataclasses.replace(WIDE, **{f"{group}_nodes": 2})
    jobs = {"7": {node.name for node in nodes}}
    assert held("n1", {"n0"}, 6, 6, jobs, limits, index) is None
    assert "(at most 2 may be)" in str(held("n2", {"n0", "n1"}, 6, 6, jobs, limits, index))


def test_a_group_without_a_name_is_none() -> None:
    index = FleetIndex(FleetSpec(tuple(NodeSpec(f"n{n}") for n in range(4))))
    limits = dataclasses.replace(WIDE, rack_nodes=1, leaf_nodes=1, pool_nodes=1)
    assert held("n1", {"n0"}, 4, 4, limits=limits, index=index) is None


def test_small_fleets_may_lose_one_node() -> None:
    small = small_fleet(2)
    assert held("n00", (), 1, 2, {"1": {"n00"}}, index=small) is None
    assert held("n01", {"n00"}, 1, 2, index=small) is not None


def test_too_few_healthy_ones_ask_a_person() -> None:
    assert "27 of 40" in str(held("n00", healthy=27))
    assert held("n00", healthy=27, known=30) is None  # unknown is not unhealthy


def test_a_node_that_is_out_already_costs_nothing_more() -> None:
    assert held("n00", {"n00", "n04", "n08", "n12", "n16"}, healthy=1) is None


def test_a_node_of_no_fleet_is_held() -> None:
    assert "fleet file" in str(held("other"))


def test_so_many_nodes_an_hour() -> None:
    pace, limits = Pace(), GuardLimits(per_hour=2)
    pace.note_taken("n1", 0)
    assert pace.hold("n3", 1000, limits) is None
    pace.note_taken("n2", 1000)
    assert "2 nodes went out within the last hour" in str(pace.hold("n3", 2000, limits))
    assert pace.hold("n3", 3_600_000, limits) is None


def test_a_node_that_came_back_is_left_alone_for_a_while() -> None:
    pace, limits = Pace(), GuardLimits(cooldown_s=600)
    pace.note_outage(NodeOutage("n1", Health.VALIDATING, 0, "i1", "probes run"))
    assert pace.hold("n1", 1000, limits) is None
    pace.note_outage(NodeOutage("n1", Health.HEALTHY, 1000, "i1", "probes passed"))
    assert "came back 5 min ago" in str(pace.hold("n1", 301_000, limits))
    assert pace.hold("n1", 601_000, limits) is None
    assert pace.hold("n2", 1000, limits) is None


def test_a_clock_that_goes_back_holds_nothing_for_longer_than_its_time() -> None:
    year_ms = 365 * 86_400_000
    pace, limits = Pace(), dataclasses.replace(LIMITS, per_hour=1, cooldown_s=600)
    pace.note_taken("n00", year_ms)
    pace.note_outage(NodeOutage("n01", Health.HEALTHY, year_ms, "", "passed"))
    assert "1 nodes went out within the last hour" in str(pace.hold("n02", 1000, limits))
    assert pace.hold("n02", 1000 + 3_600_000, limits) is None
    assert "n01 came back 0 min ago" in str(pace.hold("n01", 1000 + 3_600_000, limits))
    assert pace.hold("n01", 1000 + 3_600_000 + 600_000, limits) is None


def test_only_what_drover_took_out_is_put_back() -> None:
    assert "not taken out by Drover" in str(may_resume("n1", None))
    assert may_resume("n1", NodeOutage("n1", Health.DRAINED, 0, "i1", "")) is None
    assert (
        may_resume("n1", NodeOutage("n1", Health.HEALTHY, 0, "i1", "")) is not None
    )  # and came back; what is now is another's
