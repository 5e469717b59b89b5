"""Current outages of a fleet: which nodes Drover keeps out of service, how far each is, and which are about to go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from drover_collector.actions.base import own_mark
from drover_collector.actions.node_outage import CLOSINGS, is_out
from drover_collector.store import Store
from drover_core.model.events import Action, Health, NodeOutage, WaitsFor

log = logging.getLogger(__name__)

Outages = Mapping[str, NodeOutage]  # node -> its newest outage


class OutageStore:
    """Any thread may use it. Reads never wait for the store.

    Attributes:
        current: node -> its newest outage, ended ones too. Replaced with each change, never changed in place.
        lock: held while an outage is read, judged and set.
    """

    def __init__(self, store: Store) -> None:
        self.current: Outages = {}
        self.lock = threading.RLock()
        self._store = store
        self._closings: dict[str, Action] = {}  # by id: drains and isolations that have not ended
        self._held: dict[str, tuple[str, str]] = {}  # id of a closing -> its node, and why the guard holds it back
        self._requested: dict[str, None] = {}  # nodes
        self._subscribers: list[Callable[[Outages], None]] = []

    def subscribe(self, changed: Callable[[Outages], None]) -> None:
        """Call `changed` with the current outages after each change, in the thread that made it."""
        self._subscribers.append(changed)

    def load(self) -> None:
        """Read the stored outages. Raises StoreError."""
        self.current = self._store.outages.current()

    def write(self, outage: NodeOutage) -> None:
        """Store the next stage of a node, then call the subscribers. Raises StoreError: nothing has changed."""
        if outage.stage is not Health.DRAINED:
            outage = replace(outage, waits_for=WaitsFor.NOTHING)
        with self.lock:
            self._store.outages.write([outage])
            self.current = {**self.current, outage.node: outage}
        log.info("%s is %s (%s): %s", outage.node, outage.stage, own_mark(outage), outage.reason)
        for changed in self._subscribers:
            changed(self.current)

    # ---- nodes that are about to go out

    def add_closing(self, action: Action) -> None:
        """Count the node of a drain or isolation as leaving until that has ended; ignore other acts."""
        if action.action in CLOSINGS:
            self._closings[action.id] = action

    def end_closing(self, action: Action) -> None:
        """Call this after the outage is set, so that the node counts without a gap."""
        self._closings.pop(action.id, None)
        self._held.pop(action.id, None)

    def note_held(self, action: Action, why: str) -> None:
        """Note what the guard said right before a closing; "": it let the node go."""
        if why and action.action in CLOSINGS:
            self._held[action.id] = action.node, why
        else:
            self._held.pop(action.id, None)

    def clear_closings(self) -> None:
        """Forget what waits: this collector no longer acts."""
        self._closings.clear()
        self._held.clear()

    @contextmanager
    def requested(self, node: str) -> Iterator[None]:
        """Count a node as leaving while the guard is asked for a person, and until the intent is stored.

        Of two that are requested at once, each would otherwise find room for one.
        """
        self._requested[node] = None
        try:
            yield
        finally:
            self._requested.pop(node, None)

    @property
    def leaving(self) -> set[str]:
        """Nodes that are to be taken out and are not out yet: their scheduler is slow, or does not answer."""
        return {action.node for action in list(self._closings.values())}

    @property
    def held(self) -> dict[str, str]:
        """Nodes that were to be taken out, and that the guard held back when it was asked again, each with why."""
        return {node: why for id_, (node, why) in list(self._held.items()) if id_ in self._closings}

    def out_or_leaving(self) -> set[str]:
        """Return the nodes that are out, leaving, or requested."""
        waiting = {*list(self._requested), *self.leaving}  # read first: a node that leaves this set is in `current`
        return waiting | {node for node, outage in self.current.items() if is_out(outage)}

    def leaving_after(self, action: Action) -> set[str]:
        """Return the nodes whose turn at the guard comes after that of `action`, over all schedulers.

        Of two that wait for room one must go first, or each waits for the other. A forced action waits for none.
        """
        mine = action.ts_ms, action.id
        waiting = list(self._closings.values())
        return {a.node for a in waiting if not a.forced and (a.ts_ms, a.id) > mine}
