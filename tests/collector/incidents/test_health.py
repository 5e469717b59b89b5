"""Health is a fold over reports and the open incidents; unknown is never healthy."""

from __future__ import annotations

import numpy as np

from drover_collector.detectors._lib.examples import small_fleet
from drover_collector.incidents.health import (
    HEALTHS,
    HealthFold,
    changes,
    fold,
    reason_of,
    unknown,
)
from drover_core.model.events import (
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    RecommendedAction,
    Severity,
)

INDEX = small_fleet(4)
ALL_NODES, ALL_GPUS = np.ones(4, bool), np.ones(32, bool)


def incident(
    kind: str, cause: str, scope: str, node: str, gpu: int | None, severity: str, confidence: float = 0.95
) -> Incident:
    return Incident(
        f"{cause}-{node}", IncidentKind(kind), cause, scope, node, gpu, ((node, gpu),), 0, 0, None, Severity(severity),
        confidence, RecommendedAction.NONE, f"{cause} on {node}.", "",
    )  # fmt: skip


def of(folded: HealthFold, node: int, slot: int | None = None) -> Health:
    return reason_of(folded, node, None if slot is None else node * 8 + slot)[0]


def test_no_report_is_unknown() -> None:
    folded = unknown(INDEX)
    assert {HEALTHS[c] for c in (*folded.node, *folded.gpu)} == {Health.UNKNOWN}
    assert reason_of(folded, 0, None)[1] == "no report"


def test_a_report_and_no_incident_is_healthy() -> None:
    folded = fold(INDEX, [], ALL_NODES, ALL_GPUS)
    assert {HEALTHS[c] for c in (*folded.node, *folded.gpu)} == {Health.HEALTHY}


def test_a_warning_is_suspect_a_sure_critical_one_confirmed_and_the_node_is_as_bad_as_its_gpu() -> None:
    found = [
        incident("straggler", "clock", "gpu", "n00", 1, "warning"),
        incident("xid", "xid_79", "gpu", "n01", 2, "critical"),
        incident("xid", "xid_999", "gpu", "n02", 3, "critical", 0.5),
        incident("xid", "xid_31", "gpu", "n03", 3, "info"),
    ]
    folded = fold(INDEX, found, ALL_NODES, ALL_GPUS)
    assert [of(folded, n) for n in range(4)] == [Health.SUSPECT, Health.CONFIRMED, Health.SUSPECT, Health.HEALTHY]
    assert of(folded, 0, 1) is Health.SUSPECT
    assert of(folded, 0, 2) is Health.HEALTHY
    assert reason_of(folded, 1, 10) == (Health.CONFIRMED, "xid_79 on n01.", "xid_79-n01")


def test_a_silent_node_is_unknown_with_its_reason() -> None:
    reporting, gpus = ALL_NODES.copy(), ALL_GPUS.copy()
    reporting[1], gpus[8:16] = False, False
    folded = fold(INDEX, [incident("liveness", "silent", "node", "n01", None, "critical")], reporting, gpus)
    assert of(folded, 1) is Health.UNKNOWN
    assert reason_of(folded, 1, 8)[:2] == (Health.UNKNOWN, "silent on n01.")


def test_a_lost_gpu_is_confirmed_although_it_says_nothing() -> None:
    gpus = ALL_GPUS.copy()
    gpus[10] = False
    folded = fold(INDEX, [incident("xid", "xid_79", "gpu", "n01", 2, "critical")], ALL_NODES, gpus)
    assert of(folded, 1, 2) is Health.CONFIRMED


def test_a_gpu_that_says_nothing_makes_its_node_unknown_not_healthy() -> None:
    gpus = ALL_GPUS.copy()
    gpus[10] = False
    folded = fold(INDEX, [], ALL_NODES, gpus)
    assert of(folded, 1) is Health.UNKNOWN
    assert "GPU 2" in reason_of(folded, 1, None)[1]


def test_the_worse_of_two_incidents_counts_whatever_their_order() -> None:
    bad = incident("xid", "xid_79", "gpu", "n01", 2, "critical")
    mild = incident("straggler", "clock", "gpu", "n01", 2, "warning")
    for order in ([bad, mild], [mild, bad]):
        assert reason_of(fold(INDEX, order, ALL_NODES, ALL_GPUS), 1, 10)[2] == bad.id


def test_a_hung_driver_is_all_gpus_of_the_node() -> None:
    hung = incident("liveness", "driver_hung", "node", "n01", None, "critical")
    folded = fold(INDEX, [hung], ALL_NODES, ALL_GPUS)
    assert {of(folded, 1, slot) for slot in range(8)} == {Health.CONFIRMED}


def test_changes_name_what_moved_once() -> None:
    start = unknown(INDEX)
    well = fold(INDEX, [], ALL_NODES, ALL_GPUS)
    assert [(c.node, c.gpu, c.health) for c in changes(INDEX, start, well, 5)] == [
        (f"n0{n}", None, Health.HEALTHY) for n in range(4)
    ]
    ill = fold(INDEX, [incident("xid", "xid_79", "gpu", "n01", 2, "critical")], ALL_NODES, ALL_GPUS)
    moved = changes(INDEX, well, ill, 6)
    assert [(c.node, c.gpu, c.incident_id) for c in moved] == [("n01", None, "xid_79-n01"), ("n01", 2, "xid_79-n01")]
    assert [(c.gpu, c.health, c.reason) for c in changes(INDEX, ill, well, 7)] == [
        (None, Health.HEALTHY, ""), (2, Health.HEALTHY, ""),
    ]  # fmt: skip
    assert changes(INDEX, well, well, 8) == []


def test_of_a_node_out_of_service_its_duty_says_the_health() -> None:
    dead = incident("xid", "xid_79", "gpu", "n01", 2, "critical")
    duties = {
        "n01": NodeOutage("n01", Health.VALIDATING, 1, dead.id, "probes run"),
        "n02": NodeOutage("n02", Health.HEALTHY, 1, "", "back"),
        "gone": NodeOutage("gone", Health.DRAINED, 1, "", "no longer in the fleet file"),
    }
    folded = fold(INDEX, [dead], ALL_NODES, ALL_GPUS, duties)
    assert reason_of(folded, 1, None) == (Health.VALIDATING, "probes run", dead.id)
    assert of(folded, 1, 2) is Health.CONFIRMED  # the sick GPU stays in sight
    assert of(folded, 1, 3) is Health.VALIDATING
    assert of(folded, 2) is Health.HEALTHY
    silent = fold(INDEX, [], ~ALL_NODES, ~ALL_GPUS, duties)
    assert of(silent, 1) is Health.VALIDATING  # a node that reboots in repair is no riddle
