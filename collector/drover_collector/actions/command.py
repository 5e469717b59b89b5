"""Any scheduler through a program of the operator's: JSON on stdin, an exit status and a line of JSON as the answer.

    {"version": 1, "act": "drain", "id": "...", "node": "...", "mark": "...", "why": "...", "reason": "...", ...}

Acts: advise, unadvise, drain, isolate, resume, and observe, which changes nothing. Exit status 0: done, or already
so; 75: not now, try again; else failed, with the last line of stderr as the reason. After 0 the last line of
stdout may be JSON: {"detail": "a sentence"}; of observe it must be
{"service": "in" | "draining" | "drained" | "down", "reason": "...", "by": "...", "jobs": ["..."]}.
Each act is to be idempotent (the same `id` may come again) and must leave alone what carries another mark; `reason`
begins with drover:MARK: and is to be kept where `observe` finds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from drover_collector.actions.base import (
    ACTS,
    ActError,
    AwayError,
    CheckLease,
    ForeignError,
    LaterError,
    NodeState,
    Result,
    Service,
    own_mark,
    reason_of,
)
from drover_collector.actions.run_program import Ran, run
from drover_collector.actions.settings import ActConfig, CommandConfig
from drover_core.model.events import Act, Action

TRY_AGAIN = 75


def payload(action: Action) -> dict[str, Any]:
    """Return what a program gets. `id` is the same when the same action is tried again."""
    return {
        "version": 1, "act": action.action.value, "id": action.id, "node": action.node, "mark": own_mark(action),
        "why": action.why, "reason": reason_of(action), "by": action.by, "before": action.before,
    }  # fmt: skip


def ended(program: Sequence[str], ran: Ran) -> str:
    """Return what it printed last. Raises LaterError, ActError: by its exit status."""
    if ran.status == TRY_AGAIN:
        raise LaterError(f"{program[0]} asks to be tried again: {ran.said}")
    if ran.status:
        raise ActError(f"{program[0]} ended with {ran.status}: {ran.said}")
    return (ran.out.strip().splitlines() or ["done"])[-1][:500]


class CommandActuator:
    name = "command"
    repeatable = True
    surveys = False
    acts = ACTS

    def __init__(self, config: CommandConfig) -> None:
        self._program, self._timeout_s = config.program, config.timeout_s

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        act = action.action
        if act not in self.acts:
            raise ActError(f"the command knows no {act}")
        if act in (Act.ADVISE, Act.UNADVISE):
            check_lease()
            return Result(_detail(self._call(payload(action))))
        state = self.observe(action.node)
        wanted_in = act is Act.RESUME
        if state.out and state.mark != own_mark(action) and (wanted_in or state.mark is None):
            raise ForeignError(
                f"it is {state.service} by {state.by or 'somebody else'} ({state.reason}): left unchanged"
            )
        if wanted_in and state.service is Service.IN:
            return Result("in service already")
        if act is Act.DRAIN and state.out:  # another mark stays: what a person drained is not made this incident's
            other = "" if state.mark == own_mark(action) else " for another incident"
            return Result(f"drained already{other}, with reason {state.reason!r}")
        check_lease()
        said = _detail(self._call(payload(action)))
        after = self.observe(action.node)
        if not (after.service is Service.IN if wanted_in else after.out and after.mark is not None):
            raise LaterError(f"the command said {said!r}, and the node is {after.service} ({after.reason!r})")
        return Result(said)

    def before(self, node: str) -> str:  # noqa: ARG002  # the program has to know
        return ""

    def observe(self, node: str) -> NodeState:
        said = self._call({"version": 1, "act": "observe", "node": node})
        try:
            answer = json.loads(said)
            jobs = answer.get("jobs")
            return NodeState(
                node, Service(answer["service"]), str(answer.get("reason", "")), str(answer.get("by", "")),
                None if jobs is None else tuple(str(job) for job in jobs),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ActError(
                f"the command's answer to observe is not as docs/how-to/own-scheduler.md says ({error}): {said[:200]!r}"
            ) from None

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:
        return {node: self.observe(node) for node in nodes}

    def survey(self, nodes: Sequence[str]) -> None:  # noqa: ARG002  # it would be a program for each
        return None

    def _call(self, request: Mapping[str, Any]) -> str:
        return ended(self._program, run(self._program, self._timeout_s, stdin=json.dumps(request)))


def _detail(said: str) -> str:
    try:
        answer = json.loads(said)
    except ValueError:
        return said
    return str(answer.get("detail", "done")) if isinstance(answer, dict) else said


class OperatorCommands:
    """Repair tickets, resets and reboots: programs of the operator, off unless configured.

    They get one JSON object on stdin, with the keys of `payload`, and end with 0 (done), 75 (EX_TEMPFAIL of
    sysexits.h: try again later) or another status (failed). The last line that they print is the action's detail.
    After the collector was killed nobody knows whether one has done its work: it does not run again, and that is
    reported.
    """

    name = "commands"
    repeatable = False
    surveys = False

    def __init__(self, config: ActConfig) -> None:
        programs = {
            Act.REPAIR: config.repair_command,
            Act.RESET: config.reset_command,
            Act.REBOOT: config.reboot_command,
        }
        self._programs = {act: program for act, program in programs.items() if program}
        self.acts = frozenset(self._programs)
        self._timeout_s = config.command_timeout_s

    def knows(self, act: Act) -> bool:
        return act in self._programs

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        act = action.action
        program = self._programs.get(act)
        if program is None:
            raise ActError(f"no command for it: set act.{act}_command in the collector's settings")
        check_lease()
        try:
            ran = run(program, self._timeout_s, stdin=json.dumps(payload(action)))
        except AwayError as error:  # to run it again might be a second ticket, or a second reboot
            raise ActError(f"{error}; it was killed: nobody knows whether it was done") from None
        return Result(ended(program, ran))

    def before(self, node: str) -> str:  # noqa: ARG002  # these change nothing that could be put back
        return ""

    def observe(self, node: str) -> NodeState:
        raise ActError(f"a command does not show the state of {node}")

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:  # noqa: ARG002  # a command has no such question
        return {}

    def survey(self, nodes: Sequence[str]) -> None:  # noqa: ARG002  # a command has no such question
        return None
