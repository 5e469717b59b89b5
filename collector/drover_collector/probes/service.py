"""Orders for probes: asked for, sent over the node's stream, judged when their closing result is stored.

An order is stored before it is sent, and ends in exactly one of done and failed, whatever becomes of node, stream and
collector: what is open is read from the store at a start. Whoever holds the node's stream sends (again after each
reconnect: the agent runs an id once); only the active collector asks, judges and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from drover_collector.actions.base import ActError
from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.completion import Ending
from drover_collector.probes.judging.verdicts import failed
from drover_collector.probes.scheduling.group_orders import (
    Turn,
    groups_of,
    request_of,
    turn,
)
from drover_collector.probes.scheduling.protection import Given, Protection, Unprotected
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import OpenOrder, Store, StoreError
from drover_core.model.events import ProbeOrder, ProbeReason
from drover_core.model.probe_figures import LEVELS
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

POLL_S = 2.0  # how often open orders are looked at, when nothing wakes us
WAIT_TURN_S = 86_400.0  # for the bounds on what is under way at once
# Asked for by Drover itself, where nothing ran at that time.
OF_ITSELF = frozenset({ProbeReason.CONFIRM, ProbeReason.BASELINE, ProbeReason.ADMIT, ProbeReason.IDLE})
INLET_MS = 300_000  # the inlet's temperature that goes with a request is not older


class Stream(Protocol):
    """An agent's stream that has been welcomed."""

    def send(self, message: pb.CollectorMessage, /) -> Awaitable[None]: ...


