"""Draw the nodes of the adversary's fleets: pools of different boards, racks and leafs of different sizes."""

from __future__ import annotations

import string
from dataclasses import replace

import numpy as np

from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_simulator.hardware import links_of
from drover_simulator.sku import SKUS

GPUS_PER_NODE = 8
# Nodes of a rack by what a rack can feed and cool (NVIDIA DGX SuperPOD reference designs: 4 x H100 or B200 in 40 kW;
# denser rows exist): drawn, so that no rule of a detector can rely on one size.
NODES_PER_RACK = {"A100-SXM": (4, 8), "H100-SXM": (4, 8), "H200-SXM": (4, 8), "B200-SXM": (2, 4)}
NODES_PER_LEAF = (8, 16, 32)  # a scalable unit has 32 nodes, rails of 8 leafs; small clusters have less
SMALLEST_POOL = 4  # nodes


def draw_layout(rng: np.random.Generator, gpus: int, name: str) -> FleetSpec:
    """Return nodes for `gpus` GPUs, rounded up to whole nodes, with one to four kinds of boards in separate pools."""
    nodes = -(-gpus // GPUS_PER_NODE)
    kinds = [sorted(SKUS)[i] for i in rng.permutation(len(SKUS))]
    most = int(np.clip(nodes // SMALLEST_POOL, 1, len(kinds)))
    count = min(most, int(rng.integers(1, 5)))
    # One large pool and smaller older or newer ones.
    shares = np.sort(rng.dirichlet(np.full(count, 1.2)))[::-1]
    sizes = np.maximum(SMALLEST_POOL if count > 1 else 1, np.floor(shares * nodes)).astype(int)
    sizes[0] += nodes - sizes.sum()
    result: list[NodeSpec] = []
    rack = leaf = 0
    row = string.ascii_lowercase[int(rng.integers(26))]
    for sku, size in zip(kinds, sizes.tolist(), strict=False):
        low, high = NODES_PER_RACK[sku]
        per_rack = int(rng.integers(low, high + 1))
        per_leaf = max(per_rack, int(rng.choice(NODES_PER_LEAF)) // per_rack * per_rack)
        pool = sku.partition("-")[0].lower()
        for n in range(size):
            rack += n % per_rack == 0
            leaf += n % per_leaf == 0
            node = NodeSpec(
                f"{row}{rack:02d}n{n % per_rack + 1:02d}", f"{row}{rack:02d}", f"leaf{leaf:02d}", pool, sku,
                GPUS_PER_NODE,
            )  # fmt: skip
            result.append(replace(node, links=links_of(node)))
    return FleetSpec(tuple(result), (), name)
