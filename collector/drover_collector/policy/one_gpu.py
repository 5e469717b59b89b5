"""Whether the GPU of an incident goes out of service alone, and which GPUs are out so. Pure.

A rule asks for it by `take_out = "gpu"`. The node goes all the same, and the decision says why, where the fault may
hurt its neighbours, where only a reboot of the node mends it, where the scheduler cannot take out one GPU, and where it
is not known for sure which board it is. A GPU is named by its UUID: after a boot its slot may hold another board.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import xid_of
from drover_core.model.events import (
    OUT_STAGES,
    Action,
    Decision,
    GpuRef,
    Incident,
    IncidentKind,
    NodeOutage,
)
from drover_core.xid.actions import XidAction
from drover_core.xid.codes import lookup

REBOOTS = frozenset({XidAction.RESTART_NODE, XidAction.RESTART_VM})  # they end the jobs of all GPUs of the node
MOST = 0.5  # of a node's GPUs that go one by one; beyond it the node is at fault


@dataclass(frozen=True, slots=True)
class Board:
    """The board in a slot, as its node reports it. `since_ms`: another one was there before; 0: none is known."""

    uuid: str
    since_ms: int = 0


Boards = Callable[[str, int], Board | None]  # of a node's slot; None: not known


def share_of(index: FleetIndex, node: str) -> float:
    """Return which share of its node one GPU is."""
    place = index.spec.by_name.get(node)
    return 1.0 if place is None or not place.gpus else 1.0 / place.gpus


def described(gpu: GpuRef, node: str) -> str:
    return f"GPU {gpu.slot} of {node}" + (f" ({gpu.uuid})" if gpu.uuid else "")


class SingleGpus:
    """
    Args:
        board: None: the fleet is recorded without it, and each slot holds the board that it held.
        hindrance: returns why the scheduler of a node cannot take out one GPU; "": it can.
        leaving: returns node and UUID of each GPU that is about to go out, a person's too.
    Attributes:
        outages: UUID -> its newest outage.
        refused: (incident, UUID) -> why its scheduler could not take it out alone.
    """

    def __init__(
        self,
        index: FleetIndex,
        board: Boards | None,
        hindrance: Callable[[str], str],
        leaving: Callable[[], Set[tuple[str, str]]] = frozenset,
    ) -> None:
        self._index, self._board, self._hindrance = index, board, hindrance
        self.leaving = leaving
        self.outages: dict[str, NodeOutage] = {}
        self.refused: dict[tuple[str, str], str] = {}

    def choose(self, incident: Incident, last: Decision | None, node_out: bool) -> tuple[GpuRef | None, str]:
        """Return the GPU that goes alone; None: the node goes, and why.

        Args:
            last: the newest decision about the incident.
            node_out: whether the node is out of service already.
        """
        node, slot = incident.node, incident.gpu
        if node is not None and last is not None and last.gpu is not None and last.gpu.uuid in self.isolated(node):
            return last.gpu, ""
        if node is None or slot is None or incident.scope != "gpu" or tuple(incident.members) != ((node, slot),):
            return None, "the fault is not of one GPU alone"
        if incident.kind is IncidentKind.LINK:
            return None, "the fault is of a link, which its neighbours use too"
        if (code := xid_of(incident.cause)) is not None and (row := lookup(code)) is not None and row.action in REBOOTS:
            return None, f"XID {code} needs a reboot of the node"
        place = self._index.spec.by_name.get(node)
        if place is None or place.gpus < 2:
            return None, "the node has no other GPU"
        if node_out:
            return None, "the node is out of service already"
        if why := self._hindrance(node):
            return None, why
        gpu, why = self._identify(incident, node, slot, last)
        if gpu is None:
            return None, why
        if why := self.refused.get((incident.id, gpu.uuid), ""):
            return None, f"GPU {slot} cannot go alone: {why}"
        if why := self.crowded(node, gpu.uuid):
            return None, why
        return gpu, ""

    def crowded(self, node: str, uuid: str) -> str:
        """Return why a node has too many single GPUs out for one more; "": it has not."""
        place = self._index.spec.by_name.get(node)
        known = 0 if place is None else place.gpus
        out = {*self.isolated(node), *(other for where, other in self.leaving() if where == node)} - {uuid}
        return f"{len(out)} of its {known} GPUs are isolated already" if len(out) + 1 > max(1, known * MOST) else ""

    def _identify(self, incident: Incident, node: str, slot: int, last: Decision | None) -> tuple[GpuRef | None, str]:
        if self._board is None:
            return GpuRef(slot, ""), ""
        board = self._board(node, slot)
        if board is None or not board.uuid:
            return None, f"the node has not reported the UUID of GPU {slot}"
        decided = last.gpu.uuid if last is not None and last.gpu is not None else board.uuid
        if decided != board.uuid or board.since_ms > incident.since_ms:
            return None, f"GPU {slot} is another board now than when the fault came"
        return GpuRef(slot, board.uuid), ""

    def isolated(self, node: str) -> list[str]:
        """Return the UUIDs of a node's GPUs that are out of service alone."""
        return [uuid for uuid, one in self.outages.items() if one.node == node and one.stage in OUT_STAGES]

    def out(self, standing: Iterable[Decision], failed: Callable[[Decision], bool], said: bool) -> set[tuple[str, str]]:
        """Return node and UUID of each GPU that is out of service alone, or about to go.

        Args:
            standing: decisions. failed: whether the action of one has failed.
            said: with those that would be out, as observe mode announced.
        """
        outcomes = ("act", "would_act") if said else ("act",)
        found = {(one.node, uuid) for uuid, one in self.outages.items() if one.stage in OUT_STAGES}
        found |= self.leaving()
        for decision in standing:
            if decision.gpu is None or decision.outcome not in outcomes or failed(decision):
                continue
            outage = self.outages.get(decision.gpu.uuid)
            if outage is None or outage.ts_ms < decision.ts_ms:  # else its outage shows the result
                found.add((decision.node, decision.gpu.uuid or f"slot {decision.gpu.slot}"))
        return found

    def take_outages(self, outages: Mapping[str, NodeOutage]) -> list[NodeOutage]:
        """Take in outages; return those that are new."""
        new = [outage for uuid, outage in outages.items() if self.outages.get(uuid) != outage]
        self.outages = dict(outages)
        return new

    def note_failed(self, action: Action) -> None:
        """Note that a scheduler cannot take a GPU out alone."""
        if action.gpu is not None and action.gpu.refused:
            self.refused[action.incident_id, action.gpu.uuid] = action.detail
            for key in list(self.refused)[:-1000]:  # bounded: of incidents that are over
                del self.refused[key]
