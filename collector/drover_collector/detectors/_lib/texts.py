"""Format parts of the sentences in findings."""

from __future__ import annotations

from collections.abc import Collection

LISTED = 4  # names written out before "and N more"


def place(node: str | None, gpu: int | None) -> str:
    """Return `GPU 5 of node r12n03`, or `node r12n03`."""
    return f"node {node}" if gpu is None else f"GPU {gpu} of node {node}"


def listing(names: Collection[str]) -> str:
    """Return `a, b, c, d and 3 more`, sorted."""
    ordered = sorted(names)
    head = ", ".join(ordered[:LISTED])
    return head if len(ordered) <= LISTED else f"{head} and {len(ordered) - LISTED} more"


def duration(ms: float) -> str:
    """Return `40 s`, `12 min` or `3.5 h`."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
