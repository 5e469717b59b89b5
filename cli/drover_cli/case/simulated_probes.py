"""Simulated nodes are probed while nothing runs on them, and judged as a collector would: probes.jsonl of a case.

What a probe of an idle node finds depends on the faults that the node has then: a GPU that stays slow when its job is
over, one that computes wrongly and shows it in no sensor. Replays judge by the verdicts.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from drover_collector.probes.judging.judgement import judge
from drover_collector.probes.judging.measurements import Measurement
from drover_collector.probes.judging.rows import measurement, row_of
from drover_collector.probes.judging.verdicts import verdicts, with_all
from drover_collector.store import ProbeRow
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeVerdict
from drover_proto import telemetry_pb2 as pb
from drover_simulator.probing import Prober
from drover_simulator.readings import inventory

if TYPE_CHECKING:
    from drover_simulator.fleet import SimulatedFleet

LEVEL = "quick"
IDLE_MS = 60_000  # after the end of a job: its restart would come within minutes
AGAIN_MS = 1_800_000
TAKES_MS = 50_000  # of the level, for the node
NODES = 64  # that a node is held against, those probed last


class SimulatedProbes:
    """`take` after each step of the fleet; `lines` at the end."""

    def __init__(self, fleet: SimulatedFleet, seed: int) -> None:
        self._fleet, self._prober = fleet, Prober(fleet, seed)
        self._idle_ms: dict[str, int] = {}  # node -> since when nothing runs there
        self._next_ms: dict[str, int] = {}
        self._newest: dict[str, list[Measurement]] = {}  # node -> of its last order; those probed last come last
        self._rows: list[ProbeRow] = []
        self._orders: list[ProbeOrder] = []
        self._verdicts: list[ProbeVerdict] = []

    def take(self) -> None:
        """Probe the nodes whose turn it is."""
        fleet, now_ms = self._fleet, self._fleet.now_ms
        away = fleet.unreachable()
        for n, node in enumerate(fleet.spec.nodes):
            gpus = fleet.hardware.gpus_of(n)
            if not node.gpus or away[gpus].any() or any(fleet.steps.job_at(int(g)) for g in gpus):
                self._idle_ms.pop(node.name, None)
                continue
            since_ms = self._idle_ms.setdefault(node.name, now_ms)
            if now_ms - since_ms >= IDLE_MS and now_ms >= self._next_ms.get(node.name, 0):
                self._next_ms[node.name] = now_ms + AGAIN_MS
                self._probe(n, node.name)

    def _probe(self, n: int, node: str) -> None:
        asked_ms = self._fleet.now_ms
        ended_ms = asked_ms + TAKES_MS
        order = ProbeOrder(
            f"sim-{node}-{asked_ms}", node, (), LEVEL, (), ProbeReason.IDLE, "asked", asked_ms, by="simulation"
        )
        facts = inventory(self._fleet.hardware, n)
        results = self._prober.answer(node, pb.ProbeRequest(id=order.id, level=LEVEL))
        rows = [row_of(replace(result, ts_ms=ended_ms), facts, ended_ms) for result in results]
        own = [m for row in rows if (m := measurement(row)) is not None]
        others = list(self._newest.items())[-NODES:]
        fleet = [m for name, measured in others if name != node for m in measured]
        judged = verdicts(order, rows, judge([*fleet, *own]), {}, ended_ms)
        self._verdicts += with_all(judged, self._fleet.spec.nodes[n].gpus)
        self._newest.pop(node, None)
        self._newest[node] = own
        self._rows += rows
        done = replace(order, state="done", ts_ms=ended_ms)
        self._orders += [order, replace(order, state="sent"), done]

    @property
    def orders(self) -> int:
        return len(self._orders) // 3

    def lines(self) -> list[dict[str, Any]]:
        """Of probes.jsonl, as an export writes them."""
        found: list[dict[str, Any]] = []
        for row in self._rows:
            made_of = {"key": asdict(row.key), "serial": row.serial, "uuid": row.uuid, "received_ms": row.received_ms}
            found.append({"result": asdict(row.result)} | made_of)
        found += [{"order": asdict(order)} for order in self._orders]
        return [*found, *({"verdict": asdict(verdict)} for verdict in self._verdicts)]
