"""The life of a decision: modes, approvals, what the guard holds back, and the same answers after a restart."""

from __future__ import annotations

import dataclasses

import pytest

from drover_collector.policy.decider import (
    AGAIN_MS,
    PERSON_MS,
    UNSEEN,
    Decider,
    LiveFleet,
)
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.policy import Rule
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Approval,
    Decision,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    RecommendedAction,
)
from testbed.deciding import OPEN, decide, fleet, folded, incident, policy

INDEX = fleet(32)
HOUR_MS = 3_600_000


def decider(mode: str = "enforce", ceiling: str = "enforce", **more: object) -> Decider:
    return Decider(INDEX, policy(mode, **more), ceiling)  # type: ignore[arg-type]  # as `policy` takes them


def answer(
    subject: Decider, decision: Decision, approved: bool, incidents: list[Incident], now_ms: int
) -> list[Decision]:
    given = Approval(decision.id, now_ms, "anna", approved, "seen the log")
    known = {i.id: i for i in incidents}
    return subject.answer(given, known, folded(INDEX, incidents, subject.duties), lambda _: {}, now_ms)[0]


@pytest.mark.parametrize(
    ("mode", "ceiling", "outcome"),
    [
        ("observe", "enforce", "would_act"), ("approve", "enforce", "pending_approval"), ("enforce", "enforce", "act"),
        ("enforce", "observe", "would_act"), ("enforce", "approve", "pending_approval"),
    ],
)  # fmt: skip
def test_what_comes_of_a_wish_in_each_mode_and_never_beyond_the_settings(mode: str, ceiling: str, outcome: str) -> None:
    made, events = decide(decider(mode, ceiling), [incident("n001")], 1000)
    assert [(d.outcome, d.node, d.wanted) for d in made] == [(outcome, "n001", RecommendedAction.DRAIN)]
    assert events == []


def test_when_the_scheduler_has_answered_the_guards_own_reason_is_shown() -> None:
    """At 3 a.m. nobody may look for a scheduler that is well."""
    subject = decider(guard=dataclasses.replace(OPEN, fleet_nodes=1))
    subject.away = None
    first, _ = decide(subject, [incident("n001")], 1000)
    assert [(d.outcome, d.reason) for d in first] == [("held", UNSEEN)]
    assert decide(subject, [incident("n001")], 2000)[0] == []
    subject.away = {"n000"}
    second, _ = decide(subject, [incident("n001")], 3000)
    assert [d.outcome for d in second] == ["held"]
    assert second[0].reason.startswith("2 of 32 nodes of the fleet would be out")


def test_nothing_is_decided_twice() -> None:
    subject = decider()
    assert len(decide(subject, [incident("n001")], 1000)[0]) == 1
    assert decide(subject, [incident("n001")], 2000)[0] == []


def test_a_probe_waits_for_nobody_and_passes_the_guard() -> None:
    slow = incident("n001", "clock", kind=IncidentKind.STRAGGLER, wanted=RecommendedAction.PROBE)
    subject = decider("approve", guard=dataclasses.replace(OPEN, fleet_nodes=1))
    decide(subject, [incident("n000")], 1000)
    made, _ = decide(subject, [incident("n000"), slow], 2000)
    assert [(d.outcome, d.wanted) for d in made] == [("act", RecommendedAction.PROBE)]


def test_an_approval_acts_with_its_reason_and_keeps_the_id_of_the_question() -> None:
    subject, open_ = decider("approve"), [incident("n001")]
    (asked,), _ = decide(subject, open_, 1000)
    made = answer(subject, asked, True, open_, 5000)
    assert [d.outcome for d in made] == ["approved", "act"]
    assert made[0].id == asked.id
    assert made[1].id != asked.id
    assert all("approved by anna: seen the log" in d.reason for d in made)
    assert answer(subject, asked, True, open_, 6000) == []  # once
    assert decide(subject, open_, 7000)[0] == []


def test_what_was_approved_is_held_while_the_guard_says_no_and_acts_then() -> None:
    subject = decider("approve", guard=dataclasses.replace(OPEN, fleet_nodes=1))
    open_ = [incident("n001"), incident("n002", "remap_failed")]
    asked, _ = decide(subject, open_, 1000)
    assert [d.outcome for d in asked] == ["pending_approval", "pending_approval"]
    assert [d.outcome for d in answer(subject, asked[0], True, open_, 2000)] == ["approved", "act"]
    assert [d.outcome for d in answer(subject, asked[1], True, open_, 3000)] == ["approved", "held"]
    subject.take_duties({"n001": NodeOutage("n001", Health.HEALTHY, 9000, "n001-xid_79-0", "passed")})
    made, _ = decide(subject, open_[1:], 10_000)
    assert [(d.outcome, d.node) for d in made] == [("act", "n002")]


