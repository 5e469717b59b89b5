"""The audit line of a collector that begins to judge: its version, and how long nobody had judged before."""

from __future__ import annotations

import importlib.metadata
import socket

from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Audit
from drover_core.times import iso

START = "start"


def start_line(store: Store, now_ms: int) -> Audit:
    """Return the line. Its state is up to when buckets had been judged, in ms; empty: this store has none."""
    upto_ms, _ = store.rollups.rolled_up(Scope.GPU, "10s", (now_ms, now_ms))
    version, host = importlib.metadata.version("drover"), socket.gethostname()
    before = f"; judged before up to {iso(upto_ms)}" if upto_ms else ""
    text = f"drover-collector {version} started on {host}{before}"
    return Audit(f"{START} {host} {now_ms}", now_ms, "drover", START, "collector", "", text, str(upto_ms or ""))
