"""What acts rightly, taken out again, one mend at a time: each must be found by the histories of `acting_history`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from drover_collector.actions import return_to_service as returning
from drover_collector.actions import worker
from drover_collector.actions.base import HAND, NodeState
from drover_collector.engine import engine
from drover_collector.engine import warmup as recall
from drover_collector.ingest import parse_records as records
from drover_collector.policy.decider import Decider
from drover_collector.policy.guard_clock import ClockSteps
from drover_core.model.events import Health, NodeOutage


@dataclass(frozen=True)
class Mutation:
    """`found`: the property that breaks without it, in `episode`. `puts`: (of what, its name, what is put there)."""

    name: str
    found: str
    episode: str
    puts: Sequence[tuple[Any, str, Any]]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for of, name, instead in self.puts:
                stack.enter_context(mock.patch.object(of, name, instead, create=not hasattr(of, name)))
            yield


def nothing(*_: object, **__: object) -> None:
    return None


def as_it_came(event: object, *_: object) -> object:
    return event


_census = Decider.census


def counted_too(self: Decider, fold: Any, incidents: Any, said: bool = False) -> Any:
    del said
    return _census(self, fold, incidents, said=True)


def none_closed() -> property:
    """Until schedulers have answered nobody counts as out."""

    def put(self: Decider, value: Any) -> None:
        self.__dict__["away"] = frozenset() if value is None else value

    return property(lambda self: self.__dict__.get("away", frozenset()), put)


def made_ours(state: NodeState, now_ms: int) -> NodeOutage:
    """A node that is found closed is Drover's to validate and put back, no matter who closed it."""
    return NodeOutage(
        state.node, Health.DRAINING, now_ms, "" if state.mark == HAND else state.mark or "", "closed", "drover"
    )


def is_no_error(*_: object) -> bool:
    return False


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("a late fault is history, whatever it waited for (2)", "a", "late", [
        (engine, "dealt_with", as_it_came), (recall, "dealt_with", as_it_came), (records, "is_error", is_no_error),
    ]),
    Mutation("a return needs the boot or reset that its fault needs (A2)", "b", "fault",
             [(returning.NodeReturns, "_remedy_lack", nothing)]),
    Mutation("a return needs values of every GPU, and no finding against it (A2)", "b", "fault",
             [(returning.NodeReturns, "_present_lack", nothing)]),
    Mutation("caps are unknown until each scheduler has answered (5)", "c", "unheard",
             [(Decider, "away", none_closed())]),
    Mutation("caps are asked again right before the effect (5)", "c", "meanwhile",
             [(worker.Worker, "_wait_for_guard", nothing)]),
    Mutation("a silent node that its scheduler reaches is not dead (10)", "a", "silent",
             [(Decider, "_is_dead", lambda *_: True)]),
    Mutation("what observe mode only said does not count against a person (A5)", "e", "trial",
             [(Decider, "census", counted_too)]),
    Mutation("a reset or reboot looks at the scheduler right before its effect (6)", "f", "job",
             [(worker.Worker, "_refuse_busy_node", nothing)]),
    Mutation("a person's drain is never made Drover's own (11)", "d", "lost", [
        (worker, "adopted", made_ours), (Decider, "away", none_closed()),  # else the first look has taken it up before
    ]),
    Mutation("a person who drains what is out keeps it", "d", "hand", [(worker, "drained_too", nothing)]),
    Mutation("the guard's times survive a step of the clock (12)", "c", "pace", [(ClockSteps, "note", nothing)]),
)  # fmt: skip
