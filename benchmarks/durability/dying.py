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

from drover_collector.ingest import service as ingest
from drover_collector.ingest.limits import Limits
from drover_collector.main import main
from drover_collector.pipeline import pipeline as pipeline_judging
from drover_collector.store import Store

POINTS: dict[str, tuple[str, bool]] = {  # method of the store, and whether before it runs or after it returned
    "before the insert": ("write_samples", False),
    "between insert and Ack": ("write_samples", True),
    "after late rows are noted": ("mark_late", True),
    "between an event's insert and its Ack": ("write_events", True),
    "before positions are noted": ("write_lane_seqs", False),
    "after positions are noted": ("write_lane_seqs", True),
}


def arm(point: str, count: int) -> None:
    method, after = POINTS[point]
    original: Callable[..., Any] = getattr(Store, method)
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

    setattr(Store, method, dying)


if __name__ == "__main__":
    vars(ingest)["Limits"] = functools.partial(Limits, seqs_every_s=0.5)  # else these points come every 5 s
    if sys.argv[1]:
        arm(sys.argv[1], int(sys.argv[2]))
    if sys.argv[4:]:
        vars(pipeline_judging)["LATE_SETTLE_MS"] = int(sys.argv[4]) * 1000
    sys.exit(main(["run", "--config", sys.argv[3]]))