def test_a_rejection_stands_until_more_is_wanted() -> None:
    subject, open_ = decider("approve"), [incident("n001")]
    (asked,), _ = decide(subject, open_, 1000)
    (said,) = answer(subject, asked, False, open_, 2000)
    assert (said.outcome, said.id) == ("rejected", asked.id)
    assert decide(subject, open_, 100 * HOUR_MS)[0] == []
    worse = [dataclasses.replace(open_[0], action=RecommendedAction.ISOLATE)]
    assert [d.outcome for d in decide(subject, worse, 100 * HOUR_MS)[0]] == ["pending_approval"]


def test_a_question_expires_and_is_asked_again_later() -> None:
    subject, open_ = decider("approve", approval_expires_s=600.0, approval_again_s=3600.0), [incident("n001")]
    (asked,), _ = decide(subject, open_, 0)
    assert decide(subject, open_, 599_999)[0] == []
    (expired,), _ = decide(subject, open_, 600_000)
    assert (expired.outcome, expired.id) == ("expired", asked.id)
    assert answer(subject, asked, True, open_, 700_000) == []
    assert decide(subject, open_, 4_199_999)[0] == []
    (again,), _ = decide(subject, open_, 4_200_000)
    assert (again.outcome, again.id != asked.id) == ("pending_approval", True)


def test_a_question_about_what_is_over_is_withdrawn() -> None:
    subject = decider("approve")
    (asked,), _ = decide(subject, [incident("n001")], 1000)
    (gone,), _ = decide(subject, [], 2000)
    assert (gone.id, gone.outcome) == (asked.id, "expired")
    assert "over" in gone.reason


def test_what_a_person_put_back_goes_out_again_only_after_asking() -> None:
    subject = decider()
    subject.take_duties({"n001": NodeOutage("n001", Health.HEALTHY, 1000, "", "looks fine", by="anna")})
    assert [d.outcome for d in decide(subject, [incident("n001")], 2000)[0]] == ["pending_approval"]
    later = decider()
    later.take_duties({"n001": NodeOutage("n001", Health.HEALTHY, 1000, "", "looks fine", by="anna")})
    assert [d.outcome for d in decide(later, [incident("n001")], 1000 + PERSON_MS)[0]] == ["act"]


def test_a_node_whose_values_a_user_could_have_written_goes_out_only_after_asking() -> None:
    written_by_users = {"n001"}
    live = LiveFleet(unproven=lambda node: node in written_by_users)
    subject = Decider(INDEX, policy("enforce"), "enforce", live)
    found = [incident("n001"), incident("n005")]
    asked, done = decide(subject, found, 1000)[0]
    assert [(d.node, d.outcome) for d in (asked, done)] == [("n001", "pending_approval"), ("n005", "act")]
    assert "others than root could have written its values" in asked.reason
    assert decide(subject, found, 2000)[0] == [], "one question is enough"
    written_by_users.clear()  # its agent has come, which has not seen what the pages said
    assert decide(subject, found, 3000)[0] == []
    again = Decider(INDEX, policy("enforce"), "enforce", live)
    again.restore([asked, done], found)
    assert decide(again, found, 4000)[0] == [], "the question stands after a restart"
    new = incident("n001", "gpu_lost", 5000)
    assert [d.outcome for d in decide(subject, [*found, new], 5000)[0]] == ["act"], "of what its agent reports"
    written_by_users |= {"n001", "n005"}
    assert decide(subject, [*found, new], 6000)[0] == [], "what is done is not asked for"


@pytest.mark.parametrize("before", ["approve", "enforce"])
def test_a_question_about_values_of_others_outlives_a_policy_that_stops_asking(before: str) -> None:
    written_by_users = {"n001"}
    live = LiveFleet(unproven=lambda node: node in written_by_users)
    subject = Decider(INDEX, policy(before), "enforce", live)
    decide(subject, [incident("n001")], 1000)
    written_by_users.clear()
    subject.policy = policy("enforce")
    assert "act" not in [d.outcome for d in decide(subject, [incident("n001")], 2000)[0]]


