"""How far a node is that was taken out of service: pure steps, and what being out costs.

draining     no new work; jobs may run on
drained      they are gone
validating   probes run
repair       they failed: a person, a ticket
healthy      back in service, or somebody else's matter now: `reason` says which
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from drover_collector.actions.base import HAND, NodeState, Service
from drover_core.model.events import (
    Health,
    NodeOutage,
    ProbeVerdict,
    WaitsFor,
    Withheld,
)

OUT = frozenset({Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR})
IDLE = frozenset({Health.DRAINED, Health.VALIDATING, Health.REPAIR})  # no job runs there
ITSELF = "drover"  # as whose what Drover does by itself is written down: no person is called so
SOMEBODY = "somebody else"
DAY_MS = 86_400_000
HOUR_MS = 3_600_000


def is_out(duty: NodeOutage | None) -> bool:
    return duty is not None and duty.stage in OUT


def mark_of_duty(duty: NodeOutage) -> str:
    """The mark in its scheduler's reason."""
    return duty.incident_id or HAND


def taken_out(
    node: str, mark: str, reason: str, by: str, before: NodeOutage | None, now_ms: int, return_days: float
) -> NodeOutage:
    """The first stage of a node. One that came back less than `return_days` ago is told apart, by number and word."""
    returns = 0
    if before is not None and before.stage is Health.HEALTHY and now_ms - before.ts_ms < return_days * DAY_MS:
        returns = before.returns + 1
        times = "" if returns == 1 else f", for the {returns}. time"
        days = (now_ms - before.ts_ms) / DAY_MS
        reason = f"out again {days:.1f} days after it came back{times}: {reason}"
    return NodeOutage(node, Health.DRAINING, now_ms, "" if mark == HAND else mark, reason, by, returns)


def moved(duty: NodeOutage, stage: Health, now_ms: int, reason: str, **changes: Any) -> NodeOutage:
    """The next step of a node that is out, for a reason of its own: what it waited for before is over."""
    fresh: dict[str, Any] = {"waits_for": WaitsFor.NOTHING, "withheld": Withheld.NO, "incidents": ()}
    return replace(duty, stage=stage, ts_ms=now_ms, reason=reason, **(fresh | changes))


def seen(duty: NodeOutage, state: NodeState, now_ms: int) -> NodeOutage | None:
    """What a look at the scheduler changes; None: nothing."""
    if state.service is Service.IN:
        text = "put back in service by somebody else"
        return moved(duty, Health.HEALTHY, now_ms, text, by=SOMEBODY, asked_ms=0)
    if not state.out:
        return None  # down: its scheduler looks after it
    if state.mark != mark_of_duty(duty):
        text = f"taken over by {state.by or SOMEBODY}, who keeps it out: {state.reason or 'no reason given'}"
        return moved(duty, Health.HEALTHY, now_ms, text, by=state.by or SOMEBODY, asked_ms=0)
    if duty.stage is Health.DRAINING and state.service is Service.DRAINED:
        return replace(duty, stage=Health.DRAINED, ts_ms=now_ms)
    return None


def kept_by(duty: NodeOutage) -> str:
    """The person who has drained it by hand and has not asked for its return since; "": nobody."""
    return "" if duty.by == ITSELF else duty.by


def drained_too(duty: NodeOutage, by: str, why: str, now_ms: int) -> NodeOutage | None:
    """A person drains what is out already: from then on only people put it back, whatever its probes show.

    None: nothing changes, as of one that waits for people anyway.
    """
    if kept_by(duty) or duty.stage is Health.REPAIR:
        return None
    stage = Health.DRAINED if duty.stage is Health.VALIDATING else duty.stage
    return replace(
        duty,
        stage=stage,
        ts_ms=now_ms,
        by=by,
        reason=f"{why}; out before that: {duty.reason}",
        asked_ms=0,
        waits_for=WaitsFor.NOTHING,
    )


def adopted(state: NodeState, now_ms: int) -> NodeOutage | None:
    """The duty of a node that is closed with a mark of ours, and that nothing here knows of; None: it has none.

    It waits for a person: why it went out is not known here, so that probes may not look for it.
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


def judged(duty: NodeOutage, verdicts: Iterable[ProbeVerdict], now_ms: int) -> NodeOutage | None:
    """The duty after its validation: repair, or drained when it could not be told; None: it passed."""
    listed = list(verdicts)
    failed = [v.text for v in listed if v.passed is False]
    if failed:
        return moved(duty, Health.REPAIR, now_ms, "; ".join(failed))
    untold = [v.text for v in listed if v.passed is None]
    if untold or not listed:
        return unjudged(duty, "; ".join(untold) or "no verdict came", now_ms)
    return None


def unjudged(duty: NodeOutage, why: str, now_ms: int) -> NodeOutage:
    """One that probes could not judge: a person must look at it. `why`: a sentence without its full stop."""
    return moved(duty, Health.DRAINED, now_ms, f"not validated: {why}", withheld=Withheld.REVIEW)


def gpu_hours_lost(history: Sequence[NodeOutage], gpus: int, now_ms: int) -> float:
    """GPU-hours that a node did not work while it was out: from when its jobs were gone until it was back (or now).

    While it drains its jobs still work; what of it is idle then is not counted.

    Args:
        history: the node's duties, oldest first; gpus: how many it has.
    """
    ends = [*(duty.ts_ms for duty in history[1:]), now_ms][: len(history)]
    out_ms = sum(max(0, end - d.ts_ms) for d, end in zip(history, ends, strict=True) if d.stage in IDLE)
    return out_ms / HOUR_MS * gpus
