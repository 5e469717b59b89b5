"""How one GPU comes back to service while its node works: probed alone, or by a person.

The demands are those of a node's return, for this GPU: values of it, no finding that still holds, a reset that its
faults need, nothing new since its probes were asked for. One more: its slot must hold the same board, because probes
and telemetry are by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from drover_collector.actions.base import ActError, gpu_of
from drover_collector.actions.context import ActionContext
from drover_collector.actions.node_outage import ITSELF, is_out, judged, kept_by, moved, unjudged
from drover_collector.actions.replaced_boards import new_board, slot_of
from drover_collector.actions.return_conditions import (
    CLOSES,
    Lack,
    LackError,
    asked_lack,
    finding_lack,
    name_of,
    new_evidence,
    telemetry_lack,
)
from drover_collector.actions.return_to_service import (
    QUIET_MS,
    NodeReturns,
    Validator,
    is_rejected,
    missing_remedy,
)
from drover_core.model.events import (
    Act,
    Action,
    Health,
    Incident,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
    WaitsFor,
    Withheld,
)


class IntendGpu(Protocol):
    """Stores an intent about a GPU and queues it."""

    def __call__(self, outage: NodeOutage, act: Act, seed: str, why: str, by: str) -> Action: ...


class GpuReturns:
    """Any thread may use it. The methods raise StoreError; then the same call may be made again.

    Args:
        repairs: whether a ticket or a command for repairs is configured.
        validator: None: GPUs are put back by people, without probes.
    """

    def __init__(
        self, context: ActionContext, intend: IntendGpu, repairs: Callable[[], bool], validator: Validator | None
    ) -> None:
        self._context, self._intend, self._repairs, self._validator = context, intend, repairs, validator

    def resume(self, node: str, which: int | str, why: str, by: str, force: bool) -> tuple[Action | None, str]:
        """Put a GPU back that Drover took out: after probes, or at once by `force`.

        Args:
            which: its slot or UUID.
        Returns:
            The action, if there is one yet, and a sentence.
        Raises:
            ActError: Drover did not take it out, or something must come first.
        """
        outage = self._context.gpus.at(node, which)
        if outage is None:
            return self._forget_replaced(node, which, why, by, force), "its rule is deleted: it is not isolated again"
        slot = gpu_of(outage).slot
        if force or self._validator is None or not self._context.config.validate:
            made = self._intend(outage, Act.RETURN_GPU, f"{by} {self._context.now_ms()}", why, by)
            return made, "put back without validation"
        if outage.stage is Health.DRAINING:
            return None, "a pod still holds it: it is probed and put back when that is gone; --force: at once"
        if (lack := self._lack(outage)) is not None:
            raise ActError(f"{lack.text}; drover resume {node} --gpu {slot} --why TEXT --force puts it back at once")
        reason = ProbeReason.REPAIRED if outage.stage is Health.REPAIR else ProbeReason.VALIDATE
        fresh = replace(outage, withheld=Withheld.NO, passed_before=False, incidents=())
        self._order_probes(self._validator, fresh, reason, by, why)
        return None, "probes were asked for; it is put back when it passes them"

    def _forget_replaced(self, node: str, which: int | str, why: str, by: str, force: bool) -> Action:
        """Delete the rule of a board that was replaced. Raises ActError: there is none, or the board is back."""
        if (outage := self._context.gpus.replaced_board(node, which)) is not None:
            if not force and (back := self.why_kept(outage)):
                raise ActError(back)
            return self._intend(outage, Act.RETURN_GPU, f"{by} {self._context.now_ms()}", why, by)
        named = f"GPU {which} of {node}" if isinstance(which, int) else f"{which} of {node}"
        raise ActError(f"Drover has not taken out {named} alone: `drover explain {node}` says what is")

    def why_kept(self, outage: NodeOutage) -> str:
        """Return why the rule of a board that was replaced is not to be deleted: it would be back unprobed; "": it is.

        Drover isolates such a board again as soon as its scheduler lists it.
        """
        slot = self.slot_now(outage)
        if slot is None or self._validator is None or not self._context.config.validate:
            return ""
        named = f"{gpu_of(outage).uuid} is back, as GPU {slot} of {outage.node}"
        return f"{named}, and is isolated again soon: resume it then, and it is probed; --force deletes its rule now"

    def new_board(self, outage: NodeOutage) -> str:
        """Return the UUID of the board that took the place of a GPU, by its node; "": none for sure."""
        return new_board(outage, self._context.detection.node_now(outage.node), self._context.now_ms())

    def slot_now(self, outage: NodeOutage) -> int | None:
        """Return the slot in which its node reports a GPU now; None: in none."""
        return slot_of(outage, self._context.detection.node_now(outage.node))

    def lack_text(self, outage: NodeOutage) -> str:
        """Return what is missing for its return now, as a person asks; "": nothing. Raises StoreError."""
        lack = self._lack(outage)
        return "" if lack is None else lack.text

    def validate(self, outage: NodeOutage) -> None:
        """Order the probes of a GPU that no pod holds, if nothing holds its return."""
        if self._validator is None or not self._context.config.validate:
            return
        if outage.withheld is Withheld.REVIEW or kept_by(outage):
            return
        since_ms = self._context.now_ms() - QUIET_MS
        if outage.withheld is Withheld.QUIET and self._new_evidence(outage, since_ms) is not None:
            return
        lack = self._lack(outage)
        if lack is None:
            self._order_probes(self._validator, outage, ProbeReason.VALIDATE, ITSELF, outage.reason)
        elif (outage.waits_for, outage.reason) != (lack.waits_for, lack.text):
            self._context.gpus.write(self._held(outage, lack))

    def take_verdicts(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """Put back, or keep for repair, the GPUs that were probed."""
        gpus, now_ms = self._context.gpus, self._context.now_ms()
        for outage in gpus.out():
            gpu = gpu_of(outage)
            if not gpu.order or outage.stage is not Health.VALIDATING:
                continue
            of_order = [v for v in verdicts if v.request == gpu.order]
            own = [v for v in of_order if v.gpu == gpu.slot] or of_order  # others' work disturbs the node's figures
            if not own:
                continue
            after = judged(outage, own, now_ms)
            if after is None:
                passed = f"GPU {gpu.slot} passed its validation: {own[0].text}"
                self._intend(outage, Act.RETURN_GPU, gpu.order, passed, ITSELF)
                continue
            if after.stage is Health.REPAIR and self._repairs():
                self._intend(outage, Act.REPAIR, gpu.order, f"GPU {gpu.slot} ({gpu.uuid}): {after.reason}", ITSELF)
            gpus.write(after)

    def check(self, action: Action, others: Sequence[Action]) -> None:
        """Refuse Drover's own return of a GPU for which something is missing, or that had faults since its probes.

        Args:
            others: actions on its node that have not ended.
        Raises:
            LackError.
        """
        outage = self._context.gpus.current.get(gpu_of(action).uuid)
        if action.by != ITSELF or outage is None or not is_out(outage):
            return
        asked = (a.by for a in others if a.action is Act.ISOLATE_GPU and a.by != ITSELF and same_gpu(a, action))
        if person := kept_by(outage) or next(asked, ""):
            again = f"drover resume {outage.node} --gpu {gpu_of(outage).slot} --why TEXT has it probed again"
            text = f"return withheld: {person} isolates it by hand; {again}"
            raise LackError(Lack(WaitsFor.NOTHING, text, withheld=Withheld.QUIET))
        if (lack := self._lack(outage, outage.asked_ms or outage.ts_ms)) is not None:
            raise LackError(lack)
        if (found := self._new_evidence(outage, outage.asked_ms or outage.ts_ms)) is not None:
            withheld = Withheld.REVIEW if outage.passed_before else Withheld.QUIET
            text = f"return withheld: {action.why}; but since its probes were asked for {found.text}"
            raise LackError(Lack(WaitsFor.NOTHING, text, found.incidents, withheld))

    def after_refusal(self, action: Action, why: str, lack: Lack | None) -> None:
        """Set the outage after a return failed: a GPU that passed must not look as if its probes ran for ever."""
        outage = self._context.gpus.current.get(gpu_of(action).uuid)
        if outage is None or outage.stage is not Health.VALIDATING:
            return
        now_ms = self._context.now_ms()
        if lack is None:
            after = replace(unjudged(outage, f"it could not be put back: {why}", now_ms), asked_ms=0)
        elif lack.withheld is Withheld.NO:
            after = self._held(outage, lack)
        else:
            after = moved(
                outage, Health.DRAINED, now_ms, why, withheld=lack.withheld, incidents=lack.incidents,
                passed_before=True, asked_ms=0,
            )  # fmt: skip
        self._context.gpus.write(after)

    def _held(self, outage: NodeOutage, lack: Lack) -> NodeOutage:
        return moved(
            outage, Health.DRAINED, self._context.now_ms(), lack.text, waits_for=lack.waits_for,
            incidents=lack.incidents, asked_ms=0,
        )  # fmt: skip

    def _order_probes(self, validator: Validator, outage: NodeOutage, why: ProbeReason, by: str, reason: str) -> None:
        context, gpu = self._context, gpu_of(outage)
        level = context.config.validate_level
        try:
            order = validator.ask(
                outage.node, why, level=level, incident_id=outage.incident_id, by=by, gpus=(gpu.slot,)
            )
        except ValueError as error:
            context.gpus.write(unjudged(outage, str(error), context.now_ms()))
            return
        context.crash_test_hook("asked")
        now_ms = context.now_ms()
        first = next(iter(context.store.probes.orders.versions(order)), None)  # it may have been open for a while
        context.gpus.write(
            moved(
                outage, Health.VALIDATING, now_ms, reason, by=ITSELF, asked_ms=now_ms if first is None else first.ts_ms,
                gpu=replace(gpu, order=order),
            )
        )  # fmt: skip

    def _lack(self, outage: NodeOutage, since_ms: int = 0) -> Lack | None:
        """Return what is missing for a return now; None: nothing.

        Args:
            since_ms: when its probes were asked for; 0: they are yet to be.
        """
        context, gpu = self._context, gpu_of(outage)
        now, now_ms = context.detection.node_now(outage.node), context.now_ms()
        there = "" if now is None else now.boards.get(gpu.slot, "")
        if not there:
            text = f"held for telemetry: the node has not reported which board is GPU {gpu.slot}"
            return Lack(WaitsFor.TELEMETRY, text)
        if there != gpu.uuid:
            text = (
                f"held for a person: GPU {gpu.slot} is another board now ({there}); {gpu.uuid} went out. If it stays"
                " away, its outage ends by itself"
            )
            return Lack(WaitsFor.PERSON, text)
        assert now is not None
        asked = {slot: number for slot, number in now.asked.items() if slot == gpu.slot}
        if (lack := asked_lack(asked)) is not None:
            return lack
        own = self._own_incidents(outage)
        if (lack := missing_remedy(context, outage, list(own.values()), gpu.slot)) is not None:
            return lack
        # As if the node had this GPU alone: what is missing of its neighbours does not hold it.
        at_ms = now.gpus_ms[gpu.slot] if gpu.slot < len(now.gpus_ms) else 0
        if telemetry_lack(replace(now, values_ms=at_ms, gpus_ms=()), now_ms, since_ms) is not None:
            return Lack(WaitsFor.TELEMETRY, f"held for telemetry: GPU {gpu.slot} gives no values")
        names = {id_: name_of(i) for id_, i in own.items() if i.closed_ms is None}
        return finding_lack(now.said, names, now_ms, since_ms or None, outage.waits_for is WaitsFor.FINDING)

    def _own_incidents(self, outage: NodeOutage) -> dict[str, Incident]:
        """Return incidents about the GPU that want it out, open or just closed, without those a person rejected."""
        gpu = gpu_of(outage)
        known = self._context.detection.incidents.values()
        own = [i for i in known if (i.node, i.gpu) == (outage.node, gpu.slot) and i.action in CLOSES]
        return {i.id: i for i in own if not is_rejected(self._context.store, i)}

    def _new_evidence(self, outage: NodeOutage, since_ms: int) -> Lack | None:
        """Return what probes that were asked for at `since_ms` do not speak for."""
        own, store, slot = list(self._own_incidents(outage).values()), self._context.store, gpu_of(outage).slot
        if not own:
            return None
        to_ms = max(self._context.now_ms(), since_ms) + 1
        events = [e for e in store.events.received(outage.node, since_ms) if e.gpu == slot]
        findings = [f for f in store.findings.between(since_ms, to_ms, node=outage.node) if f.gpu == slot]
        found = new_evidence(outage.node, since_ms, own, events, findings)
        return None if found is None else Lack(WaitsFor.NOTHING, found.text, found.incidents)


def same_gpu(one: Action, other: Action) -> bool:
    return one.gpu is not None and other.gpu is not None and one.gpu.uuid == other.gpu.uuid


@dataclass(frozen=True, slots=True)
class Returns:
    """How nodes, and single GPUs, come back to service."""

    nodes: NodeReturns
    gpus: GpuReturns
