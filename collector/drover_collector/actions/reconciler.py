"""Compare what a scheduler reports with what is stored: nodes that are out, who else closed nodes, advices to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from drover_collector.actions.base import ActError, Actuator, AwayError, Disowner, NodeState, own_mark
from drover_collector.actions.context import ActionContext
from drover_collector.actions.gpu_outages import GpuLife, GpuReconciler
from drover_collector.actions.node_outage import (
    CLOSINGS,
    ITSELF,
    SOMEBODY,
    adopted,
    is_out,
    seen,
)
from drover_collector.actions.return_to_service import Intend
from drover_collector.engine.node_state import Survey
from drover_core.model.events import Act, ActionState, Audit, Health, NodeOutage

log = logging.getLogger(__name__)

SURVEY_S = 60.0  # between surveys of all nodes: for the guard's count of those that others took out
BATCH = 20  # nodes closed by an unknown hand that are observed before waiting actions get their turn


class SchedulerReconciler:
    """Of one actuator, in its worker's thread. All methods raise ActError and its kinds, and StoreError.

    Args:
        validate: orders the probes of a node whose jobs are gone. gpu_life: the same, and more, for single GPUs.
    Attributes:
        survey_first: all nodes must be surveyed before anything is done.
        gpus: the same for single GPUs.
    """

    def __init__(
        self,
        context: ActionContext,
        actuator: Actuator,
        intend: Intend,
        validate: Callable[[NodeOutage], None],
        gpu_life: GpuLife,
    ) -> None:
        self.survey_first = actuator.surveys
        self._context, self._actuator = context, actuator
        self._intend, self._validate = intend, validate
        self._survey_at = 0.0  # when all nodes are surveyed again, time.monotonic
        self._survey: Survey | None = None  # the newest, until what it shows is taken up
        self._foreign: set[str] = set()  # closed, and not by Drover
        self.gpus = GpuReconciler(
            actuator, context.store, context.gpus, context.actuators.of, gpu_life, context.troubles
        )  # fmt: skip

    def reconcile(self, under_way: Set[str], answered: Callable[[], object], interrupted: Callable[[], bool]) -> bool:
        """Bring outages and advices up to date. False: it was interrupted, and goes on with the next call.

        Args:
            under_way: nodes of actions that wait, and UUIDs of their GPUs.
            answered: called when the scheduler has answered.
            interrupted: whether an action is due meanwhile: many nodes may be out, and a store be slow.
        """
        context, actuator = self._context, self._actuator
        out = [o for o in context.outages.current.values() if is_out(o) and context.actuators.of(o.node) is actuator]
        if out:
            states = actuator.observe_all([outage.node for outage in out])
            answered()
            for outage in out:
                if outage.node not in under_way:
                    self._update(outage, states)
                if interrupted():
                    return False
        self.gpus.reconcile(context.now_ms(), context.look_s, under_way)
        self._end_advices()
        return self._take_up_survey(under_way, interrupted)

    def _update(self, outage: NodeOutage, states: Mapping[str, NodeState]) -> None:
        context, state = self._context, states.get(outage.node)
        if state is None:
            return
        if state.lifted and state.mark == own_mark(outage):
            self._disown(outage)
        after = seen(outage, state, context.now_ms())
        if after is not None:
            if after.stage is Health.HEALTHY:
                self._mark_undone(outage, after.reason)
            context.outages.write(after)
        if (after or outage).stage is Health.DRAINED:
            self._validate(after or outage)

    def _disown(self, outage: NodeOutage) -> None:
        """Give up a claim that somebody else has lifted: if the node is closed so again, no resume may undo it."""
        context = self._context
        if not isinstance(self._actuator, Disowner):
            return
        if not self._actuator.disown(outage.node, context.store.fence):
            return
        text = "our cordon was lifted, our taint is left: it stays out, and a cordon that is set from now on stays too"
        log.warning("%s: %s", outage.node, text)
        now_ms = context.now_ms()
        line = Audit(f"uncordon {outage.node} {now_ms}", now_ms, SOMEBODY, "uncordon", outage.node, "", text)
        context.store.audit.write([line])

    def _mark_undone(self, outage: NodeOutage, why: str) -> None:
        store, now_ms = self._context.store, self._context.now_ms()
        done = [
            a for a in store.actions.newest(node=outage.node) if a.action in CLOSINGS and a.state is ActionState.DONE
        ]
        store.actions.write([replace(a, state=ActionState.UNDONE, detail=why, ts_ms=now_ms) for a in done[-1:]])

    def survey(self, older_s: float = 0.0) -> None:
        """Survey all nodes, if the newest survey is older than this: the guard counts who is out by others."""
        fresh = time.monotonic() < self._survey_at - SURVEY_S + older_s
        if not self._actuator.surveys or (not self.survey_first and fresh):
            return
        context, subject = self._context, f"{self._actuator.name} nodes"
        names = [name for name in context.actuators.nodes if context.actuators.of(name) is self._actuator]
        try:
            found = self._actuator.survey(names)
        except AwayError:
            self.survey_first = True  # its next answer may differ
            raise
        except ActError as error:  # a missing right must not hide behind what goes well
            context.troubles[subject] = f"The guard does not know which nodes others have closed: {error}."
            self._note_survey()
            context.surveys.drop_stale()
            return
        context.troubles.pop(subject, None)
        self._note_survey()
        if found is not None:
            self._survey = found
            context.surveys.set(self._actuator.name, found)

    def _note_survey(self) -> None:
        self.survey_first, self._survey_at = False, time.monotonic() + SURVEY_S

    def _take_up_survey(self, under_way: Set[str], interrupted: Callable[[], bool]) -> bool:
        if time.monotonic() >= self._survey_at:
            self.survey()
        if self._survey is None:
            return True
        if not self._adopt(self._survey.closed, under_way, interrupted):
            return False
        self._survey = None
        return True

    def _adopt(self, closed: Set[str] | None, under_way: Set[str], interrupted: Callable[[], bool]) -> bool:
        """Take up nodes that carry a mark of Drover and have no outage: the store was lost, or set back to a backup.

        False: it was interrupted. Others may have closed hundreds, and no drain waits for the looks at them.
        """
        outages = self._context.outages
        if closed is None:
            return True
        known = under_way | {node for node, outage in outages.current.items() if is_out(outage)}
        self._foreign &= closed - known  # observed once: in Kubernetes each is a request of its own
        strange = sorted(closed - known - self._foreign)
        for begin in range(0, len(strange), BATCH):
            for node, state in self._actuator.observe_all(strange[begin : begin + BATCH]).items():
                outage = adopted(state, self._context.now_ms())
                if outage is None:
                    self._foreign.add(node)
                else:
                    log.warning("%s: %s", node, outage.reason)
                    outages.write(outage)
            if interrupted():
                return False
        return True

    def _end_advices(self) -> None:
        """End an advice when its incident and all others that advise the same of that node have ended."""
        if Act.UNADVISE not in self._actuator.acts:
            return
        context, advices = self._context, self._context.advices.current
        newest = {advice.node: advice for advice in list(advices.values())}
        known = context.detection.incidents
        wanted = {
            node
            for node, incident in list(advices)
            if (found := known.get(incident)) is not None and found.closed_ms is None
        }
        for advice in newest.values():
            if advice.node in wanted or not advice.incident_id:
                continue
            if context.actuators.of(advice.node) is self._actuator:
                why = "its incident has ended"
                self._intend(advice.node, Act.UNADVISE, advice.id, advice.incident_id, why, ITSELF)
