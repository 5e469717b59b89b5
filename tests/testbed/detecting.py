"""Engines of a few detectors, for tests of what these say: all thirteen cost ten times as much CPU as one."""

from __future__ import annotations

from drover_collector.detectors import DETECTORS, Detector


def only(*names: str) -> tuple[Detector, ...]:
    """Return the detectors of these names, in their order."""
    assert set(names) <= {detector.name for detector in DETECTORS}
    return tuple(detector for detector in DETECTORS if detector.name in names)
