"""Single GPUs that Drover keeps out of service while their nodes stay: stored outages, and how each goes on and back.

draining     no new pod gets it; one may run on it
drained      no pod holds it
validating   probes run on it alone
repair       its probes failed
healthy      back in service, or no longer Drover's: `reason` says which

A GPU is named by its UUID everywhere: after a boot its slot, and its scheduler's name for it, may be another board's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import dropwhile, takewhile
from typing import Protocol

from drover_collector.actions.base import (
    HAND,
    Actuator,
    GpuIsolator,
    GpuState,
    NotAloneError,
    own_mark,
)
from drover_collector.actions.base import gpu_of as gpu_ref
from drover_collector.actions.node_outage import ITSELF, SOMEBODY, is_out, moved
from drover_collector.actions.replaced_boards import AGAIN_S, ReplacedBoards
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    GpuRef,
    Health,
    NodeOutage,
    Withheld,
)

log = logging.getLogger(__name__)

LOOKS = 3  # of a node's looks for one at its GPUs: each reads every claim of the cluster
Outages = Mapping[str, NodeOutage]  # UUID -> its newest outage
GpuKey = tuple[str, str]  # node, UUID


class GpuOutageStore:
    """Any thread may use it. Reads never wait for the store.

    Attributes:
        current: UUID -> its newest outage, ended ones too. Replaced with each change, never changed in place.
        lock: held while an outage is read, judged and set.
    """

    def __init__(self, store: Store) -> None:
        self.current: Outages = {}
        self.lock = threading.RLock()
        self._store = store
        self._isolations: dict[str, Action] = {}  # by id: those that have not ended
        self._requested: dict[GpuKey, None] = {}
        self._subscribers: list[Callable[[Outages], None]] = []

    def subscribe(self, changed: Callable[[Outages], None]) -> None:
        """Call `changed` with the current outages after each change, in the thread that made it."""
        self._subscribers.append(changed)

    def load(self) -> None:
        """Read the stored outages. Raises StoreError."""
        self.current = self._store.outages.gpus.current()

    def write(self, outage: NodeOutage) -> None:
        """Store the next stage of a GPU, then call the subscribers. Raises StoreError: nothing has changed."""
        gpu = gpu_ref(outage)
        with self.lock:
            self._store.outages.gpus.write([outage])
            self.current = {**self.current, gpu.uuid: outage}
        log.info("%s is %s (%s): %s", name_of(outage), outage.stage, own_mark(outage), outage.reason)
        for changed in self._subscribers:
            changed(self.current)

    def out(self) -> list[NodeOutage]:
        """Return the outages of the GPUs that are out of service now."""
        return [outage for outage in self.current.values() if is_out(outage)]

    def at(self, node: str, which: int | str) -> NodeOutage | None:
        """Return the outage of a GPU of a node: of this UUID, or the newest that went out of this slot; None: none."""
        found = [o for o in self.out() if o.node == node and is_meant(gpu_ref(o), which)]
        return max(found, key=lambda outage: outage.ts_ms, default=None)

    def replaced(self) -> list[NodeOutage]:
        """Return the outages that ended because another board took the place: the rule of each waits for its return."""
        return [o for o in self.current.values() if not is_out(o) and o.gpu is not None and o.gpu.replaced_by]

    def orders(self) -> frozenset[str]:
        """Return the ids of the orders for probes that validate single GPUs: they say nothing of their nodes."""
        return frozenset(o.gpu.order for o in self.current.values() if o.gpu is not None and o.gpu.order)

    def replaced_board(self, node: str, which: int | str) -> NodeOutage | None:
        """Return the ended outage of a board that was replaced, by its UUID; its slot is another's now."""
        found = (o for o in self.replaced() if o.node == node and isinstance(which, str))
        return next((o for o in found if is_meant(gpu_ref(o), which)), None)

    # ---- GPUs that are about to go out

    def add_isolation(self, action: Action) -> None:
        """Count the GPU of an isolation as leaving until that has ended; ignore other acts."""
        if action.action is Act.ISOLATE_GPU:
            self._isolations[action.id] = action

    def end_isolation(self, action: Action) -> None:
        """Call this after the outage is set, so that the GPU counts without a gap."""
        self._isolations.pop(action.id, None)

    def clear_isolations(self) -> None:
        """Forget what waits: this collector no longer acts."""
        self._isolations.clear()

    @contextmanager
    def requested(self, node: str, uuid: str) -> Iterator[None]:
        """Count a GPU as leaving while the guard is asked for a person, and until the intent is stored."""
        self._requested[node, uuid] = None
        try:
            yield
        finally:
            self._requested.pop((node, uuid), None)

    def leaving(self) -> set[GpuKey]:
        """Return the GPUs that are requested, or wait for their scheduler."""
        return {*list(self._requested), *((a.node, gpu_ref(a).uuid) for a in list(self._isolations.values()))}

    def leaving_after(self, action: Action) -> set[str]:
        """Return the UUIDs of the GPUs whose turn at the guard comes after that of `action`."""
        waiting = [a for a in list(self._isolations.values()) if not a.forced]
        return {gpu_ref(a).uuid for a in waiting if (a.ts_ms, a.id) > (action.ts_ms, action.id)}


