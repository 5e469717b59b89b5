"""The fleet by day: utilisation, power, GPU-hours lost and goodput, from rollups and the ledger.

A day that is over is counted once; the newest is counted again every few minutes. Each call counts days for a few
seconds at most, the newest first, and says how many are left.
"""

from __future__ import annotations

import time

from drover_collector.api import ledger
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot, RefusalError, bad_argument
from drover_collector.api.trend_days import MOST_DAYS
from drover_proto import fleet_pb2 as pb

DAYS = 30
WORK_S = 2.0  # of one call, and no day is begun after it
LATE_MS = 2 * 3_600_000  # what comes late changes a day for so long after its end
HOUR_MS = 3_600_000


def get_trend(facts: ApiSnapshot, request: pb.TrendRequest) -> pb.Trend:
    count = request.days or DAYS
    if count > MOST_DAYS:
        raise bad_argument(f"days {count}: give at most {MOST_DAYS}")
    today_ms, began_s = facts.now_ms() // DAY_MS * DAY_MS, time.monotonic()
    found: list[pb.TrendDay] = []
    for from_ms in range(today_ms, today_ms - count * DAY_MS, -DAY_MS):
        day = facts.trend.get(from_ms)
        if day is None and time.monotonic() - began_s < WORK_S:
            day = _count(facts, from_ms)
        found.append(day or pb.TrendDay(from_ms=from_ms, pending=True))
    return pb.Trend(days=found[::-1], pending=sum(day.pending for day in found))


def _count(facts: ApiSnapshot, from_ms: int) -> pb.TrendDay | None:
    """Count one day; None: another report is being made."""
    now_ms = facts.now_ms()
    to_ms = min(from_ms + DAY_MS, now_ms)
    day = pb.TrendDay(from_ms=from_ms)
    load = facts.store.rollups.fleet_load(from_ms, to_ms)
    if load.util_ratio is not None:
        day.util_ratio = load.util_ratio
    if load.power_w is not None:
        day.power_w = load.power_w
    if load.buckets and to_ms > from_ms:  # without telemetry nothing is known, so nothing is lost or useful
        try:
            total = ledger.day_total(facts, from_ms, to_ms)
        except RefusalError:
            return None
        if total.held_ms:
            shares = total.shares
            taken_ms = shares.waiting_ms + shares.lost_ms + shares.restarting_ms + shares.repeated_ms
            day.gpu_hours_lost = taken_ms / HOUR_MS
            if total.HasField("goodput") and shares.unknown_ms < total.held_ms:
                day.goodput = total.goodput
    facts.trend.put(day, now_ms >= from_ms + DAY_MS + LATE_MS)
    return day
