"""Past incidents decided again, by the policy in force and by each preset, beside each other (`policy_backtest`)."""

from __future__ import annotations

from drover_collector.api.snapshot import DAY_MS, ApiSnapshot
from drover_collector.policy.backtest import Backtest, backtest
from drover_collector.policy.policy import PRESETS, Policy
from drover_proto import fleet_pb2 as pb

DAYS = 7
KEPT_S = 60.0  # one answer for all who ask meanwhile
MOST = 1_000  # incidents, the newest
MOST_WORK = (
    20_000_000  # incidents times GPUs: each decision looks at the whole fleet's health, and detection goes first
)
SHOWN = 50  # nodes by name


def backtest_policies(facts: ApiSnapshot) -> pb.BacktestReply:
    """The last DAYS days; nodes of jobs of the past are not known, so the cap of a job's nodes is left out."""
    return facts.once("backtest", KEPT_S, lambda: _made(facts))


def _made(facts: ApiSnapshot) -> pb.BacktestReply:
    index, now_ms = facts.index, facts.now_ms()
    since_ms = now_ms - DAYS * DAY_MS
    known = sorted((i for i in facts.incidents(since_ms) if i.opened_ms >= since_ms), key=lambda i: (i.opened_ms, i.id))
    found = known[-min(MOST, max(1, MOST_WORK // max(1, index.gpu_count))) :]
    present = facts.pipeline.policy
    reply = pb.BacktestReply(
        incidents=len(found), total=len(known), since_ms=since_ms if len(found) == len(known) else found[0].opened_ms
    )
    for policy in (present, *_others(present)):
        row = _row(backtest(index, found, policy, now_ms), policy)
        row.in_force = policy is present
        reply.policies.append(row)
    return reply


def _others(present: Policy) -> list[Policy]:
    """Presets that decide otherwise."""
    presets = [Policy.load(None, name) for name in PRESETS]
    decides = (present.rules, present.guard, present.overrides)
    return [p for p in presets if (p.rules, p.guard, p.overrides) != decides]


def _row(found: Backtest, policy: Policy) -> pb.BacktestRow:
    nodes = list(dict.fromkeys(outage.node for outage in found.outages))
    return pb.BacktestRow(
        policy=policy.name, wanted=dict(found.wanted), nodes=nodes[:SHOWN], nodes_out=len(nodes),
        times=len(found.outages), most_out=found.most_out, gpu_hours=found.gpu_hours,
        held=len({d.incident_id for d in found.held}), mass_events=found.mass_events,
    )  # fmt: skip
