"""What Drover may do: the policy, the guard and what it holds back, who is out, and what waits for a person."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import streamlit as st

from drover_core.model.events import (
    Decision,
    Incident,
    NodeOutage,
    RecommendedAction,
    from_json,
)
from drover_core.model.policy_what_if import describe_enforcement
from drover_dashboard import client
from drover_dashboard.pages import (
    approval_form as answering,
)
from drover_dashboard.pages import (
    policy_backtest as backtest_parts,
)
from drover_dashboard.server import signin
from drover_dashboard.widgets import address, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

SHOWN = 100
PARTS = ("fleet", "pool", "rack", "leaf", "job")
GUARD = {  # limits in words (docs/explanation/guard.md)
    "min_healthy_ratio": "Nothing more goes while fewer nodes are healthy than",
    "per_hour": "Nodes within an hour",
    "cooldown_s": "A node that came back is left alone for",
    "mass_nodes": "Breaker: nodes with one cause",
    "mass_ratio": "Breaker: or this share of the fleet",
    "mass_window_s": "Breaker: within",
    "gap_ratio": "Breaker: share of the fleet that falls silent",
    "quiet_s": "Breaker closes when no node has joined for",
}
LIST_PX, FIT = 320, 6  # of a table, and the rows that need no scrolling
DECISIONS = 2_000
EVERY_S = 5
NOTHING: Mapping[str, str] = MappingProxyType({})


@st.fragment(run_every=EVERY_S)
def show() -> None:
    who = view.viewer()
    answer = client.fleet().policy()
    view.trouble("policy", answer.trouble, answer.as_of_ms, who)
    state = answer.value
    if state is None:
        return
    with view.place():
        if state.trouble:
            view.notice("policy_file", "trouble", state.trouble)
        for text in state.breaker_json:
            _breaker(from_json(Incident, text), who)
    pending = answering.strongest_first([from_json(Decision, text) for text in state.pending_json])
    about = _summaries() if pending else {}
    # Before all else: somebody came here for it.
    person = signin.person()
    answers = state.may_answer and person is not None and person.may_act
    view.heading("Waits for a person")
    with view.place():
        if answers and pending:  # each has a form below, which says all of it
            answering.ask(pending, about)
        else:
            _decisions("pending", "Wanted", pending, who, "Nothing waits for a person.", about=about)
            if state.may_answer:
                answering.ask(pending, about)
    view.heading("Mode")
    _head(state)
    with view.place():
        enforced = _enforced(state, who)
    held = sorted((from_json(Decision, text) for text in state.held_json), key=lambda d: -d.ts_ms)
    view.heading("Held back, and what enforcing would have done")
    _held(held, who)
    with view.place():
        if enforced:
            _decisions("enforced", "Had it enforced", enforced, who, "", with_outcome=True)
    with view.place():
        backtest_parts.show(who)
    view.heading("Limits and rules")
    left, right = st.columns(2, gap="medium")
    policy: dict[str, Any] = json.loads(state.policy_json or "{}")
    with left:
        _out(state, who)
        _guard(policy.get("guard", {}))
    with right:
        if "rules" in policy:
            _rules(policy["rules"], state.mode)
            _overrides(policy.get("overrides", ()))
        else:
            view.notice("no_rules", "remark", "This collector does not report its rules (an older version).")


def _breaker(event: Incident, who: view.Viewer) -> None:
    said = f"The breaker is open {who.since(event.opened_ms)}: {event.summary}"
    view.notice(f"breaker_{event.id}", "trouble", f"{said}\n{event.advice}")


def _head(state: pb.PolicyState) -> None:
    ceiling = Cell(fmt.MODES.get(state.ceiling, state.ceiling), sub="act.mode of the settings")
    modes = list(fmt.MODES)  # the more is done, the later
    with view.place():
        if state.ceiling in modes and state.mode in modes[modes.index(state.ceiling) + 1 :]:
            most = state.ceiling
            said = f"The policy says {state.mode}, the settings (act.mode) {most}: no more than {most} is done."
            view.notice("lowered", "remark", said)
    facts = {
        "Policy": Cell(state.name, kind="strong"),
        "Mode": Cell(fmt.MODES.get(state.mode, state.mode)),
        "At most": ceiling,
        "Out of service": Cell(
            fmt.out_of_service(state.out, _duties(state)), sub=f"decided within the last hour: {state.taken_in_hour}"
        ),
        "Breaker": Cell("open: nothing more is taken out" if state.breaker_json else "closed: it stops nothing"),
    }
    rows = [Row((Cell(name, kind="faint"), cell)) for name, cell in facts.items()]
    table("policy_head", (Column(), Column(wrap=True)), rows, empty="")


def _decisions(
    key: str, title: str, found: Sequence[Decision], who: view.Viewer, empty: str, with_outcome: bool = False,
    about: Mapping[str, str] = NOTHING,
) -> None:  # fmt: skip
    """`about`: what is wrong, by incident."""
    rows = [
        Row(
            (
                Cell(who.clock(d.ts_ms), kind="faint", sub=d.outcome.replace("_", " ") if with_outcome else ""),
                Cell(_wish_for(d) if d.node else "go on with a mass event", sub=fmt.rule(d.rule)),
                _why(about.get(d.incident_id, ""), d.reason, who),
            ),
            id=d.incident_id,
            href=view.href(view.INCIDENTS, id=d.incident_id, state="all"),
        )
        for d in found
    ]
    columns = (Column(title), Column(), Column("Why", wrap=True))
    _open(table(f"policy_{key}", columns, rows, empty=empty, height=LIST_PX if len(rows) > FIT else None))


def _wish(wanted: RecommendedAction) -> str:
    """What is to be done to the node whose name follows."""
    return {RecommendedAction.NONE: "resume", RecommendedAction.ADVISE: "advise against"}.get(wanted, str(wanted))


def _wish_for(decision: Decision) -> str:
    return f"{_wish(decision.wanted)} {decision.node}" if decision.gpu is None else decision.what


def _why(wrong: str, reason: str, who: view.Viewer) -> Cell:
    return Cell(who.localize(wrong), sub=who.localize(reason)) if wrong else Cell(who.localize(reason))


def _summaries() -> dict[str, str]:
    """What is wrong, by open incident."""
    found = client.fleet().incidents("open").value
    incidents = [from_json(Incident, text) for text in found.incidents_json] if found else []
    return {i.id: i.summary for i in incidents}


def _open(incident: str | None) -> None:
    if incident:
        st.switch_page(view.INCIDENTS, query_params={"id": incident, "state": "all"})


def _held(held: Sequence[Decision], who: view.Viewer) -> None:
    """What is held for the same reason in one row: a mass event holds hundreds."""
    groups: dict[tuple[RecommendedAction, str, str], list[Decision]] = {}
    for decision in held:
        groups.setdefault((decision.wanted, decision.rule, decision.reason), []).append(decision)
    rows = [
        Row(
            (
                Cell(who.clock(found[0].ts_ms), kind="faint"),
                Cell(
                    _wish_for(found[0]) if len(found) == 1 else f"{_wish(wanted)} {_some([d.node for d in found])}",
                    sub=fmt.rule(rule),
                ),
                Cell(who.localize(reason)),
            ),
            id=found[0].incident_id,
            href=view.href(view.INCIDENTS, id=found[0].incident_id, state="all"),
        )
        for (wanted, rule, reason), found in list(groups.items())[:SHOWN]
    ]
    columns = (Column("Held back by the guard"), Column(wrap=True), Column("Why", wrap=True))
    _open(table("policy_held", columns, rows, empty="The guard holds nothing back."))


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _enforced(state: pb.PolicyState, who: view.Viewer) -> list[Decision]:
    """Says what would have happened by itself in the last 7 days, unless it did; the decisions that this is about."""
    if state.mode == state.ceiling == "enforce":
        return []
    answer = client.fleet().decisions(DECISIONS)
    if answer.value is None:
        view.trouble("decisions", answer.trouble, answer.as_of_ms, who)
        return []
    said, about = describe_enforcement(
        [from_json(Decision, text) for text in answer.value.decisions_json], "the last 7 days"
    )
    view.notice("enforced", "remark", said)
    return about[:SHOWN]


def _duties(state: pb.PolicyState) -> dict[str, NodeOutage]:
    return {duty.node: duty for duty in (from_json(NodeOutage, text) for text in state.duties_json)}


def _out(state: pb.PolicyState, who: view.Viewer) -> None:
    duties = _duties(state)
    rows = []
    for node in state.out[:SHOWN]:
        duty = duties.get(node)
        stage = view.health_cell(duty.stage) if duty else Cell("would be out", kind="faint")
        why = (
            f"{who.clock(duty.ts_ms)} {who.localize(duty.reason)}"
            if duty
            else "by a decision, in observe mode or about to be done"
        )
        rows.append(Row((Cell(node), stage, Cell(why)), id=node, href=view.href(view.NODE, node=node)))
    columns = (Column("Out of service"), Column(), Column(wrap=True))
    clicked = table("policy_out", columns, rows, empty="No node is out of service.")
    if clicked:
        st.switch_page(view.NODE, query_params={"node": clicked})


def _guard(limits: dict[str, Any]) -> None:
    free = [key for key, value in limits.items() if _limit(key, value) == NO_LIMIT]
    rows = [Row((Cell(_named(key), title=key), Cell(_limit(key, limits[key])))) for key in limits if key not in free]
    if free:
        rows.append(
            Row(
                (
                    Cell("Not limited", sub=", ".join(_named(key)[:1].lower() + _named(key)[1:] for key in free)),
                    Cell(""),
                )
            )
        )
    table("policy_guard", (Column("Guard", wrap=True), Column("Limit", align="right")), rows, empty="")


NO_LIMIT = "no limit"


def _named(key: str) -> str:
    """What a limit is of, in words; one of a newer collector by its key."""
    if key in GUARD:
        return GUARD[key]
    what, _, kind = key.rpartition("_")
    return {"ratio": f"Share of a {what}'s nodes out at once", "nodes": f"Number of a {what}'s nodes out at once"}.get(
        kind if what in PARTS else "", key.replace("_", " ")
    )


def _limit(key: str, value: float) -> str:
    if key.endswith("_ratio"):
        return f"{value * 100:g} %"
    if not value and key not in ("cooldown_s", "gap_ratio"):
        return "a person only" if key == "quiet_s" else NO_LIMIT
    return fmt.duration(round(value * 1000)) if key.endswith("_s") else f"{value:g}"


def _rules(rules: Sequence[dict[str, Any]], mode: str) -> None:
    rows = [
        Row(
            (
                Cell(rule["name"] or f"rule {number}", sub=_matches(rule)),
                Cell(rule["action"], kind="strong"),
                Cell(rule["mode"] or mode, kind="" if rule["mode"] else "faint"),
            )
        )
        for number, rule in enumerate(rules, 1)
    ]
    columns = (Column("Rules: the first that matches decides", wrap=True), Column("Wants"), Column("Mode"))
    table("policy_rules", columns, rows, empty="No rule: what the detectors ask for stands.")


def _overrides(overrides: Sequence[dict[str, Any]]) -> None:
    if not overrides:
        return
    rows = [Row((Cell(_matches(o)), Cell(f"at most {o['at_most']}"), Cell(o["mode"] or "-"))) for o in overrides]
    table("policy_overrides", (Column("Otherwise for", wrap=True), Column(), Column("Mode")), rows, empty="")


def _matches(rule: dict[str, Any]) -> str:
    said = [
        f"{key} {', '.join(map(str, rule[key]))}"
        for key in ("kind", "cause", "xid", "severity", "pool", "sku")
        if rule.get(key)
    ]
    if rule.get("min_confidence"):
        said.append(f"from {rule['min_confidence'] * 100:.0f} % sure")
    if rule.get("save_s"):
        said.append(f"its jobs have {rule['save_s']:.0f} s to save themselves")
    return "; ".join(said) or "everything"


address.title("Policy")
show()
