"""What nodes say they are made of: driver, firmware, modes; and the nodes where it drifted."""

from __future__ import annotations

from typing import Any

from drover_agent.simulation.adversary.trouble import Trouble
from drover_agent.simulation.hardware import Hardware
from drover_agent.simulation.readings import DRIVER, inventory
from drover_proto.times import iso

OTHER_DRIVER = "565.57.01"
NEW_DRIVER = "575.57.08"
OTHER_VBIOS = "96.00.74.00.1C"


class Stock:
    """Rows of inventory.jsonl: {"ts", "node", "inventory"}, all of a node's facts at the start and at each change."""

    def __init__(self, hardware: Hardware) -> None:
        self._hw = hardware
        self._changes: list[tuple[float, int, dict[str, str]]] = []

    def change(self, t: Trouble) -> None:
        """Take in what a trouble changes of the inventory, if anything."""
        slot = self._hw.gpu_slot[t.gpu]
        if t.kind != "drift":
            return
        if t.cause == "driver":
            self._changes.append((t.start_s, t.node, {"driver": OTHER_DRIVER}))
        elif t.cause == "vbios":
            self._changes.append((t.start_s, t.node, {f"gpu{slot}.vbios": OTHER_VBIOS}))
        elif t.cause == "ecc_mode":
            self._changes.append((t.start_s, t.node, {f"gpu{slot}.ecc_mode": "disabled"}))
        elif t.cause == "rollout":
            for k, n in enumerate(t.nodes.tolist()):
                at_s = t.start_s + k * t.facts["each_s"] + t.facts["away_s"]
                if at_s < t.end_s:
                    self._changes.append((at_s, n, {"driver": NEW_DRIVER}))

    def rows(self, start_ms: int) -> list[dict[str, Any]]:
        facts = []
        for n in range(self._hw.nodes):
            of_node = inventory(self._hw, n) | {"driver": DRIVER}
            facts.append(of_node | {f"gpu{slot}.ecc_mode": "enabled" for slot in range(self._hw.spec.nodes[n].gpus)})
        for at_s, n, change in self._changes:
            if at_s <= 0:
                facts[n] = facts[n] | change
        rows = [{"ts": iso(start_ms), "node": name, "inventory": facts[n]} for n, name in enumerate(self._hw.names)]
        for at_s, n, change in sorted(((a, n, c) for a, n, c in self._changes if a > 0), key=lambda row: row[:2]):
            facts[n] = facts[n] | change
            rows.append({"ts": iso(start_ms + round(at_s * 1000)), "node": self._hw.names[n], "inventory": facts[n]})
        return rows
