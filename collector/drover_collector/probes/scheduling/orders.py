"""Keep the open orders for probes. An order is stored before anything is done with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.scheduling.group_orders import check_group
from drover_collector.store import OpenOrder, Store
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeResult
from drover_core.model.probe_figures import FIGURES, GROUP_FIGURES, LEVELS, VALIDATION_FIGURES

log = logging.getLogger(__name__)

MAX_OPEN = 10_000  # orders
GATE = "gate-"  # of the id of probes that a node ran after a job, unasked (`drover-agent gate --deep`)
GATE_EVERY_MS = 30_000  # of a node's; others between are stored and not judged
REFUSED = "refused"  # such probes, next to another job: there is nothing to judge


class OrderBook:
    """The open orders. Any thread, but `listen` and `wait` in the event loop."""

    def __init__(self, store: Store, index: FleetIndex, now_ms: Callable[[], int]) -> None:
        self._store, self._index, self._now_ms = store, index, now_ms
        self._lock = threading.Lock()
        self._open: dict[str, OpenOrder] | None = None  # None: not read yet
        self.answered: dict[str, None] = {}  # orders whose closing result is stored
        self._of_gates: dict[str, str] = {}  # id -> node, of results that nobody asked for
        self._gate_ms: dict[str, int] = {}  # node -> when such a result was last judged
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(
        self,
        node: str,
        why: ProbeReason,
        *,
        gpus: Iterable[int] = (),
        level: str = "quick",
        probes: Iterable[str] = (),
        incident_id: str = "",
        by: str = "drover",
    ) -> str:
        """Store an order, to be sent when its turn comes. Return its id, or that of the same open order.

        Args:
            gpus: slots; none: all that no process uses. probes: none: all of the level.
        Raises:
            ValueError: no such node, GPU, probe or level: one line, what to do.
            StoreError: it could not be stored, or this collector is not the active one.
        """
        slots, names = tuple(sorted(set(gpus))), tuple(dict.fromkeys(probes))
        self._check(node, slots, level, names)
        self._store.fence()
        with self._lock:
            open_ = self._read()
            for held in open_.values():
                order = held.order
                if (order.node, order.gpus, order.level, order.probes, order.why) == (node, slots, level, names, why):
                    return order.id
            if len(open_) >= MAX_OPEN:
                raise ValueError(f"{MAX_OPEN} orders for probes are open already; wait until some have ended")
            now_ms = self._now_ms()
            made = ProbeOrder(
                f"p{secrets.token_hex(8)}", node, slots, level, names, why, "asked", now_ms, incident_id, by
            )
            self._store.probes.orders.write([made])
            open_[made.id] = OpenOrder(made, now_ms, None)
        log.info("probes of %s asked for (%s, by %s): %s", node, why.value, by, made.id)
        self._rouse()
        return made.id

    def ask_group(
        self, nodes: Iterable[str], why: ProbeReason, *, probes: Iterable[str] = (), level: str = "quick",
        incident_id: str = "", by: str = "drover",
    ) -> list[str]:  # fmt: skip
        """Store orders for nodes that are probed together, one each. Return their ids, or those of the same open group.

        Raises:
            ValueError, StoreError: as `ask`.
        """
        members, names = tuple(nodes), tuple(dict.fromkeys(probes)) or GROUP_FIGURES
        check_group(self._index, members, names)
        if level not in LEVELS:
            raise ValueError(f"no level is called {level!r}; there are {', '.join(LEVELS)}")
        self._store.fence()
        with self._lock:
            open_ = self._read()
            same = [h.order for h in open_.values() if (h.order.members, h.order.probes) == (members, names)]
            if len(same) == len(members):
                return [order.id for order in same]
            if len(open_) + len(members) > MAX_OPEN:
                raise ValueError(f"{MAX_OPEN} orders for probes are open already; wait until some have ended")
            now_ms, group = self._now_ms(), f"g{secrets.token_hex(16)}"
            made = [
                ProbeOrder(
                    f"p{secrets.token_hex(8)}", node, (), level, names, why, "asked", now_ms, incident_id, by,
                    group=group, members=members,
                )
                for node in members
            ]  # fmt: skip
            self._store.probes.orders.write(made)
            open_.update({order.id: OpenOrder(order, now_ms, None) for order in made})
        log.info("probes of a group asked for (%s, by %s): %s", why.value, by, ", ".join(members))
        self._rouse()
        return [order.id for order in made]

    def open_orders(self) -> list[ProbeOrder]:
        """Return the open orders in the order they were asked for.

        With several collectors on the store this is the newest snapshot.
        """
        with self._lock:
            return [held.order for held in self._read().values()]

    def take_results(self, results: Sequence[ProbeResult]) -> None:
        """Note the results that ingest has stored. Take no lock: the event loop calls this."""
        self.answered.update(dict.fromkeys(r.request for r in results if r.end))
        for result in results:
            of_gate = result.end and result.end != REFUSED and result.request.startswith(GATE)
            if of_gate and len(self._of_gates) < MAX_OPEN:
                self._of_gates[result.request] = result.node
        self._rouse()

    def adopt_of_gates(self) -> None:
        """Make orders of the probes that nodes ran after a job, so that they are judged like those asked for.

        Raises:
            StoreError: call again.
        """
        for id_, node in list(self._of_gates.items()):
            now_ms = self._now_ms()
            with self._lock:
                # abs: the clock may have been set back.
                due = abs(now_ms - self._gate_ms.get(node, -GATE_EVERY_MS)) >= GATE_EVERY_MS
                if due and node in self._index.spec.by_name and id_ not in self._read():
                    made = ProbeOrder(id_, node, (), "quick", (), ProbeReason.IDLE, "sent", now_ms, by="gate")
                    self._store.probes.orders.write([made])
                    self._read()[id_] = OpenOrder(made, now_ms, now_ms)
                    self.answered[id_] = None
                    self._gate_ms[node] = now_ms
            self._of_gates.pop(id_, None)

    def snapshot(self) -> list[OpenOrder]:
        """Return the open orders; read again if other collectors may have changed them. Raises StoreError."""
        with self._lock:
            if self._store.shared:
                self._open = None
            return list(self._read().values())

    def forget_answers(self, open_ids: Container[str]) -> None:
        """Forget answers to other orders: they had ended, or are unknown."""
        for request in [request for request in list(self.answered) if request not in open_ids]:
            self.answered.pop(request, None)

    def update(self, held: OpenOrder, order: ProbeOrder) -> None:
        """Store a new version of an open order. Raises StoreError."""
        self._store.probes.orders.write([order])
        with self._lock:
            if self._open is not None and order.id in self._open:
                self._open[order.id] = replace(held, order=order)

    def mark_sent(self, held: OpenOrder) -> ProbeOrder:
        """Store that an order is sent, before it is: nobody waits for an answer to one that is not stored."""
        now_ms = self._now_ms()
        order = replace(held.order, state="sent", ts_ms=now_ms, detail="")
        self.update(replace(held, sent_ms=now_ms), order)
        return order

    def end(self, held: OpenOrder, state: str, detail: str) -> None:
        """Store an order's end: done or failed. Raises StoreError."""
        self._store.probes.orders.write([replace(held.order, state=state, ts_ms=self._now_ms(), detail=detail[:2000])])
        with self._lock:
            if self._open is not None:
                self._open.pop(held.order.id, None)
            self.answered.pop(held.order.id, None)
        log.info("probes of %s: order %s %s %s", held.order.node, held.order.id, state, detail)

    def listen(self) -> None:
        """Let `wait` in this event loop end early when an order or an answer comes."""
        self._loop = asyncio.get_running_loop()

    async def wait(self, seconds: float) -> None:
        """Wait for a new order or answer, but not longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # not wait_for, which may lose a cancellation (Python 3.11)
                await self._wake.wait()
        self._wake.clear()

    def _check(self, node: str, gpus: Sequence[int], level: str, probes: Sequence[str]) -> None:
        spec = self._index.spec.by_name.get(node)
        if spec is None:
            raise ValueError(f"no node is called {node!r}; `drover nodes` lists them")
        if wrong := [gpu for gpu in gpus if not 0 <= gpu < spec.gpus]:
            raise ValueError(f"{node} has no GPU {wrong[0]}; its slots are 0 to {spec.gpus - 1}")
        if level not in LEVELS:
            raise ValueError(f"no level is called {level!r}; there are {', '.join(LEVELS)}")
        if unknown := [name for name in probes if name not in FIGURES or name.startswith("soak_")]:
            raise ValueError(f"no probe is called {unknown[0]!r}; docs/reference/probes.md lists them")
        if validated := [name for name in probes if name in VALIDATION_FIGURES]:
            raise ValueError(f"{validated[0]} needs several nodes: `drover validate NODE NODE`")
        if together := [name for name in probes if name in GROUP_FIGURES]:
            raise ValueError(f"{together[0]} needs several nodes: `drover probe --group NODE NODE`")

    def _read(self) -> dict[str, OpenOrder]:
        if self._open is None:
            self._open = {held.order.id: held for held in self._store.probes.orders.open()}
            # Closing results from before a stop.
            self.answered.update(dict.fromkeys(self._store.probes.results.ended(list(self._open))))
        return self._open

    def _rouse(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)
