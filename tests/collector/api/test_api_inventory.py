"""A node's inventory next to that of its peers."""

from __future__ import annotations

from drover_collector.api.nodes import inventory_peers
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.fleet.index import FleetIndex
from drover_core.model.fleet import FleetSpec, NodeSpec


def fleet() -> tuple[FleetIndex, Inventory]:
    nodes = [NodeSpec(f"n{k}", "r1", "leaf1", "train", "H100", 2) for k in range(5)]
    nodes.append(NodeSpec("other", "r1", "leaf1", "train", "A100", 2))
    index = FleetIndex(FleetSpec(tuple(nodes), (), "f"))
    return index, Inventory(index)


def facts_of(driver: str = "570.1", vbios: tuple[str, str] = ("96.1", "96.1")) -> dict[str, str]:
    return {"driver_version": driver, "gpu0.vbios": vbios[0], "gpu1.vbios": vbios[1], "nic.mlx5_0.firmware": "28.39"}


def test_what_most_others_of_the_model_have_and_how_many() -> None:
    index, inventory = fleet()
    for k in range(4):
        inventory.update(f"n{k}", facts_of("570.1" if k else "560.0"), 1)
    inventory.update("other", facts_of("470.0", ("90.0", "90.0")), 1)
    found = {p.key: (p.usual, p.having, p.peers) for p in inventory_peers(inventory, index, 0, facts_of("560.0"))}
    assert found == {
        "driver_version": ("570.1", 3, 3),
        "gpu0.vbios": ("96.1", 6, 6),
        "gpu1.vbios": ("96.1", 6, 6),
        "nic.mlx5_0.firmware": ("28.39", 3, 3),
    }


def test_the_boards_of_the_node_itself_are_no_peers() -> None:
    index, inventory = fleet()
    own = facts_of(vbios=("97.0", "97.0"))
    inventory.update("n0", own, 1)
    inventory.update("n1", facts_of(vbios=("96.1", "96.2")), 1)
    inventory.update("n2", facts_of(vbios=("96.1", "96.1")), 1)
    found = {p.key: (p.usual, p.having, p.peers) for p in inventory_peers(inventory, index, 0, own)}
    assert found["gpu0.vbios"] == ("96.1", 3, 4)


def test_nothing_is_said_where_no_peer_reported_anything_or_the_node_did_not() -> None:
    index, inventory = fleet()
    inventory.update("n0", facts_of(), 1)
    assert inventory_peers(inventory, index, 0, facts_of()) == []
    inventory.update("n1", facts_of(), 1)
    assert [p.key for p in inventory_peers(inventory, index, 0, {"driver_version": "570.1"})] == ["driver_version"]
