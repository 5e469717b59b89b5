"""Slurm: drain with a reason that carries the incident, advice by weight, isolation by requeueing, resume of our own.

Effects are those of scontrol(1), `update nodename=`. Slurm has no compare-and-set: somebody who changes a node in the
milliseconds between our look and our command is not seen; each command is therefore preceded by a look of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from drover_collector.actions.base import (
    ActError,
    AwayError,
    CheckLease,
    ForeignError,
    LaterError,
    NodeState,
    Result,
    Scheduler,
    Service,
    mark_of,
    own_mark,
    reason_of,
)
from drover_collector.actions.slurm.save_signal import SaveSignal
from drover_collector.actions.slurm.scontrol import SlurmNode
from drover_collector.engine.node_state import Survey
from drover_core.model.events import Action
from drover_core.model.saving import JobSave

AT_ONCE = 2_000  # names in one question: a command line is no longer than 128 KiB
# Its answers to `scontrol requeue` of a job that was submitted so (slurm_errno.c, ESLURM_DISABLED), and of one that has
# left the node since it was listed (ESLURM_JOB_PENDING, ESLURM_TRANSITION_STATE_NO_UPDATE, ESLURM_ALREADY_DONE, ...).
NOT_REQUEUED = "disabled"
GONE = ("pending execution", "already complet", "in transition", "invalid job id")
NO_SIGNAL = "it names no signal (#SBATCH --signal=, or drover:signal= in its comment)"
NOT_RESPONDING = "NOT_RESPONDING"
NOT_ASKED = frozenset({"UNKNOWN", "FUTURE", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT_ISSUED"})
# What Slurm itself writes when it sets a node DOWN (slurmctld's ping.c and node_mgr.c): it takes that back by itself.
SLURMS_OWN = ("Not responding", "Node unexpectedly rebooted")
# States in which Slurm starts no ordinary job on a node (slurm.h, node_states and NODE_STATE_*; the names are those of
# scontrol and slurmrestd, old and new): a cap must count it as out. MAINT: a maintenance reservation has it.
# POWERED_DOWN: it takes minutes until it works, and a cap that is too strict harms less than one that is too loose.
# Not here: RESERVED, on which a project's jobs run; PLANNED and COMPLETING, which a job is about to take or has left;
# NOT_RESPONDING, which Slurm turns into DOWN.
NO_JOBS = frozenset({
    "DOWN", "FAIL", "FAILING", "ERROR", "UNKNOWN", "FUTURE", "MAINT", "MAINTENANCE", "INVALID", "INVALID_REG",
    "BLOCKED", "POWER", "POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN", "REBOOT_ISSUED",
})  # fmt: skip


class Client(Protocol):
    """`requeues`: it can put a job back into the queue."""

    requeues: bool

    def nodes(self, names: Sequence[str]) -> Mapping[str, SlurmNode]: ...

    def update(self, node: str, **fields: str) -> None: ...

    def jobs(self, node: str) -> tuple[str, ...]: ...

    def requeue(self, job: str) -> None: ...

    def save_signal(self, job: str) -> SaveSignal | None:
        """Return the signal that a job says makes it save itself; None: it names none."""

    def signal(self, job: str, signal: SaveSignal) -> None: ...


class SlurmActuator(Scheduler):
    name = "slurm"
    label = "Slurm"

    def __init__(self, client: Client, advise_weight: int) -> None:
        self._client = client
        self._advise_weight = advise_weight

    def before(self, node: str) -> str:
        weight = self._node(node).weight
        return "" if weight == self._advise_weight else str(weight)

    def observe(self, node: str) -> NodeState:
        return _state(self._node(node), self._client.jobs(node))

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:
        return {name: _state(node) for name, node in self._client.nodes(nodes).items()}

    def find_saves(self, node: str) -> tuple[JobSave, ...]:
        """Only a job that names a signal gets it: one that does not handle it would be killed."""
        state = self._node(node)
        dead = "DOWN" in state.states or NOT_RESPONDING in state.states
        saves = []
        for job in self._client.jobs(node):
            if dead:
                saves.append(JobSave(job, why_not="its node does not answer Slurm"))
                continue
            try:
                found = self._client.save_signal(job)
            except AwayError:
                raise
            except ActError as error:
                saves.append(JobSave(job, why_not=str(error)))
                continue
            if found is None:
                saves.append(JobSave(job, why_not=NO_SIGNAL))
            else:
                how = f"signal {found.name}{' to its batch script' if found.to_script else ''}"
                saves.append(JobSave(job, how, signal=found.name, to_script=found.to_script))
        return tuple(saves)

    def ask_to_save(self, save: JobSave) -> None:
        self._client.signal(save.job, SaveSignal(save.signal, save.to_script))

    def survey(self, nodes: Sequence[str]) -> Survey:
        closed: set[str] = set()
        answers: dict[str, bool] = {}
        for begin in range(0, len(nodes), AT_ONCE):
            for name, node in self._client.nodes(nodes[begin : begin + AT_ONCE]).items():
                if _state(node).service is not Service.IN:
                    closed.add(name)
                if (answer := _answers(node)) is not None:
                    answers[name] = answer
        return Survey(closed, answers)

    def _advise(self, action: Action, check_lease: CheckLease) -> Result:
        node = self._node(action.node)
        if node.weight == self._advise_weight:
            return Result(f"its weight is {node.weight} already")
        check_lease()
        self._client.update(action.node, weight=str(self._advise_weight))
        self._verify(action.node, lambda n: n.weight == self._advise_weight, "its weight")
        return Result(f"weight {self._advise_weight} instead of {node.weight}: jobs get other nodes first")

    def _unadvise(self, action: Action, check_lease: CheckLease) -> Result:
        node = self._node(action.node)
        if node.weight != self._advise_weight:
            return Result(f"its weight is {node.weight} already, not the advice's")
        if not action.before.isdecimal():
            raise ActError(f"its weight before the advice is not known; set it with scontrol, now {node.weight}")
        check_lease()
        self._client.update(action.node, weight=action.before)
        self._verify(action.node, lambda n: n.weight == int(action.before), "its weight")
        return Result(f"weight {action.before} again")

    def _drain(self, action: Action, check_lease: CheckLease) -> Result:
        node = self._node(action.node)
        if (mark := _ours(node)) is not None:
            return Result(f"drained already, with reason {node.reason!r}" if mark == own_mark(action) else _other(node))
        down = "DOWN" in node.states and node.reason and node.reason not in SLURMS_OWN and mark_of(node.reason) is None
        if "DRAIN" in node.states or down:  # Drover's reason may still be there: not every undrain removes it
            raise ForeignError(_foreign(node))
        check_lease()
        self._client.update(action.node, state="drain", reason=reason_of(action))
        node = self._verify(action.node, lambda n: _ours(n) == own_mark(action), "its drain")
        return Result("no new jobs; those that run may end" if node.busy else "no new jobs; none runs")

    def _isolate(self, action: Action, check_lease: CheckLease) -> Result:
        """Closed first, so that no requeued job comes back to it."""
        self._drain(action, check_lease)
        requeued, stayed = [], []
        jobs = self._client.jobs(action.node)
        if jobs and not self._client.requeues:
            listed = ",".join(jobs)
            raise ActError(
                f"closed; its jobs run on to their end, as slurmrestd has no call that requeues them: {listed};"
                f" by hand: scontrol requeue {listed}"
            )
        for job in jobs:
            check_lease()
            try:
                self._client.requeue(job)
                requeued.append(job)
            except ActError as error:
                said = str(error).lower()
                if any(word in said for word in GONE):
                    continue
                if NOT_REQUEUED not in said:
                    raise
                stayed.append(job)
        done = f"closed; requeued: {', '.join(requeued) or 'no job'}"
        if stayed:
            done += f"; Slurm does not let be requeued, and run on to their end: {', '.join(stayed)}"
        return Result(done)

    def _resume(self, action: Action, check_lease: CheckLease) -> Result:
        node = self._node(action.node)
        if "DRAIN" not in node.states:
            if "DOWN" in node.states:
                raise LaterError(
                    f"Slurm has it as DOWN ({node.reason or 'no reason given'}); its slurmd must come back"
                )
            return Result("in service already")
        if _ours(node) != own_mark(action):
            raise ForeignError(_foreign(node))
        check_lease()
        self._client.update(action.node, state="undrain")  # unlike resume it does not end a DOWN
        self._verify(action.node, lambda n: "DRAIN" not in n.states, "its resume")
        return Result("gets jobs again")

    def _node(self, name: str) -> SlurmNode:
        found = self._client.nodes([name]).get(name)
        if found is None:
            raise ActError(f"Slurm knows no node {name}; node names in the fleet file must be Slurm's")
        return found

    def _verify(self, name: str, good: Check, what: str) -> SlurmNode:
        node = self._node(name)
        if not good(node):
            state = f"{'+'.join(sorted(node.states))}, reason {node.reason!r}"
            raise LaterError(f"Slurm took {what} and does not show it ({state})")
        return node


class Check(Protocol):
    def __call__(self, node: SlurmNode, /) -> bool: ...


def _ours(node: SlurmNode) -> str | None:
    return mark_of(node.reason) if "DRAIN" in node.states else None


def _state(node: SlurmNode, jobs: tuple[str, ...] | None = None) -> NodeState:
    if "DRAIN" in node.states:
        service = Service.DRAINING if node.busy or jobs else Service.DRAINED
    elif node.states & NO_JOBS:
        service = Service.DOWN
    else:
        service = Service.IN
    return NodeState(node.name, service, node.reason, node.by, jobs, "+".join(sorted(node.states)))


def _answers(node: SlurmNode) -> bool | None:
    """Whether its slurmd answers slurmctld. None: none is expected now. See NODE STATE CODES of sinfo(1)."""
    if NOT_RESPONDING in node.states:
        return False
    return None if node.states & NOT_ASKED else True


def _other(node: SlurmNode) -> str:
    return f"drained already for another incident, with reason {node.reason!r}"


def _foreign(node: SlurmNode) -> str:
    state = "drained" if "DRAIN" in node.states else "down"
    return f"it is {state} by {node.by or 'somebody else'} ({node.reason or 'no reason given'}): left unchanged"
