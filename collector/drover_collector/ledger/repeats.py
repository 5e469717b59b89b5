"""Work that a job does again: what it did after its last checkpoint, once its next run works.

Only of jobs that report their checkpoints. It is taken that work takes as long the second time, and that no work was
done from the begin of a fault that ended the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from drover_collector.ledger.claims import Attempt, JobHistory, former_of, works_after
from drover_collector.ledger.facts import Facts


def find_repeats(facts: Facts, history: JobHistory, attempts: Sequence[Attempt]) -> list[tuple[int, int, int]]:
    """Return (job, from_ms, to_ms) in which a job repeated work since its last checkpoint."""
    saved: dict[int, list[int]] = defaultdict(list)
    for job, at_ms in sorted(facts.checkpoints):
        saved[job].append(at_ms)
    if not saved:
        return []
    found = []
    last: dict[str, Attempt] = {}
    for attempt in sorted(attempts, key=lambda each: (each.from_ms, each.job)):
        name = facts.jobs[attempt.job]
        former = last.get(name) or former_of(name, last)
        last[name] = attempt
        checkpoints = [at_ms for at_ms in saved.get(former.job, ()) if at_ms <= former.to_ms] if former else []
        if former is None or not checkpoints:
            continue
        end_ms = former.to_ms
        if former.incident >= 0:
            end_ms = min(end_ms, max(facts.incidents[former.incident].since_ms, checkpoints[-1]))
        lost_ms = end_ms - max(checkpoints[-1], former.from_ms)
        works_ms = works_after(facts, history, attempt, attempt.from_ms)
        if works_ms is not None and lost_ms > 0:
            found.append((attempt.job, works_ms, min(attempt.to_ms, works_ms + lost_ms)))
    return found