def is_meant(gpu: GpuRef, which: int | str) -> bool:
    """Return whether a person means this GPU by a slot or a UUID."""
    return gpu.slot == which if isinstance(which, int) else gpu.uuid.casefold() == which.casefold()


def name_of(outage: NodeOutage) -> str:
    """Return what to call what is out in a sentence."""
    return outage.node if outage.gpu is None else f"GPU {outage.gpu.slot} of {outage.node}"


def isolated(action: Action, before: NodeOutage | None, now_ms: int) -> NodeOutage:
    """Return the first stage of a GPU that `action` has taken out."""
    gpu = replace(gpu_ref(action), order="")
    returns = 0 if before is None else before.returns + (before.stage is Health.HEALTHY)
    return NodeOutage(action.node, Health.DRAINING, now_ms, action.incident_id, action.why, action.by, returns, gpu=gpu)


def adopted(state: GpuState, now_ms: int) -> NodeOutage | None:
    """Return the outage of a GPU that a mark of Drover keeps out and that is unknown here; None: it cannot be read."""
    if not state.mark or not state.uuid or not state.node or state.slot is None:
        return None
    text = (
        f"not validated: it was found isolated by Drover ({state.reason}), and this store knows nothing of it: lost, or"
        f" set back? drover resume {state.node} --gpu {state.slot} --why ... has it probed and put back"
    )
    incident = "" if state.mark == HAND else state.mark
    gpu = GpuRef(state.slot, state.uuid)
    return NodeOutage(
        state.node, Health.DRAINING, now_ms, incident, text, ITSELF, withheld=Withheld.REVIEW, gpu=gpu
    )  # fmt: skip


def seen(outage: NodeOutage, state: GpuState | None, now_ms: int) -> NodeOutage | None:
    """Return what the scheduler's state of a GPU changes; None: nothing."""
    if state is None:
        text = "put back in service by somebody else"
        return moved(outage, Health.HEALTHY, now_ms, text, by=SOMEBODY, asked_ms=0)
    if state.mark != own_mark(outage):
        text = f"taken over by {SOMEBODY}, who keeps it out: {state.reason or 'no reason given'}"
        return moved(outage, Health.HEALTHY, now_ms, text, by=SOMEBODY, asked_ms=0)
    if outage.stage is Health.DRAINING and state.jobs == ():
        return replace(outage, stage=Health.DRAINED, ts_ms=now_ms)
    if outage.stage in (Health.DRAINED, Health.VALIDATING) and state.jobs:  # it tolerates the taint, or came before it
        gpu = replace(gpu_ref(outage), order="")  # probes next to a job say nothing of the GPU
        return replace(outage, stage=Health.DRAINING, ts_ms=now_ms, asked_ms=0, gpu=gpu)
    return None


class GpuLife(Protocol):
    """What a node says of a GPU that is out, and its probes: `GpuReturns`. All calls raise StoreError."""

    def validate(self, outage: NodeOutage) -> None:
        """Order the probes of a GPU that no pod holds."""

    def new_board(self, outage: NodeOutage) -> str:
        """Return the UUID of the board that took its place; "": none for sure."""

    def slot_now(self, outage: NodeOutage) -> int | None:
        """Return the slot in which its node reports it now; None: in none."""


