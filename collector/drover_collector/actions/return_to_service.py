"""How a node comes back to service: validated, or by a person; and what holds back a return that has passed.

A pass speaks for what was known when its probes were asked for. What came since (`return_conditions.new_evidence`)
withholds the return: the node is probed once more when nothing has come for a while, and then waits for a person. All
of it follows from stored outages, incidents, events and findings, so a restart gives the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from drover_collector.actions.base import ActError, LaterError
from drover_collector.actions.context import ActionContext
from drover_collector.actions.node_outage import (
    CLOSINGS,
    ITSELF,
    RESETS,
    is_out,
    judged,
    kept_by,
    moved,
    unjudged,
)
from drover_collector.actions.return_conditions import (
    CLOSES,
    Lack,
    LackError,
    NewEvidence,
    asked_lack,
    faults_of,
    finding_lack,
    name_of,
    new_evidence,
    remedy_lack,
    telemetry_lack,
)
from drover_collector.detectors.xid import detector as xid
from drover_collector.engine.node_state import FRESH_MS
from drover_collector.incidents.incident import was_absorbed
from drover_collector.policy.guard import may_resume
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Health,
    Incident,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
    WaitsFor,
    Withheld,
)

VALIDATIONS = (ProbeReason.VALIDATE, ProbeReason.REPAIRED)
LOOKED_BACK_MS = 30 * 86_400_000  # for faults that need a reset or a reboot, however old their incident is
BOOTS_MS = 7 * 86_400_000  # what a node reports of its faults may wait this long in its spool
BEFORE_MS = 60_000  # an incident's first event may have come this long before the incident's own time
QUIET_MS = 60_000  # a node whose return was withheld is probed again when nothing more has come for this long

HELD_BEFORE = "probed after it was "  # how the reason of a node begins that no longer waits


def with_help(outage: NodeOutage, lack: Lack) -> str:
    """Return what the node waits for, and what ends that."""
    by_hand = f"drover resume {outage.node} --why TEXT --force puts it back at once"
    if lack.waits_for is WaitsFor.PERSON:
        return f"{lack.text}. When it has rebooted: {by_hand}"
    return f"{lack.text}. It is probed and put back when that has come; {by_hand}"


def held(outage: NodeOutage, lack: Lack, now_ms: int) -> NodeOutage:
    """Return the outage of a drained node whose return waits for something."""
    return moved(
        outage, Health.DRAINED, now_ms, with_help(outage, lack), waits_for=lack.waits_for, incidents=lack.incidents,
        asked_ms=0,
    )  # fmt: skip


class Validator(Protocol):
    """Orders probes: `probes.service.ProbeOrderService`."""

    def ask(
        self, node: str, why: ProbeReason, *, level: str = "quick", incident_id: str = "", by: str = "drover",
        gpus: Iterable[int] = (),
    ) -> str: ...  # fmt: skip


class Intend(Protocol):
    """Stores an intent and queues it: `ActionDispatcher.intend`."""

    def __call__(self, node: str, act: Act, seed: str, incident: str, why: str, by: str) -> Action: ...


class NodeReturns:
    """Any thread may use it. The methods raise StoreError; then the same call may be made again.

    Args:
        repairs: whether a ticket or a command for repairs is configured.
    Attributes:
        validator: None: nodes are put back without probes.
    """

    def __init__(
        self, context: ActionContext, intend: Intend, repairs: Callable[[], bool], validator: Validator | None = None
    ) -> None:
        self.validator = validator
        self._context, self._intend, self._repairs = context, intend, repairs
        self._recheck_s = 2 * context.look_s  # between two checks of what a held node waits for
        self._rechecks: dict[str, float] = {}  # node -> when it is checked again, time.monotonic

    def restart(self) -> None:
        """Check at once what held nodes wait for."""
        self._rechecks.clear()

    def resume(self, node: str, why: str, by: str, force: bool) -> tuple[Action | None, str]:
        """Put a node back that Drover took out: after probes, or at once by `force`.

        Returns:
            The action, if there is one yet, and a sentence.
        Raises:
            ActError: Drover did not take it out. StoreError.
        """
        outages, now_ms = self._context.outages, self._context.now_ms
        if why_not := may_resume(node, outages.current.get(node)):
            raise ActError(why_not)
        outage = outages.current[node]
        if force or self.validator is None or not self._context.config.validate:
            made = self._intend(node, Act.RESUME, f"{by} {now_ms()}", outage.incident_id, why, by)
            return made, "put back without validation"
        if outage.stage is Health.DRAINING:
            return None, "jobs still run there: it is validated and put back when they are gone; --force: at once"
        if (lack := self._remedy_lack(outage)) is not None:
            if lack.waits_for is WaitsFor.PERSON:
                raise ActError(with_help(outage, lack))
            outages.write(held(replace(outage, by=ITSELF), lack, now_ms()))
            return None, with_help(outage, lack)
        reason = ProbeReason.REPAIRED if outage.stage is Health.REPAIR else ProbeReason.VALIDATE
        asked = replace(outage, withheld=Withheld.NO, passed_before=False, incidents=())
        self._order_probes(self.validator, asked, reason, by, why)
        return None, "probes were asked for; it is put back when it passes them"

    def validate(self, outage: NodeOutage) -> None:
        """Order the probes of a node whose jobs are gone, if nothing holds its return. Raises StoreError."""
        if self.validator is None or not self._context.config.validate:
            return
        if outage.withheld is Withheld.REVIEW or kept_by(outage):
            return
        since_ms = self._context.now_ms() - QUIET_MS
        if outage.withheld is Withheld.QUIET and self._new_evidence(outage.node, since_ms) is not None:
            return
        if (at := self._rechecks.get(outage.node)) is not None and time.monotonic() < at:
            return
        lack = self._remedy_lack(outage)
        held_before = outage.waits_for is not WaitsFor.NOTHING
        if lack is None and held_before:
            lack = self._present_lack(outage)
        if lack is None:
            self._rechecks.pop(outage.node, None)
            reason = f"{HELD_BEFORE}{outage.reason}" if held_before else outage.reason
            self._order_probes(self.validator, outage, ProbeReason.VALIDATE, ITSELF, reason)
            return
        self._rechecks[outage.node] = time.monotonic() + self._recheck_s
        if (outage.waits_for, outage.reason) != (lack.waits_for, with_help(outage, lack)):
            self._context.outages.write(held(outage, lack, self._context.now_ms()))

    def _order_probes(self, validator: Validator, outage: NodeOutage, why: ProbeReason, by: str, reason: str) -> None:
        context = self._context
        now_ms, level = context.now_ms(), context.config.validate_level
        try:
            order = validator.ask(outage.node, why, level=level, incident_id=outage.incident_id, by=by)
        except ValueError as error:
            context.outages.write(unjudged(outage, str(error), now_ms))
            return
        context.crash_test_hook("asked")
        first = next(
            iter(context.store.probes.orders.versions(order)), None
        )  # the same one may have been open for a while
        asked_ms = now_ms if first is None else first.ts_ms
        context.outages.write(  # no matter who asks, from here on Drover decides on its return
            replace(
                outage, ts_ms=context.now_ms(), stage=Health.VALIDATING, reason=reason, by=ITSELF, asked_ms=asked_ms,
                waits_for=WaitsFor.NOTHING, withheld=Withheld.NO,
            )
        )  # fmt: skip

    def take_verdicts(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """Put back, or send to repair, the nodes that were validated. Raises StoreError: call again with the same."""
        outages, now_ms = self._context.outages, self._context.now_ms
        of_gpus = self._context.gpus.orders()  # they say nothing of the node
        verdicts = [v for v in verdicts if v.request not in of_gpus]
        for node in dict.fromkeys(v.node for v in verdicts if v.why in VALIDATIONS):
            with outages.lock:
                outage = outages.current.get(node)
                if outage is None or outage.stage not in (Health.VALIDATING, Health.DRAINED, Health.REPAIR):
                    continue
                # Probes that another outage asked for prove nothing about this one.
                own = [v for v in verdicts if v.node == node and v.incident_id == outage.incident_id]
                own = [v for v in own if v.why in VALIDATIONS]
                if not own:
                    continue
                after = judged(outage, own, now_ms())
                if after is None:
                    passed = f"passed its validation: {own[0].text}"
                    self._intend(node, Act.RESUME, own[0].request, outage.incident_id, passed, ITSELF)
                    continue
                if after.stage is Health.REPAIR and self._repairs():
                    self._intend(node, Act.REPAIR, own[0].request, outage.incident_id, after.reason, ITSELF)
                outages.write(after)

    def why_withheld(self, resume: Action, waiting: Sequence[Action]) -> Lack | None:
        """Return why Drover's own return of a node that has passed is withheld; None: it is not. Ask before the effect.

        Args:
            waiting: other actions on its node that have not ended.
        Raises:
            LackError: something is missing. LaterError: it may still come. StoreError.
        """
        outage = self._context.outages.current.get(resume.node)
        if resume.by != ITSELF or outage is None or not is_out(outage):
            return None
        closing = next((a.by for a in waiting if a.action in CLOSINGS and a.by != ITSELF), "")
        if person := kept_by(outage) or closing:
            again = f"drover resume {resume.node} --why TEXT has it probed again"
            text = f"resume withheld: {person} drains it by hand; {again}"
            return Lack(WaitsFor.NOTHING, text, withheld=Withheld.QUIET)
        self._refuse_lack(resume, outage)
        if (found := self._new_evidence(resume.node, outage.asked_ms or outage.ts_ms)) is None:
            return None
        since = f"it {resume.why}; but since its probes were asked for {found.text}"
        if outage.passed_before:
            text = f"not validated: {since}, as after the time before: a person must look"
            return Lack(WaitsFor.NOTHING, text, found.incidents, Withheld.REVIEW)
        text = f"resume withheld: {since}. It is probed again when nothing more comes"
        return Lack(WaitsFor.NOTHING, text, found.incidents, Withheld.QUIET)

    def after_refusal(self, outage: NodeOutage, why: str, lack: Lack | None) -> NodeOutage | None:
        """Return the outage after a resume failed; None: it is as before. Raises StoreError.

        A node that passed its probes must not look as if they ran for ever.
        """
        now_ms = self._context.now_ms()
        withheld = lack is not None and lack.withheld is not Withheld.NO
        if lack is not None and not withheld and is_out(outage) and not kept_by(outage):
            finding = lack.waits_for is WaitsFor.FINDING
            return self._contradicted(outage, lack) if finding else held(outage, lack, now_ms)
        if outage.stage is not Health.VALIDATING and (not withheld or kept_by(outage)):
            return None
        if lack is None or not withheld:
            return replace(unjudged(outage, f"it could not be put back: {why}", now_ms), asked_ms=0)
        return moved(
            outage, Health.DRAINED, now_ms, why, withheld=lack.withheld, incidents=lack.incidents, passed_before=True,
            asked_ms=0,
        )  # fmt: skip

    def _contradicted(self, outage: NodeOutage, lack: Lack) -> NodeOutage:
        """Return the outage after a finding contradicts a pass. Raises StoreError.

        The second time in one outage a person must look, as it would be probed for ever.
        """
        now_ms = self._context.now_ms()
        if not any(before.waits_for is WaitsFor.FINDING for before in self._stages(outage.node)):
            return held(outage, lack, now_ms)
        again = f"drover resume {outage.node} --why TEXT has it probed again"
        why = f"it passed its validation twice, and was {lack.text} each time: a person must look; {again}"
        return replace(unjudged(outage, why, now_ms), asked_ms=0, incidents=lack.incidents)

    def _stages(self, node: str) -> list[NodeOutage]:
        """Return the stages of a node's present outage, newest first. Raises StoreError."""
        return list(takewhile(is_out, reversed(self._context.store.outages.history(node))))

    def _new_evidence(self, node: str, since_ms: int) -> NewEvidence | None:
        """Return what probes that were asked for at `since_ms` do not speak for. Raises StoreError."""
        own = list(self._own_incidents(node).values())
        if not own:
            return None
        store, to_ms = self._context.store, max(self._context.now_ms(), since_ms) + 1
        findings = store.findings.between(since_ms, to_ms, node=node)
        return new_evidence(node, since_ms, own, store.events.received(node, since_ms), findings)

    def _refuse_lack(self, resume: Action, outage: NodeOutage) -> None:
        """Raise LackError if a condition of the return is missing, LaterError if values may still come."""
        if (lack := self._remedy_lack(outage)) is not None:
            raise LackError(lack)
        since_ms = outage.asked_ms or outage.ts_ms
        if (lack := self._present_lack(outage, since_ms)) is None:
            return
        now = self._context.detection.node_now(outage.node)
        fresh_ms = FRESH_MS if now is None else now.fresh_ms
        if lack.waits_for is WaitsFor.TELEMETRY and self._context.now_ms() - resume.ts_ms <= fresh_ms:
            raise LaterError(f"{lack.text}, since its probes were asked for")
        raise LackError(lack)

    def _own_incidents(self, node: str) -> dict[str, Incident]:
        """Return incidents about the node that want it out, open or just closed, without those a person rejected."""
        own = [i for i in self._context.detection.incidents.values() if i.node == node and i.action in CLOSES]
        return {i.id: i for i in own if not is_rejected(self._context.store, i)}

    def _present_lack(self, outage: NodeOutage, since_ms: int | None = None) -> Lack | None:
        """Return which values or findings speak against a return now; None: none.

        `since_ms`: when its probes were asked for.
        """
        now, now_ms = self._context.detection.node_now(outage.node), self._context.now_ms()
        if (lack := telemetry_lack(now, now_ms, since_ms or 0)) is not None:
            return lack
        assert now is not None
        names = {id_: name_of(i) for id_, i in self._own_incidents(outage.node).items() if i.closed_ms is None}
        return finding_lack(now.said, names, now_ms, since_ms, outage.waits_for is WaitsFor.FINDING)

    def _remedy_lack(self, outage: NodeOutage) -> Lack | None:
        """Return which boot or reset that a fault needs is missing; None: none. Raises StoreError."""
        node = outage.node
        now = self._context.detection.node_now(node)
        if now is not None and (lack := asked_lack(now.asked)) is not None:
            return lack
        return missing_remedy(self._context, outage, list(self._own_incidents(node).values()))


