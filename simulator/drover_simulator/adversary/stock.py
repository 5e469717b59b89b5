"""Write the inventories that nodes report, with the changes by drift and rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_core.times import iso
from drover_simulator.adversary.trouble import Trouble
from drover_simulator.hardware import Hardware
from drover_simulator.readings import DRIVER, inventory

SETTINGS_EVERY_S = 300  # as nvml_inventory.py
OTHER_DRIVER = "565.57.01"
NEW_DRIVER = "575.57.08"
OTHER_VBIOS = {"A100-SXM": "92.00.19.00.01"}  # older ones; the first byte is the architecture's
OTHER_VBIOS_ELSE = "96.00.74.00.1C"


class Stock:
    """Rows of inventory.jsonl: {"ts", "node", "inventory"}, all of a node's facts at the start and at each change."""

    def __init__(self, hardware: Hardware) -> None:
        self._hw = hardware
        self._changes: list[tuple[float, int, dict[str, str]]] = []

    def change(self, t: Trouble) -> None:
        """Add the changes that a trouble makes to inventories, if any."""
        slot, sku = self._hw.gpu_slot[t.gpu], self._hw.sku_of_node[t.node].name
        if t.name in (("drift", "power_limit"), ("straggler", "planned_power_cap")):
            for n in t.nodes.tolist():
                seen_s = n * 97 % SETTINGS_EVERY_S if t.start_s > 0 else 0  # agents read settings now and then
                for at_s, share in ((t.start_s, 1 - t.severity), (t.end_s, 1.0)):
                    self._changes.append((at_s + seen_s, n, self._limits(n, share)))
            return
        if t.kind != "drift":
            return
        if t.cause == "driver":
            self._changes.append((t.start_s, t.node, {"driver": OTHER_DRIVER}))
        elif t.cause == "vbios":
            self._changes.append((t.start_s, t.node, {f"gpu{slot}.vbios": OTHER_VBIOS.get(sku, OTHER_VBIOS_ELSE)}))
        elif t.cause == "ecc_mode":
            self._changes.append((t.start_s, t.node, {f"gpu{slot}.ecc_mode": "disabled"}))
        elif t.cause == "rollout":
            for k, n in enumerate(t.nodes.tolist()):
                at_s = t.start_s + k * t.facts["each_s"] + t.facts["away_s"]
                if at_s < t.end_s:
                    self._changes.append((at_s, n, {"driver": NEW_DRIVER}))

    def _limits(self, node: int, share: float) -> dict[str, str]:
        """Return power limits at a share of the TDP for a node's GPUs, as `effects._limit` sets them."""
        gpus = self._hw.gpus_of(node)
        watts = np.minimum(self._hw.tdp_w[gpus], np.round(self._hw.tdp_w[gpus] * share / 25) * 25)
        return {
            f"gpu{slot}.power_limit_set_w": f"{w:.0f}" for slot, w in zip(self._hw.gpu_slot[gpus], watts, strict=True)
        }

    def rows(self, start_ms: int) -> list[dict[str, Any]]:
        facts = []
        for n in range(self._hw.nodes):
            of_node = inventory(self._hw, n) | {"driver": DRIVER}
            of_node |= {f"gpu{slot}.ecc_mode": "enabled" for slot in range(self._hw.spec.nodes[n].gpus)}
            facts.append(of_node | self._limits(n, 1.0))
        for at_s, n, change in self._changes:
            if at_s <= 0:
                facts[n] = facts[n] | change
        rows = [{"ts": iso(start_ms), "node": name, "inventory": facts[n]} for n, name in enumerate(self._hw.names)]
        for at_s, n, change in sorted(((a, n, c) for a, n, c in self._changes if a > 0), key=lambda row: row[:2]):
            facts[n] = facts[n] | change
            rows.append({"ts": iso(start_ms + round(at_s * 1000)), "node": self._hw.names[n], "inventory": facts[n]})
        return rows
