"""How two policies differ, for commands and the audit. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.policy import Override, Policy, Rule
from drover_core.model.events import Audit

SUMMARY_CHARS = 1_000


def differences(a: Policy, b: Policy) -> list[tuple[str, str, str]]:
    """(what, in `a`, in `b`) of each."""
    rows = []
    for key in ("mode", "approval_expires_s", "approval_again_s"):
        if getattr(a, key) != getattr(b, key):
            rows.append((key, f"{getattr(a, key)}", f"{getattr(b, key)}"))
    for item in dataclasses.fields(a.guard):
        left, right = getattr(a.guard, item.name), getattr(b.guard, item.name)
        if left != right:
            rows.append((f"guard.{item.name}", f"{left:g}", f"{right:g}"))
    for kind, left_all, right_all in (("overrides", a.overrides, b.overrides), ("rules", a.rules, b.rules)):
        for number in range(max(len(left_all), len(right_all))):
            left, right = _at(left_all, number), _at(right_all, number)
            if left != right:
                rows.append((f"{kind}[{number}]", left, right))
    return rows


def summary(rows: Sequence[tuple[str, str, str]]) -> str:
    """All of it in a line, for the audit."""
    text = "; ".join(f"{what}: {a} -> {b}" for what, a, b in rows) or "it decides as before"
    return text if len(text) <= SUMMARY_CHARS else f"{text[:SUMMARY_CHARS]}... ({len(rows)} differences)"


def state_of(policy: Policy, ceiling: str) -> str:
    """All that decides, to be compared with later."""
    return json.dumps({"policy": dataclasses.asdict(policy), "ceiling": ceiling}, sort_keys=True)


def line(by: str, why: str, before: str, policy: Policy, ceiling: str, now_ms: int) -> Audit | None:
    """For the audit: a policy that holds from now on; None: it is the one before.

    Args:
        before: `state` of the newest such line; "": there is none.
        ceiling: `[act] mode` of the settings.
    """
    state = state_of(policy, ceiling)
    if state == before:
        return None
    known = _read(before)
    if known is None:
        detail = f"mode {policy.mode}, act.mode {ceiling}, {len(policy.rules)} rules; the one before is not known"
    else:
        rows = differences(known[0], policy)
        if known[1] != ceiling:
            rows.insert(0, ("act.mode", known[1], ceiling))
        if known[0].name != policy.name:
            rows.insert(0, ("name", known[0].name, policy.name))
        detail = summary(rows)
    return Audit(f"policy {now_ms}", now_ms, by, "policy", policy.name, why, detail, state)


def read(found: dict[str, Any]) -> Policy:
    """A policy out of what `dataclasses.asdict` made of it, as it stands in JSON.

    Raises:
        TypeError, KeyError: another release wrote it.
    """
    guard = GuardLimits(**found["guard"])
    rules = tuple(Rule(**_tuples(rule)) for rule in found["rules"])
    overrides = tuple(Override(**_tuples(override)) for override in found["overrides"])
    return Policy(**{**found, "guard": guard, "rules": rules, "overrides": overrides})


def _read(state: str) -> tuple[Policy, str] | None:
    """None: there is none, or another release wrote it."""
    try:
        read_state = json.loads(state)
        return read(read_state["policy"]), str(read_state["ceiling"])
    except (ValueError, TypeError, KeyError):
        return None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _at(held: Sequence[Any], number: int) -> str:
    """One rule in a line: only what it says itself."""
    if number >= len(held):
        return "-"
    defaults = {f.name: f.default for f in dataclasses.fields(held[number])}
    given = {k: v for k, v in dataclasses.asdict(held[number]).items() if v != defaults[k]}
    return ", ".join(f"{k} {'/'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in given.items())
