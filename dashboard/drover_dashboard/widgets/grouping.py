"""In which order the fleet's picture shows its GPUs: by rack, leaf, pool, SKU, or by the job that holds them. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_proto import fleet_pb2 as pb

GROUPS = {"rack": "rack", "leaf": "leaf", "pool": "pool", "sku": "model", "job": "job"}  # and what people call them
USUAL = "rack"
NOBODY = "(no job)"
BLOCK = 16  # nodes below one another: a pool of thousands in one column would have no room


def grouped(layout: pb.Layout, by: str) -> list[dict[str, Any]]:
    """Groups of nodes as assets/fleet_layout.js takes them; `first`: place of the node's slot 0 in a picture's bytes.

    Args:
        by: of GROUPS. For `job` the layout must have been asked for with jobs; of a node that several hold, each group
            has its slots.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    jobs = np.frombuffer(layout.jobs, "<i4") if by == "job" else np.zeros(0, np.int32)
    first = 0
    for rack in layout.racks:
        for node in rack.nodes:
            for name, slots in _parts(layout, jobs, rack, node, first, by):
                part = {"name": node.name, "gpus": len(slots), "first": first, "rack": rack.name}
                groups.setdefault(name, []).append(part if len(slots) == node.gpus else part | {"slots": slots})
            first += node.gpus
    order = list(groups)
    if by == "job":  # the largest first, what nobody holds last
        order.sort(key=lambda name: (name == NOBODY, -sum(node["gpus"] for node in groups[name])))
    size = BLOCK if by != "rack" else max(map(len, groups.values()), default=1)
    return [
        {"name": name if not at else f"{name} ({at // size + 1})", "nodes": groups[name][at : at + size]}
        for name in order
        for at in range(0, len(groups[name]), size)
    ]


def _parts(
    layout: pb.Layout, jobs: np.ndarray[Any, np.dtype[np.int32]], rack: pb.Rack, node: pb.RackNode, first: int, by: str
) -> list[tuple[str, list[int]]]:
    if by != "job":
        name = {"rack": rack.name, "leaf": node.leaf, "pool": node.pool, "sku": node.sku}[by]
        return [(name or f"(no {GROUPS[by]})", list(range(node.gpus)))]
    mine: dict[str, list[int]] = {}
    for slot, code in enumerate(jobs[first : first + node.gpus].tolist()):
        known = 0 <= code < len(layout.job_names)
        mine.setdefault(layout.job_names[code] if known else NOBODY, []).append(slot)
    return list(mine.items())
