"""Jobs whose node went out of service after they had time to save themselves: what they need not repeat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.ledger.facts import Facts
from drover_core.model.events import Act, Action, ActionState
from drover_core.model.saving import JobSave, sentence_of
from drover_proto import fleet_pb2 as pb

CLOSINGS = (Act.DRAIN, Act.ISOLATE)


@dataclass(frozen=True, slots=True)
class Move:
    """`save`: what the job answered before `action` was done."""

    action: Action
    asked_ms: int
    save: JobSave

    @property
    def moved(self) -> bool:
        """Whether the job stopped on this node: else it goes on there, and would have repeated nothing."""
        return self.action.action is Act.ISOLATE or self.save.left


def moves_of(facts: ApiSnapshot, from_ms: int, to_ms: int, job: str = "") -> list[Move]:
    """Return the moves of a time, the newest first. `job`: only of this one."""
    return [
        Move(action, action.saving.asked_ms, save)
        for action in reversed(facts.store.actions.newest(acts=CLOSINGS, since_ms=from_ms))
        if action.saving is not None and action.state is ActionState.DONE and from_ms <= action.saving.asked_ms < to_ms
        for save in action.saving.jobs
        if save.job and job in ("", save.job)
    ]


def messages(moves: Iterable[Move], facts: Facts) -> list[pb.JobMove]:
    return [_message(move, facts) for move in moves]


def _message(move: Move, facts: Facts) -> pb.JobMove:
    save = move.save
    reply = pb.JobMove(
        job=save.job, node=move.action.node, asked_ms=move.asked_ms, answer=_answer(save), text=sentence_of(save)
    )
    if move.moved and save.steps_kept is not None:
        reply.steps_kept = save.steps_kept
    gpus = _gpus(facts, save.job, move.asked_ms)
    if move.moved and save.kept_ms is not None and gpus:
        reply.kept_ms = save.kept_ms * gpus
    return reply


def _answer(save: JobSave) -> str:
    if not save.how:
        return "not asked"
    if save.saved_ms:
        return "saved"
    return "left" if save.left else "none"


def _gpus(facts: Facts, job: str, at_ms: int) -> int:
    """Return how many GPUs a job held then; 0: not known."""
    if job not in facts.jobs:
        return 0
    holds = facts.holds
    there = (holds.value == facts.jobs.index(job)) & (holds.from_ms <= at_ms) & (holds.to_ms > at_ms)
    return len(np.unique(holds.gpu[there]))
