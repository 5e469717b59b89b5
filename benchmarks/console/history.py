"""What a fleet went through before today, written into its store as a collector writes it: some closed incidents of the
last weeks, and the whole story of a node that was drained last Tuesday and came back the day after.

    python -m console.history chdb:///path/to/store        while no collector has it open
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    Decision,
    Evidence,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    Note,
    ProbeOrder,
    ProbeReason,
    ProbeVerdict,
    RecommendedAction,
    Severity,
)

NODE, GPU = "r02n07", 3  # drained last Tuesday
RISKY = ("r03n02", 6)  # failed again and again, and is well now
NIGHT = ("r03n05", 2)  # had a fault at 03:12 of last night, where its people are
ZONE = ZoneInfo("Europe/Berlin")
BY = "alex@example.com (console)"
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


def last_tuesday(now: datetime) -> datetime:
    """9:12 UTC of the newest Tuesday before today."""
    back = (now.weekday() - 1) % 7 or 7
    return (now - timedelta(days=back)).replace(hour=9, minute=12, second=0, microsecond=0)


def last_night(now: datetime) -> datetime:
    """The newest 03:12 in `ZONE` that is an hour past."""
    local = now.astimezone(ZONE)
    night = local.replace(hour=3, minute=12, second=0, microsecond=0)
    return night if local - night > timedelta(hours=1) else night - timedelta(days=1)


def _incident(
    id_: str, node: str, gpu: int, at_ms: int, lasted_ms: int, xid: str, what: str, lost: float, waited: float
) -> Incident:
    return Incident(
        id_, IncidentKind.XID, f"xid_{xid}", "gpu", node, gpu, ((node, gpu),), at_ms + 1_000, at_ms, at_ms + lasted_ms,
        Severity.CRITICAL, 0.97, RecommendedAction.DRAIN, f"GPU {gpu} of node {node}: {what} (XID {xid})",
        "Drain the node, reset the GPU; if it comes again, have the board replaced.",
        (Evidence(f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=4711, name=python", from_ms=at_ms, to_ms=at_ms),),
        (Note(at_ms + 1_000, "reported"), Note(at_ms + lasted_ms, "closed: the node came back and passed its probes")),
        ("xid",), "job-0990", lost, waited, 2, at_ms + lasted_ms,
    )  # fmt: skip


def write(store: Store, now: datetime) -> None:
    now_ms = round(now.timestamp() * 1000)
    at_ms = round(last_tuesday(now).timestamp() * 1000)
    back_ms = at_ms + DAY_MS + 2 * HOUR_MS
    story = _incident("7ue5da1fa11e", NODE, GPU, at_ms, back_ms - at_ms, "79", "has fallen off the bus", 24 * 8.0, 31.5)
    incidents = [story]
    for number, days in enumerate((2, 4, 6, 11, 19)):  # the risky node's own
        what = "row remapper failure" if number % 2 else "uncontained memory error"
        incidents.append(
            _incident(
                f"r15c{number:08x}", *RISKY, now_ms - days * DAY_MS, 3 * HOUR_MS, "64" if number % 2 else "95", what,
                24.0, 6.0 * number,
            )
        )  # fmt: skip
    night_ms = round(last_night(now).timestamp() * 1000)
    incidents.append(
        _incident("7165705a0312", *NIGHT, night_ms, 40 * MINUTE_MS, "94", "contained memory error", 0.7, 0.0)
    )
    store.incidents.write(incidents)
    decision = Decision(
        "7ue5d0001", story.id, at_ms + 2_000, NODE, RecommendedAction.DRAIN, "approve", "pending_approval",
        "critical XID, memory or link", f"asks a person to drain {NODE}",
    )  # fmt: skip
    answered = Decision(
        decision.id,
        story.id,
        at_ms + 4 * MINUTE_MS,
        NODE,
        RecommendedAction.DRAIN,
        "approve",
        "approved",
        decision.rule,
        f"approved by {BY}: its job has ended",
    )
    store.decisions.write([decision, answered])
    store.audit.write(
        [Audit("7ue5a0001", answered.ts_ms, BY, "approve", story.id, "its job has ended", f"drain {NODE}")]
    )
    store.actions.write(
        [
            Action(
                "7ue5ac001", decision.id, story.id, NODE, Act.DRAIN, "command", ActionState.DONE,
                answered.ts_ms + 2_000, "drain noted", attempts=1, why=story.summary,
            ),
            Action(
                "7ue5ac002", "", story.id, NODE, Act.RESUME, "command", ActionState.DONE, back_ms, "resume noted",
                attempts=1, why="validation passed",
            ),
        ]
    )  # fmt: skip
    order = ProbeOrder(
        "7ue5pr001", NODE, (), "standard", (), ProbeReason.REPAIRED, "done", back_ms - 5 * MINUTE_MS, story.id
    )
    store.probes.orders.write([order])
    store.probes.verdicts.write(
        [
            ProbeVerdict(
                order.id, NODE, None, True, "", "all 14 probes of 8 GPUs are as they should be",
                back_ms - MINUTE_MS, ProbeReason.REPAIRED, story.id,
            )
        ]
    )  # fmt: skip
    stages = (
        (Health.DRAINING, answered.ts_ms + 1_000, story.summary),
        (Health.DRAINED, answered.ts_ms + 2_000, "no job ran"),
        (Health.REPAIR, at_ms + 3 * HOUR_MS, "board reseated, ticket 4471"),
        (Health.VALIDATING, back_ms - 5 * MINUTE_MS, "repaired: probes were asked for"),
        (Health.HEALTHY, back_ms, "validation passed"),
    )  # fmt: skip
    store.outages.write([NodeOutage(NODE, stage, ts_ms, story.id, reason) for stage, ts_ms, reason in stages])


def main() -> None:
    store = Store.open(sys.argv[1])
    try:
        write(store, datetime.now(UTC))
    finally:
        store.close()


if __name__ == "__main__":
    main()
