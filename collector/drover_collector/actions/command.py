"""Any scheduler through a program of the operator's: JSON on stdin, an exit status and a line of JSON as the answer.

    {"version": 1, "act": "drain", "id": "...", "node": "...", "mark": "...", "why": "...", "reason": "...", ...}

Acts: advise, unadvise, drain, isolate, resume, and observe, which changes nothing. Exit status 0: done, or as it
was already; 75: not now, try again; else failed, with the last line of stderr as the reason. After 0 the last line of
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
    ForeignError,
    LaterError,
    NodeState,
    Order,
    Result,
    Service,
)
from drover_collector.actions.operator_commands import ended, payload
from drover_collector.actions.run_program import run
from drover_collector.actions.settings import CommandConfig
from drover_core.model.events import Act


class CommandActuator:
    name = "command"
    repeatable = True
    surveys = False
    acts = ACTS

    def __init__(self, config: CommandConfig) -> None:
        self._program, self._timeout_s = config.program, config.timeout_s

    def do(self, act: Act, order: Order) -> Result:
        if act not in self.acts:
            raise ActError(f"the command knows no {act}")
        if act in (Act.ADVISE, Act.UNADVISE):
            order.may()
            return Result(_detail(self._call(payload(act, order))))
        state = self.observe(order.node)
        wanted_in = act is Act.RESUME
        if state.out and state.mark != order.mark and (wanted_in or state.mark is None):
            raise ForeignError(
                f"it is {state.service} by {state.by or 'somebody else'} ({state.reason}): left as it is"
            )
        if wanted_in and state.service is Service.IN:
            return Result("in service already")
        if act is Act.DRAIN and state.out:  # another mark stays: what a person drained is not made this incident's
            other = "" if state.mark == order.mark else " for another incident"
            return Result(f"drained already{other}, with reason {state.reason!r}")
        order.may()
        said = _detail(self._call(payload(act, order)))
        after = self.observe(order.node)
        if not (after.service is Service.IN if wanted_in else after.out and after.mark is not None):
            raise LaterError(f"the command said {said!r}, and the node is {after.service} ({after.reason!r})")
        return Result(said)

    def before(self, node: str) -> str:  # noqa: ARG002  # the program has to know
        return ""

    def observe(self, node: str) -> NodeState:
        said = self._call({"version": 1, "act": "observe", "node": node})
        try:
            told = json.loads(said)
            jobs = told.get("jobs")
            return NodeState(
                node, Service(told["service"]), str(told.get("reason", "")), str(told.get("by", "")),
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

    def _call(self, told: Mapping[str, Any]) -> str:
        return ended(self._program, run(self._program, self._timeout_s, stdin=json.dumps(told)))


def _detail(said: str) -> str:
    try:
        told = json.loads(said)
    except ValueError:
        return said
    return str(told.get("detail", "done")) if isinstance(told, dict) else said
