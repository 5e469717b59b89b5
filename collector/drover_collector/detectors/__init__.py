"""The detectors, in the order in which they run.

A detector is a module that has what `DetectorModule` names; to add one: docs/how-to/add-a-detector.md.
It does no I/O and reads no clock: all it knows is its window and state. It owns the state that it is given (None at
first) and may alter it in place; the caller keeps only the one it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class DetectorModule(Protocol):
    """What a module has that is a detector."""

    @property
    def NAME(self) -> str: ...  # noqa: N802  # a module's constant, like those below

    @property
    def VERSION(self) -> int: ...  # noqa: N802

    @property
    def QUIET_MS(self) -> int | None: ...  # noqa: N802

    @property
    def EXAMPLES(self) -> Sequence[Example]: ...  # noqa: N802

    def detect(self, window: Window, state: Any, now_ms: int, /) -> tuple[list[Finding], Any]: ...

    def could_not_judge(self, window: Window, /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Detector:
    """One detector, as the engine drives it.

    Attributes:
        quiet_ms: how long without a finding until its hold on an incident ends; None: it says when it is over.
    """

    name: str
    version: int
    detect: Callable[[Window, Any, int], tuple[list[Finding], Any]]
    could_not_judge: Callable[[Window], list[str]]
    examples: Sequence[Example]
    quiet_ms: int | None


MODULES: tuple[DetectorModule, ...] = (
    xid,
    liveness,
    memory,
    links,
    hang,
    thermal,
    kernel,
    straggler,
    drift,
    idle,
    risk,
)

DETECTORS: tuple[Detector, ...] = tuple(
    Detector(m.NAME, m.VERSION, m.detect, m.could_not_judge, m.EXAMPLES, m.QUIET_MS) for m in MODULES
)

# What each knows again after a restart of incidents that are open, beside what it sees in the last minutes.
RESTORED: Mapping[str, Callable[[Sequence[Incident]], object]] = {
    module.NAME: module.restored for module in (xid, memory, links, hang, thermal, straggler, drift, idle)
}  # liveness needs the fleet too; kernel and risk tell again what still stands
