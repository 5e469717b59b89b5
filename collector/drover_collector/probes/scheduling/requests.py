"""Asks for probes where the plan says so: suspicions, changes of driver or firmware, new and idle nodes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.engine.engine import Outcome
from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.judging.rows import firmware
from drover_collector.probes.scheduling.planner import (
    DAY_MS,
    PlannedProbe,
    Standing,
    confirmations,
    upkeep,
)
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Decision,
    Incident,
    ProbeReason,
    RecommendedAction,
)

log = logging.getLogger(__name__)

EVERY_S = 30.0
UPKEEP_S = 300.0


@dataclass(slots=True)
class Asking:
    """`run` in the event loop while this collector lives; `take` in the thread that stores outcomes.

    Args:
        incidents: the current ones by id. risk: node -> how likely a fault is. maintained: nodes in maintenance.
    """

    store: Store
    index: FleetIndex
    config: ProbesConfig
    desk: ProbeOrderService
    leading: Callable[[], bool]
    incidents: Callable[[], Mapping[str, Incident]]
    now_ms: Callable[[], int]
    risk: Callable[[], Mapping[str, float]] = dict
    every_s: float = EVERY_S
    maintained: Callable[[], Container[str]] = tuple  # nodes that people work on: a probe would be in their way
    _decisions: dict[str, Decision] = field(default_factory=dict)  # incident -> the newest that wants a probe
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _idle_since: dict[str, int] = field(default_factory=dict)
    _restored: bool = False
    _unprotected: set[str] = field(default_factory=set)  # nodes with GPUs that upkeep leaves out
    _upkeep_s: float = 0.0

    def take(self, outcome: Outcome) -> None:
        """Decisions that are stored."""
        with self._lock:
            self._keep(outcome.decisions)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if self.leading():
                    await asyncio.to_thread(self.step)
                else:
                    self._restored = False
                self.desk.troubles.pop("asking", None)
            except (StoreError, ValueError) as error:
                self.desk.troubles["asking"] = f"Probes cannot be asked for: {error}."
                log.warning("asking for probes: %s", error)
            except Exception:  # a defect must not end this task; it is shown
                self.desk.troubles["asking"] = "Probes cannot be asked for; see the collector's log."
                log.exception("asking for probes")
            await asyncio.sleep(self.every_s)

    def step(self) -> list[str]:
        """One look; ids of the orders that were made.

        Raises:
            StoreError.
        """
        if not self._restored:
            self._restore()
        now_ms = self.now_ms()
        with self._lock:
            known = self.incidents()
            self._decisions = {id_: d for id_, d in self._decisions.items() if id_ in known or not known}
            decisions = list(self._decisions.values())
        active = self.config.baseline or self.config.admit or self.config.idle_share_per_day > 0
        if not decisions and not active:
            return []
        self._look(now_ms)
        wishes: list[PlannedProbe] = []
        if decisions:
            plain = {n.name: Standing(n.name, self._idle(n.name, now_ms)) for n in self.index.nodes}
            orders = self.store.probes.orders.newest(since_ms=now_ms - DAY_MS, limit=5000)
            wishes += confirmations(decisions, known, plain, orders, self.config, now_ms)
        if active and time.monotonic() - self._upkeep_s >= UPKEEP_S:
            self._upkeep_s = time.monotonic()
            wishes += self._upkeep(now_ms)
        maintained = self.maintained()
        self._report_refused({w.node for w in wishes if w.incident_id} | self._unprotected)
        return [
            self.desk.orders.ask(w.node, w.why, probes=w.probes, level=self.config.level, incident_id=w.incident_id)
            for w in wishes
            if w.node not in maintained and not self.desk.protection.refused(w.node)
        ]

    def _report_refused(self, nodes: Collection[str]) -> None:
        """That nothing will ever be asked of nodes in service must not go unseen."""
        refused = sorted(filter(self.desk.protection.refused, nodes))
        if refused:
            more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            self.desk.troubles["unprotected"] = (
                f"Not probed while in service, where a job may start at any time: {refused[0]}{more}; set probes.slurm,"
                " or drain what is to be probed."
            )
        else:
            self.desk.troubles.pop("unprotected", None)

    def _upkeep(self, now_ms: int) -> list[PlannedProbe]:
        self._unprotected = set()
        risk = self.risk()
        probed = self.store.probes.results.last_probed()
        nodes = []
        for spec in self.index.nodes:
            if not spec.gpus:
                continue
            if self.desk.protection.refused(spec.name):
                self._unprotected.add(spec.name)
                continue
            now, then = "", ""
            if self.config.baseline and spec.name in probed:
                now = firmware(self.store.inventories.newest(spec.name))
                then = firmware(self.store.inventories.at(spec.name, probed[spec.name]))
            nodes.append(
                Standing(
                    spec.name, self._idle(spec.name, now_ms), probed.get(spec.name, 0), now, then,
                    risk.get(spec.name, 0.0),
                )
            )  # fmt: skip
        orders = self.store.probes.orders.newest(since_ms=now_ms - DAY_MS, limit=100_000)
        asked = sum(o.why is ProbeReason.IDLE for o in orders)
        open_ = {o.node for o in self.desk.orders.open_orders()}
        return upkeep(nodes, open_, asked, self.config, self.config.most_at_once - len(open_))

    def _look(self, now_ms: int) -> None:
        """Notes since when nothing has run on a node."""
        held = held_nodes(self.store, self.index, now_ms)
        for spec in self.index.nodes:
            if spec.name in held:
                self._idle_since.pop(spec.name, None)
            else:
                self._idle_since.setdefault(spec.name, now_ms)

    def _idle(self, node: str, now_ms: int) -> int | None:
        since_ms = self._idle_since.get(node)
        return None if since_ms is None else now_ms - since_ms

    def _restore(self) -> None:
        """Suspicions from before a restart."""
        for incident in list(self.incidents().values()):
            if incident.closed_ms is None and incident.action is RecommendedAction.PROBE:
                stored = self.store.decisions.of_incident(incident.id)
                with self._lock:
                    self._keep(stored)
        self._restored = True

    def _keep(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if decision.wanted is RecommendedAction.PROBE:
                self._decisions[decision.incident_id] = decision
            else:
                self._decisions.pop(decision.incident_id, None)


def held_nodes(store: Store, index: FleetIndex, now_ms: int) -> frozenset[str]:
    """Nodes on which a job holds a GPU. Raises StoreError."""
    jobs, _ = store.jobs.at(index, now_ms)
    return frozenset(index.nodes[n].name for n in np.unique(index.gpu_node[jobs >= 0]).tolist())