class GpuReconciler:
    """Compares the single GPUs that a scheduler keeps out with what is stored. Of one actuator, in its worker's thread.

    Args:
        of: the actuator that has a node.
        troubles: what goes wrong, each a sentence, by subject.
    """

    def __init__(
        self,
        actuator: Actuator,
        store: Store,
        outages: GpuOutageStore,
        of: Callable[[str], Actuator | None],
        life: GpuLife,
        troubles: dict[str, str],
    ) -> None:
        self._actuator, self._store, self._outages = actuator, store, outages
        self._of, self._life, self._troubles = of, life, troubles
        self._boards = ReplacedBoards()
        self._look_at = 0.0  # time.monotonic
        self._looked_at = 0.0
        self._look_once = True  # for what a lost store or a call without an answer has left

    def look_once(self) -> None:
        """Look at the next turn, though none of its GPUs is known to be out."""
        self._look_once, self._look_at = True, 0.0

    def reconcile(self, now_ms: int, every_s: float, under_way: Container[str]) -> None:
        """Bring outages up to date.

        Args:
            under_way: UUIDs of actions that wait.
        Raises:
            ActError and its kinds, StoreError.
        """
        actuator, subject = self._actuator, f"{self._actuator.name} GPUs"
        if not isinstance(actuator, GpuIsolator) or time.monotonic() < self._look_at:
            return
        known, replaced = self._outages.out(), self._outages.replaced()
        # With those of nodes that are no longer in the fleet: their rules would stay for ever, and nobody would say so.
        out, ended = ([o for o in each if self._of(o.node) in (self._actuator, None)] for each in (known, replaced))
        if not out and not self._look_once and not self._may_be_back(ended):
            return
        self._looked_at = time.monotonic()
        self._look_at = self._looked_at + LOOKS * every_s
        try:
            states = {state.uuid: state for state in actuator.isolated()}
        except NotAloneError as error:
            self._look_once = False
            if out:  # else nothing of Drover's can be there
                self._troubles[subject] = f"Whether {len(out)} isolated GPUs still are is not known: {error}."
            return
        self._troubles.pop(subject, None)
        for outage in out:
            if gpu_ref(outage).uuid not in under_way:
                self._update(actuator, outage, states.get(gpu_ref(outage).uuid), now_ms)
        for outage in ended:
            if gpu_ref(outage).uuid not in under_way:
                self._take_back(actuator, outage, states.get(gpu_ref(outage).uuid), now_ms)
        stored = {gpu_ref(outage).uuid for outage in (*known, *replaced)}
        self._adopt([s for s in states.values() if s.uuid not in stored and s.uuid not in under_way], now_ms)
        self._look_once = False

    def _may_be_back(self, replaced: Iterable[NodeOutage]) -> bool:
        """Return whether to look for boards that were replaced: their nodes report one, or it was long ago."""
        due = time.monotonic() >= self._looked_at + AGAIN_S
        return any(due or self._life.slot_now(outage) is not None for outage in replaced)

    def _end_replaced(self, outage: NodeOutage, new: str, now_ms: int) -> None:
        gpu = gpu_ref(outage)
        text = (
            f"another board is GPU {gpu.slot} of {outage.node} now, {new}, and no node has {gpu.uuid} any more: its"
            " outage is over; should it come back, it is isolated again"
        )
        log.warning("%s", text)
        subject, id_ = f"{outage.node} GPU {gpu.slot}", f"replaced {gpu.uuid} {outage.ts_ms}"
        self._store.audit.write([Audit(id_, now_ms, ITSELF, "board replaced", subject, outage.reason, text)])
        gpu = replace(gpu, order="", replaced_by=new)
        self._outages.write(moved(outage, Health.HEALTHY, now_ms, text, by=ITSELF, asked_ms=0, gpu=gpu))

    def _take_back(self, actuator: GpuIsolator, outage: NodeOutage, state: GpuState | None, now_ms: int) -> None:
        """Isolate a board again that was replaced and has come back. A person decides on it: it was somewhere else."""
        gpu = gpu_ref(outage)
        if state is None or state.mark != own_mark(outage):
            text = "its rule is gone: it would not be isolated again if it came back"
            after = moved(outage, Health.HEALTHY, now_ms, text, by=SOMEBODY, gpu=replace(gpu, replaced_by=""))
            self._outages.write(after)
        elif state.jobs is not None:  # listed again
            slot = self._life.slot_now(outage)
            gpu = replace(gpu, slot=gpu.slot if slot is None else slot, replaced_by="")
            text = f"it came back after it was replaced, and is isolated again; it went out for: {self._cause(outage)}"
            log.warning("GPU %d of %s (%s): %s", gpu.slot, outage.node, gpu.uuid, text)
            actuator.mend(state, self._store.fence)
            subject, id_ = f"{outage.node} GPU {gpu.slot}", f"back {gpu.uuid} {outage.ts_ms}"
            self._store.audit.write([Audit(id_, now_ms, ITSELF, "isolate again", subject, outage.reason, text)])
            self._outages.write(moved(outage, Health.DRAINING, now_ms, text, withheld=Withheld.REVIEW, gpu=gpu))

    def _update(self, actuator: GpuIsolator, outage: NodeOutage, state: GpuState | None, now_ms: int) -> None:
        after = seen(outage, state, now_ms)
        if after is None and state is not None and self._of(outage.node) is not None:
            new = self._life.new_board(outage)
            if self._boards.settled(outage, new, state):
                self._end_replaced(outage, new, now_ms)
                return
        if self._is_orphan(outage, over=after is not None and after.stage is Health.HEALTHY):
            return
        if after is not None:
            if after.stage is Health.HEALTHY:
                self._mark_undone(outage, after.reason, now_ms)
            self._outages.write(after)
        elif state is not None and not state.fits and (text := actuator.mend(state, self._store.fence)):
            log.warning("%s: %s", name_of(outage), text)
            subject = f"{outage.node} GPU {gpu_ref(outage).slot}"
            id_ = f"move {gpu_ref(outage).uuid} {now_ms}"
            self._store.audit.write([Audit(id_, now_ms, ITSELF, "move isolation", subject, outage.reason, text)])
            reason = text if state.jobs is None else self._cause(outage)  # the former: nothing keeps it out now
            self._outages.write(replace(outage, ts_ms=now_ms, reason=reason))
        if (after or outage).stage is Health.DRAINED:
            self._life.validate(after or outage)

    def _is_orphan(self, outage: NodeOutage, *, over: bool) -> bool:
        """Return whether a GPU is out whose node left the fleet, and note how a person gives it back."""
        uuid = gpu_ref(outage).uuid
        self._troubles.pop(f"GPU {uuid}", None)
        if over or self._of(outage.node) is not None:
            return False
        self._troubles[f"GPU {uuid}"] = (
            f"{name_of(outage)} stays isolated, and no scheduler of this collector has {outage.node} any more. If that"
            f" is meant, kubectl delete devicetaintrule drover-{uuid.lower()} gives it back."
        )
        return True

    def _cause(self, outage: NodeOutage) -> str:
        """Return why a GPU went out. Raises StoreError."""
        history = reversed(self._store.outages.gpus.history(gpu_ref(outage).uuid))
        if not is_out(outage):
            history = dropwhile(lambda each: not is_out(each), history)
        return ([*takewhile(is_out, history)] or [outage])[-1].reason

    def _mark_undone(self, outage: NodeOutage, why: str, now_ms: int) -> None:
        uuid = gpu_ref(outage).uuid
        done = [
            a
            for a in self._store.actions.newest(node=outage.node, acts=(Act.ISOLATE_GPU,))
            if a.state is ActionState.DONE and a.gpu is not None and a.gpu.uuid == uuid
        ]
        self._store.actions.write([replace(a, state=ActionState.UNDONE, detail=why, ts_ms=now_ms) for a in done[-1:]])

    def _adopt(self, states: Iterable[GpuState], now_ms: int) -> None:
        for state in states:
            outage = adopted(state, now_ms)
            if outage is None:
                self._troubles[f"GPU {state.uuid}"] = (
                    f"An isolation of Drover's cannot be read ({state.node or 'no node'}, {state.uuid or 'no UUID'});"
                    " look at the DeviceTaintRules with label app.kubernetes.io/managed-by=drover."
                )
            else:
                log.warning("%s: %s", name_of(outage), outage.reason)
                self._outages.write(outage)
