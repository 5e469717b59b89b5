"""Whether another board has taken the place of a GPU that was out of service alone. Pure, but for the time it has held.

The rule of such a GPU keeps nothing out any more: it names a device that no driver lists. So the end of the outage
gives out no board; it is a matter of what is shown and counted. What could be wrong is that the old board comes back:
the rule stays, and isolates it again. A board that only vanished for a moment must not end its outage, so all of this
has to hold for a while, as the node and as its scheduler report it:

    the node       gives fresh values of each GPU of the fleet file, each with a UUID of its own, none of them the old
                   one. After a boot without a lost GPU others may move up into its slot: then one UUID is missing, or
                   is there twice, because what a node no longer reports is kept
    the scheduler  lists the new board on this node, the old one nowhere, and every slice of the node's pools is there
"""

from __future__ import annotations

import time

from drover_collector.actions.base import GpuState, gpu_of
from drover_collector.actions.return_conditions import telemetry_lack
from drover_collector.engine.node_state import NodeNow
from drover_core.model.events import NodeOutage

SETTLED_S = 600.0  # an outage ends when its board has been another one for this long
AGAIN_S = 600.0  # between two looks at schedulers for boards that were replaced; their nodes are asked each time


def new_board(outage: NodeOutage, now: NodeNow | None, now_ms: int) -> str:
    """Return the UUID of the board that its node reports in the slot of a GPU that it no longer has; "": not known."""
    if now is None or telemetry_lack(now, now_ms) is not None:
        return ""
    gpu, slots = gpu_of(outage), len(now.gpus_ms)
    uuids = {now.boards.get(slot, "") for slot in range(slots)} - {""}
    if len(uuids) < slots or gpu.uuid in now.boards.values():
        return ""
    return now.boards.get(gpu.slot, "")


def slot_of(outage: NodeOutage, now: NodeNow | None) -> int | None:
    """Return the slot in which its node reports a GPU now; None: in none."""
    boards = {} if now is None else now.boards
    return next((slot for slot, uuid in sorted(boards.items()) if uuid == gpu_of(outage).uuid), None)


class ReplacedBoards:
    """For how long each board has been replaced. Not for several threads at once; a restart begins again."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}  # UUID -> that of its new board, and since when

    def settled(self, outage: NodeOutage, new: str, state: GpuState) -> bool:
        """Return whether an outage is over.

        Args:
            new: the UUID of the board in its slot, as its node reports it; "": not known. state: by its scheduler.
        """
        uuid = gpu_of(outage).uuid
        if not new or not state.gone or not state.fits or new not in state.boards:
            self._since.pop(uuid, None)
            return False
        known, since = self._since.get(uuid, ("", 0.0))
        if known != new:
            since = time.monotonic()
            self._since[uuid] = new, since
        if time.monotonic() - since < SETTLED_S:
            return False
        del self._since[uuid]
        return True
