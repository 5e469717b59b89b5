"""The stages of a node that Drover takes out of service: pure steps, and what the outage costs.

draining     no new work; jobs may still run
drained      its jobs are gone
validating   probes run
repair       probes failed: a person must act, or a ticket
healthy      back in service, or somebody else keeps it out now: `reason` says which
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from drover_collector.actions.base import HAND, NodeState, Service, own_mark
from drover_core.model.events import (
    Act,
    Action,
    Health,
    NodeOutage,
    ProbeVerdict,
    WaitsFor,
    Withheld,
)

OUT = frozenset({Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR})
IDLE = frozenset({Health.DRAINED, Health.VALIDATING, Health.REPAIR})  # no job runs there
CLOSINGS = frozenset({Act.DRAIN, Act.ISOLATE})  # acts that take a node out
RESETS = frozenset({Act.RESET, Act.REBOOT})
ITSELF = "drover"  # the author of what Drover does on its own; no person has this name
SOMEBODY = "somebody else"
DAY_MS = 86_400_000
HOUR_MS = 3_600_000


def is_out(outage: NodeOutage | None) -> bool:
    return outage is not None and outage.stage in OUT


def taken_out(action: Action, before: NodeOutage | None, now_ms: int, return_days: float) -> NodeOutage:
    """Return the first stage of a node that `action` has closed.

    One that came back less than `return_days` ago gets a count and a sentence that says so.
    """
    returns, reason = 0, action.why
    if before is not None and before.stage is Health.HEALTHY and now_ms - before.ts_ms < return_days * DAY_MS:
        returns = before.returns + 1
        times = "" if returns == 1 else f", for the {returns}. time"
        days = (now_ms - before.ts_ms) / DAY_MS
        reason = f"out again {days:.1f} days after it came back{times}: {reason}"
    return NodeOutage(action.node, Health.DRAINING, now_ms, action.incident_id, reason, action.by, returns)


def moved(outage: NodeOutage, stage: Health, now_ms: int, reason: str, **changes: Any) -> NodeOutage:
    """Return the next stage of a node that is out. What it waited for before no longer counts."""
    fresh: dict[str, Any] = {"waits_for": WaitsFor.NOTHING, "withheld": Withheld.NO, "incidents": ()}
    return replace(outage, stage=stage, ts_ms=now_ms, reason=reason, **(fresh | changes))


def seen(outage: NodeOutage, state: NodeState, now_ms: int) -> NodeOutage | None:
    """Return what the scheduler's state of the node changes; None: nothing."""
    if state.service is Service.IN:
        text = "put back in service by somebody else"
        return moved(outage, Health.HEALTHY, now_ms, text, by=SOMEBODY, asked_ms=0)
    if not state.out:
        return None  # down: its scheduler handles that
    if state.mark != own_mark(outage):
        text = f"taken over by {state.by or SOMEBODY}, who keeps it out: {state.reason or 'no reason given'}"
        return moved(outage, Health.HEALTHY, now_ms, text, by=state.by or SOMEBODY, asked_ms=0)
    if outage.stage is Health.DRAINING and state.service is Service.DRAINED:
        return replace(outage, stage=Health.DRAINED, ts_ms=now_ms)
    return None


def kept_by(outage: NodeOutage) -> str:
    """Return the person who drained it by hand and has not asked for its return since; "": nobody."""
    return "" if outage.by == ITSELF else outage.by


def drained_too(outage: NodeOutage, by: str, why: str, now_ms: int) -> NodeOutage | None:
    """Return the outage after a person drains what is out already: from then on only people put it back.

    None: nothing changes, as for one that waits for people anyway.
    """
    if kept_by(outage) or outage.stage is Health.REPAIR:
        return None
    stage = Health.DRAINED if outage.stage is Health.VALIDATING else outage.stage
    reason = f"{why}; out before that: {outage.reason}"
    return replace(
        outage, stage=stage, ts_ms=now_ms, by=by, reason=reason, asked_ms=0, waits_for=WaitsFor.NOTHING
    )  # fmt: skip


def adopted(state: NodeState, now_ms: int) -> NodeOutage | None:
    """Return the outage of a node that a mark of Drover closes and that is unknown here; None: it has none.

    It waits for a person: nobody here knows why it went out, so probes may miss the cause.
    """
    mark = state.mark if state.out else None
    if mark is None:
        return None
    text = (
        f"not validated: it was found closed by Drover ({state.reason}), and this store knows nothing of it: lost, or"
        f" set back? drover resume {state.node} --why ... has it probed and put back"
    )
    incident = "" if mark == HAND else mark
    return NodeOutage(state.node, Health.DRAINING, now_ms, incident, text, "drover", withheld=Withheld.REVIEW)


def judged(outage: NodeOutage, verdicts: Iterable[ProbeVerdict], now_ms: int) -> NodeOutage | None:
    """Return the outage after its validation: repair, or drained if no verdict is clear; None: it passed."""
    listed = list(verdicts)
    failed = [v.text for v in listed if v.passed is False]
    if failed:
        return moved(outage, Health.REPAIR, now_ms, "; ".join(failed))
    unclear = [v.text for v in listed if v.passed is None]
    if unclear or not listed:
        return unjudged(outage, "; ".join(unclear) or "no verdict came", now_ms)
    return None


def unjudged(outage: NodeOutage, why: str, now_ms: int) -> NodeOutage:
    """Return the outage of a node that probes could not judge: a person must look at it.

    `why` is a sentence without its full stop.
    """
    return moved(outage, Health.DRAINED, now_ms, f"not validated: {why}", withheld=Withheld.REVIEW)


def gpu_hours_lost(history: Sequence[NodeOutage], gpus: int, now_ms: int) -> float:
    """Return the GPU-hours that a node did not work while out: from when its jobs were gone until it was back, or now.

    While it drains its jobs still work; GPUs that idle meanwhile are not counted.

    Args:
        history: the node's outages, oldest first; gpus: how many it has.
    """
    ends = [*(outage.ts_ms for outage in history[1:]), now_ms][: len(history)]
    out_ms = sum(max(0, end - o.ts_ms) for o, end in zip(history, ends, strict=True) if o.stage in IDLE)
    return out_ms / HOUR_MS * gpus
