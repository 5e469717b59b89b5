"""Format parts of the sentences in findings."""

from __future__ import annotations

from collections.abc import Collection

from drover_collector.fleet.buckets import GUESSED
from drover_core.model.reports import job_label

LISTED = 4  # names written out before "and N more"


def place(node: str | None, gpu: int | None) -> str:
    """Return `GPU 5 of node r12n03`, or `node r12n03`."""
    return f"node {node}" if gpu is None else f"GPU {gpu} of node {node}"


def listing(names: Collection[str]) -> str:
    """Return `a, b, c, d and 3 more`, sorted."""
    ordered = sorted(names)
    head = ", ".join(ordered[:LISTED])
    return head if len(ordered) <= LISTED else f"{head} and {len(ordered) - LISTED} more"


def job_named(name: str) -> str:
    """Return `job 812`, or `a job that nobody names` for one that was guessed."""
    return "a job that nobody names" if name.startswith(GUESSED) else job_label(name)


def duration(ms: float) -> str:
    """Return `40 s`, `12 min` or `3.5 h`."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
