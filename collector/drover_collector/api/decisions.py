"""Decisions as people see and answer them, the audit history, and the policy with the guard's state."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import string
from collections.abc import Sequence

import grpc

from drover_collector.actions.node_outage import ITSELF
from drover_collector.api.snapshot import (
    DAY_MS,
    ApiSnapshot,
    RefusalError,
    bad_argument,
    not_found,
)
from drover_collector.auth.identity import Identity, Role
from drover_collector.policy.backtest import Backtest, backtest
from drover_collector.policy.policy import PRESETS, Policy
from drover_collector.store import Store
from drover_core.model.events import (
    OUT_STAGES,
    Action,
    ActionState,
    Approval,
    Audit,
    Decision,
    Health,
    NodeOutage,
    RecommendedAction,
    Withheld,
    to_json,
)
from drover_proto import fleet_pb2 as pb

SINCE_MS = 7 * DAY_MS
AUDIT_MS = 30 * DAY_MS
LIMIT = 100
AUDIT_LIMIT = 200
MOST = 10_000
WHY_CHARS = 500
OUTCOMES = ("would_act", "held", "pending_approval", "approved", "rejected", "expired", "act")
NAMED = 5
RETURN = "return to service"  # in place of a rule's name
ANSWERS = ("approved", "rejected")  # outcomes that are in the audit already
BACKTEST_DAYS = 7
BACKTEST_FRESH_S = 60.0  # one answer for all callers meanwhile
BACKTEST_INCIDENTS = 1_000  # incidents, the newest
BACKTEST_WORK = 20_000_000  # incidents x GPUs: each decision reads the whole fleet's health; detection goes first
BACKTEST_NODES = 50  # nodes by name


def may_answer(caller: Identity | None) -> bool:
    """Return True if a caller may approve and reject; without TLS every local user may."""
    return caller is None or caller.role in (Role.OPERATOR, Role.ADMIN)


def named(caller: Identity | None, who: str) -> str:
    """Return who acts: the certificate's name, and before it the person's name as the console sent it."""
    name = "a local user" if caller is None else caller.name
    if who.strip():
        printable = "".join(c if c.isprintable() else " " for c in who)  # no character may reverse the text after it
        return f"{' '.join(printable.split())[:80]} ({name})"
    return f"{name} (a certificate)" if name == ITSELF else name


def list_decisions(facts: ApiSnapshot, request: pb.DecisionsRequest, may: bool) -> pb.DecisionList:
    if request.outcome and request.outcome not in OUTCOMES:
        raise bad_argument(f"outcome {request.outcome!r}: give one of {', '.join(OUTCOMES)}")
    since_ms = request.since_ms or facts.now_ms() - SINCE_MS
    limit = min(request.limit or LIMIT, MOST)
    waiting = {d.id: d for d in pending(facts)} if request.outcome in ("", "pending_approval") else {}
    found = facts.store.decisions.newest(since_ms, request.outcome, limit)
    # A decision that the engine no longer asks about does not wait, even if the store says so after a crash.
    rest = [d for d in found if d.id not in waiting and d.outcome != "pending_approval"]
    shown = [*waiting.values(), *rest][:limit]
    return pb.DecisionList(decisions_json=[to_json(d) for d in shown], may_answer=may)


def pending(facts: ApiSnapshot) -> list[Decision]:
    """Return the decisions that wait for a person, the newest first."""
    standing = list(facts.pipeline.engine.decider.standing.copy().values())
    return sorted((d for d in standing if d.outcome == "pending_approval"), key=lambda d: (-d.ts_ms, d.id))


def answer(facts: ApiSnapshot, request: pb.Answer, approved: bool, by: str) -> pb.Answered:
    """Apply a person's answer, and return the decisions that follow.

    Raises:
        RefusalError: no reason, no such decision, one that no longer waits, or this collector does not decide.
    """
    why = " ".join(request.why.split())
    if not why:
        raise bad_argument("why is empty; say in a few words why, for those who read it later")
    if len(why) > WHY_CHARS:
        raise bad_argument(f"why has {len(why)} characters; at most {WHY_CHARS}")
    if not facts.pipeline.leading:
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION, "this collector stands by; ask the active one, which decides"
        )
    decision = _waiting(facts, request.decision)
    now_ms = facts.now_ms()
    what = "approve" if approved else "reject"
    id_ = hashlib.blake2b(f"{decision.id} {what} {by} {now_ms}".encode(), digest_size=8).hexdigest()
    line = Audit(id_, now_ms, by, what, decision.incident_id, why, f"{decision.wanted} {decision.node} ({decision.id})")
    outcome = facts.pipeline.answer(Approval(decision.id, now_ms, by, approved, why), line)
    if not any(d.outcome in ("approved", "rejected") for d in outcome.decisions):
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION, f"decision {decision.id} no longer waits; nothing was done"
        )
    return pb.Answered(decisions_json=[to_json(d) for d in outcome.decisions])


def _waiting(facts: ApiSnapshot, beginning: str) -> Decision:
    if not beginning or set(beginning) - set(string.hexdigits):
        raise bad_argument(f"{beginning!r} is no decision id; `drover decisions` lists them")
    found = [d for d in pending(facts) if d.id.startswith(beginning) or d.incident_id == beginning]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(d.id for d in found[:NAMED])
        raise bad_argument(f"{beginning!r} begins {len(found)} ids: {some}; give more of it")
    known = [d for d in facts.store.decisions.newest(0, limit=MOST) if d.id.startswith(beginning)]
    if known and known[0].outcome == "pending_approval":
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"decision {known[0].id} has been replaced by a newer one; `drover decisions` lists those that wait",
        )
    if known:
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"decision {known[0].id} does not wait for an answer, it is {known[0].outcome}: {known[0].reason}",
        )
    raise not_found(f"no decision {beginning!r} waits for an answer; `drover decisions` lists them")


def list_audit(facts: ApiSnapshot, request: pb.AuditRequest) -> pb.AuditList:
    since_ms = request.since_ms or facts.now_ms() - AUDIT_MS
    limit = min(request.limit or AUDIT_LIMIT, MOST)
    found = facts.store.audit.read(since_ms, request.subject, limit)
    if request.whole:
        found += automatic_audit(facts.store, since_ms, request.subject, limit)
        found = sorted(found, key=lambda line: (-line.ts_ms, line.id))[:limit]
    return pb.AuditList(audit_json=[to_json(line) for line in found])


def _withheld(duties: Sequence[NodeOutage], mode: str) -> list[Decision]:
    """Return the returns to service that are withheld though their probes passed."""
    return [
        Decision(
            f"return {d.node}", d.incident_id, d.ts_ms, d.node, RecommendedAction.NONE, mode, "held", RETURN, d.reason
        )
        for d in duties
        if d.withheld is Withheld.QUIET or (d.passed_before and d.stage is Health.VALIDATING)
    ]


def get_policy(facts: ApiSnapshot, may: bool) -> pb.PolicyState:
    pipeline = facts.pipeline
    policy, decider = pipeline.policy, pipeline.engine.decider
    content = {
        "guard": dataclasses.asdict(policy.guard),
        "rules": [dataclasses.asdict(rule) for rule in policy.rules],
        "overrides": [dataclasses.asdict(override) for override in policy.overrides],
        "approval_expires_s": policy.approval_expires_s,
        "approval_again_s": policy.approval_again_s,
    }
    standing = list(decider.standing.copy().values())
    taken = {node for at_ms, node in decider.pace.taken.copy() if facts.now_ms() - at_ms < 3_600_000}
    duties = sorted((d for d in dict(decider.duties).values() if d.stage in OUT_STAGES), key=lambda d: d.node)
    held = [*(d for d in standing if d.outcome == "held"), *_withheld(duties, policy.mode)]
    return pb.PolicyState(
        name=policy.name,
        mode=policy.mode,
        ceiling=pipeline.ceiling,
        policy_json=json.dumps(content),
        breaker_json=[to_json(i) for i in decider.breaker.events.copy().values() if i.closed_ms is None],
        out=sorted(decider.out()),
        taken_in_hour=len(taken),
        pending_json=[to_json(d) for d in pending(facts)],
        held_json=[to_json(d) for d in held],
        trouble=pipeline.ticks.troubles.get("policy", ""),
        duties_json=[to_json(d) for d in duties],
        may_answer=may,
        opens_tickets=_opens_tickets(facts),
    )


def automatic_audit(store: Store, since_ms: int, subject: str, limit: int) -> list[Audit]:
    """Return what Drover did by itself, of all or of one incident, node or decision: the newest `limit`.

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
    return [*map(_decision_line, decisions), *map(_action_line, ended)]


