"""Looks at what a scheduler has closed: how far nodes are that are out, who else is, and advices that are over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from drover_collector.actions.base import ActError, Actuator, AwayError, Disowner, NodeState
from drover_collector.actions.node_outage import (
    SOMEBODY,
    adopted,
    is_out,
    mark_of_duty,
    seen,
)
from drover_collector.engine.node_state import Survey
from drover_core.model.events import (
    Act,
    ActionState,
    Audit,
    Health,
    NodeOutage,
)

if TYPE_CHECKING:
    from drover_collector.actions.dispatcher import ActionDispatcher

log = logging.getLogger(__name__)

ALL_S = 60.0  # between looks at all nodes: for the guard's count of those that others took out
AT_ONCE = 20  # nodes closed by whom is not known yet, looked at before it is seen whether there is something to do


class SchedulerReconciler:
    """Of one actuator, in its worker's thread. All raise ActError and its kinds, and StoreError."""

    def __init__(self, desk: ActionDispatcher, actuator: Actuator) -> None:
        self._desk, self._actuator = desk, actuator
        self._all_at = 0.0  # when all nodes are looked at again, time.monotonic
        self._survey: Survey | None = None  # the newest, until what it shows is taken up
        self.first = actuator.surveys  # all nodes are to be looked at before anything is done
        self._foreign: set[str] = set()  # closed, and not by us

    def look(self, under_way: Set[str], answered: Callable[[], object], has_come: Callable[[], bool]) -> bool:
        """False: it was broken off.

        Args:
            under_way: nodes of actions that wait.
            answered: called when the scheduler has answered.
            has_come: whether there is something to do meanwhile.
        """
        desk, actuator = self._desk, self._actuator
        mine = [d for d in desk.duties.values() if is_out(d) and desk.actuator_of(d.node) is actuator]
        if mine:
            states = actuator.observe_all([d.node for d in mine])
            answered()
            for duty in mine:
                if duty.node not in under_way:
                    self._look_at(duty, states)
                if has_come():
                    return False
        self._look_at_advices()
        return self._look_at_all(under_way, has_come)

    def _look_at(self, duty: NodeOutage, states: Mapping[str, NodeState]) -> None:
        desk, state = self._desk, states.get(duty.node)
        if state is None:
            return
        if state.lifted and state.mark == mark_of_duty(duty):
            self._disown(duty, mark_of_duty(duty))
        after = seen(duty, state, desk.now_ms())
        if after is not None and after.stage is Health.HEALTHY:
            self._undone(duty, after.reason)
        if after is not None:
            desk.set_duty(after)
        if (after or duty).stage is Health.DRAINED:
            desk.validate(after or duty)

    def _disown(self, duty: NodeOutage, mark: str) -> None:
        """Were it closed so again, that would be somebody else's doing, which no resume undoes."""
        desk = self._desk
        if not isinstance(self._actuator, Disowner) or not self._actuator.disown(duty.node, mark, desk.store.fence):
            return
        told = "our cordon was lifted, our taint is left: it stays out, and a cordon that is set from now on stays too"
        log.warning("%s: %s", duty.node, told)
        now_ms = desk.now_ms()
        line = Audit(f"uncordon {duty.node} {now_ms}", now_ms, SOMEBODY, "uncordon", duty.node, "", told)
        desk.store.audit.write([line])

    def _undone(self, duty: NodeOutage, why: str) -> None:
        done = [
            a
            for a in self._desk.store.actions.newest(node=duty.node)
            if a.action in (Act.DRAIN, Act.ISOLATE) and a.state is ActionState.DONE
        ]
        changed = [replace(a, state=ActionState.UNDONE, detail=why, ts_ms=self._desk.now_ms()) for a in done[-1:]]
        self._desk.store.actions.write(changed)

    def survey(self, older_s: float = 0.0) -> None:
        """Look at all nodes, where the newest look is older than this: the guard counts who is out by others."""
        if not self._actuator.surveys or (not self.first and time.monotonic() < self._all_at - ALL_S + older_s):
            return
        desk, trouble = self._desk, f"{self._actuator.name} nodes"
        names = [name for name in desk.nodes if desk.actuator_of(name) is self._actuator]
        try:
            found = self._actuator.survey(names)
        except AwayError:
            self.first = True  # what it tells next may be another thing
            raise
        except ActError as error:  # a right that is missing must not hide behind what goes well
            desk.troubles[trouble] = f"The guard does not know which nodes others have closed: {error}."
            self._looked_at_all()
            desk.note_stale()
            return
        desk.troubles.pop(trouble, None)
        self._looked_at_all()
        if found is not None:
            self._survey = found
            desk.set_survey(self._actuator.name, found)

    def _looked_at_all(self) -> None:
        self.first, self._all_at = False, time.monotonic() + ALL_S

    def _look_at_all(self, under_way: Set[str], has_come: Callable[[], bool]) -> bool:
        """What carries a mark of ours and nobody knows of is taken up; the rest of it when nothing is due."""
        if time.monotonic() >= self._all_at:
            self.survey()
        if self._survey is None:
            return True
        if not self._adopt(self._survey.closed, under_way, has_come):
            return False
        self._survey = None
        return True

    def _adopt(self, closed: Set[str] | None, under_way: Set[str], has_come: Callable[[], bool]) -> bool:
        """Closed by Drover, and forgotten: by a store that was lost, or set back to an older backup. False: it was
        broken off, as others may have closed hundreds, and a drain is not to wait for looks at them."""
        desk = self._desk
        if closed is None:
            return True
        known = under_way | {node for node, duty in desk.duties.items() if is_out(duty)}
        self._foreign &= closed - known  # looked at once: in Kubernetes each is a question of its own
        strange = sorted(closed - known - self._foreign)
        for begin in range(0, len(strange), AT_ONCE):
            for node, state in self._actuator.observe_all(strange[begin : begin + AT_ONCE]).items():
                duty = adopted(state, desk.now_ms())
                if duty is None:
                    self._foreign.add(node)
                else:
                    log.warning("%s: %s", node, duty.reason)
                    desk.set_duty(duty)
            if has_come():
                return False
        return True

    def _look_at_advices(self) -> None:
        """An advice ends with its incident, and with all others that have advised the same of that node."""
        if Act.UNADVISE not in self._actuator.acts:
            return
        desk = self._desk
        newest = {advice.node: advice for advice in list(desk.advices.values())}
        known = desk.incidents()
        wanted = {
            node
            for node, incident in list(desk.advices)
            if (found := known.get(incident)) is not None and found.closed_ms is None
        }
        for advice in newest.values():
            if advice.node in wanted:
                continue
            if advice.incident_id and desk.actuator_of(advice.node) is self._actuator:
                desk.intend(
                    advice.node, Act.UNADVISE, advice.id, advice.incident_id, "its incident has ended", "drover"
                )
