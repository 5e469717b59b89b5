"""The form of an incident that replay prints and webhooks carry."""

from __future__ import annotations

import json

from drover_core.model.events import (
    Evidence,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.model.reports import gpu_hours, incident_report, job_label

INCIDENT = Incident(
    id="i1",
    kind=IncidentKind.STRAGGLER,
    cause="power_cap",
    scope="gpu",
    node="r01n01",
    gpu=3,
    members=(("r01n01", 3), ("r01n02", None)),
    opened_ms=1_700_000_000_250,
    since_ms=1_699_999_990_000,
    closed_ms=None,
    severity=Severity.WARNING,
    confidence=0.9,
    action=RecommendedAction.PROBE,
    summary="slow",
    advice="probe it",
    evidence=(Evidence("clock low", "sm_clock_mhz", 1000.0, 1400.0, from_ms=1_699_999_990_000),),
)


def test_every_documented_key_with_iso_times() -> None:
    report = incident_report(INCIDENT)
    assert json.loads(json.dumps(report)) == report
    assert {
        "id", "kind", "scope", "node", "gpu", "members", "opened", "since", "closed", "severity", "cause",
        "confidence", "action", "evidence",
    } <= set(report)  # fmt: skip
    assert report["opened"] == "2023-11-14T22:13:20.250Z"
    assert report["since"] == "2023-11-14T22:13:10.000Z"
    assert report["closed"] is None
    assert report["members"] == [["r01n01", 3], ["r01n02", None]]
    assert (report["kind"], report["severity"], report["action"]) == ("straggler", "warning", "probe")


def test_evidence_leaves_out_what_it_does_not_have() -> None:
    assert incident_report(INCIDENT)["evidence"] == [
        {"text": "clock low", "metric": "sm_clock_mhz", "value": 1000.0, "expected": 1400.0,
         "from": "2023-11-14T22:13:10.000Z"}
    ]  # fmt: skip


def test_a_job_is_called_so_once() -> None:
    assert [job_label(name) for name in ("812", "job-1001", "Job7")] == ["job 812", "job-1001", "Job7"]


def test_gpu_hours_are_written_for_people() -> None:
    hours = (0, 1 / 3_600_000, 0.001, 0.0016, 0.594, 0.999, 1, 1204.46)
    assert [gpu_hours(each * 3_600_000) for each in hours] == [
        "0.0", "under 0.001", "0.001", "0.0016", "0.59", "1", "1.0", "1,204.5",
    ]  # fmt: skip
