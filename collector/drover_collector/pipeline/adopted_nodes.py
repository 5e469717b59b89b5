"""Nodes that a person has adopted: they report, are not in the fleet file, and belong to the fleet all the same.

Kept as lines of the audit, so that all collectors of a store know them. The fleet file wins over an adoption. The
fleet's arrays have a fixed order for as long as a collector runs, so it starts again when adoptions have changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from drover_collector.store import Store, StoreError
from drover_core.model.events import Audit, from_json, to_json
from drover_core.model.fleet import FleetSpec, NodeSpec

log = logging.getLogger(__name__)

ADOPT = "adopt"
MOST = 10_000
LOOK_S = 5.0
STEADY_S = 10.0  # several that are adopted one after the other are one start
SPREAD_S = 20.0  # collectors of one store do not all start again at the same moment


def adopted(store: Store) -> dict[str, NodeSpec]:
    """Return the adopted nodes by name, also those that stand in the fleet file meanwhile. Raises StoreError."""
    newest: dict[str, str] = {}
    for line in store.audit.read(what=ADOPT, limit=MOST):  # the newest first
        newest.setdefault(line.subject, line.state)
    return {name: from_json(NodeSpec, state) for name, state in newest.items() if state}


def next_ms(store: Store, node: str, now_ms: int) -> int:
    """Return the time of a node's next line: behind those it has, though the clock may have gone back since.

    Raises:
        StoreError
    """
    last = next(iter(store.audit.read(what=ADOPT, subject=node, limit=1)), None)
    return now_ms if last is None else max(now_ms, last.ts_ms + 1)


def with_adopted(spec: FleetSpec, nodes: Mapping[str, NodeSpec]) -> FleetSpec:
    """Return the fleet of the file with the adopted nodes behind, by name."""
    more = tuple(nodes[name] for name in sorted(nodes) if name not in spec.by_name)
    return replace(spec, nodes=(*spec.nodes, *more)) if more else spec


def line(node: NodeSpec, by: str, why: str, now_ms: int, *, forget: bool = False) -> Audit:
    """Return the audit line that adopts a node, or that ends its adoption."""
    text = f"{node.gpus} GPUs" + "".join(
        f", {key} {value}" for key in ("rack", "leaf", "pool", "sku") if (value := getattr(node, key))
    )
    detail = "no longer adopted" if forget else f"adopted into the fleet: {text}"
    return Audit(
        f"adopt {node.name} {now_ms}", now_ms, by, ADOPT, node.name, why, detail, "" if forget else to_json(node)
    )


class AdoptionWatch:
    """Notices that other nodes are adopted than those in use.

    Args:
        filed: the fleet of the file. spec: the one in use. stop: called when they have differed for a while.

    Attributes:
        changed: that is so: the collector is to start again.
    """

    def __init__(self, store: Store, filed: FleetSpec, spec: FleetSpec, stop: Callable[[], None]) -> None:
        self._store, self._filed, self._spec, self._stop = store, filed, spec, stop
        self.changed = False

    async def run(self) -> None:
        """Run until cancelled, or until the fleet has changed."""
        newest, since_s = self._spec, time.monotonic()
        steady_s = STEADY_S + (random.uniform(0, SPREAD_S) if self._store.shared else 0)
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = with_adopted(self._filed, await asyncio.to_thread(adopted, self._store))
            except StoreError as error:
                log.info("which nodes are adopted is not known: %s", error)
                continue
            if found != newest:
                newest, since_s = found, time.monotonic()
            if newest != self._spec and time.monotonic() - since_s >= steady_s:
                log.info("%d nodes are in the fleet, %d were: starting again", len(newest.nodes), len(self._spec.nodes))
                self.changed = True
                self._stop()
                return