def is_rejected(store: Store, incident: Incident) -> bool:
    """Return whether a person has decided that its node stays for an incident. Raises StoreError."""
    decisions = store.decisions.of_incident(incident.id)
    return bool(decisions) and decisions[-1].outcome == "rejected"


def missing_remedy(
    context: ActionContext, outage: NodeOutage, own: Sequence[Incident], slot: int | None = None
) -> Lack | None:
    """Return which boot or reset that a fault needs is missing; None: none. Raises StoreError.

    Args:
        own: incidents about what is out. slot: of a GPU that is out alone; None: the node.
    """
    store, node, now_ms = context.store, outage.node, context.now_ms()
    now = context.detection.node_now(node)
    known = context.detection.incidents.get(outage.incident_id)
    if known is None and outage.incident_id:
        known = next(iter(store.incidents.history(outage.incident_id)[-1:]), None)
    times = [i.since_ms for i in (*own, *([] if known is None else [known]))]
    first_ms = min([_first_stage(store, outage).ts_ms, *times])
    events = store.events.received(node, max(now_ms - LOOKED_BACK_MS, first_ms - BEFORE_MS))
    faults = faults_of(event for event in events if slot is None or event.gpu == slot)
    if not faults:
        return None
    reset_ms: dict[int | None, int] = {}

    def note(gpu: int | None, at_ms: int) -> None:
        reset_ms[gpu] = max(at_ms, reset_ms.get(gpu, 0))

    for action in store.actions.newest(node=node, acts=tuple(sorted(RESETS)), since_ms=faults[0].at_ms):
        if action.state is ActionState.DONE:
            note(None, action.ts_ms)
    for incident in own:  # its detector saw the GPU reset
        if incident.closed_ms is not None and xid.NAME in incident.detectors and not was_absorbed(incident):
            note(incident.gpu, incident.closed_ms)
    for gpu, at_ms in ({} if now is None else now.reset_ms).items():
        note(gpu, at_ms)
    return remedy_lack(faults, store.inventories.boots(node, faults[0].at_ms - BOOTS_MS), reset_ms)


def _first_stage(store: Store, outage: NodeOutage) -> NodeOutage:
    """Return the first stage of the present outage of a node, or of a GPU. Raises StoreError."""
    gpu = outage.gpu
    history = store.outages.history(outage.node) if gpu is None else store.outages.gpus.history(gpu.uuid)
    return ([*takewhile(is_out, reversed(history))] or [outage])[-1]
