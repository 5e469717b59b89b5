"""How two policies differ, for commands and the audit. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from drover_collector.policy import Policy

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


def _at(held: Sequence[Any], number: int) -> str:
    """One rule in a line: only what it says itself."""
    if number >= len(held):
        return "-"
    defaults = {f.name: f.default for f in dataclasses.fields(held[number])}
    given = {k: v for k, v in dataclasses.asdict(held[number]).items() if v != defaults[k]}
    return ", ".join(f"{k} {'/'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in given.items())
