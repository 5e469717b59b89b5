"""Repair tickets, resets and reboots: programs of the operator's, off unless configured.

They get one JSON object on stdin, with the keys of `payload`, and end with 0 (done), 75 (EX_TEMPFAIL of sysexits.h: try
again later) or anything else (failed). What they print last is kept as the action's detail. Nobody can tell whether one
that was running when the collector was killed has done its work: it is not run again, and that is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from drover_collector.actions.base import (
    ActError,
    AwayError,
    CheckLease,
    LaterError,
    NodeState,
    Result,
    own_mark,
    reason_of,
)
from drover_collector.actions.run_program import Ran, run
from drover_collector.actions.settings import ActConfig
from drover_core.model.events import Act, Action

TRY_AGAIN = 75


def payload(action: Action) -> dict[str, Any]:
    """Return what a program gets. `id` is the same when the same action is tried again."""
    return {
        "version": 1, "act": action.action.value, "id": action.id, "node": action.node, "mark": own_mark(action),
        "why": action.why, "reason": reason_of(action), "by": action.by, "before": action.before,
    }  # fmt: skip


def ended(program: Sequence[str], ran: Ran) -> str:
    """What it printed last. Raises LaterError, ActError: by its exit status."""
    if ran.status == TRY_AGAIN:
        raise LaterError(f"{program[0]} asks to be tried again: {ran.said}")
    if ran.status:
        raise ActError(f"{program[0]} ended with {ran.status}: {ran.said}")
    return (ran.out.strip().splitlines() or ["done"])[-1][:500]


class Commands:
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
        raise ActError(f"nobody can tell from a command how {node} is")

    def observe_all(self, nodes: Sequence[str]) -> Mapping[str, NodeState]:  # noqa: ARG002  # likewise
        return {}

    def survey(self, nodes: Sequence[str]) -> None:  # noqa: ARG002  # likewise
        return None