class ProbeOrderService(Ending):
    """`run` in the event loop; `ask` and `take_results` from any thread.

    Args:
        stream: the node's stream here; None: this collector does not hold it. leading: whether this is the active one.
        held: nodes that a job runs on now; none of Drover's own orders is sent to them, nor any of a group.
        address: where other nodes reach one, "" where that is not known. protection: None: no scheduler is known.
    """

    def __init__(
        self,
        store: Store,
        index: FleetIndex,
        config: ProbesConfig,
        *,
        stream: Callable[[str], Stream | None],
        leading: Callable[[], bool],
        now_ms: Callable[[], int],
        held: Callable[[], Collection[str]] = tuple,
        address: Callable[[str], str] = lambda _: "",
        protection: Protection | None = None,
        troubles: dict[str, str] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(store, index, config, now_ms, {} if troubles is None else troubles, held)
        self._stream, self._leading = stream, leading
        self._address, self._poll_s = address, poll_s
        self.protection = protection or Unprotected()
        self._told: dict[str, Stream] = {}  # order -> the stream it was sent on last

    async def run(self) -> None:
        """Until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            try:
                await self._turn()
                self.troubles.pop("probes", None)
            except StoreError as error:
                self.troubles["probes"] = f"Orders for probes cannot be kept: {error}."
                log.warning("orders for probes: %s", error)
            except Exception as error:  # a defect must not end this task; it is shown
                self.troubles["probes"] = f"Orders for probes: {type(error).__name__}; see the collector's log."
                log.exception("orders for probes")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):  # not wait_for, which may lose a cancellation (Python 3.11)
                    await self._wake.wait()
            self._wake.clear()

    async def _turn(self) -> None:
        """One look at all that is open."""
        held = await asyncio.to_thread(self._snapshot)
        self._told = {one.order.id: self._told[one.order.id] for one in held if one.order.id in self._told}
        known = {one.order.id for one in held}
        for request in [request for request in list(self._ended) if request not in known]:
            self._ended.pop(request, None)  # sent again after its order had ended, or nobody's
        answered = {one.order.id for one in held if one.order.id in self._ended}
        over = set(answered)
        if self._leading():
            for one in held:
                if one.order.group:
                    continue
                if one.order.id in answered:
                    await asyncio.to_thread(self._finish, one)
                elif why := self._overdue(one):
                    over.add(one.order.id)
                    await asyncio.to_thread(self._end, one, [failed(one.order, why, self._now_ms())], "failed", why)
            for group in groups_of(held).values():
                for one in group:
                    if one.order.id not in answered and (why := self._overdue(one)):
                        over.add(one.order.id)
                        await asyncio.to_thread(self._end, one, [failed(one.order, why, self._now_ms())], "failed", why)
                left = [one for one in group if one.order.id not in over - answered]
                if left and all(one.order.id in answered for one in left):
                    await asyncio.to_thread(self._finish_group, left)
        await self._send([one for one in held if one.order.id not in over])

    def _snapshot(self) -> list[OpenOrder]:
        with self._lock:
            if self._store.shared:  # others ask, send and judge too
                self._open = None
            return list(self._read().values())

    def _overdue(self, held: OpenOrder) -> str:
        """Why it has failed by now; "" while there is hope."""
        now_ms, order = self._now_ms(), held.order
        if held.sent_ms is None:
            away = next((node for node in order.members or (order.node,) if self._stream(node) is None), "")
            limit_s = self._config.wait_s if away else WAIT_TURN_S  # for its turn among others
            if now_ms - held.asked_ms < limit_s * 1000:
                return ""
            why = f"{away} has no stream" if away else order.detail or "others came first"
            return f"expired: not sent within {limit_s:.0f} s, {why}"
        limit_ms = self._due_ms(order)
        return f"expired: no answer within {limit_ms / 1000:.0f} s" if now_ms - held.sent_ms >= limit_ms else ""

    async def _send(self, held: Sequence[OpenOrder]) -> None:
        racks = {node.name: node.rack for node in self._index.nodes}
        unsent = [one for one in held if one.sent_ms is None] if self._leading() else []
        jobs = await self._jobs([one.order.id for one in held], bool(unsent)) if self._leading() else ()
        under_way = [one.order for one in held if one.sent_ms is not None or one.order.id in jobs]
        busy = await asyncio.to_thread(self._held) if any(one.sent_ms is None for one in held) else ()
        for group in groups_of(unsent).values():
            own = {one.order.id for one in group}
            others = [order for order in under_way if order.id not in own]
            told = turn(group, others, racks, busy, self._there, self._config)
            under_way = [*others, *await self._send_group(group, told, busy)]
        fleet, in_rack = len(under_way), Counter(racks.get(order.node, "") for order in under_way)
        away = False  # a scheduler that does not answer is asked once a turn
        for one in held:
            if one.order.group and one.sent_ms is None:
                continue
            order, rack = one.order, racks.get(one.order.node, "")
            stream = self._stream(order.node)
            if self._told.get(order.id) is stream or not (stream or self._there(order.node)):
                continue
            if one.sent_ms is None and not order.protection:
                if not self._leading() and self.protection.needed:
                    continue  # the active one asks the scheduler
                full = fleet >= self._config.most_at_once or (rack and in_rack[rack] >= self._config.most_per_rack)
                if full and order.id not in jobs:
                    continue
                if order.why in OF_ITSELF and order.node in busy:
                    await self._give_way(one)
                    continue
                if away:
                    continue
                given = await asyncio.to_thread(self.protection.of, order, busy=order.node in busy)
                away = given.away
                if order.id not in jobs and not (given.never or away):
                    fleet, in_rack[rack] = fleet + 1, in_rack[rack] + 1
                if given.never or given.wait:
                    await self._not_yet(one, given)
                    continue
                order = replace(order, protection=given.word, job=given.job)
                if stream is None:  # another collector's, which sends
                    await asyncio.to_thread(self._note, one, replace(order, ts_ms=self._now_ms()))
            if stream is None:
                continue
            if order is one.order and not await asyncio.to_thread(self.protection.stands, order):
                if one.sent_ms is None:  # the active one asks the scheduler again
                    await asyncio.to_thread(
                        self._note, one, replace(order, protection="", job="", ts_ms=self._now_ms())
                    )
                continue  # put back since: what was sent may have come there, else it expires
            if one.sent_ms is None:
                order = await asyncio.to_thread(self._note_sent, replace(one, order=order))
            request = await asyncio.to_thread(self._request, order)
            self._told[order.id] = stream
            await stream.send(pb.CollectorMessage(probe_request=request))

    async def _jobs(self, orders: list[str], unsent: bool) -> Collection[str]:
        """Orders with a scheduler's job that holds their node, or is to."""
        try:
            await asyncio.to_thread(self.protection.look, orders, unsent=unsent)
            self.troubles.pop("probe_jobs", None)
        except ActError as error:
            self.troubles["probe_jobs"] = f"Jobs that hold nodes for probes: {error}."
            log.warning("jobs that hold nodes for probes: %s", error)
        return self.protection.held

    async def _not_yet(self, one: OpenOrder, given: Given) -> None:
        if given.never:
            verdict = failed(one.order, given.never, self._now_ms())
            await asyncio.to_thread(self._end, one, [verdict], "failed", given.never)
        elif one.order.detail != given.wait:
            await asyncio.to_thread(self._note, one, replace(one.order, ts_ms=self._now_ms(), detail=given.wait))

    def _there(self, node: str) -> bool:
        """Whether a node has a stream; with other collectors on the store it may have one at another."""
        return self._stream(node) is not None or self._store.shared

    async def _send_group(self, group: Sequence[OpenOrder], told: Turn, busy: Collection[str]) -> list[ProbeOrder]:
        """All of it, or none; those that are under way now, or wait for the jobs that hold their nodes."""
        if told.why:
            for one in group if self._leading() else ():
                await asyncio.to_thread(
                    self._end, one, [failed(one.order, told.why, self._now_ms())], "failed", told.why
                )
            return []
        if not told.port:
            return []
        addresses = tuple([await asyncio.to_thread(self._address, node) for node in group[0].order.members])
        if "" in addresses:
            name = group[0].order.members[addresses.index("")]
            why = f"it is not known where other nodes reach {name}: set probe_address in its agent's settings"
            return await self._send_group(group, Turn(why=why), busy)
        given = [
            await asyncio.to_thread(self.protection.of, one.order, busy=one.order.node in busy) for one in group
        ]  # fmt: skip
        if never := next((g.never for g in given if g.never), ""):
            return await self._send_group(group, Turn(why=never), busy)
        if any(g.wait for g in given):
            for one, its in zip(group, given, strict=True):
                if its.wait:
                    await self._not_yet(one, its)
            return [one.order for one in group]
        sent = [
            replace(
                one, order=replace(one.order, addresses=addresses, port=told.port, protection=its.word, job=its.job)
            )
            for one, its in zip(group, given, strict=True)
        ]
        for one in sent:
            await asyncio.to_thread(self._note_sent, one)
        for one in sent:
            stream = self._stream(one.order.node)
            if stream is not None:  # else once it is back
                self._told[one.order.id] = stream
                request = request_of(one.order, self._config.group_join_s)
                await stream.send(pb.CollectorMessage(probe_request=request))
        return [one.order for one in sent]

    async def _give_way(self, held: OpenOrder) -> None:
        if self._leading():
            why = f"given up: a job runs on {held.order.node} by now"
            verdict = failed(held.order, why, self._now_ms())
            await asyncio.to_thread(self._end, held, [verdict], "failed", why)

    def _note_sent(self, held: OpenOrder) -> ProbeOrder:
        """Before it leaves: one that is sent and not noted would not be waited for."""
        now_ms = self._now_ms()
        order = replace(held.order, state="sent", ts_ms=now_ms, detail="")
        self._note(replace(held, sent_ms=now_ms), order)
        return order

    def _note(self, held: OpenOrder, order: ProbeOrder) -> None:
        self._store.probes.orders.write([order])
        with self._lock:
            if self._open is not None and order.id in self._open:
                self._open[order.id] = replace(held, order=order)

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
            found = self._store.samples.latest_values(order.node, self._now_ms(), INLET_MS)
            for values in found.values():
                if "inlet_temp_c" in values:
                    request.inlet_c = values["inlet_temp_c"][0]
        return request
