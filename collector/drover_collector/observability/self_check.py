"""Whether Drover itself sees, judges and can tell: what its dead-man's switch stands on (`notify/heartbeat.py`).

Pure: `self_check` says in sentences what is dead, out of figures that `signs_of` takes from memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from drover_collector.api.snapshot import REPORTING_MS, ApiSnapshot

STARTING_S = 120.0  # agents come back within a minute of a restart, and the first bucket is judged
JUDGED_S = 90.0  # as the alert DroverNotJudging: a bucket is judged each 10 s
STUCK_S = 60.0  # a write to the store takes milliseconds to seconds
UNTOLD_S = 900.0  # a receiver that was down so long is no blip: the fourth try has failed


@dataclass(frozen=True, slots=True)
class HealthSignals:
    """
    Attributes:
        leading: whether this collector detects; one that stands by sees nothing of its own, and is not blind.
        up_s: since its start.
        known: nodes of the fleet file that have ever reported; reporting: those of which something came within 30 s.
        judged_s: since the end of the newest bucket judged.
        refused: why the store takes no telemetry; "" when it does.
        write_s: how long the write under way takes.
        untold_s: age of the oldest message that waits, by receiver; 0: none waits.
    """

    leading: bool
    up_s: float
    expected: int
    known: int
    reporting: int
    judged_s: float
    refused: str = ""
    write_s: float = 0.0
    untold_s: Mapping[str, float] = field(default_factory=dict)


def self_check(signs: HealthSignals, silent_ratio: float) -> list[str]:
    """What is dead, a sentence each; empty: Drover sees, judges and can tell, or stands by.

    Args:
        silent_ratio: when more than this share of the nodes that ever reported is silent, the fault is most likely
            Drover's own or the network's, and what is wrong with the fleet is not seen.
    """
    if not signs.leading or signs.up_s < STARTING_S:
        return []
    found = []
    silent = signs.known - signs.reporting
    if signs.expected and not signs.known:
        found.append(f"no agent of {signs.expected} nodes has ever reported")
    elif silent > silent_ratio * signs.known:
        found.append(f"nothing comes from {silent} of {signs.known} nodes that used to report")
    if signs.judged_s > JUDGED_S:
        found.append(f"nothing was judged for {signs.judged_s:.0f} s")
    if signs.refused:
        found.append(f"the store takes no telemetry ({signs.refused})")
    elif signs.write_s > STUCK_S:
        found.append(f"a write to the store has not returned for {signs.write_s:.0f} s")
    if signs.untold_s and all(age_s > UNTOLD_S for age_s in signs.untold_s.values()):
        oldest_s = max(signs.untold_s.values())
        found.append(f"no receiver takes messages, the oldest waits for {oldest_s / 60:.0f} min")
    return found


def beats(signs: HealthSignals, reasons: list[str]) -> bool:
    """Whether the sign of life may be given: by the collector that detects, once it has begun to."""
    return signs.leading and not reasons and signs.judged_s <= JUDGED_S and signs.reporting > 0


def signs_of(facts: ApiSnapshot) -> HealthSignals:
    """May block on the store.

    Raises:
        StoreError: the store cannot say which nodes ever reported.
    """
    pipeline, stats = facts.pipeline, facts.stats
    now_ms, now = facts.now_ms(), time.monotonic()
    seen = facts.last_seen()
    return HealthSignals(
        leading=pipeline.leading,
        up_s=(now_ms - pipeline.started_ms) / 1000,
        expected=facts.index.node_count,
        known=int(np.count_nonzero(seen > 0)),
        reporting=int(np.count_nonzero(seen >= now_ms - REPORTING_MS)),
        judged_s=(now_ms - max(pipeline.ticks.newest_end_ms, pipeline.began_ms)) / 1000,
        refused=stats.trouble,
        write_s=max((now - since for since in stats.writing.copy().values()), default=0.0),
        untold_s=pipeline.outbox.oldest_s,
    )
