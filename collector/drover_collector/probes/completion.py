"""End orders: judge their results, pass the verdicts on, and ask for the probes that are still needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from drover_collector.probes.context import ProbeContext
from drover_collector.probes.judging.group_orders import Judged, judge_groups
from drover_collector.probes.judging.judge import judge_order
from drover_collector.probes.judging.verdicts import DONE, failed, with_all
from drover_collector.probes.scheduling.follow_ups import follow_ups
from drover_collector.probes.scheduling.group_orders import timeout_s
from drover_collector.probes.scheduling.orders import OrderBook
from drover_collector.store import OpenOrder, StoreError
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeVerdict
from drover_core.model.probe_figures import LEVELS

log = logging.getLogger(__name__)

OVERDUE_S = 600.0  # for the closing result, after waiting and running on the node
GROUP_OVERDUE_S = 60.0  # the same for a group, whose members wait for each other
# A pass says that all GPUs of the node are well: it returns to service, or a person signs for it (`drover validate`).
OF_ALL = frozenset({ProbeReason.VALIDATE, ProbeReason.REPAIRED, ProbeReason.PERSON})
LATE_MS = 3_600_000  # later results may be of another board

Listener = Callable[[list[ProbeVerdict]], None]


class OrderCompletion:
    """Judges and ends orders, in a thread.

    Attributes:
        on_verdicts: each is called with the verdicts of an ended order, before its end is stored: after a crash between
            the two it is called again.
    """

    def __init__(self, context: ProbeContext, orders: OrderBook) -> None:
        self._store, self._index, self._config = context.store, context.index, context.config
        self._nodes, self._runtime = context.nodes, context.runtime
        self._orders = orders
        self.on_verdicts: list[Listener] = []

    def due_ms(self, order: ProbeOrder) -> float:
        """Return how long after its sending an order is overdue: it waits on the node, then runs."""
        limit_s = timeout_s(order) if order.group else LEVELS[order.level]
        return (2 * limit_s + (GROUP_OVERDUE_S if order.group else OVERDUE_S)) * 1000

    def finish(self, held: OpenOrder) -> None:
        """Judge and end an order whose closing result is stored. Raises StoreError."""
        order = held.order
        if held.sent_ms is not None and self._runtime.now_ms() - held.sent_ms >= self.due_ms(order) + LATE_MS:
            why = "its results were not judged in time, and the boards may have been replaced since"
            self.fail(held, why)
            return
        verdicts, end = judge_order(self._store, order, self._runtime.now_ms())
        place = self._index.spec.by_name.get(order.node)
        if order.why in OF_ALL and not order.gpus and place is not None:
            verdicts = with_all(verdicts, place.gpus)
        state = "done" if end.end == DONE else "failed"
        what = f" in {end.probe}" if end.probe else ""
        detail = "" if end.end == DONE else f"{end.end}{what}: {end.detail}".rstrip(": ")
        self._end(held, verdicts, state, detail)

    def finish_group(self, group: Sequence[OpenOrder]) -> None:
        """Judge and end a group whose orders are answered, and judge the last hour's groups again in its light."""
        judged = judge_groups(self._store, self._index, group[0].order.group, self._runtime.now_ms())
        mine = {one.order.id for one in group}
        for id_, verdict in judged.verdicts.items():
            if id_ not in mine:
                self._report([verdict])
        for one in group:
            end = next((r.result for r in self._store.probes.results.of_order(one.order.id) if r.result.end), None)
            if end is None:
                why = "its results are no longer stored"
                self.fail(one, why)
                continue
            detail = "" if end.end == DONE else f"{end.end}: {end.detail}".rstrip(": ")
            self._end(one, [judged.verdicts[one.order.id]], "done" if end.end == DONE else "failed", detail)
        self._ask_follow_ups(group[0].order, judged)

    def _ask_follow_ups(self, order: ProbeOrder, judged: Judged) -> None:
        """Ask for the groups that find the node that made one slow. If they cannot run, the verdicts name them."""
        specs = self._index.spec.by_name
        busy, maintained = self._nodes.busy(), self._nodes.maintained()

        def partners(node: str) -> list[str]:
            mine = specs[node]
            like = [
                n for n in self._index.nodes
                if (n.gpus, n.sku) == (mine.gpus, mine.sku) and n.name not in busy and self.reachable(n.name)
                and n.name not in maintained
            ]  # fmt: skip
            return [n.name for n in sorted(like, key=lambda n: (n.leaf != mine.leaf, n.name))]

        for one in follow_ups(judged.blames, judged.orders, partners, anybody=self._config.confirm):
            try:
                self._orders.ask_group(
                    one.nodes, ProbeReason.CONFIRM, probes=one.probes, level=order.level, incident_id=order.incident_id
                )
            except ValueError as error:
                log.warning("no group of %s: %s", " and ".join(one.nodes), error)

    def _report(self, verdicts: list[ProbeVerdict]) -> None:
        """Store verdicts and pass them on.

        Raises:
            StoreError: a listener could not store the result; all are called again.
        """
        self._store.probes.verdicts.write(verdicts)
        for listener in self.on_verdicts:
            try:
                listener(verdicts)
            except StoreError:
                raise
            except Exception as error:  # a defect in one must not stop the others or keep the order open
                self._runtime.troubles["verdicts"] = (
                    f"Verdicts of probes: {type(error).__name__}; see the collector's log."
                )
                log.exception("verdicts of order %s", verdicts[0].request if verdicts else "")

    def _end(self, held: OpenOrder, verdicts: list[ProbeVerdict], state: str, detail: str) -> None:
        self._report(verdicts)
        self._orders.end(held, state, detail)

    def fail(self, held: OpenOrder, why: str) -> None:
        """End an order without results. Raises StoreError."""
        self._end(held, [failed(held.order, why, self._runtime.now_ms())], "failed", why)

    def reachable(self, node: str) -> bool:
        """Whether a node has a stream, or may have one at another collector on the store."""
        return self._nodes.stream(node) is not None or self._store.shared
