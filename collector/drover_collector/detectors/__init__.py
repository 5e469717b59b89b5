"""The detectors, in the order in which they run.

A detector is a module with NAME, VERSION, EXAMPLES, `detect(window, state, now_ms) -> (findings, state)` and
`could_not_judge(window) -> list of sentences`. It does no I/O and reads no clock: all it knows is its window and state.
It owns the state that it is given (None at first) and may alter it in place; the caller keeps only the one it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drover_collector.detectors import hang, idle, memory
from drover_collector.detectors._lib.examples import Example
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.drift import detector as drift
from drover_collector.detectors.kernel import detector as kernel
from drover_collector.detectors.links import detector as links
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.detectors.risk import detector as risk
from drover_collector.detectors.straggler import detector as straggler
from drover_collector.detectors.thermal import detector as thermal
from drover_collector.detectors.xid import detector as xid
from drover_core.model.events import Finding, Incident


@dataclass(frozen=True, slots=True)
class Detector:
    """`quiet_ms`: how long without a finding until its hold on an incident ends; None: it says when it is over."""

    name: str
    version: int
    detect: Callable[[Window, Any, int], tuple[list[Finding], Any]]
    could_not_judge: Callable[[Window], list[str]]
    examples: Sequence[Example]
    quiet_ms: int | None


# What each knows again after a restart of incidents that are open, beside what it sees in the last minutes.
RESTORED: Mapping[str, Callable[[Sequence[Incident]], object]] = {
    module.NAME: module.restored for module in (xid, memory, links, hang, thermal, straggler, drift, idle)
}  # liveness needs the fleet too; kernel and risk tell again what still stands

DETECTORS: tuple[Detector, ...] = (
    Detector(xid.NAME, xid.VERSION, xid.detect, xid.could_not_judge, xid.EXAMPLES, None),
    Detector(liveness.NAME, liveness.VERSION, liveness.detect, liveness.could_not_judge, liveness.EXAMPLES, None),
    Detector(memory.NAME, memory.VERSION, memory.detect, memory.could_not_judge, memory.EXAMPLES, memory.QUIET_MS),
    Detector(links.NAME, links.VERSION, links.detect, links.could_not_judge, links.EXAMPLES, links.QUIET_MS),
    Detector(hang.NAME, hang.VERSION, hang.detect, hang.could_not_judge, hang.EXAMPLES, hang.QUIET_MS),
    Detector(
        thermal.NAME, thermal.VERSION, thermal.detect, thermal.could_not_judge, thermal.EXAMPLES, thermal.QUIET_MS
    ),
    Detector(kernel.NAME, kernel.VERSION, kernel.detect, kernel.could_not_judge, kernel.EXAMPLES, kernel.QUIET_MS),
    Detector(
        straggler.NAME, straggler.VERSION, straggler.detect, straggler.could_not_judge, straggler.EXAMPLES,
        straggler.QUIET_MS,
    ),
    Detector(drift.NAME, drift.VERSION, drift.detect, drift.could_not_judge, drift.EXAMPLES, drift.QUIET_MS),
    Detector(idle.NAME, idle.VERSION, idle.detect, idle.could_not_judge, idle.EXAMPLES, idle.QUIET_MS),
    Detector(risk.NAME, risk.VERSION, risk.detect, risk.could_not_judge, risk.EXAMPLES, risk.QUIET_MS),
)  # fmt: skip