def test_gpus_lost_on_nodes_in_repair_take_nothing_of_what_the_guard_allows() -> None:
    """A batch of them is reset at once. They are out for something else, and no more nodes go."""
    limits = dataclasses.replace(OPEN, mass_nodes=3, mass_window_s=300, per_hour=3)
    subject, nodes = decider(guard=limits), ("n001", "n005", "n009", "n013")
    duties = (NodeOutage(node, Health.REPAIR, 1000, f"{node}-remap_failed-0", "it failed") for node in nodes)
    subject.take_duties({duty.node: duty for duty in duties})
    lost = [incident(node, "gpu_lost", 2000) for node in nodes]
    made, events = decide(subject, lost, 2000)
    assert ([d.outcome for d in made], events) == (["act"] * 4, [])
    made, events = decide(subject, [*lost, incident("n017", at_ms=3000)], 3000)
    assert ([(d.outcome, d.node) for d in made], events) == ([("act", "n017")], [])


def test_a_stronger_policy_asks_for_more() -> None:
    subject, open_ = decider("observe"), [incident("n001")]
    decide(subject, open_, 1000)
    subject.policy = policy("enforce")
    assert [d.outcome for d in decide(subject, open_, 2000)[0]] == ["act"]


@pytest.mark.parametrize("mode", ["observe", "approve", "enforce"])
def test_after_a_restart_nothing_is_decided_again(mode: str) -> None:
    limits = dataclasses.replace(OPEN, fleet_nodes=2, mass_nodes=3, mass_window_s=60)
    open_ = [incident("n001"), incident("n005", "remap_failed"), incident("n009", "gpu_lost")]
    first = decider(mode, guard=limits)
    stored, _ = decide(first, open_, 1000)
    second = decider(mode, guard=limits)
    second.restore(stored, open_)
    assert second.standing == first.standing
    assert second.out() == first.out()
    assert decide(second, open_, 2000) == decide(first, open_, 2000) == ([], [])


def test_what_was_only_said_in_observe_mode_passes_the_guard_when_it_becomes_earnest() -> None:
    """A node that would be out is not out: neither a stronger mode nor a second incident may slip by with it."""
    limits = dataclasses.replace(OPEN, per_hour=2)
    subject, open_ = decider("observe", guard=limits), []
    for hour, node in enumerate(("n001", "n005", "n009", "n013")):
        open_.append(incident(node, f"xid_{hour}"))
        assert [d.outcome for d in decide(subject, open_, hour * HOUR_MS)[0]] == ["would_act"]
    subject.policy = policy("enforce", limits)
    made, _ = decide(subject, open_, 5 * HOUR_MS)
    assert [d.outcome for d in made] == ["act", "act", "held", "held"]
    assert subject.out() == {"n001", "n005"}


SAID = Rule("drain", "said", mode="observe", cause=("said",))
RULES = (SAID, Rule("drain", "rest"))


