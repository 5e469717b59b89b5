"""The end of an order: its results are judged, all that listen are told, and what is still to be found out is asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.judging.group_orders import Judged, judge_groups
from drover_collector.probes.judging.judge import judge_order
from drover_collector.probes.judging.verdicts import DONE, failed, with_all
from drover_collector.probes.scheduling.follow_ups import follow_ups
from drover_collector.probes.scheduling.group_orders import TIMEOUT_S
from drover_collector.probes.scheduling.orders import Orders
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import OpenOrder, Store, StoreError
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeVerdict
from drover_core.model.probe_figures import LEVELS

log = logging.getLogger(__name__)

OVERDUE_S = 600.0  # beyond waiting and running on the node, for the closing result to come
GROUP_OVERDUE_S = 60.0  # likewise where others wait for it
FOR_SERVICE = frozenset({ProbeReason.VALIDATE, ProbeReason.REPAIRED})  # the node is put back when it passes
LATE_MS = 3_600_000  # results that are judged so long after they were due may be those of another board

Listener = Callable[[list[ProbeVerdict]], None]


class Ending(Orders):
    """
    Attributes:
        on_verdicts: each is called with the verdicts of an order that has ended, in a thread, before the order's end is
            stored: after a crash between the two it is called again.
        maintained: nodes that people work on: nothing is asked of them that nobody asked for.
    """

    def __init__(
        self,
        store: Store,
        index: FleetIndex,
        config: ProbesConfig,
        now_ms: Callable[[], int],
        troubles: dict[str, str],
        held: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(store, index, config, now_ms, troubles)
        self.on_verdicts: list[Listener] = []
        self.maintained: Callable[[], Container[str]] = tuple
        self._held = held

    def _there(self, node: str) -> bool:
        """Whether a node has a stream."""
        raise NotImplementedError  # the desk has it

    def _due_ms(self, order: ProbeOrder) -> float:
        """After it was sent: it waits for so long at most on the node, and then runs."""
        limit_s = TIMEOUT_S if order.group else LEVELS[order.level]
        return (2 * limit_s + (GROUP_OVERDUE_S if order.group else OVERDUE_S)) * 1000

    def _finish(self, held: OpenOrder) -> None:
        order = held.order
        if held.sent_ms is not None and self._now_ms() - held.sent_ms >= self._due_ms(order) + LATE_MS:
            why = "its results were judged by nobody in time: the boards may be others by now"
            self._end(held, [failed(order, why, self._now_ms())], "failed", why)
            return
        verdicts, end = judge_order(self._store, order, self._now_ms())
        place = self._index.spec.by_name.get(order.node)
        if order.why in FOR_SERVICE and not order.gpus and place is not None:
            verdicts = with_all(verdicts, place.gpus)
        state = "done" if end.end == DONE else "failed"
        what = f" in {end.probe}" if end.probe else ""
        detail = "" if end.end == DONE else f"{end.end}{what}: {end.detail}".rstrip(": ")
        self._end(held, verdicts, state, detail)

    def _finish_group(self, group: Sequence[OpenOrder]) -> None:
        """All that was asked of it and did not expire is answered; others of the last hour may be seen in its light."""
        judged = judge_groups(self._store, self._index, group[0].order.group, self._now_ms())
        told = judged.verdicts
        mine = {one.order.id for one in group}
        for id_, verdict in told.items():
            if id_ not in mine:
                self._tell([verdict])
        for one in group:
            end = next((r.result for r in self._store.probes.results.of_order(one.order.id) if r.result.end), None)
            if end is None:
                why = "its results are not kept any more"
                self._end(one, [failed(one.order, why, self._now_ms())], "failed", why)
                continue
            detail = "" if end.end == DONE else f"{end.end}: {end.detail}".rstrip(": ")
            self._end(one, [told[one.order.id]], "done" if end.end == DONE else "failed", detail)
        self._follow(group[0].order, judged)

    def _follow(self, order: ProbeOrder, judged: Judged) -> None:
        """Groups that tell which node made one slow. Where they cannot be asked for the verdicts say what to run."""
        specs = self._index.spec.by_name
        busy, maintained = self._held(), self.maintained()

        def partners(node: str) -> list[str]:
            mine = specs[node]
            like = [
                n for n in self._index.nodes
                if (n.gpus, n.sku) == (mine.gpus, mine.sku) and n.name not in busy and self._there(n.name)
                and n.name not in maintained
            ]  # fmt: skip
            return [n.name for n in sorted(like, key=lambda n: (n.leaf != mine.leaf, n.name))]

        for one in follow_ups(judged.blames, judged.orders, partners, anybody=self._config.confirm):
            try:
                self.ask_group(
                    one.nodes, ProbeReason.CONFIRM, probes=one.probes, level=order.level, incident_id=order.incident_id
                )
            except ValueError as error:
                log.warning("no group of %s: %s", " and ".join(one.nodes), error)

    def _tell(self, verdicts: list[ProbeVerdict]) -> None:
        """Stored, then to all that listen.

        Raises:
            StoreError: one could not keep what came of it; all are told again.
        """
        self._store.probes.verdicts.write(verdicts)
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
        self._store.probes.orders.write([replace(held.order, state=state, ts_ms=self._now_ms(), detail=detail[:2000])])
        with self._lock:
            if self._open is not None:
                self._open.pop(held.order.id, None)
            self._ended.pop(held.order.id, None)
        log.info("probes of %s: order %s %s %s", held.order.node, held.order.id, state, detail)
