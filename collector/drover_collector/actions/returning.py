"""How a node comes back to service: validated, or by a person; and what holds a return back that has passed.

A pass speaks for what was known when its probes were asked for. What came since (`newer.py`) withholds the return: the
node is probed once more when nothing has come for a while, and then waits for a person. All of it is told by stored
duties, incidents, events and findings, so that a restart gives the same answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from drover_collector.actions.base import ActError
from drover_collector.actions.commands import Commands
from drover_collector.actions.duties import ITSELF, NOT_TOLD, WITHHELD, is_out, judged, kept_by
from drover_collector.actions.newer import CLOSES, newer
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.ticket import Ticket
from drover_collector.guard import may_resume
from drover_collector.store import Store
from drover_proto.events import Act, Action, Duty, Health, Incident, ProbeReason, ProbeVerdict

VALIDATIONS = (ProbeReason.VALIDATE, ProbeReason.REPAIRED)
QUIET_MS = 60_000  # nothing more may have come for so long before a node whose return was withheld is probed again


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
    duties: Mapping[str, Duty]
    validator: Validator | None
    _lock: threading.RLock

    @property
    def acting(self) -> bool:
        raise NotImplementedError  # the desk has it

    @property
    def _own(self) -> tuple[Commands | Ticket, ...]:
        raise NotImplementedError  # the desk has it

    def intend(self, node: str, act: Act, seed: str, incident: str, why: str, by: str, since_ms: int = 0) -> Action:
        raise NotImplementedError  # the desk has it

    def set_duty(self, duty: Duty) -> None:
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
        reason = ProbeReason.REPAIRED if duty.stage is Health.REPAIR else ProbeReason.VALIDATE
        self._validate(self.validator, duty, reason, by, why)
        return None, "probes were asked for; it is put back when it passes them"

    def validate(self, duty: Duty) -> None:
        """Ask for the probes of a node whose jobs are gone. Raises StoreError."""
        if self.validator is None or not self.config.validate or duty.reason.startswith(NOT_TOLD) or kept_by(duty):
            return
        if duty.reason.startswith(WITHHELD) and self._newer(duty.node, self.now_ms() - QUIET_MS):
            return
        self._validate(self.validator, duty, ProbeReason.VALIDATE, ITSELF, duty.reason)

    def _validate(self, validator: Validator, duty: Duty, why: ProbeReason, by: str, reason: str) -> None:
        now_ms = self.now_ms()
        try:
            order = validator.ask(duty.node, why, level=self.config.validate_level, incident_id=duty.incident_id, by=by)
        except ValueError as error:
            self.set_duty(replace(duty, ts_ms=self.now_ms(), stage=Health.DRAINED, reason=f"{NOT_TOLD}{error}"))
            return
        self.step("asked")
        first = next(iter(self.store.probe_order(order)), None)  # the same one may have been open for a while
        asked_ms = now_ms if first is None else first.ts_ms
        self.set_duty(  # whoever asks for it, its return is Drover's matter from here on
            replace(duty, ts_ms=self.now_ms(), stage=Health.VALIDATING, reason=reason, by=ITSELF, asked_ms=asked_ms)
        )

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

    def withheld(self, resume: Action, waiting: Sequence[Action]) -> str:
        """Why a return of Drover's own, which has passed, is not to be: asked right before its effect. "": it is.

        Args:
            waiting: what else is to be done to its node.
        Raises:
            StoreError.
        """
        duty = self.duties.get(resume.node)
        if resume.by != ITSELF or duty is None or not is_out(duty):
            return ""
        closing = next((a.by for a in waiting if a.action in (Act.DRAIN, Act.ISOLATE) and a.by != ITSELF), "")
        if person := kept_by(duty) or closing:
            return f"{WITHHELD}{person} drains it by hand; drover resume {resume.node} --why TEXT has it probed again"
        if not (found := self._newer(resume.node, duty.asked_ms or duty.ts_ms)):
            return ""
        since = f"it {resume.why}; but since its probes were asked for {found}"
        if duty.reason.startswith(WITHHELD):
            return f"{NOT_TOLD}{since}, as after the time before: a person must look"
        return f"{WITHHELD}{since}. It is probed again when nothing more comes"

    def _newer(self, node: str, since_ms: int) -> str:
        """What a pass of probes that were asked for then does not speak for. Raises StoreError."""
        mine = [i for i in self.incidents().values() if i.node == node and i.action in CLOSES]
        mine = [i for i in mine if not self._rejected(i)]
        if not mine:
            return ""
        store, to_ms = self.store, max(self.now_ms(), since_ms) + 1
        return newer(
            node, since_ms, mine, store.events_received(node, since_ms), store.findings(since_ms, to_ms, node=node)
        )

    def _rejected(self, incident: Incident) -> bool:
        """A person has said that its node is not to go for it."""
        told = self.store.decisions(incident.id)
        return bool(told) and told[-1].outcome == "rejected"
