"""A node's inventory beside that of its peers: what most others of its model and pool have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.inventory import (
    GPU_KEYS,
    NODE_KEYS,
    UNKNOWN,
    Codes,
    Inventory,
)
from drover_collector.fleet.index import FleetIndex
from drover_proto import fleet_pb2 as pb


def inventory_peers(told: Inventory, index: FleetIndex, n: int, own: Mapping[str, str]) -> list[pb.InventoryPeers]:
    """For each key of `own` that is compared (docs/explanation/detectors.md, drift) what the peers of node `n` have;
    nothing for a key to which no peer told anything."""
    alike = (index.sku == index.sku[n]) & (index.pool == index.pool[n])
    alike[n] = False
    return list(_nodes(told, np.flatnonzero(alike), own)) + list(_gpus(told, index, n, alike, own))


def _nodes(told: Inventory, peers: npt.NDArray[np.intp], own: Mapping[str, str]) -> Iterator[pb.InventoryPeers]:
    keys = {**NODE_KEYS, **{f"{name}.firmware": name for name in told.nic_boards}}
    for key, name in keys.items():
        if own.get(key) and (found := _usual(told, told.node[name].codes[peers])):
            yield pb.InventoryPeers(key=key, usual=found[0], having=found[1], peers=found[2])


def _gpus(
    told: Inventory, index: FleetIndex, n: int, alike: npt.NDArray[np.bool_], own: Mapping[str, str]
) -> Iterator[pb.InventoryPeers]:
    peers = np.flatnonzero(alike[index.gpu_node])
    for key, name in GPU_KEYS.items():
        slots = [slot for slot in range(index.nodes[n].gpus) if own.get(f"gpu{slot}.{key}")]
        if slots and (found := _usual(told, told.gpu[name].codes[peers])):
            for slot in slots:
                yield pb.InventoryPeers(key=f"gpu{slot}.{key}", usual=found[0], having=found[1], peers=found[2])


def _usual(told: Inventory, codes: Codes) -> tuple[str, int, int] | None:
    """(value that most have, how many have it, how many told one)."""
    known = codes[codes != UNKNOWN]
    if not len(known):
        return None
    counts = np.bincount(known)
    most = int(counts.argmax())
    return told.values[most], int(counts[most]), len(known)
