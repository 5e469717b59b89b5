"""Keep the state of network ports: since when they are down, how often they flapped, what they have of errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.bursts import Bursts
from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors.links.congestion import Congestion
from drover_collector.detectors.links.gpu import GpuState
from drover_collector.detectors.links.ports import (
    Port,
    PortLayout,
)
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import Incident

DOWN_MS = 20_000  # until a finding: retries of NCCL and of the adapters end at about 20 s
DOWN_CRITICAL_MS = 240_000  # gpud: a port is dropped after 4 minutes
FLAPS_MS = 3 * 3_600_000  # Azure: three flaps in three hours
FLAPS_WARNING, FLAPS_CRITICAL = 2, 3
FLAPS_KEPT = 8  # the newest of a port
RATES = {  # per second, over the window: limits that NVSentinel's ADR-046 calls degraded
    "symbol_errors": 10.0,
    "rx_errors": 10.0,
    "link_error_recoveries": 5 / 60,
    "ack_timeouts": 1.0,
    "local_integrity_errors": 1 / 60,
    "buffer_overruns": 1 / 60,
}
PERSIST = 2  # buckets
# Fewer errors that come again and again: our own limits. On strangers' fleets healthy ports have one error in some of
# the hours, bad ones 20 and more in each minute.
SLOW_ERRORS = ("symbol_errors", "rx_errors")
SLOW_MINUTES, SLOW_LEAST = 8.0, 40.0  # of the last half an hour, and errors in them


@dataclass(slots=True)
class PortState:
    """State of the ports of a fleet; arrays are [L]."""

    layout: PortLayout | None = None
    gpu: GpuState = field(default_factory=GpuState)
    congestion: Congestion | None = None
    seen_up: Bools = field(default_factory=lambda: np.zeros(0, bool))  # a port that was never up is not in use
    down_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # since when it is down; 0: up
    errs: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row with errors
    bursts: Bursts = field(default_factory=Bursts)  # of SLOW_ERRORS
    slow_errors: Bools = field(default_factory=lambda: np.zeros(0, bool))
    was_up: Bools = field(default_factory=lambda: np.zeros(0, bool))  # in the last bucket
    downed: Floats = field(default_factory=lambda: np.zeros(0))  # link_downed in the last bucket
    gone: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row without the card and a value
    flaps: dict[int, deque[int]] = field(default_factory=dict)  # port -> when it went down
    # leaf -> when most of its ports flapped together; "": when ports without a sure leaf did so on several nodes
    shared: dict[str, set[int]] = field(default_factory=dict)
    reopened: Sequence[Incident] = ()  # open when the collector started: their ports were up once, and have flapped


def graded(port: Port) -> bool:
    """Return True if faults of the port may be critical: it is listed, or a GPU needs it."""
    return port.listed or port.computes


def own_flaps(port: Port, k: int, s: PortState) -> list[int]:
    """Return when a port went down by itself, not with its switch."""
    shared = s.shared.get(port.group, ())
    return [at_ms for at_ms in s.flaps.get(k, ()) if at_ms not in shared]


def flaps_of(times: Collection[int], end_ms: int) -> int:
    return sum(end_ms - at_ms <= FLAPS_MS for at_ms in times)
