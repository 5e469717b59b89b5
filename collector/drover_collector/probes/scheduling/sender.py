"""Send orders over their nodes' streams, when limits, jobs and the scheduler allow it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from drover_collector.actions.base import ActError
from drover_collector.probes.completion import OrderCompletion
from drover_collector.probes.context import ProbeContext, Stream
from drover_collector.probes.scheduling.group_orders import GroupTurn, group_turn, groups_of, request_of
from drover_collector.probes.scheduling.orders import OrderBook
from drover_collector.probes.scheduling.protection import Given, Protection
from drover_collector.store import OpenOrder
from drover_core.model.events import ProbeOrder, ProbeReason
from drover_core.model.probe_figures import LEVELS
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

# Asked for by Drover itself, where nothing ran at that time.
OF_DROVER = frozenset({ProbeReason.CONFIRM, ProbeReason.BASELINE, ProbeReason.ADMIT, ProbeReason.IDLE})
INLET_MS = 300_000  # the oldest inlet temperature that goes with a request


@dataclass(slots=True)
class _Turn:
    """What one pass over the open orders knows.

    Attributes:
        busy: nodes that a job runs on. jobs: orders with a scheduler's job.
        fleet, in_rack: orders under way.
        scheduler_away: it did not answer, and is not asked again in this pass.
    """

    busy: Collection[str]
    jobs: Collection[str]
    fleet: int
    in_rack: Counter[str]
    scheduler_away: bool = False


class OrderSender:
    """Event loop only."""

    def __init__(
        self, context: ProbeContext, orders: OrderBook, completion: OrderCompletion, protection: Protection
    ) -> None:
        self._store, self._config = context.store, context.config
        self._nodes, self._runtime = context.nodes, context.runtime
        self._racks = {node.name: node.rack for node in context.index.nodes}
        self._orders, self._completion, self._protection = orders, completion, protection
        self.sent_on: dict[str, Stream] = {}  # order -> the stream it was last sent on

    async def send(self, held: Sequence[OpenOrder]) -> None:
        """Send each open order that may be sent now, and again what a new stream has not got.

        Raises:
            StoreError.
        """
        open_ids = {one.order.id for one in held}
        self.sent_on = {id_: stream for id_, stream in self.sent_on.items() if id_ in open_ids}
        leading = self._runtime.leading()
        unsent = [one for one in held if one.sent_ms is None] if leading else []
        jobs = await self._jobs([one.order.id for one in held], bool(unsent)) if leading else ()
        under_way = [one.order for one in held if one.sent_ms is not None or one.order.id in jobs]
        busy = await asyncio.to_thread(self._nodes.busy) if any(one.sent_ms is None for one in held) else ()
        for group in groups_of(unsent).values():
            own = {one.order.id for one in group}
            others = [order for order in under_way if order.id not in own]
            turn = group_turn(group, others, self._racks, busy, self._completion.reachable, self._config)
            under_way = [*others, *await self._send_group(group, turn, busy)]
        in_rack = Counter(self._racks.get(order.node, "") for order in under_way)
        state = _Turn(busy, jobs, len(under_way), in_rack)
        for one in held:
            if not one.order.group or one.sent_ms is not None:
                await self._send_one(one, state)

    async def _send_one(self, one: OpenOrder, turn: _Turn) -> None:
        order, stream = one.order, self._nodes.stream(one.order.node)
        if self.sent_on.get(order.id) is stream or not (stream or self._completion.reachable(order.node)):
            return
        if one.sent_ms is None and not order.protection:
            protected = await self._protect(one, turn)
            if protected is None:
                return
            order = protected
            if stream is None:  # another collector has the stream, and sends
                await asyncio.to_thread(self._orders.update, one, replace(order, ts_ms=self._runtime.now_ms()))
        if stream is None:
            return
        if order is one.order and not await asyncio.to_thread(self._protection.stands, order):
            if one.sent_ms is None:  # the active collector asks the scheduler again
                now_ms = self._runtime.now_ms()
                await asyncio.to_thread(self._orders.update, one, replace(order, protection="", job="", ts_ms=now_ms))
            return  # back in service: what was sent may have arrived, else it expires
        if one.sent_ms is None:
            order = await asyncio.to_thread(self._orders.mark_sent, replace(one, order=order))
        request = await asyncio.to_thread(self._request, order)
        self.sent_on[order.id] = stream
        await stream.send(pb.CollectorMessage(probe_request=request))

    async def _protect(self, one: OpenOrder, turn: _Turn) -> ProbeOrder | None:
        """Return the order with what keeps jobs off its node; None: it cannot be sent now."""
        order, rack = one.order, self._racks.get(one.order.node, "")
        if not self._runtime.leading() and self._protection.needed:
            return None  # the active collector asks the scheduler
        config = self._config
        full = turn.fleet >= config.most_at_once or (rack and turn.in_rack[rack] >= config.most_per_rack)
        if full and order.id not in turn.jobs:
            return None
        if order.why in OF_DROVER and order.node in turn.busy:
            if self._runtime.leading():
                why = f"given up: a job runs on {order.node} by now"
                await asyncio.to_thread(self._completion.fail, one, why)
            return None
        if turn.scheduler_away:
            return None
        given = await asyncio.to_thread(self._protection.of, order, busy=order.node in turn.busy)
        turn.scheduler_away = given.away
        if order.id not in turn.jobs and not (given.never or given.away):
            turn.fleet += 1
            turn.in_rack[rack] += 1
        if given.never or given.wait:
            await self._wait_or_fail(one, given)
            return None
        return replace(order, protection=given.word, job=given.job)

    async def _jobs(self, orders: list[str], unsent: bool) -> Collection[str]:
        """Return the orders with a scheduler's job that holds their node, or will."""
        troubles = self._runtime.troubles
        try:
            await asyncio.to_thread(self._protection.look, orders, unsent=unsent)
            troubles.pop("probe_jobs", None)
        except ActError as error:
            troubles["probe_jobs"] = f"Jobs that hold nodes for probes: {error}."
            log.warning("jobs that hold nodes for probes: %s", error)
        return self._protection.held

    async def _wait_or_fail(self, one: OpenOrder, given: Given) -> None:
        if given.never:
            await asyncio.to_thread(self._completion.fail, one, given.never)
        elif one.order.detail != given.wait:
            order = replace(one.order, ts_ms=self._runtime.now_ms(), detail=given.wait)
            await asyncio.to_thread(self._orders.update, one, order)

    async def _send_group(self, group: Sequence[OpenOrder], turn: GroupTurn, busy: Collection[str]) -> list[ProbeOrder]:
        """Send all orders of a group, or none. Return those that are under way or wait for their nodes' jobs."""
        if turn.why:
            return await self._fail_group(group, turn.why)
        if not turn.port:
            return []
        members = group[0].order.members
        addresses = tuple([await asyncio.to_thread(self._nodes.address, node) for node in members])
        if "" in addresses:
            name = members[addresses.index("")]
            why = f"it is not known where other nodes reach {name}: set probe_address in its agent's settings"
            return await self._fail_group(group, why)
        protect, given = self._protection.of, []
        for one in group:
            given.append(await asyncio.to_thread(protect, one.order, busy=one.order.node in busy))
        if never := next((g.never for g in given if g.never), ""):
            return await self._fail_group(group, never)
        if any(g.wait for g in given):
            for one, its in zip(group, given, strict=True):
                if its.wait:
                    await self._wait_or_fail(one, its)
            return [one.order for one in group]
        prepared = []
        for one, its in zip(group, given, strict=True):
            order = replace(one.order, addresses=addresses, port=turn.port, protection=its.word, job=its.job)
            prepared.append(replace(one, order=order))
        await self._send_prepared(prepared)
        return [one.order for one in prepared]

    async def _send_prepared(self, group: Sequence[OpenOrder]) -> None:
        """Store that all orders of a group are sent, then send them."""
        for one in group:
            await asyncio.to_thread(self._orders.mark_sent, one)
        for one in group:
            stream = self._nodes.stream(one.order.node)
            if stream is not None:  # else when it is back
                self.sent_on[one.order.id] = stream
                request = request_of(one.order, self._config.group_join_s)
                await stream.send(pb.CollectorMessage(probe_request=request))

    async def _fail_group(self, group: Sequence[OpenOrder], why: str) -> list[ProbeOrder]:
        for one in group if self._runtime.leading() else ():
            await asyncio.to_thread(self._completion.fail, one, why)
        return []

    def _request(self, order: ProbeOrder) -> pb.ProbeRequest:
        if order.group:
            return request_of(order, self._config.group_join_s)
        request = pb.ProbeRequest(
            id=order.id,
            probes=order.probes,
            level=order.level,
            gpus=order.gpus,
            timeout_s=LEVELS[order.level],
            protection=order.protection,
        )
        if order.level == "deep" or "soak" in order.probes:
            found = self._store.samples.latest_values(order.node, self._runtime.now_ms(), INLET_MS)
            for values in found.values():
                if "inlet_temp_c" in values:
                    request.inlet_c = values["inlet_temp_c"][0]
        return request
