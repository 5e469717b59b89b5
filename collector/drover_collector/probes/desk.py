"""Orders for probes: asked for, sent over the node's stream, judged when their closing result is stored.

An order is stored before it is sent, and ends in exactly one of done and failed, whatever becomes of node, stream and
collector: what is open is read from the store at a start. Whoever holds the node's stream sends (again after each
reconnect: the agent runs an id once); only the active collector asks, judges and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from drover_collector.fleet_index import FleetIndex
from drover_collector.probes.group_orders import TIMEOUT_S, Turn, check_group, groups_of, request_of, turn
from drover_collector.probes.judging import judge_order
from drover_collector.probes.judging_groups import judge_groups
from drover_collector.probes.settings import ProbesConfig
from drover_collector.probes.verdicts import DONE, failed
from drover_collector.store import OpenOrder, Store, StoreError
from drover_proto import telemetry_pb2 as pb
from drover_proto.events import ProbeOrder, ProbeReason, ProbeResult, ProbeVerdict
from drover_proto.probes import FIGURES, GROUP_FIGURES, LEVELS

log = logging.getLogger(__name__)

POLL_S = 2.0  # how often open orders are looked at, when nothing wakes us
OVERDUE_S = 600.0  # beyond waiting and running on the node, for the closing result to come
GROUP_OVERDUE_S = 60.0  # likewise where others wait for it
WAIT_TURN_S = 86_400.0  # for the bounds on what is under way at once
MAX_OPEN = 10_000  # orders
LATE_MS = 3_600_000  # results that are judged so long after they were due may be those of another board
# Asked for by Drover itself, where nothing ran at that time.
OF_ITSELF = frozenset({ProbeReason.CONFIRM, ProbeReason.BASELINE, ProbeReason.ADMIT, ProbeReason.IDLE})
INLET_MS = 300_000  # the inlet's temperature that goes with a request is not older


class Stream(Protocol):
    """An agent's stream that has been welcomed."""

    def send(self, message: pb.CollectorMessage, /) -> Awaitable[None]: ...


Listener = Callable[[list[ProbeVerdict]], None]


