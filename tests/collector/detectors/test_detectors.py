"""Every detector's own examples, and what all detectors have in common."""

from __future__ import annotations

import dataclasses
import re

import pytest

from drover_collector.detectors import DETECTORS, Detector
from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.straggler.texts import CAUSES
from drover_core.model.events import Finding, RecommendedAction

EXAMPLES = [pytest.param(d, e, id=f"{d.name}: {e.name}") for d in DETECTORS for e in d.examples]
each_detector = pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.name)


Reported = tuple[tuple[int, Finding], ...]  # (time of the call, what it found)
_once: dict[tuple[str, str], Reported] = {}


def played(detector: Detector, example: Example) -> Reported:
    """What it finds in an example."""
    state, found = None, list[tuple[int, Finding]]()
    for window, now_ms in example.play():
        findings, state = detector.detect(window, state, now_ms)
        found += [(now_ms, finding) for finding in findings]
    return tuple(found)


def played_once(detector: Detector, example: Example) -> Reported:
    """The same, kept for all who look at it."""
    key = detector.name, example.name
    if key not in _once:
        _once[key] = played(detector, example)
    return _once[key]


@pytest.mark.parametrize(("detector", "example"), EXAMPLES)
def test_example(detector: Detector, example: Example) -> None:
    found = {
        (f.kind.value, f.cause, f.scope, f.severity.value) for _, f in played_once(detector, example) if not f.cleared
    }
    assert found == example.expected


ORDERS = {
    RecommendedAction.PROBE: r"\b(test|probe|diagnostics)\b",
    RecommendedAction.DRAIN: r"\bdrain\b",
    RecommendedAction.ISOLATE: r"\bisolate\b",
}


@pytest.mark.parametrize(("detector", "example"), EXAMPLES)
def test_the_advice_gives_the_order_that_the_recommendation_gives(detector: Detector, example: Example) -> None:
    """ "Test it", said the headline, and the text below "Set the power limit back"."""
    for _, f in played_once(detector, example):
        assert f.cleared or re.search(ORDERS.get(f.action, ""), f.advice, re.IGNORECASE), (f.action, f.advice)


def test_each_cause_of_a_straggler_is_to_be_tested_first() -> None:
    assert [cause for cause, (_, advice, _) in CAUSES.items() if not advice.startswith("Test ")] == []


@each_detector
def test_has_a_healthy_and_a_faulty_example(detector: Detector) -> None:
    notes_only = detector.name in ("idle", "risk")  # what they find is never a warning
    reported = [any(notes_only or severity != "info" for *_, severity in e.expected) for e in detector.examples]
    assert any(reported)
    assert not all(reported)


@each_detector
def test_is_quiet_on_healthy_training(detector: Detector) -> None:
    state = None
    for window, now_ms in play(small_fleet(), 40):
        findings, state = detector.detect(window, state, now_ms)
        assert findings == []


@each_detector
def test_copes_with_no_columns_and_says_so(detector: Detector) -> None:
    state = None
    for window, now_ms in play(small_fleet(), 5):
        bare = tuple(dataclasses.replace(b, gpu={}, node={}, link={}) for b in window.buckets)
        window = dataclasses.replace(window, buckets=bare)
        findings, state = detector.detect(window, state, now_ms)
        assert findings == []
    only_events = detector.name == "conditions"  # that none came says nothing
    assert bool(detector.could_not_judge(window)) is not only_events


@each_detector
def test_copes_with_events_before_the_first_bucket(detector: Detector) -> None:
    findings, _ = detector.detect(Window(small_fleet(), (), False, (), START_MS), None, START_MS)
    assert findings == []


@each_detector
def test_is_deterministic(detector: Detector) -> None:
    example = detector.examples[-1]
    assert played(detector, example) == played_once(detector, example)


def test_findings_say_what_an_operator_needs() -> None:
    for detector in DETECTORS:
        for example in detector.examples:
            for now_ms, finding in played_once(detector, example):
                if finding.cleared:
                    continue
                assert finding.summary.endswith(".")
                assert finding.advice.endswith(".")
                assert finding.evidence
                assert finding.members
                assert finding.since_ms <= now_ms
