"""What would have happened if a policy had enforced: out of the decisions that it made while it did not."""

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
    """(a sentence, the decisions that it is about: those done first, the newest first).

    Args:
        decisions: how each stands now. over: the time they are of, such as "the last 7 days".
    """
    named = sorted((d for d in decisions if d.node and d.wanted in WORDS), key=lambda d: -d.ts_ms)
    done = [d for d in named if d.outcome in DONE]
    held = [d for d in named if d.outcome == "held"]
    did = []
    for wanted, word in WORDS.items():
        nodes = list(dict.fromkeys(d.node for d in done if d.wanted is wanted))
        if nodes:
            did.append(f"{word} {_some(nodes)}")
    said = f"Had it enforced in {over}, Drover would by itself have {', '.join(did) or 'done nothing'}"
    gone = {
        d.node for d in done if d.wanted in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)
    }  # for something else that is wrong
    kept = list(dict.fromkeys(d.node for d in held if d.node not in gone))
    said += f"; the guard would have held {_some(kept)} back." if kept else "; the guard would have held nothing back."
    if refused := [d.node for d in done if d.outcome == "rejected"]:
        said += f" Of these a person rejected {_some(list(dict.fromkeys(refused)))}."
    return said, [*done, *held]


def _some(nodes: list[str]) -> str:
    """`3 nodes (r01n02, r02n03, r04n03)`."""
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ({', '.join(nodes[:NAMED])}{more})"
