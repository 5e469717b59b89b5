"""Run the orders for probes: ask, send over the node's stream, judge when the closing result is stored.

An order is stored before it is sent, and ends as done or failed whatever happens to node, stream and collector: a start
reads the open ones from the store. The collector with the node's stream sends, again after each reconnect (the agent
runs an id once); only the active collector asks, judges and ends.
"""

from __future__ import annotations

import asyncio
import logging

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.completion import Listener, OrderCompletion
from drover_collector.probes.context import NodeAccess, ProbeContext, ProbeRuntime
from drover_collector.probes.scheduling.group_orders import groups_of
from drover_collector.probes.scheduling.orders import OrderBook
from drover_collector.probes.scheduling.protection import Protection, Unprotected
from drover_collector.probes.scheduling.sender import OrderSender
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import OpenOrder, Store, StoreError

log = logging.getLogger(__name__)

WAIT_TURN_S = 86_400.0  # how long an order waits for the limits on orders under way


class ProbeOrderService:
    """Drives all open orders. `run` in the event loop; `orders` from any thread.

    Args:
        protection: None: no scheduler is known.
    """

    def __init__(
        self,
        store: Store,
        index: FleetIndex,
        config: ProbesConfig,
        nodes: NodeAccess,
        runtime: ProbeRuntime,
        protection: Protection | None = None,
    ) -> None:
        self._config, self.nodes, self.runtime = config, nodes, runtime
        self.protection = protection or Unprotected()
        self.orders = OrderBook(store, index, runtime.now_ms)
        context = ProbeContext(store, index, config, nodes, runtime)
        self.completion = OrderCompletion(context, self.orders)
        self.sender = OrderSender(context, self.orders, self.completion, self.protection)

    @property
    def on_verdicts(self) -> list[Listener]:
        """As `OrderCompletion.on_verdicts`."""
        return self.completion.on_verdicts

    @property
    def troubles(self) -> dict[str, str]:
        return self.runtime.troubles

    async def run(self) -> None:
        """Run until cancelled."""
        self.orders.listen()
        while True:
            try:
                await self._turn()
                self.troubles.pop("probes", None)
            except StoreError as error:
                self.troubles["probes"] = f"Orders for probes cannot be stored: {error}."
                log.warning("orders for probes: %s", error)
            except Exception as error:  # a defect must not end this task; the operator sees it
                self.troubles["probes"] = f"Orders for probes: {type(error).__name__}; see the collector's log."
                log.exception("orders for probes")
            await self.orders.wait(self.runtime.poll_s)

    async def _turn(self) -> None:
        """End what is answered or overdue, then send what may be sent."""
        if self.runtime.leading():
            await asyncio.to_thread(self.orders.adopt_of_gates)
        held = await asyncio.to_thread(self.orders.snapshot)
        self.orders.forget_answers({one.order.id for one in held})
        answered = {one.order.id for one in held if one.order.id in self.orders.answered}
        ended = set(answered)
        if self.runtime.leading():
            for one in held:
                if one.order.group:
                    continue
                if one.order.id in answered:
                    await asyncio.to_thread(self.completion.finish, one)
                elif await self._end_overdue(one):
                    ended.add(one.order.id)
            for group in groups_of(held).values():
                for one in group:
                    if one.order.id not in answered and await self._end_overdue(one):
                        ended.add(one.order.id)
                left = [one for one in group if one.order.id not in ended - answered]
                if left and all(one.order.id in answered for one in left):
                    await asyncio.to_thread(self.completion.finish_group, left)
        await self.sender.send([one for one in held if one.order.id not in ended])

    async def _end_overdue(self, held: OpenOrder) -> bool:
        """End an order that has expired. Return whether it has."""
        if why := self._overdue(held):
            await asyncio.to_thread(self.completion.fail, held, why)
        return bool(why)

    def _overdue(self, held: OpenOrder) -> str:
        """Return why the order has expired; "": it has not."""
        now_ms, order = self.runtime.now_ms(), held.order
        if held.sent_ms is None:
            away = next((node for node in order.members or (order.node,) if self.nodes.stream(node) is None), "")
            limit_s = self._config.wait_s if away else WAIT_TURN_S
            if now_ms - held.asked_ms < limit_s * 1000:
                return ""
            why = f"{away} has no stream" if away else order.detail or "others came first"
            return f"expired: not sent within {limit_s:.0f} s, {why}"
        limit_ms = self.completion.due_ms(order)
        return f"expired: no answer within {limit_ms / 1000:.0f} s" if now_ms - held.sent_ms >= limit_ms else ""
