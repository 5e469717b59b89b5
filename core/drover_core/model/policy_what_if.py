"""Describe what a policy would have done in enforce mode, from the decisions that it made without."""

from __future__ import annotations

from collections.abc import Iterable

from drover_core.model.events import Decision, RecommendedAction

DONE = ("would_act", "pending_approval", "approved", "rejected", "expired", "act")  # outcomes; `held` stays held
WORDS = {
    RecommendedAction.ISOLATE: "isolated",
    RecommendedAction.DRAIN: "drained",
    RecommendedAction.PROBE: "probed",
    RecommendedAction.ADVISE: "advised against",
}
NAMED = 4


def describe_enforcement(decisions: Iterable[Decision], over: str) -> tuple[str, list[Decision]]:
    """Return a sentence and its decisions: first those that would have been carried out, the newest first.

    Args:
        decisions: the newest version of each. over: their time, such as "the last 7 days".
    """
    named = sorted((d for d in decisions if d.node and d.wanted in WORDS), key=lambda d: -d.ts_ms)
    done = [d for d in named if d.outcome in DONE]
    held = [d for d in named if d.outcome == "held"]
    did = []
    for wanted, word in WORDS.items():
        nodes = list(dict.fromkeys(d.node for d in done if d.wanted is wanted))
        if nodes:
            did.append(f"{word} {_some(nodes)}")
    text = f"Had it enforced in {over}, Drover would by itself have {', '.join(did) or 'done nothing'}"
    gone = {
        d.node for d in done if d.wanted in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)
    }  # out of service for another reason
    kept = list(dict.fromkeys(d.node for d in held if d.node not in gone))
    text += f"; the guard would have held {_some(kept)} back." if kept else "; the guard would have held nothing back."
    if refused := [d.node for d in done if d.outcome == "rejected"]:
        text += f" Of these a person rejected {_some(list(dict.fromkeys(refused)))}."
    return text, [*done, *held]


def _some(nodes: list[str]) -> str:
    """Return `3 nodes (r01n02, r02n03, r04n03)`."""
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ({', '.join(nodes[:NAMED])}{more})"
