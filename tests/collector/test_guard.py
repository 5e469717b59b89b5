"""The guard: how much may be out of service at once."""

from __future__ import annotations

import dataclasses

from drover_collector.detectors.example import small_fleet
from drover_collector.guard import FleetState, GuardLimits, hold

INDEX = small_fleet(40, per_rack=4)
LIMITS = GuardLimits()
STATE = FleetState(INDEX, frozenset(), 40, 40, {})


def state(**changes: object) -> FleetState:
    return dataclasses.replace(STATE, **changes)  # type: ignore[arg-type]  # whatever field the test says


def test_one_node_of_a_healthy_fleet_may_go() -> None:
    assert hold("n00", None, STATE, LIMITS) is None


def test_the_fleets_share() -> None:
    out = {"n00", "n04", "n08"}
    assert hold("n12", None, state(out=out), LIMITS) is None
    assert "5 of 40 nodes of the fleet" in str(hold("n16", None, state(out={*out, "n12"}), LIMITS))


def test_the_racks_share() -> None:
    assert hold("n01", None, state(out={"n00"}), LIMITS) is None
    assert "rack r00" in str(hold("n02", None, state(out={"n00", "n01"}), LIMITS))
    assert hold("n05", None, state(out={"n00", "n01"}), LIMITS) is None


def test_the_jobs_share() -> None:
    jobs = {"812": {f"n{n:02d}" for n in range(8)}}
    assert hold("n04", "812", state(out={"n00"}, job_nodes=jobs), LIMITS) is None
    assert "job 812" in str(hold("n06", "812", state(out={"n00", "n04"}, job_nodes=jobs), LIMITS))


def test_small_fleets_may_lose_one_node() -> None:
    small = small_fleet(2)
    assert hold("n00", "1", FleetState(small, frozenset(), 2, 2, {"1": {"n00"}}), LIMITS) is None


def test_a_mass_event_asks_a_person() -> None:
    assert "27 of 40" in str(hold("n00", None, state(healthy_nodes=27), LIMITS))
    assert hold("n00", None, state(healthy_nodes=27, known_nodes=30), LIMITS) is None  # unknown is not unhealthy


def test_a_node_that_is_out_already_costs_nothing_more() -> None:
    out = {"n00", "n04", "n08", "n12", "n16"}
    assert hold("n00", None, state(out=out, healthy_nodes=1), LIMITS) is None


def test_a_node_of_no_fleet_is_held() -> None:
    assert "fleet file" in str(hold("other", None, STATE, LIMITS))
