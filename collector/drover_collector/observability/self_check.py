"""Check whether Drover receives, judges and can notify: the condition of its dead man's switch.

Pure: `self_check` makes sentences of the signals that `read_signals` takes from memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from drover_collector.api.snapshot import REPORTING_MS, ApiSnapshot

STARTING_S = 120.0  # within it agents reconnect after a restart, and the first bucket is judged
JUDGED_S = 90.0  # as the alert DroverNotJudging: a bucket is judged each 10 s
STUCK_S = 60.0  # a write to the store takes milliseconds to seconds
UNDELIVERED_S = 900.0  # a receiver that was down this long: the fourth try has failed


@dataclass(frozen=True, slots=True)
class HealthSignals:
    """What shows whether Drover works.

    Attributes:
        leading: this collector detects; a standby judges nothing and is not blind.
        up_s: time since its start.
        known: nodes of the fleet file that have ever reported; reporting: those that reported within 30 s.
        judged_s: time since the end of the newest bucket judged.
        refused: why the store takes no telemetry; "" if it does.
        write_s: how long the write under way has taken.
        undelivered_s: age of the oldest waiting message, by receiver; 0: none waits.
    """

    leading: bool
    up_s: float
    expected: int
    known: int
    reporting: int
    judged_s: float
    refused: str = ""
    write_s: float = 0.0
    undelivered_s: Mapping[str, float] = field(default_factory=dict)


def self_check(signs: HealthSignals, silent_ratio: float) -> list[str]:
    """Return what does not work, a sentence each. Empty: Drover receives, judges and can notify, or stands by.

    Args:
        silent_ratio: when more than this share of the nodes that ever reported is silent, the fault is most likely
            Drover's own or the network's, and faults of the fleet go unseen.
    """
    if not signs.leading or signs.up_s < STARTING_S:
        return []
    found = []
    silent = signs.known - signs.reporting
    if signs.expected and not signs.known:
        found.append(f"no agent of {signs.expected} nodes has ever reported")
    elif silent > silent_ratio * signs.known:
        found.append(f"nothing arrives from {silent} of {signs.known} nodes that used to report")
    if signs.judged_s > JUDGED_S:
        found.append(f"nothing was judged for {signs.judged_s:.0f} s")
    if signs.refused:
        found.append(f"the store takes no telemetry ({signs.refused})")
    elif signs.write_s > STUCK_S:
        found.append(f"a write to the store has not returned for {signs.write_s:.0f} s")
    if signs.undelivered_s and all(age_s > UNDELIVERED_S for age_s in signs.undelivered_s.values()):
        oldest_s = max(signs.undelivered_s.values())
        found.append(f"no receiver takes messages, the oldest waits for {oldest_s / 60:.0f} min")
    return found


def works(signs: HealthSignals, reasons: list[str]) -> bool:
    """Return True if this collector detects, has judged a bucket lately, and nothing is wrong."""
    return signs.leading and not reasons and signs.judged_s <= JUDGED_S and signs.reporting > 0


def read_signals(facts: ApiSnapshot) -> HealthSignals:
    """Read the signals. May block on the store.

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
        undelivered_s=pipeline.outbox.delivery.oldest_s,
    )