@pytest.mark.parametrize("limit", [{"fleet_nodes": 2}, {"per_hour": 2}], ids=["caps", "pace"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_rule_in_observe_mode_only_said_counts_against_nothing_that_is_done(
    limit: dict[str, int], restarted: bool
) -> None:
    """Two nodes would be out by one rule, and are not: another rule's fault is acted on all the same."""
    limits = dataclasses.replace(OPEN, **limit)  # type: ignore[arg-type]  # by name
    subject = decider("enforce", guard=limits, rules=RULES)
    said = [incident(node, "said") for node in ("n001", "n005", "n009")]
    made, _ = decide(subject, said, 1000)
    assert [d.outcome for d in made] == ["would_act", "would_act", "held"], "among themselves they count"
    assert subject.out() == {"n001", "n005"}, "shown as out if they were enforced"
    if restarted:
        first, subject = subject, decider("enforce", guard=limits, rules=RULES)
        subject.restore(first.standing.values(), said)
    open_ = [*said, *(incident(node) for node in ("n013", "n017", "n021"))]
    made, _ = decide(subject, open_, 2000)
    assert [(d.node, d.outcome) for d in made] == [("n013", "act"), ("n017", "act"), ("n021", "held")]


def test_what_is_done_counts_against_what_a_rule_in_observe_mode_says() -> None:
    subject = decider("enforce", guard=dataclasses.replace(OPEN, fleet_nodes=1), rules=RULES)
    made, _ = decide(subject, [incident("n001"), incident("n005", "said")], 1000)
    assert [d.outcome for d in made] == ["act", "held"]


def test_a_node_that_is_only_said_to_be_out_counts_when_it_is_taken_out_in_earnest() -> None:
    subject = decider("enforce", guard=dataclasses.replace(OPEN, fleet_nodes=1), rules=RULES)
    decide(subject, [incident("n001", "said")], 1000)
    made, _ = decide(subject, [incident("n001", "said"), incident("n001"), incident("n005")], 2000)
    assert [(d.node, d.outcome) for d in made] == [("n001", "act"), ("n005", "held")]


def test_an_answer_that_comes_too_late_does_nothing() -> None:
    """Nothing was judged meanwhile, so that the question still stood."""
    subject, open_ = decider("approve", approval_expires_s=600.0), [incident("n001")]
    (asked,), _ = decide(subject, open_, 0)
    made = answer(subject, asked, True, open_, 600_000)
    assert [(d.outcome, d.id) for d in made] == [("expired", asked.id)]
    assert "too late, approved by anna" in made[0].reason
    assert decide(subject, open_, 601_000)[0] == []


def test_an_approval_that_a_stop_left_counts_from_when_it_was_given() -> None:
    subject, open_ = decider("approve", approval_expires_s=600.0), [incident("n001")]
    (asked,), _ = decide(subject, open_, 0)
    given = Approval(asked.id, 1000, "anna", True, "yes")
    made, _ = subject.answer(given, {i.id: i for i in open_}, folded(INDEX, open_), lambda _: {}, 700_000)
    assert [d.outcome for d in made] == ["approved", "pending_approval"], "it is asked again"


def test_an_answer_never_goes_beyond_the_settings() -> None:
    subject, open_ = decider("approve"), [incident("n001")]
    (asked,), _ = decide(subject, open_, 1000)
    subject.ceiling = "observe"  # as after a restart with other settings
    assert [d.outcome for d in answer(subject, asked, True, open_, 2000)] == ["approved", "would_act"]


def test_nodes_that_others_took_out_count() -> None:
    """32 nodes; 3 of them may be out."""
    subject = decider(guard=dataclasses.replace(OPEN, fleet_ratio=0.1))
    subject.away = {"n000", "n001", "n002"}
    (held,), _ = decide(subject, [incident("n008")], 1000)
    assert held.outcome == "held"
    assert "4 of 32 nodes of the fleet would be out (at most 3 may be; 3 nodes" in held.reason
    theirs, _ = decide(subject, [incident("n001"), incident("n008")], 2000)
    assert [(d.node, d.outcome) for d in theirs] == [("n001", "act")], "it takes nothing more away"
    subject = decider(guard=dataclasses.replace(OPEN, fleet_ratio=0.1))
    subject.away = {"n000"}
    assert [d.outcome for d in decide(subject, [incident("n008")], 3000)[0]] == ["act"]


def test_dead_nodes_count() -> None:
    limits = dataclasses.replace(OPEN, rack_ratio=0.5)
    dead = [incident(n, "silent", kind=IncidentKind.LIVENESS, wanted=RecommendedAction.WATCH) for n in ("n000", "n001")]
    (held,), _ = decide(decider(guard=limits), [*dead, incident("n002")], 1000)
    assert (held.node, held.outcome) == ("n002", "held")
    assert "3 of 4 nodes of rack r0" in held.reason
    few = dataclasses.replace(OPEN, min_healthy_ratio=0.9)
    subject = decider(guard=few)
    subject.away = {f"n{n:03d}" for n in range(10, 14)}
    (held,), _ = decide(subject, [incident("n002")], 1000)
    assert "only 27 of 32 known nodes are healthy" in held.reason


@pytest.mark.parametrize(("count", "outcomes"), [(1, ["act"]), (2, ["held", "held"])])
def test_a_fleet_of_one_node_may_lose_it_and_one_of_two_sick_nodes_asks(count: int, outcomes: list[str]) -> None:
    subject = Decider(fleet(count), policy("enforce", GuardLimits()), "enforce")
    open_ = [incident(f"n{n:03d}") for n in range(count)]
    assert [d.outcome for d in decide(subject, open_, 10 * HOUR_MS)[0]] == outcomes


def failed(decision: Decision, at_ms: int, decision_id: str | None = None) -> Action:
    made_for = decision.id if decision_id is None else decision_id
    act = Act(decision.wanted.value)
    return Action("a1", made_for, decision.incident_id, decision.node, act, "slurm", ActionState.FAILED, at_ms, "away")


def test_what_failed_is_not_out_and_is_decided_again_an_hour_later_once_also_after_a_restart() -> None:
    first, open_ = decider(), [incident("n001")]
    stored, _ = decide(first, open_, 1000)
    first.take_failed([failed(stored[0], 5000)])
    second = decider()
    second.restore(stored, open_)
    second.take_failed([failed(stored[0], 5000)])
    for subject in (first, second):
        assert (subject.out(), subject.out(really=True)) == (set(), set())
        assert decide(subject, open_, 5000 + AGAIN_MS - 1)[0] == []
        (again,), _ = decide(subject, open_, 5000 + AGAIN_MS)
        assert (again.outcome, again.node, again.id != stored[0].id) == ("act", "n001", True)
        assert subject.out() == {"n001"}
        subject.take_failed([failed(stored[0], 5000)])  # reported again, of the one before
        assert decide(subject, open_, 5000 + 9 * AGAIN_MS)[0] == []


def test_what_failed_passes_the_guard_again() -> None:
    subject, open_ = decider(guard=dataclasses.replace(OPEN, fleet_nodes=1)), [incident("n001"), incident("n008")]
    made, _ = decide(subject, open_, 1000)
    assert [d.outcome for d in made] == ["act", "held"]
    subject.take_failed([failed(made[0], 2000)])
    (other,), _ = decide(subject, open_, 3000)
    assert (other.node, other.outcome) == ("n008", "act"), "what failed takes nothing of what may be out"
    (again,), _ = decide(subject, open_, 2000 + AGAIN_MS)
    assert (again.node, again.outcome) == ("n001", "held")


def test_what_failed_is_not_decided_again_when_it_is_over_or_its_node_out_anyway() -> None:
    subject, open_ = decider(), [incident("n001")]
    (made,), _ = decide(subject, open_, 1000)
    subject.take_failed([failed(made, 2000)])
    subject.away = {"n001"}
    assert decide(subject, open_, 2000 + AGAIN_MS)[0] == []
    subject.away = set()
    subject.take_duties({"n001": NodeOutage("n001", Health.DRAINED, 3000, "other", "cables")})
    assert decide(subject, open_, 2000 + AGAIN_MS)[0] == []
    subject.take_duties({})
    assert decide(subject, [], 2000 + AGAIN_MS)[0] == []
    assert subject.failed == {}


def test_what_failed_asks_again_when_the_yes_has_expired() -> None:
    subject, open_ = decider("approve", approval_expires_s=600.0), [incident("n001")]
    (asked,), _ = decide(subject, open_, 1000)
    _, act = answer(subject, asked, True, open_, 2000)
    subject.take_failed([failed(act, 3000)])
    assert [d.outcome for d in decide(subject, open_, 3000 + AGAIN_MS)[0]] == ["pending_approval"]


def test_an_action_that_failed_counts_for_a_later_decision_that_it_was_for_too_and_for_no_other() -> None:
    subject, open_ = decider(), [incident("n001")]
    (made,), _ = decide(subject, open_, 1000)
    subject.take_failed([failed(made, 999, "d0"), dataclasses.replace(failed(made, 2000, "d0"), action=Act.ISOLATE)])
    assert subject.out() == {"n001"}
    subject.take_failed([failed(made, 2000, "d0")])
    assert subject.out() == set()


def test_a_clock_that_went_back_holds_up_for_an_hour_at_most() -> None:
    subject, open_ = decider(), [incident("n001")]
    (made,), _ = decide(subject, open_, 1000)
    subject.take_failed([failed(made, 100 * HOUR_MS)])
    assert decide(subject, open_, HOUR_MS)[0] == []
    assert [d.outcome for d in decide(subject, open_, HOUR_MS + AGAIN_MS)[0]] == ["act"]


def test_what_somebody_else_had_taken_out_is_not_taken_out_when_they_put_it_back() -> None:
    subject, open_ = decider(), [incident("n001")]
    (made,), _ = decide(subject, open_, 1000)
    subject.take_failed([dataclasses.replace(failed(made, 2000), foreign=True)])
    assert subject.out() == set()
    assert decide(subject, open_, 2000 + 9 * AGAIN_MS)[0] == []
