"""Actuators: they make a scheduler stop giving work to a node, and start again.

    ActError            it cannot be done, and trying again would not help
      LaterError        not now: the node is not ready, or somebody changed the same thing; tried again
        AwayError       the scheduler does not answer: nothing can be done there now
      ForeignError      somebody else has taken the node out; nothing was changed
      NotAloneError     its scheduler cannot take this GPU out without its node; nothing was changed

What Drover closes carries its mark, `drover:MARK: text`, where the scheduler shows reasons; MARK is the incident's id,
or `hand` when a person asked for it. Only what carries the mark of the order is ever opened again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from drover_collector.engine.node_state import Survey
from drover_core.model.events import Act, Action, GpuRef, NodeOutage

CheckLease = Callable[[], object]  # raises StoreError when this collector is no longer the active one

HAND = "hand"
GPU_ACTS = frozenset({Act.ISOLATE_GPU, Act.RETURN_GPU})
ACTS = frozenset({Act.ADVISE, Act.UNADVISE, Act.DRAIN, Act.ISOLATE, Act.RESUME})  # that schedulers know
REASON_CHARS = 200  # of what schedulers show in a column
_MARK = re.compile(r"drover:([A-Za-z0-9._-]+):")


class ActError(Exception):
    """It cannot be done. The text is a sentence for the operator."""


class LaterError(ActError):
    """It cannot be done now; trying again may help."""


class AwayError(LaterError):
    """The scheduler does not answer."""


class ForeignError(ActError):
    """Somebody else has changed the node. Nothing was done."""


class NotAloneError(ActError):
    """The scheduler cannot take this GPU out without its node. Nothing was done."""


class Service(StrEnum):
    """A node's state in its scheduler. DOWN: the scheduler itself gives it no work."""

    IN = "in"
    DRAINING = "draining"
    DRAINED = "drained"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as its scheduler sees it."""

    node: str
    service: Service
    reason: str = ""  # of who closed it
    by: str = ""  # who closed it, if the scheduler knows
    jobs: tuple[str, ...] | None = None  # that run there; None: not asked for
    text: str = ""  # the scheduler's own text
    lifted: bool = False  # somebody else has undone a part of what closed it, and our mark still claims that part

    @property
    def mark(self) -> str | None:
        """Drover's mark that closed it; None: it is open, or somebody else closed it."""
        return None if self.service is Service.IN else mark_of(self.reason)

    @property
    def out(self) -> bool:
        return self.service in (Service.DRAINING, Service.DRAINED)


@dataclass(frozen=True, slots=True)
class Result:
    """`detail`: what was done, as a sentence."""

    detail: str


class Actuator(Protocol):
    """Each act is idempotent and verified before it returns. All raise ActError, LaterError or ForeignError."""

    name: str
    acts: frozenset[Act]  # that it knows
    repeatable: bool  # an act may be done again after a stop, without an effect of its own
    surveys: bool  # `survey` has an answer: the caps wait for it

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        """Carry out `action.action`. Call `check_lease` before each effect."""

    def before(self, node: str) -> str:
        """Return what an advice would replace, which `unadvise` puts back; "": the node has the advice already."""

    def observe(self, node: str) -> NodeState:
        """With the jobs that run there."""

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:
        """Of those that the scheduler knows; cheaper than one by one, without jobs."""

    def survey(self, nodes: Sequence[str]) -> Survey | None:
        """Look at a whole fleet with few questions, now and then. None: this actuator has no such question."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU that Drover's mark keeps out of service alone, as its scheduler sees it.

    Attributes:
        slot: as it was when it went out; None: not noted.
        mark: of who took it out; None: it is in service.
        reason: as written then.
        jobs: that hold it; None: the scheduler does not know the GPU now.
        fits: what keeps it out is about this GPU; False: `mend` has something to do.
        boards: UUIDs of its node's GPUs; empty: not known for sure. gone: the scheduler lists it nowhere.
    """

    uuid: str
    node: str
    slot: int | None = None
    mark: str | None = None
    reason: str = ""
    jobs: tuple[str, ...] | None = None
    fits: bool = True
    boards: frozenset[str] = frozenset()
    gone: bool = False


@runtime_checkable
class GpuIsolator(Protocol):
    """An actuator that can take out one GPU of a node."""

    def why_not_alone(self, node: str, gpu: GpuRef) -> str:
        """Return why a GPU cannot go without its node, asked now; "": it can. Nothing is changed."""

    def isolated(self) -> Sequence[GpuState]:
        """Return the GPUs that Drover keeps out of service alone, with jobs."""

    def mend(self, state: GpuState, check_lease: CheckLease) -> str:
        """Make what keeps a GPU out fit to where the GPU is now. Return what was changed; "": nothing was to do."""


@runtime_checkable
class Disowner(Protocol):
    """An actuator whose states may be `lifted`."""

    def disown(self, node: str, check_lease: CheckLease) -> bool:
        """Withdraw our claim to what somebody else has lifted: were it closed so again, that would be theirs. Whether
        there was something to withdraw."""


class Scheduler(ABC):
    """An actuator with a method for each act."""

    name: str
    label: str  # what people call it
    repeatable = True
    surveys = True
    acts = ACTS

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        match action.action:
            case Act.ADVISE:
                return self._advise(action, check_lease)
            case Act.UNADVISE:
                return self._unadvise(action, check_lease)
            case Act.DRAIN:
                return self._drain(action, check_lease)
            case Act.ISOLATE:
                return self._isolate(action, check_lease)
            case Act.RESUME:
                return self._resume(action, check_lease)
            case _:
                raise ActError(f"{self.label} cannot {action.action} a node")

    @abstractmethod
    def _advise(self, action: Action, check_lease: CheckLease) -> Result: ...

    @abstractmethod
    def _unadvise(self, action: Action, check_lease: CheckLease) -> Result: ...

    @abstractmethod
    def _drain(self, action: Action, check_lease: CheckLease) -> Result: ...

    @abstractmethod
    def _isolate(self, action: Action, check_lease: CheckLease) -> Result: ...

    @abstractmethod
    def _resume(self, action: Action, check_lease: CheckLease) -> Result: ...


def own_mark(of: Action | NodeOutage) -> str:
    """Return the mark in the scheduler's reason for this action or outage."""
    return of.incident_id or HAND


def reason_of(action: Action) -> str:
    """Return the reason that a scheduler shows: one line of plain ASCII, as not every scheduler keeps anything else."""
    plain = " ".join(action.why.encode("ascii", "replace").decode().split())
    return f"drover:{own_mark(action)}: {plain}"[:REASON_CHARS].rstrip()


def gpu_of(of: Action | NodeOutage) -> GpuRef:
    """Return the GPU that an action or outage is about. Raises ActError: it is about a node."""
    if of.gpu is None:
        raise ActError("it names no GPU")
    return of.gpu


def mark_of(reason: str) -> str | None:
    """Return the mark in a reason; None: it is not Drover's."""
    found = _MARK.match(reason)
    return found[1] if found else None
