"""Decisions on their way to being intents. A thread stores these, so that a store that hangs holds up no judging."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from drover_collector.store import StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Incident,
    RecommendedAction,
)

log = logging.getLogger(__name__)

ACT_OF = {
    RecommendedAction.ADVISE: Act.ADVISE,
    RecommendedAction.DRAIN: Act.DRAIN,
    RecommendedAction.ISOLATE: Act.ISOLATE,
}
TROUBLE = "intents"  # its key among the desk's
MAX_WISHES = 10_000  # decisions that wait for their intents to be stored
RETRY_S = 1.0  # after the store has failed
STOP_S = 15.0


class Wish(NamedTuple):
    """What is to become an action; see `ActionDesk.intend`."""

    node: str
    act: Act
    seed: str
    incident: str
    why: str
    by: str
    since_ms: int = 0  # when it was decided


def wish(decision: Decision, incident: Incident | None) -> Wish | None:
    """None: it is no decision to act."""
    act = ACT_OF.get(decision.wanted)
    if decision.outcome != "act" or act is None:
        return None
    why = decision.reason if incident is None else f"{incident.kind}/{incident.cause}: {incident.summary}"
    return Wish(decision.node, act, decision.id, decision.incident_id, why, "drover", decision.ts_ms)


def never_begun(decisions: Iterable[Decision], acted: Sequence[Action], open_ids: Set[str]) -> list[Decision]:
    """Of decisions to act without an action those of open incidents that no other decision's action was done for.

    Args:
        acted: actions; one may be for a later decision too, that wanted the same while it waited.
    """
    until: dict[tuple[str, str, Act], float] = {}
    for a in acted:
        key, at_ms = (a.node, a.incident_id, a.action), a.ts_ms
        until[key] = max(until.get(key, 0), float("inf") if a.state is ActionState.INTENDED else at_ms)
    wanted = [d for d in decisions if d.incident_id in open_ids and d.wanted in ACT_OF]
    return [d for d in wanted if until.get((d.node, d.incident_id, ACT_OF[d.wanted]), 0) < d.ts_ms]


class Intents:
    """Runs from `start` until `stop`, once.

    Args:
        intend: stores one; raises StoreError.
        troubles: where it is told that they wait.
    """

    def __init__(self, intend: Callable[[Wish], object], troubles: dict[str, str]) -> None:
        self._intend, self._troubles = intend, troubles
        self._waiting: deque[Wish] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="act-intents", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def put(self, wishes: Iterable[Wish]) -> None:
        """Raises StoreError: too many wait, and none of these was taken."""
        new = list(wishes)
        with self._changed:
            if new and len(self._waiting) + len(new) > MAX_WISHES:
                raise StoreError(f"{len(self._waiting)} decisions wait for the store already")
            self._waiting.extend(new)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                first = self._waiting[0]
            try:
                self._intend(first)
                self._troubles.pop(TROUBLE, None)
            except StoreError as error:
                if self._stopping:
                    return
                self._troubles[TROUBLE] = f"Decisions wait to be begun, {first.act} {first.node} first: {error}."
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, RETRY_S)
                continue
            except Exception as error:  # a defect must neither end the thread nor go unseen
                log.exception("%s %s: a defect", first.act, first.node)
                self._troubles[TROUBLE] = f"{first.act} {first.node} was not begun: {type(error).__name__}: {error}."
            with self._changed:
                self._waiting.popleft()
