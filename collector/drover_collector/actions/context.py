"""What all parts that act share: the store, the settings, the schedulers, and what detection knows of a node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from drover_collector.actions.actuators import Actuators
from drover_collector.actions.gpu_outages import GpuOutageStore
from drover_collector.actions.outage_store import OutageStore
from drover_collector.actions.settings import ActConfig
from drover_collector.engine.node_state import NodeNow, Survey
from drover_collector.store import Store
from drover_core.model.events import Act, Action, ActionState, Incident

STALE_S = 180.0  # after three surveys without an answer, who is out by this scheduler is unknown


class Detection(Protocol):
    """What acting asks detection, and reports to it. Called from any thread but the one that judges."""

    @property
    def incidents(self) -> Mapping[str, Incident]:
        """Open incidents, and those that have just closed, by id."""

    def why_unwanted(self, action: Action) -> str:
        """Return why an action is no longer decided though its incident is open; "": it is."""

    def why_held(self, action: Action, later: Set[str]) -> str:
        """Return why the guard does not let the node of an action go now; "": it does.

        Args:
            later: nodes, and UUIDs of single GPUs, whose turn comes after this one.
        Raises:
            LaterError: detection is too busy to answer.
        """

    def node_now(self, node: str) -> NodeNow | None:
        """Return what is known of a node now; None: nothing, and Drover puts nothing back."""

    def take_survey(self, survey: Survey) -> None:
        """Note what all schedulers say of their nodes. Returns at once."""

    def take_failed(self, actions: Sequence[Action]) -> None:
        """Note actions that failed, those from before a start too. Returns at once."""


class SchedulerSurveys:
    """The newest survey of each scheduler, reported to detection as one when they change. Any thread."""

    def __init__(self, actuators: Actuators, detection: Detection) -> None:
        self._actuators, self._detection = actuators, detection
        self._newest: dict[str, tuple[Survey, float]] = {}  # by actuator; when, time.monotonic
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all surveys, and report nothing: detection starts again too."""
        with self._lock:
            self._newest.clear()

    def set(self, actuator: str, survey: Survey) -> None:
        """Note what the scheduler of an actuator says of all its nodes."""
        with self._lock:
            before = self._merged()
            self._newest[actuator] = survey, time.monotonic()
            after = self._merged()
        if before != after:
            self._detection.take_survey(after)

    def drop_stale(self) -> None:
        """Forget the surveys of schedulers that have not answered for long: others may have closed nodes since."""
        with self._lock:
            before, oldest = self._merged(), time.monotonic() - STALE_S
            self._newest = {name: held for name, held in self._newest.items() if held[1] >= oldest}
            after = self._merged()
        if before != after:
            self._detection.take_survey(after)

    def _merged(self) -> Survey:
        """Which nodes are closed is unknown until every scheduler has answered."""
        found = [survey for survey, _ in self._newest.values()]
        known = all(a.name in self._newest for a in self._actuators.all if a.surveys)
        closed = frozenset[str]().union(*(s.closed or () for s in found)) if known else None
        return Survey(closed, {node: answer for s in found for node, answer in s.answers.items()})


class Advices:
    """The advices in force, by node and incident. Any thread."""

    def __init__(self) -> None:
        self.current: dict[tuple[str, str], Action] = {}

    def note(self, action: Action) -> None:
        """Note the end of an action, if it is an advice or takes one back."""
        if action.action is Act.ADVISE and action.state is ActionState.DONE:
            self.current[action.node, action.incident_id] = action
        elif action.action is Act.UNADVISE and action.state is not ActionState.INTENDED:
            for key in [key for key in self.current if key[0] == action.node]:
                del self.current[key]

    def value_before(self, node: str) -> str:
        """Return what the first advice in force on a node has replaced: a later one finds the advice itself."""
        return next((a.before for a in list(self.current.values()) if a.node == node and a.before), "")


@dataclass(slots=True)
class ActionContext:
    """
    Attributes:
        look_s: seconds between two looks at the nodes that are out.
        crash_test_hook: called between the steps of an action with their names.
        troubles: what goes wrong, each a sentence, by subject.
        gpus: single GPUs that are out of service while their nodes stay.
    """

    store: Store
    config: ActConfig
    actuators: Actuators
    outages: OutageStore
    detection: Detection
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    look_s: float = 5.0
    crash_test_hook: Callable[[str], None] = lambda _: None
    troubles: dict[str, str] = field(default_factory=dict)
    advices: Advices = field(default_factory=Advices)
    surveys: SchedulerSurveys = field(init=False)
    gpus: GpuOutageStore = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = GpuOutageStore(self.store)
        self.surveys = SchedulerSurveys(self.actuators, self.detection)
