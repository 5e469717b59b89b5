"""What Drover decided and did by itself, as lines of the audit history: made of the decisions and actions as stored."""

from __future__ import annotations

from drover_collector.actions.node_outage import ITSELF
from drover_collector.store import Store
from drover_core.model.events import (
    Action,
    ActionState,
    Audit,
    Decision,
)

ANSWERS = ("approved", "rejected")  # outcomes that stand in the audit as the answers they are


def own_deeds(store: Store, since_ms: int, subject: str, limit: int) -> list[Audit]:
    """Of all, or of one incident, node or decision; the newest where there are more than `limit` of either.

    Raises:
        StoreError: the store cannot be read.
    """
    decisions = [d for d in store.decisions.versions(since_ms, subject, limit) if d.outcome not in ANSWERS]
    if subject:
        found = {a.id: a for a in store.actions.newest(node=subject, since_ms=since_ms, limit=limit)}
        found |= {a.id: a for a in store.actions.newest(incident=subject, since_ms=since_ms, limit=limit)}
        actions = list(found.values())
    else:
        actions = store.actions.newest(since_ms=since_ms, limit=limit)
    ended = [a for a in actions if a.by == ITSELF or a.state in (ActionState.FAILED, ActionState.UNDONE)]
    return [*map(_decided, decisions), *map(_done, ended)]


def _decided(d: Decision) -> Audit:
    what = f"{d.outcome.replace('_', ' ')}: {d.wanted} {d.node}".strip()
    return Audit(
        f"decision {d.id} {d.ts_ms}", d.ts_ms, ITSELF, what, d.incident_id, d.reason, f"{d.mode}, rule {d.rule}"
    )


def _done(a: Action) -> Audit:
    """How it stands; one that a person asked for stands in the audit itself, but not how it failed later."""
    what = f"{a.action} {a.node}: {a.state}"
    return Audit(f"action {a.id}", a.ts_ms, a.by, what, a.incident_id or a.node, a.why, f"{a.actuator}: {a.detail}")
