"""Detect faults in windows of telemetry and events: one module for each detector, listed in MODULES.

To add a detector, write a module that fits `DetectorModule` and add it to MODULES (docs/how-to/add-a-detector.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drover_collector.detectors import idle, memory
from drover_collector.detectors._lib.examples import Example
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.conditions import detector as conditions
from drover_collector.detectors.drift import detector as drift
from drover_collector.detectors.hang import detector as hang
from drover_collector.detectors.kernel import detector as kernel
from drover_collector.detectors.links import detector as links
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.detectors.risk import detector as risk
from drover_collector.detectors.slowdown import detector as slowdown
from drover_collector.detectors.straggler import detector as straggler
from drover_collector.detectors.thermal import detector as thermal
from drover_collector.detectors.xid import detector as xid
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Finding, Incident


class DetectorModule(Protocol):
    """A detector. It does no I/O and reads no clock: it knows its window and its state only.

    Attributes:
        QUIET_MS: how long without a finding until an incident no longer needs this detector; None: the detector reports
            the end itself.
        EXAMPLES: windows with and without a fault, which the tests play.
    """

    NAME: str
    VERSION: int

    @property
    def QUIET_MS(self) -> int | None: ...  # noqa: N802  # a constant of the module

    @property
    def EXAMPLES(self) -> Sequence[Example]: ...  # noqa: N802  # a constant of the module

    def detect(self, window: Window, state: Any, now_ms: int, /) -> tuple[list[Finding], Any]:
        """Return the findings of now and the new state.

        Args:
            state: what the last call returned; None at first. It may be changed in place.
        """

    def could_not_judge(self, window: Window, /) -> list[str]:
        """Return a sentence for each fault that the newest bucket has no metrics for."""

    def restored(self, incidents: Sequence[Incident], index: FleetIndex, started_ms: int, /) -> Any:
        """Return the state that resumes the open incidents of a former run of the collector; None if none is needed."""


@dataclass(frozen=True, slots=True)
class Detector:
    """A row of DETECTORS; see `DetectorModule`."""

    name: str
    version: int
    detect: Callable[[Window, Any, int], tuple[list[Finding], Any]]
    could_not_judge: Callable[[Window], list[str]]
    examples: Sequence[Example]
    quiet_ms: int | None
    restored: Callable[[Sequence[Incident], FleetIndex, int], Any] = lambda _incidents, _index, _started_ms: None

    @classmethod
    def of(cls, module: DetectorModule) -> Detector:
        return cls(
            module.NAME, module.VERSION, module.detect, module.could_not_judge, module.EXAMPLES, module.QUIET_MS,
            module.restored,
        )  # fmt: skip


# In the order in which they run.
MODULES: tuple[DetectorModule, ...] = (
    xid,
    liveness,
    memory,
    links,
    hang,
    thermal,
    kernel,
    conditions,
    straggler,
    drift,
    idle,
    risk,
    slowdown,
)
DETECTORS: tuple[Detector, ...] = tuple(Detector.of(module) for module in MODULES)
