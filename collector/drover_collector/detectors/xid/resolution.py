"""Decide when XIDs are over."""

from __future__ import annotations

from drover_collector.detectors._lib.texts import duration, place
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.xid.resets import answers
from drover_collector.detectors.xid.state import XidState
from drover_core.model.events import (
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.times import iso

NAME = "xid"
QUIET_CRITICAL_MS = 600_000  # after the GPU came back: no repeat for this long closes (gpud, NVSentinel: 10 min and up)
QUIET_WARNING_MS = 3_600_000
QUIET_INFO_MS = 600_000


def ended(window: Window, s: XidState, now_ms: int) -> list[Finding]:
    """Return findings that end what has been quiet long enough. A critical XID needs the GPU back, with telemetry."""
    found = []
    for where, held in list(s.open.items()):
        quiet_ms = {Severity.CRITICAL: QUIET_CRITICAL_MS, Severity.WARNING: QUIET_WARNING_MS}.get(
            held.severity, QUIET_INFO_MS
        )
        since = held.last_ms
        if held.severity is Severity.CRITICAL:
            if held.back_ms is None or not answers(window, where):
                continue
            since = max(since, held.back_ms)
        if now_ms - since < quiet_ms:
            continue
        del s.open[where]
        node, gpu = where
        text = f"no XID on {place(node, gpu)} for {duration(now_ms - since)}"
        if held.severity is Severity.CRITICAL:
            text = f"the GPU came back at {iso(held.back_ms or 0)}, sends telemetry, and {text}"
        found.append(
            Finding(
                NAME, held.kind, held.cause, "gpu" if gpu is not None else "node", node, gpu, (where,), now_ms, since,
                Severity.INFO, 0.9, RecommendedAction.NONE, f"Over: {text}.", "Nothing to do.", cleared=True,
            )
        )  # fmt: skip
    for key in [key for key, (newest, _) in s.crashes.items() if now_ms - newest > QUIET_INFO_MS]:
        members = s.crashes.pop(key)[1]
        found.append(
            Finding(
                NAME, IncidentKind.XID, "job_crash", "job", None, None, members, now_ms, now_ms, Severity.INFO, 0.9,
                RecommendedAction.NONE, f"Over: job {key[0]} has no further faults.", "Nothing to do.", job=key[0],
                cleared=True,
            )
        )  # fmt: skip
    return found
