"""The real collector, which kills itself with -9 at a named point of its work.

    python -m durability.dying POINT COUNT CONFIG [SETTLE_S]

POINT is one of POINTS; it dies when it comes there for the COUNT-th time; "": nowhere. SETTLE_S: how long late rows
wait for more of their kind before their rollups are made again.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from drover_collector import main as program
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.limits import Limits
from drover_collector.main import main
from drover_collector.pipeline import pipeline as pipeline_judging
from drover_collector.store.repositories.events import EventTable
from drover_collector.store.repositories.offsets import OffsetTable
from drover_collector.store.rollups.dirty_ranges import DirtyRanges
from drover_collector.store.samples.table import SampleTable

# A table of the store, its method, and whether after it returned (else before it runs).
POINTS: dict[str, tuple[type[object], str, bool]] = {
    "before the insert": (SampleTable, "write", False),
    "between insert and Ack": (SampleTable, "write", True),
    "after late rows are noted": (DirtyRanges, "mark_late", True),
    "between an event's insert and its Ack": (EventTable, "write", True),
    "before positions are noted": (OffsetTable, "write", False),
    "after positions are noted": (OffsetTable, "write", True),
}


def arm(point: str, count: int) -> None:
    table, method, after = POINTS[point]
    original: Callable[..., Any] = getattr(table, method)
    left = count

    def die() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(original)
    def dying(*words: Any, **named: Any) -> Any:
        if not after:
            die()
        result = original(*words, **named)
        if after:
            die()
        return result

    setattr(table, method, dying)


if __name__ == "__main__":
    limits = Limits(seqs_every_s=0.5)  # else these points come every 5 s
    vars(program)["IngestContext"] = functools.partial(IngestContext, limits=limits)
    if sys.argv[1]:
        arm(sys.argv[1], int(sys.argv[2]))
    if sys.argv[4:]:
        vars(pipeline_judging)["LATE_SETTLE_MS"] = int(sys.argv[4]) * 1000
    sys.exit(main(["run", "--config", sys.argv[3]]))
