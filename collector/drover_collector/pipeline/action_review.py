"""What detection says of an action right before it is carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from drover_collector.actions.base import LaterError
from drover_collector.engine.node_state import NodeNow, Survey
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.policy.decider import WANTED_OF
from drover_collector.policy.policy import least_mode
from drover_core.model.events import Action, Incident


class ActionReview:
    """The `Detection` of a dispatcher. Any thread but the engine's may use it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def incidents(self) -> Mapping[str, Incident]:
        return self._pipeline.incidents

    def take_survey(self, survey: Survey) -> None:
        self._pipeline.take_survey(survey)

    def take_failed(self, actions: Sequence[Action]) -> None:
        self._pipeline.take_failed(actions)

    def node_now(self, node: str) -> NodeNow | None:
        """Return what is known of a node now; None: the fleet does not have it. From any thread."""
        return self._pipeline.engine.now_of(node)

    def why_held(self, action: Action, later: Set[str]) -> str:
        """Return why the guard does not let the node of an action go now; "": it does. Not from the thread that judges.

        Args:
            later: nodes, and UUIDs of single GPUs, whose turn comes after this one.
        Raises:
            LaterError: detection is too busy to say.
        """
        try:
            return self._pipeline.of_engine(lambda engine: engine.held(action, later))
        except TimeoutError:
            raise LaterError("detection is too busy to ask the guard") from None

    def why_unwanted(self, action: Action) -> str:
        """Return why an action is no longer decided though its incident is open; "": it is. From any thread.

        Less is wanted of it, or the mode was lowered.
        """
        if not action.decision_id:
            return ""
        if less := self._pipeline.engine.decider.why_less(action):
            return less
        mode = least_mode(self._pipeline.policy.most_mode, self._pipeline.ceiling)
        found = self._pipeline.engine.decider.standing.get((action.incident_id, action.node))
        if found is None or found.wanted is not WANTED_OF.get(action.action):
            return f"the policy's mode is {mode} since" if mode == "observe" else ""
        if found.outcome not in ("act", "approved"):  # the latter for a moment, while an answer is taken in
            return f"it is not decided so any more: {found.outcome}: {found.reason}"
        return "" if least_mode(found.mode, mode) == found.mode else f"the policy's mode is {mode} since"
