"""What Drover asks for by itself, out of a real store: driver changes, new nodes, idle ones, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from drover_collector.actions.base import Actuator, NodeState
from drover_collector.probes.context import NodeAccess, ProbeRuntime
from drover_collector.probes.scheduling.protection import Protection, Unprotected
from drover_collector.probes.scheduling.requests import UPKEEP_S, Asking
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import ProbeRow, Store
from drover_core.model.events import (
    Holding,
    ProbeOrder,
    ProbeReason,
    ProbeResult,
)
from testbed.fleets import T0, index_of
from testbed.probed import KEY

ADMIT, BASELINE, IDLE = ProbeReason.ADMIT, ProbeReason.BASELINE, ProbeReason.IDLE
MINUTE_MS, DAY_MS = 60_000, 86_400_000
NODES = 4
ALL = ProbesConfig(baseline=True, admit=True, idle_share_per_day=0.5, idle_for_s=900)


class Site:
    """Asks whenever it is called; its nodes have been idle for longer than they must."""

    def __init__(
        self, store: Store, config: ProbesConfig = ALL, risk: Mapping[str, float] | None = None,
        protection: Protection | None = None, maintained: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.store, self.now_ms = store, T0
        index = index_of(NODES)
        self.desk = ProbeOrderService(
            store,
            index,
            config,
            NodeAccess(stream=lambda _: None),
            ProbeRuntime(leading=lambda: True, now_ms=lambda: self.now_ms),
            protection or Unprotected(),
        )
        self.asking = Asking(
            store, index, config, self.desk, lambda: True, dict, lambda: self.now_ms, lambda: risk or {},
            maintained=lambda: maintained,
        )  # fmt: skip

    def step(self, later_s: float = 1000.0) -> list[tuple[str, ProbeReason]]:
        """What is asked at once, and again when nothing has run there for so long."""
        self.asking.step()
        self.now_ms += round(later_s * 1000)
        self.asking._upkeep_s -= UPKEEP_S
        asked = self.asking.step()
        orders = {o.id: o for o in self.desk.orders.open_orders()}
        return [(orders[id_].node, orders[id_].why) for id_ in asked]


def probed(store: Store, node: str, ago_ms: int) -> None:
    result = ProbeResult(
        f"{node}/0", node, 0, "hbm_copy", T0 - ago_ms, None, 4300.0, "GB/s", request=node, device=KEY.sku
    )
    store.probes.results.write([ProbeRow(result, KEY, "S", "", T0 - ago_ms)])


def test_a_node_that_was_never_probed_is_and_one_whose_driver_changed_since(store: Store) -> None:
    for node in ("n0", "n1", "n2"):
        probed(store, node, 10 * DAY_MS)
        store.inventories.write_one(node, T0 - 20 * DAY_MS, {"driver_version": "570.1", "gpu0.vbios": "96.1"})
    store.inventories.write_one("n1", T0 - DAY_MS, {"driver_version": "580.1", "gpu0.vbios": "96.1"})
    store.inventories.write_one("n2", T0 - DAY_MS, {"driver_version": "570.1", "gpu0.vbios": "96.2"})
    config = replace(ALL, idle_share_per_day=0.0)
    assert set(Site(store, config).step()) == {("n1", BASELINE), ("n2", BASELINE), ("n3", ADMIT)}


def test_idle_nodes_are_probed_by_the_days_share_the_riskiest_first_then_the_oldest(store: Store) -> None:
    for n, days in enumerate((3, 9, 5, 7)):
        probed(store, f"n{n}", days * DAY_MS)
    at = Site(store, risk={"n2": 0.3})
    assert at.step() == [("n2", IDLE), ("n1", IDLE)]
    assert at.step() == [], "the day's share is used"
    at.store.probes.orders.write([replace(o, state="done", ts_ms=at.now_ms) for o in at.desk.orders.open_orders()])
    again = Site(store)
    again.now_ms = at.now_ms
    assert again.step() == [], "and a restart does not forget that"
    again.now_ms += DAY_MS
    assert len(again.step()) == 2


def test_where_a_job_runs_or_did_just_now_or_people_work_nothing_is_asked(store: Store) -> None:
    store.jobs.write_holdings([Holding("n0", 1, "train", T0 - MINUTE_MS)])
    at = Site(store, maintained=("n2",))
    assert {node for node, _ in at.step()} == {"n1", "n3"}
    store.jobs.write_holdings([Holding("n0", 1, None, at.now_ms)])
    assert at.step(later_s=60.0) == [], "it must have been idle for as long as the settings say"
    assert at.step() == [("n0", ADMIT)]


def test_only_as_many_are_asked_as_may_be_under_way(store: Store) -> None:
    assert len(Site(store, replace(ALL, most_at_once=1)).step()) == 1


def test_by_default_nothing_is_asked(store: Store) -> None:
    assert Site(store, ProbesConfig()).step() == []


def test_under_a_scheduler_without_jobs_for_it_nothing_is_asked_and_that_is_reported(store: Store) -> None:
    class Slurm:
        def observe(self, node: str) -> NodeState:
            raise AssertionError("asking asks no scheduler")

    at = Site(store, protection=Protection(lambda _: cast(Actuator, Slurm()), lambda _: True))
    assert at.step() == []
    assert at.desk.troubles["unprotected"].startswith(
        "Not probed while in service, where a job may start at any time: n0 and 3 more; set probes.slurm"
    )
    assert at.store.probes.orders.newest() == list[ProbeOrder]()


@pytest.mark.parametrize("state", ["asked", "sent"])
def test_a_node_with_an_order_under_way_is_not_asked_for_another(store: Store, state: str) -> None:
    store.probes.orders.write([ProbeOrder("p1", "n0", (), "quick", (), ProbeReason.PERSON, state, T0)])
    assert {node for node, _ in Site(store).step()} == {"n1", "n2", "n3"}
