"""A fleet without a fleet file: the nodes whose agents have reported. It is watched, and nothing is done to it.

The fleet's arrays have a fixed order for as long as a collector runs. So when other nodes or GPUs have reported for a
while, the collector starts again, as it does after a change of the fleet file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_core.model.fleet import FleetSpec, NodeSpec

log = logging.getLogger(__name__)

LOOK_S = 5.0
STEADY_S = 30.0  # agents that start together are learned together
KEPT_MS = 7 * 86_400_000  # a node that has not reported for so long is not of the fleet any longer


def learned(store: Store, now_ms: int) -> FleetSpec:
    """Return the nodes that have reported within a week, with the GPUs that they have now."""
    ids, seen = store.entities.registry.seen()
    sampled_ms = dict(zip(ids.tolist(), seen.tolist(), strict=True))
    last_ms: dict[str, int] = {}
    for row in store.entities.registry.rows():
        if row.scope in (Scope.NODE, Scope.GPU):
            at_ms = max(row.last_ms, sampled_ms.get(row.entity_id, 0))
            last_ms[row.node] = max(last_ms.get(row.node, 0), at_ms)
    names = sorted(name for name, at_ms in last_ms.items() if at_ms >= now_ms - KEPT_MS)
    return FleetSpec(tuple(_node(store, name) for name in names))


def _node(store: Store, name: str) -> NodeSpec:
    gpus = store.entities.gpus_of(name)
    models = Counter(row.model.removeprefix("NVIDIA ") for row in gpus if row.model)
    sku = models.most_common(1)[0][0] if models else ""
    return NodeSpec(name, sku=sku, gpus=1 + max((row.gpu or 0 for row in gpus), default=-1))


def sentence(spec: FleetSpec) -> str:
    """Return what `drover status` says of such a fleet."""
    count = len(spec.nodes)
    return (
        f"There is no fleet file: {count} node{'' if count == 1 else 's'} learned from what reports, and nothing is"
        " done to them. `drover fleet discover -o FILE` writes one."
    )


class FleetLearner:
    """Notices that another fleet reports than the one in use.

    Args:
        spec: the one in use.
        stop: called when it has been another for a while.

    Attributes:
        changed: that is so: the collector is to start again.
    """

    def __init__(self, store: Store, spec: FleetSpec, stop: Callable[[], None]) -> None:
        self._store, self._spec, self._stop = store, spec, stop
        self.changed = False

    async def run(self) -> None:
        """Run until cancelled, or until the fleet has changed."""
        newest, since_s = self._spec, time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            found = await asyncio.to_thread(learned, self._store, time.time_ns() // 1_000_000)
            if found != newest:
                newest, since_s = found, time.monotonic()
            if newest != self._spec and time.monotonic() - since_s >= STEADY_S:
                log.info("%d nodes report, %d were known: starting again", len(newest.nodes), len(self._spec.nodes))
                self.changed = True
                self._stop()
                return