class ProbeDesk:
    """`run` in the event loop; `ask` and `take_results` from any thread.

    Args:
        stream: the node's stream here; None: this collector does not hold it. leading: whether this is the active one.
        held: nodes that a job runs on now; none of Drover's own orders is sent to them, nor any of a group.
        address: where other nodes reach one, "" where that is not known.
    Attributes:
        on_verdicts: each is called with the verdicts of an order that has ended, in a thread, before the order's end is
            stored: after a crash between the two it is called again.
        troubles: what goes wrong, by what, each a sentence.
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
        troubles: dict[str, str] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.on_verdicts: list[Listener] = []
        self.troubles = {} if troubles is None else troubles
        self._store, self._index, self._config = store, index, config
        self._stream, self._leading, self._now_ms = stream, leading, now_ms
        self._held, self._address, self._poll_s = held, address, poll_s
        self._lock = threading.Lock()
        self._open: dict[str, OpenOrder] | None = None  # None: not read yet
        self._ended: dict[str, None] = {}  # requests whose closing result is stored
        self._told: dict[str, Stream] = {}  # order -> the stream it was sent on last
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- asking

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
        """Store an order, to be sent when its turn comes; gives its id, or that of the same one that is open.

        Args:
            gpus: slots; none: all that no process holds. probes: none: all of the level.
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
            self._store.write_probe_orders([made])
            open_[made.id] = OpenOrder(made, now_ms, None)
        log.info("probes of %s asked for (%s, by %s): %s", node, why.value, by, made.id)
        self._rouse()
        return made.id

    def ask_group(
        self, nodes: Iterable[str], why: ProbeReason, *, probes: Iterable[str] = (), level: str = "quick",
        incident_id: str = "", by: str = "drover",
    ) -> list[str]:  # fmt: skip
        """Store orders for nodes that are probed together, one each, in their order; gives their ids, or those of the
        same group that is open.

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
            self._store.write_probe_orders(made)
            open_.update({order.id: OpenOrder(order, now_ms, None) for order in made})
        log.info("probes of a group asked for (%s, by %s): %s", why.value, by, ", ".join(members))
        self._rouse()
        return [order.id for order in made]

    def open_orders(self) -> list[ProbeOrder]:
        """In the order they were asked for; as of the last look where several collectors share the store."""
        with self._lock:
            return [held.order for held in self._read().values()]

    def take_results(self, results: Sequence[ProbeResult]) -> None:
        """Results that ingest has stored. Takes no lock: the event loop calls it."""
        self._ended.update(dict.fromkeys(r.request for r in results if r.end))
        self._rouse()

    def _check(self, node: str, gpus: Sequence[int], level: str, probes: Sequence[str]) -> None:
        spec = self._index.spec.by_name.get(node)
        if spec is None:
            raise ValueError(f"no node is called {node!r}; `drover nodes` lists them")
        if wrong := [gpu for gpu in gpus if not 0 <= gpu < spec.gpus]:
            raise ValueError(f"{node} has no GPU {wrong[0]}; its slots are 0 to {spec.gpus - 1}")
        if level not in LEVELS:
            raise ValueError(f"no level is called {level!r}; there are {', '.join(LEVELS)}")
        if unknown := [name for name in probes if name not in FIGURES or name.startswith("soak_")]:
            raise ValueError(f"no probe is called {unknown[0]!r}; docs/probes.md lists them")
        if together := [name for name in probes if name in GROUP_FIGURES]:
            raise ValueError(f"{together[0]} needs several nodes: `drover probe --group NODE NODE`")

    def _read(self) -> dict[str, OpenOrder]:
        if self._open is None:
            self._open = {held.order.id: held for held in self._store.open_probe_orders()}
            # Closing results that came before a stop: seen again.
            self._ended.update(dict.fromkeys(self._store.ended_requests(list(self._open))))
        return self._open

    def _rouse(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    # ---- work

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
            why = f"{away} has no stream" if away else "others came first"
            return f"expired: not sent within {limit_s:.0f} s, {why}"
        limit_ms = self._due_ms(order)
        return f"expired: no answer within {limit_ms / 1000:.0f} s" if now_ms - held.sent_ms >= limit_ms else ""

    def _due_ms(self, order: ProbeOrder) -> float:
        """After it was sent: it waits for so long at most on the node, and then runs."""
        limit_s = TIMEOUT_S if order.group else LEVELS[order.level]
        return (2 * limit_s + (GROUP_OVERDUE_S if order.group else OVERDUE_S)) * 1000

    async def _send(self, held: Sequence[OpenOrder]) -> None:
        racks = {node.name: node.rack for node in self._index.nodes}
        under_way = [one.order for one in held if one.sent_ms is not None]
        busy: Collection[str] | None = None
        unsent = [one for one in held if one.sent_ms is None] if self._leading() else []
        for group in groups_of(unsent).values():
            busy = await asyncio.to_thread(self._held) if busy is None else busy
            under_way += await self._send_group(group, turn(
                group, under_way, racks, busy, self._there, self._config
            ))  # fmt: skip
        fleet, in_rack = len(under_way), Counter(racks.get(order.node, "") for order in under_way)
        for one in held:
            if one.order.group and one.sent_ms is None:
                continue
            order, rack = one.order, racks.get(one.order.node, "")
            stream = self._stream(order.node)
            if stream is None or self._told.get(order.id) is stream:
                continue
            if one.sent_ms is None:
                if fleet >= self._config.most_at_once or (rack and in_rack[rack] >= self._config.most_per_rack):
                    continue
                if order.why in OF_ITSELF:
                    busy = await asyncio.to_thread(self._held) if busy is None else busy
                    if order.node in busy:
                        await self._give_way(one)
                        continue
                fleet, in_rack[rack] = fleet + 1, in_rack[rack] + 1
                await asyncio.to_thread(self._note_sent, one)
            request = await asyncio.to_thread(self._request, order)
            self._told[order.id] = stream
            await stream.send(pb.CollectorMessage(probe_request=request))

    def _there(self, node: str) -> bool:
        """Whether a node has a stream; with other collectors on the store it may have one at another."""
        return self._stream(node) is not None or self._store.shared

    async def _send_group(self, group: Sequence[OpenOrder], told: Turn) -> list[ProbeOrder]:
        """All of it, or none; those that are under way now."""
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
            return await self._send_group(group, Turn(why=why))
        sent = [replace(one, order=replace(one.order, addresses=addresses, port=told.port)) for one in group]
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

    def _note_sent(self, held: OpenOrder) -> None:
        """Before it leaves: one that is sent and not noted would not be waited for."""
        now_ms = self._now_ms()
        order = replace(held.order, state="sent", ts_ms=now_ms)
        self._store.write_probe_orders([order])
        with self._lock:
            if self._open is not None and order.id in self._open:
                self._open[order.id] = replace(held, order=order, sent_ms=now_ms)

    def _request(self, order: ProbeOrder) -> pb.ProbeRequest:
        if order.group:
            return request_of(order, self._config.group_join_s)
        request = pb.ProbeRequest(
            id=order.id, probes=order.probes, level=order.level, gpus=order.gpus, timeout_s=LEVELS[order.level]
        )
        if order.level == "deep" or "soak" in order.probes:
            found = self._store.latest_values(order.node, self._now_ms(), INLET_MS)
            for values in found.values():
                if "inlet_temp_c" in values:
                    request.inlet_c = values["inlet_temp_c"][0]
        return request

    def _finish(self, held: OpenOrder) -> None:
        order = held.order
        if held.sent_ms is not None and self._now_ms() - held.sent_ms >= self._due_ms(order) + LATE_MS:
            why = "its results were judged by nobody in time: the boards may be others by now"
            self._end(held, [failed(order, why, self._now_ms())], "failed", why)
            return
        verdicts, end = judge_order(self._store, order, self._now_ms())
        state = "done" if end.end == DONE else "failed"
        what = f" in {end.probe}" if end.probe else ""
        detail = "" if end.end == DONE else f"{end.end}{what}: {end.detail}".rstrip(": ")
        self._end(held, verdicts, state, detail)

    def _finish_group(self, group: Sequence[OpenOrder]) -> None:
        """All that was asked of it and did not expire is answered; others of the last hour may be seen in its light."""
        told = judge_groups(self._store, self._index, group[0].order.group, self._now_ms())
        mine = {one.order.id for one in group}
        for id_, verdict in told.items():
            if id_ not in mine:
                self._tell([verdict])
        for one in group:
            end = next(r.result for r in self._store.probe_results(one.order.id) if r.result.end)
            detail = "" if end.end == DONE else f"{end.end}: {end.detail}".rstrip(": ")
            self._end(one, [told[one.order.id]], "done" if end.end == DONE else "failed", detail)

    def _tell(self, verdicts: list[ProbeVerdict]) -> None:
        """Stored, then to all that listen.

        Raises:
            StoreError: one could not keep what came of it; all are told again.
        """
        self._store.write_probe_verdicts(verdicts)
        for listener in self.on_verdicts:
            try:
                listener(verdicts)
            except StoreError:
                raise
            except Exception as error:  # one that fails must neither keep the others back nor the order open for ever
                self.troubles["verdicts"] = f"Verdicts of probes: {type(error).__name__}; see the collector's log."
                log.exception("verdicts of order %s", verdicts[0].request if verdicts else "")

    def _end(self, held: OpenOrder, verdicts: list[ProbeVerdict], state: str, detail: str) -> None:
        self._tell(verdicts)
        self._store.write_probe_orders([replace(held.order, state=state, ts_ms=self._now_ms(), detail=detail[:2000])])
        with self._lock:
            if self._open is not None:
                self._open.pop(held.order.id, None)
            self._ended.pop(held.order.id, None)
        log.info("probes of %s: order %s %s %s", held.order.node, held.order.id, state, detail)
