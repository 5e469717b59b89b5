"""Past incidents decided again by the policy in force and each preset: which, of what, and how much of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drover_collector.api import decisions as api_decisions
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot
from drover_collector.policy.policy import PRESETS, Policy
from drover_core.model.events import Incident, RecommendedAction
from drover_proto import fleet_pb2 as pb
from testbed.deciding import fleet, incident, policy

NOW = 1_800_000_000_000
GONE = incident("n000", "xid_79", NOW - 3 * DAY_MS)
PROGRAM = incident("n001", "xid_31", NOW - 2 * DAY_MS, wanted=RecommendedAction.ADVISE)
CLOSED = {i.id: i.opened_ms + 3_600_000 for i in (GONE, PROGRAM)}


def asked(present: Policy, *incidents: Incident) -> pb.BacktestReply:
    facts = SimpleNamespace(
        index=fleet(64), now_ms=lambda: NOW, pipeline=SimpleNamespace(policy=present),
        incidents=lambda since_ms: [i for i in incidents if i.closed_ms is None or i.closed_ms >= since_ms],
        once=lambda _key, _seconds, make: make(),
    )  # fmt: skip
    return api_decisions.backtest_policies(cast(ApiSnapshot, facts))


def outcome_of(reply: pb.BacktestReply) -> dict[str, Any]:
    return {row.policy: (list(row.nodes), row.times, row.gpu_hours) for row in reply.policies}


def past(*incidents: Incident) -> list[Incident]:
    return [replace(i, closed_ms=CLOSED[i.id]) for i in incidents]


def test_each_policy_decides_the_same_incidents_its_own_way() -> None:
    reply = asked(policy("observe"), *past(GONE, PROGRAM))
    assert [row.policy for row in reply.policies if row.in_force] == ["test"]
    found = outcome_of(reply)
    assert list(found) == ["test", *PRESETS]
    assert found["test"] == (["n000"], 1, 1.0)
    assert found["strict"] == (["n000", "n001"], 2, 2.0)
    assert (reply.incidents, reply.total, reply.since_ms) == (2, 2, NOW - 7 * DAY_MS)


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_a_preset_that_is_in_force_stands_there_once(mode: str) -> None:
    present = replace(Policy.load(None, "strict"), name="ours", mode=mode)
    assert list(outcome_of(asked(present, *past(GONE)))) == ["ours", "nvidia", "cautious"]


def test_of_too_many_the_newest_are_decided_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_decisions, "BACKTEST_INCIDENTS", 1)
    reply = asked(policy(), *past(GONE, PROGRAM))
    assert (reply.incidents, reply.total, reply.since_ms) == (1, 2, PROGRAM.opened_ms)
    assert outcome_of(reply)["strict"] == (["n001"], 1, 1.0)


def test_what_opened_before_those_days_and_an_empty_week_decide_nothing() -> None:
    old = replace(GONE, opened_ms=NOW - 9 * DAY_MS)  # still open
    reply = asked(policy(), old)
    assert (reply.incidents, reply.total) == (0, 0)
    assert {row.nodes_out for row in reply.policies} == {0}