def _decision_line(d: Decision) -> Audit:
    what = f"{d.outcome.replace('_', ' ')}: {d.wanted} {d.node}".strip()
    return Audit(
        f"decision {d.id} {d.ts_ms}", d.ts_ms, ITSELF, what, d.incident_id, d.reason, f"{d.mode}, rule {d.rule}"
    )


def _action_line(a: Action) -> Audit:
    """Make an audit line of an action. A person's request is in the audit already, its later failure is not."""
    what = f"{a.action} {a.node}: {a.state}"
    return Audit(f"action {a.id}", a.ts_ms, a.by, what, a.incident_id or a.node, a.why, f"{a.actuator}: {a.detail}")


def backtest_policies(facts: ApiSnapshot) -> pb.BacktestReply:
    """Decide the last BACKTEST_DAYS again, by the policy in force and each preset, without the cap of a job's nodes:
    the nodes of past jobs are not known."""
    return facts.once("backtest", BACKTEST_FRESH_S, lambda: _backtest(facts))


def _backtest(facts: ApiSnapshot) -> pb.BacktestReply:
    index, now_ms = facts.index, facts.now_ms()
    since_ms = now_ms - BACKTEST_DAYS * DAY_MS
    known = sorted((i for i in facts.incidents(since_ms) if i.opened_ms >= since_ms), key=lambda i: (i.opened_ms, i.id))
    found = known[-min(BACKTEST_INCIDENTS, max(1, BACKTEST_WORK // max(1, index.gpu_count))) :]
    present = facts.pipeline.policy
    reply = pb.BacktestReply(
        incidents=len(found), total=len(known), since_ms=since_ms if len(found) == len(known) else found[0].opened_ms
    )
    for policy in (present, *_other_presets(present)):
        row = _backtest_row(backtest(index, found, policy, now_ms), policy)
        row.in_force = policy is present
        reply.policies.append(row)
    return reply


def _other_presets(present: Policy) -> list[Policy]:
    """Return the presets that decide differently."""
    presets = [Policy.load(None, name) for name in PRESETS]
    decides = (present.rules, present.guard, present.overrides)
    return [p for p in presets if (p.rules, p.guard, p.overrides) != decides]


def _backtest_row(found: Backtest, policy: Policy) -> pb.BacktestRow:
    nodes = list(dict.fromkeys(outage.node for outage in found.outages))
    return pb.BacktestRow(
        policy=policy.name, wanted=dict(found.wanted), nodes=nodes[:BACKTEST_NODES], nodes_out=len(nodes),
        times=len(found.outages), most_out=found.most_out, gpu_hours=found.gpu_hours,
        held=len({d.incident_id for d in found.held}), mass_events=found.mass_events,
    )  # fmt: skip


def _opens_tickets(facts: ApiSnapshot) -> bool | None:
    """Return whether a node in repair gets a ticket; None: this collector only observes."""
    dispatcher = facts.pipeline.dispatcher
    if dispatcher is None or dispatcher.context.config.mode == "observe":
        return None
    return dispatcher.opens_tickets
