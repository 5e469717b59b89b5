"""Withdraw what a person asked for and what still waits for a node's jobs to save themselves."""

from __future__ import annotations

from collections.abc import Callable

from drover_collector.actions.context import ActionContext
from drover_collector.actions.node_outage import ITSELF, is_out
from drover_collector.actions.worker import Worker, waits_to_save
from drover_collector.store import StoreError
from drover_core.model.events import Action, ActionState

ENDED_S = 1.0  # for the outcome, which is stored by then


class Withdrawals:
    """From any thread.

    Args:
        under_way: returns what is under way on a node.
        wait: returns an action once it has ended, or its newest state after so many seconds.
        worker_of: returns who takes a node out of service; None: nobody.
    """

    def __init__(
        self,
        context: ActionContext,
        under_way: Callable[[str], list[Action]],
        wait: Callable[[Action, float], Action],
        worker_of: Callable[[str], Worker | None],
    ) -> None:
        self._context, self._under_way, self._wait, self._worker_of = context, under_way, wait, worker_of

    def waiting(self, node: str) -> list[Action]:
        """Return what people asked for that still waits."""
        return [a for a in self._saving(node) if a.by != ITSELF]

    def withdraw(self, node: str, why: str, by: str) -> list[Action]:
        """End what waits, for a person; return it as it has ended.

        Raises:
            LaterError: it is not known whether the node is closed. ActError: the policy asked for it. StoreError.
        """
        waiting, worker = self._saving(node), self._worker_of(node)
        if not waiting or worker is None:
            return []
        ids = worker.withdraw(node, by, why)
        ended = [self._wait(a, ENDED_S) for a in waiting if a.id in ids]
        if any(a.state is ActionState.INTENDED for a in ended):
            raise StoreError("the store did not take that it is withdrawn; ask again")
        return ended

    def _saving(self, node: str) -> list[Action]:
        if is_out(self._context.outages.current.get(node)):
            return []
        return [a for a in self._under_way(node) if waits_to_save(a)]
