"""How a node comes back to service: validated, or by a person; and what holds a return back that has passed.

A pass speaks for what was known when its probes were asked for. What came since (`newer.py`) withholds the return: the
node is probed once more when nothing has come for a while, and then waits for a person. All of it is told by stored
duties, incidents, events and findings, so that a restart gives the same answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from drover_collector.actions.base import ActError, LaterError
from drover_collector.actions.newer_evidence import (
    CLOSES,
    Newer,
    newer,
    what,
)
from drover_collector.actions.node_outage import (
    ITSELF,
    is_out,
    judged,
    kept_by,
    moved,
    unjudged,
)
from drover_collector.actions.operator_commands import Commands
from drover_collector.actions.return_conditions import (
    XID,
    Lack,
    LackError,
    asked_lack,
    faults_of,
    finding_lack,
    remedy_lack,
    telemetry_lack,
)
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.ticket import Ticket
from drover_collector.engine.node_state import FRESH_MS, NodeNow
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
RESETS = (Act.RESET, Act.REBOOT)
LOOKED_BACK_MS = 30 * 86_400_000  # for faults that need a reset or a reboot: no incident is looked at for longer
BOOTS_MS = 7 * 86_400_000  # what a node says of its faults may wait so long in its spool
BEFORE_MS = 60_000  # an incident's first event may have come so long before the incident's own time
QUIET_MS = 60_000  # nothing more may have come for so long before a node whose return was withheld is probed again


HELD_BEFORE = "probed after it was "  # begin of the reason of one that no longer waits


def with_help(duty: NodeOutage, lack: Lack) -> str:
    """What it waits for, and what ends that."""
    by_hand = f"drover resume {duty.node} --why TEXT --force puts it back at once"
    if lack.waits_for is WaitsFor.PERSON:
        return f"{lack.text}. When it has rebooted: {by_hand}"
    return f"{lack.text}. It is probed and put back when that has come; {by_hand}"


def held(duty: NodeOutage, lack: Lack, now_ms: int) -> NodeOutage:
    """A drained node whose return waits for something."""
    return moved(
        duty, Health.DRAINED, now_ms, with_help(duty, lack), waits_for=lack.waits_for, incidents=lack.incidents,
        asked_ms=0,
    )  # fmt: skip


class Validator(Protocol):
    """Asks for probes: `probes.desk.ProbeDesk`."""

    def ask(
        self, node: str, why: ProbeReason, *, level: str = "quick", incident_id: str = "", by: str = "drover"
    ) -> str: ...


class Returning:
    """Part of `desk.ActionDesk`, which has the rest."""

    store: Store
    config: ActConfig
    now_ms: Callable[[], int]
    incidents: Callable[[], Mapping[str, Incident]]
    step: Callable[[str], None]
    duties: Mapping[str, NodeOutage]
    validator: Validator | None
    now_of: Callable[[str], NodeNow | None]
    _recheck_s: float  # between looks at what a held node waits for
    _rechecks: dict[str, float]  # node -> when it is looked at again, time.monotonic
    _lock: threading.RLock

    @property
    def acting(self) -> bool:
        raise NotImplementedError  # the desk has it

    @property
    def _own(self) -> tuple[Commands | Ticket, ...]:
        raise NotImplementedError  # the desk has it

    def intend(
        self, node: str, act: Act, seed: str, incident: str, why: str, by: str, since_ms: int = 0, forced: bool = False
    ) -> Action:
        raise NotImplementedError  # the desk has it

    def set_duty(self, duty: NodeOutage) -> None:
        raise NotImplementedError  # the desk has it

    def _must_act(self, node: str) -> None:
        raise NotImplementedError  # the desk has it

    def resume(self, node: str, why: str, by: str, force: bool) -> tuple[Action | None, str]:
        """Put a node back that Drover took out: after probes, or at once by `force`.

        Returns:
            The action, if there is one yet, and a sentence.
        Raises:
            ActError: Drover did not take it out. StoreError.
        """
        self._must_act(node)
        if why_not := may_resume(node, self.duties.get(node)):
            raise ActError(why_not)
        duty = self.duties[node]
        if force or self.validator is None or not self.config.validate:
            made = self.intend(node, Act.RESUME, f"{by} {self.now_ms()}", duty.incident_id, why, by)
            return made, "put back without validation"
        if duty.stage is Health.DRAINING:
            return None, "jobs still run there: it is validated and put back when they are gone; --force: at once"
        if (lack := self._remedy_lack(duty)) is not None:
            if lack.waits_for is WaitsFor.PERSON:
                raise ActError(with_help(duty, lack))
            self.set_duty(held(replace(duty, by=ITSELF), lack, self.now_ms()))
            return None, with_help(duty, lack)
        reason = ProbeReason.REPAIRED if duty.stage is Health.REPAIR else ProbeReason.VALIDATE
        self._validate(
            self.validator, replace(duty, withheld=Withheld.NO, passed_before=False, incidents=()), reason, by, why
        )
        return None, "probes were asked for; it is put back when it passes them"

    def validate(self, duty: NodeOutage) -> None:
        """Ask for the probes of a node whose jobs are gone. Raises StoreError."""
        if self.validator is None or not self.config.validate or duty.withheld is Withheld.REVIEW or kept_by(duty):
            return
        if duty.withheld is Withheld.QUIET and self._newer(duty.node, self.now_ms() - QUIET_MS) is not None:
            return
        if (at := self._rechecks.get(duty.node)) is not None and time.monotonic() < at:
            return
        lack = self._remedy_lack(duty)
        held_before = duty.waits_for is not WaitsFor.NOTHING
        if lack is None and held_before:
            lack = self._present_lack(duty)
        if lack is None:
            self._rechecks.pop(duty.node, None)
            reason = f"{HELD_BEFORE}{duty.reason}" if held_before else duty.reason
            self._validate(self.validator, duty, ProbeReason.VALIDATE, ITSELF, reason)
            return
        self._rechecks[duty.node] = time.monotonic() + self._recheck_s
        if (duty.waits_for, duty.reason) != (lack.waits_for, with_help(duty, lack)):
            self.set_duty(held(duty, lack, self.now_ms()))

    def _validate(self, validator: Validator, duty: NodeOutage, why: ProbeReason, by: str, reason: str) -> None:
        now_ms = self.now_ms()
        try:
            order = validator.ask(duty.node, why, level=self.config.validate_level, incident_id=duty.incident_id, by=by)
        except ValueError as error:
            self.set_duty(unjudged(duty, str(error), now_ms))
            return
        self.step("asked")
        first = next(
            iter(self.store.probes.orders.versions(order)), None
        )  # the same one may have been open for a while
        asked_ms = now_ms if first is None else first.ts_ms
        self.set_duty(  # whoever asks for it, its return is Drover's matter from here on
            replace(
                duty, ts_ms=self.now_ms(), stage=Health.VALIDATING, reason=reason, by=ITSELF, asked_ms=asked_ms,
                waits_for=WaitsFor.NOTHING, withheld=Withheld.NO,
            )
        )  # fmt: skip

    def on_verdicts(self, verdicts: Sequence[ProbeVerdict]) -> None:
        """What validation has shown. Raises StoreError: call again with the same ones."""
        if not self.acting:
            return
        for node in dict.fromkeys(v.node for v in verdicts if v.why in VALIDATIONS):
            with self._lock:
                duty = self.duties.get(node)
                if duty is None or duty.stage not in (Health.VALIDATING, Health.DRAINED, Health.REPAIR):
                    continue
                # What was asked for another time that it was out proves nothing of this one.
                mine = [v for v in verdicts if v.node == node and v.incident_id == duty.incident_id]
                mine = [v for v in mine if v.why in VALIDATIONS]
                if not mine:
                    continue
                after = judged(duty, mine, self.now_ms())
                if after is None:
                    passed = f"passed its validation: {mine[0].text}"
                    self.intend(node, Act.RESUME, mine[0].request, duty.incident_id, passed, ITSELF)
                    continue
                if after.stage is Health.REPAIR and any(own.knows(Act.REPAIR) for own in self._own):
                    self.intend(node, Act.REPAIR, mine[0].request, duty.incident_id, after.reason, ITSELF)
                self.set_duty(after)

    def withheld(self, resume: Action, waiting: Sequence[Action]) -> Lack | None:
        """Why a return of Drover's own, which has passed, is not to be: asked right before its effect. None: it is.

        Args:
            waiting: what else is to be done to its node.
        Raises:
            LackError: something is missing. LaterError: it may still come. StoreError.
        """
        duty = self.duties.get(resume.node)
        if resume.by != ITSELF or duty is None or not is_out(duty):
            return None
        closing = next((a.by for a in waiting if a.action in (Act.DRAIN, Act.ISOLATE) and a.by != ITSELF), "")
        if person := kept_by(duty) or closing:
            again = f"drover resume {resume.node} --why TEXT has it probed again"
            text = f"resume withheld: {person} drains it by hand; {again}"
            return Lack(WaitsFor.NOTHING, text, withheld=Withheld.QUIET)
        self._must_lack_nothing(resume, duty)
        if (found := self._newer(resume.node, duty.asked_ms or duty.ts_ms)) is None:
            return None
        since = f"it {resume.why}; but since its probes were asked for {found.text}"
        if duty.passed_before:
            text = f"not validated: {since}, as after the time before: a person must look"
            return Lack(WaitsFor.NOTHING, text, found.incidents, Withheld.REVIEW)
        text = f"resume withheld: {since}. It is probed again when nothing more comes"
        return Lack(WaitsFor.NOTHING, text, found.incidents, Withheld.QUIET)

    def _newer(self, node: str, since_ms: int) -> Newer | None:
        """What a pass of probes that were asked for then does not speak for. Raises StoreError."""
        mine = list(self._own_incidents(node).values())
        if not mine:
            return None
        store, to_ms = self.store, max(self.now_ms(), since_ms) + 1
        return newer(
            node,
            since_ms,
            mine,
            store.events.received(node, since_ms),
            store.findings.between(since_ms, to_ms, node=node),
        )

    def _must_lack_nothing(self, resume: Action, duty: NodeOutage) -> None:
        """Raises LackError: what a return demands is missing. LaterError: values since the probes may still come."""
        if (lack := self._remedy_lack(duty)) is not None:
            raise LackError(lack)
        since_ms = duty.asked_ms or duty.ts_ms
        if (lack := self._present_lack(duty, since_ms)) is None:
            return
        now = self.now_of(duty.node)
        fresh_ms = FRESH_MS if now is None else now.fresh_ms
        if lack.waits_for is WaitsFor.TELEMETRY and self.now_ms() - resume.ts_ms <= fresh_ms:
            raise LaterError(f"{lack.text}, since its probes were asked for")
        raise LackError(lack)

    def _own_incidents(self, node: str) -> dict[str, Incident]:
        """Incidents about the node that want it out, open or just closed, without those that a person rejected."""
        mine = [i for i in self.incidents().values() if i.node == node and i.action in CLOSES]
        return {i.id: i for i in mine if not self._rejected(i)}

    def _present_lack(self, duty: NodeOutage, since_ms: int | None = None) -> Lack | None:
        """Whether values and findings speak for a return now. `since_ms`: when its probes were asked for."""
        now = self.now_of(duty.node)
        if (lack := telemetry_lack(now, self.now_ms(), since_ms or 0)) is not None:
            return lack
        assert now is not None
        names = {id_: what(i) for id_, i in self._own_incidents(duty.node).items() if i.closed_ms is None}
        return finding_lack(now.said, names, self.now_ms(), since_ms, duty.waits_for is WaitsFor.FINDING)

    def contradicted(self, duty: NodeOutage, lack: Lack) -> NodeOutage:
        """One whose pass a finding contradicts: the second time in one outage a person must look, as it would be probed
        for ever. Raises StoreError."""
        out = list(takewhile(is_out, reversed(self.store.outages.history(duty.node))))
        if not any(before.waits_for is WaitsFor.FINDING for before in out):
            return held(duty, lack, self.now_ms())
        again = f"drover resume {duty.node} --why TEXT has it probed again"
        why = f"it passed its validation twice, and was {lack.text} each time: a person must look; {again}"
        return replace(unjudged(duty, why, self.now_ms()), asked_ms=0, incidents=lack.incidents)

    def _remedy_lack(self, duty: NodeOutage) -> Lack | None:
        """Whether a boot or a reset that a fault needs is missing. Raises StoreError."""
        node, now_ms = duty.node, self.now_ms()
        now = self.now_of(node)
        if now is not None and (lack := asked_lack(now.asked)) is not None:
            return lack
        own = self._own_incidents(node)
        known = self.incidents().get(duty.incident_id)
        if known is None and duty.incident_id:
            known = next(iter(self.store.incidents.history(duty.incident_id)[-1:]), None)
        out = list(takewhile(is_out, reversed(self.store.outages.history(node)))) or [duty]
        times = [i.since_ms for i in (*own.values(), *([] if known is None else [known]))]
        since_ms = max(now_ms - LOOKED_BACK_MS, min([out[-1].ts_ms, *times]) - BEFORE_MS)
        faults = faults_of(self.store.events.received(node, since_ms))
        if not faults:
            return None
        reset_ms: dict[int | None, int] = {}

        def note(gpu: int | None, at_ms: int) -> None:
            reset_ms[gpu] = max(at_ms, reset_ms.get(gpu, 0))

        for action in self.store.actions.newest(node=node, acts=RESETS, since_ms=faults[0].at_ms):
            if action.state is ActionState.DONE:
                note(None, action.ts_ms)
        for incident in own.values():  # its detector saw the GPU reset
            if incident.closed_ms is not None and XID in incident.detectors and not was_absorbed(incident):
                note(incident.gpu, incident.closed_ms)
        for gpu, at_ms in ({} if now is None else now.reset_ms).items():
            note(gpu, at_ms)
        return remedy_lack(faults, self.store.inventories.boots(node, faults[0].at_ms - BOOTS_MS), reset_ms)

    def _rejected(self, incident: Incident) -> bool:
        """A person has said that its node is not to go for it."""
        told = self.store.decisions.of_incident(incident.id)
        return bool(told) and told[-1].outcome == "rejected"
