"""Events survive their JSON form, and junk is refused with its key."""

from __future__ import annotations

import json

import pytest

from drover_core.model.events import (
    Event,
    EventKind,
    Evidence,
    Incident,
    IncidentKind,
    Note,
    RecommendedAction,
    Severity,
    from_json,
    stronger,
    to_json,
    worse,
)
from drover_core.times import from_iso, iso

INCIDENT = Incident(
    "inc-1", IncidentKind.STRAGGLER, "power_cap", "gpu", "n1", 3, (("n1", 3),), 2000, 1000, None, Severity.WARNING, 0.9,
    RecommendedAction.PROBE, "slow", "probe it", (Evidence("x", "sm_clock_mhz", 1410.0, 1755.0, 12.0, 63, 1, 2),),
    (Note(1, "opened"),), ("straggler",), "812", 0.5, None,
)  # fmt: skip


def test_round_trip() -> None:
    assert from_json(Incident, to_json(INCIDENT)) == INCIDENT


def test_keys_of_a_newer_version_are_ignored() -> None:
    data = json.loads(to_json(INCIDENT))
    data["invented_later"] = 1
    assert from_json(Incident, json.dumps(data)) == INCIDENT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"severity": "terrible"}, "terrible"),
        ({"opened_ms": "soon"}, "opened_ms"),
        ({"opened_ms": True}, "opened_ms"),
        ({"members": "n1"}, "members"),
        ({"members": [["n1"]]}, "members"),
        ({"evidence": [3]}, "evidence"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, object], said: str) -> None:
    data = {**json.loads(to_json(INCIDENT)), **change}
    with pytest.raises(ValueError, match=said):
        from_json(Incident, json.dumps(data))


def test_missing_field_is_refused() -> None:
    with pytest.raises(ValueError, match="Event"):
        from_json(Event, '{"id": "x"}')
    with pytest.raises(ValueError, match="expected an object"):
        from_json(Event, "[]")


def test_event_round_trip() -> None:
    event = Event("n1/s/1", 5, "n1", None, EventKind.KERNEL, "oom", "Killed process \x1b[31m")
    assert from_json(Event, to_json(event)) == event


def test_orders() -> None:
    assert stronger(RecommendedAction.WATCH, RecommendedAction.DRAIN) is RecommendedAction.DRAIN
    assert worse(Severity.CRITICAL, Severity.INFO) is Severity.CRITICAL


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        ("2026-01-01T00:00:00Z", 1_767_225_600_000),
        ("2026-01-01T01:00:00.250+01:00", 1_767_225_600_250),
        ("2026-01-01 00:00:00", 1_767_225_600_000),
        (1_767_225_600, 1_767_225_600_000),
        (1_767_225_600_123, 1_767_225_600_123),
    ],
)
def test_times(value: str | int, ms: int) -> None:
    assert from_iso(value) == ms
    assert from_iso(iso(ms)) == ms


@pytest.mark.parametrize("value", ["yesterday", True])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ValueError):
        from_iso(value)  # type: ignore[arg-type]  # the wrong type is the point


def test_evidence_of_an_absent_value_is_unknown_not_a_number() -> None:
    """It used to end a replay: JSON has no NaN."""
    item = Evidence("clock", "sm_clock_mhz", float("nan"), float("inf"), float("nan"), 3)
    assert (item.value, item.expected, item.spread, item.peers) == (None, None, None, 3)
