"""Work that a job repeats after a fault: what it had done since its last checkpoint, where its loop says when that was.

Work is counted in time in which the loop reported steps. A run that a fault ended leaves a debt: the time from its last
checkpoint to the fault. The next run pays it first. If a fault ends that run, too, before it has saved anything, the
debt is as large as the furthest that either came.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from drover_collector.ledger.claims import Attempt, Repeated, Span, restarts, stepping
from drover_collector.ledger.facts import Facts


def find_repeated(facts: Facts, attempts: Sequence[Attempt]) -> list[Repeated]:
    """Return, for each attempt that follows one that a fault ended, the work that it repeats."""
    former = {_key(each.attempt): each.former for each in restarts(facts, attempts) if each.former is not None}
    stepped = stepping(facts)
    begin_ms = min((each.from_ms for each in attempts), default=0)
    checkpoints: dict[int, list[int]] = defaultdict(list)
    for job, at_ms in facts.checkpoints:
        checkpoints[job].append(at_ms)
    saving = set(checkpoints)
    for each in sorted(attempts, key=lambda one: -one.from_ms):  # a loop that saves later saved before, too
        before = former.get(_key(each))
        if before is not None and each.job in saving:
            saving.add(before.job)
    debts: dict[tuple[int, int], int | None] = {}
    found = []
    for attempt in sorted(attempts, key=lambda one: (one.from_ms, one.job)):
        before = former.get(_key(attempt))
        debt = 0 if before is None else debts.get(_key(before))
        worked = _within(stepped.get(attempt.job, ()), attempt.from_ms, _progress_end(facts, attempt))
        if before is not None:
            found.append(Repeated(attempt, before.incident, None if debt is None else _first(worked, debt)))
        saved = [at for at in checkpoints.get(attempt.job, ()) if attempt.from_ms <= at <= attempt.to_ms]
        done = sum(high - low for low, high in worked)
        if saved:
            kept = sum(high - low for low, high in _within(worked, attempt.from_ms, max(saved)))
            debts[_key(attempt)] = max(0, max(debt or 0, done) - kept)
        elif debt is None or attempt.from_ms < facts.checkpoints_from_ms:
            debts[_key(attempt)] = None  # it may have saved before what is read
        elif before is None and (attempt.job not in saving or attempt.from_ms <= begin_ms):
            debts[_key(attempt)] = None  # nothing reports it, or it may have, too
        else:
            debts[_key(attempt)] = max(debt, done)
    return found


def _key(attempt: Attempt) -> tuple[int, int]:
    return attempt.job, attempt.from_ms


def _progress_end(facts: Facts, attempt: Attempt) -> int:
    """Return when an attempt last came further: at the latest when the fault began that ended it."""
    if attempt.incident < 0:
        return attempt.to_ms
    return max(attempt.from_ms, min(attempt.to_ms, facts.incidents[attempt.incident].since_ms))


def _within(spans: Sequence[Span], from_ms: int, to_ms: int) -> list[Span]:
    clipped = [(max(low, from_ms), min(high, to_ms)) for low, high in spans]
    return [(low, high) for low, high in clipped if low < high]


def _first(spans: Sequence[Span], length_ms: int) -> list[Span]:
    """Return the first so many milliseconds of some spans."""
    found = []
    for low, high in spans:
        if length_ms <= 0:
            break
        found.append((low, min(high, low + length_ms)))
        length_ms -= high - low
    return found
