"""Scoring: what counts as found, false, early, late, and a hard negative."""

from __future__ import annotations

from typing import Any

import pytest

from drover_cli.scoring.score import (
    Found,
    Label,
    found_of,
    label_of,
    percentile,
    score,
)

BASE = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def label(**change: Any) -> Label:
    row: dict[str, Any] = {
        "id": "f1", "kind": "straggler", "node": "n1", "gpu": 3, "start": BASE, "end": BASE + 600_000,
        "cause": "power_cap", "hardware": True,
    }  # fmt: skip
    return label_of({**row, **change})


def found(**change: Any) -> Found:
    row: dict[str, Any] = {
        "id": "i1", "kind": "straggler", "node": "n1", "gpu": 3, "members": [["n1", 3]],
        "opened": "2026-01-01T00:00:20Z", "severity": "warning", "cause": "power_cap", "action": "probe",
    }  # fmt: skip
    return found_of({**row, **change})


def test_found_in_time() -> None:
    result = score([label()], [found()], 10.0)
    assert (result.found, result.faults, result.precision, result.recall, result.f1) == (1, 1, 1.0, 1.0, 1.0)
    assert result.delays_s == [20.0]


@pytest.mark.parametrize(
    ("opened_ms", "counts"),
    [(-30_000, True), (-30_001, False), (600_000 + 60_000, True), (600_000 + 60_001, False)],
)
def test_window(opened_ms: int, counts: bool) -> None:
    result = score([label()], [found(opened=BASE + opened_ms)], 10.0)
    assert result.found == counts
    assert len(result.false) == (not counts)


def test_early_is_no_negative_delay() -> None:
    assert score([label()], [found(opened=BASE - 20_000)], 10.0).delays_s == [0.0]


def test_fault_without_end_is_never_late() -> None:
    assert score([label(end=None)], [found(opened=BASE + 10**9)], 10.0).found == 1


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"severity": "info"}, False),
        ({"kind": "idle"}, False),
        ({"kind": "thermal"}, True),
        ({"members": [["n1", 4]]}, False),
        ({"members": [["n2", 3]]}, False),
        ({"members": [["n1", None]]}, True),
        ({"members": [["n2", 3], ["n1", 3]]}, True),
    ],
)
def test_severity_kind_and_member(change: dict[str, Any], counts: bool) -> None:
    assert score([label()], [found(**change)], 10.0).found == counts


def test_info_is_never_false() -> None:
    result = score([], [found(severity="info")], 10.0)
    assert not result.false and result.precision is None


def test_notes_of_idle_gpus_are_counted_apart_from_the_score_and_improve_no_figure() -> None:
    note = found(kind="idle", cause="idle_gpus", severity="info", action="none")
    result = score([label(kind="idle", cause="held")], [note], 10.0)
    assert (result.found, result.precision, result.false_notes) == (0, None, 0)
    assert set(result.otherwise) == {m.id for m in result.missed}
    assert score([], [note], 10.0).false_notes == 1
    assert not score([], [found(kind="idle", cause="scattered", severity="info", action="none")], 10.0).false_notes


def test_a_consequence_that_only_the_open_incident_of_its_cause_reports_is_missed_and_reported_otherwise() -> None:
    links = label(kind="link", cause="nvlink")
    lost: dict[str, Any] = {
        "id": "f2", "kind": "liveness", "cause": "gpu_lost", "start": BASE + 900_000, "end": BASE + 1_800_000,
        "follows": "f1",
    }  # fmt: skip
    said = {"kind": "link", "cause": "xid_74", "severity": "critical"}

    def joined(at_s: int, by: str) -> dict[str, Any]:
        return {**said, "joined": [[f"2026-01-01T00:{at_s // 60:02d}:{at_s % 60:02d}Z", by]]}

    def run(change: dict[str, Any], **of_label: Any) -> float | None:
        result = score([links, label(**{**lost, **of_label})], [found(**change)], 10.0)
        assert not result.false
        assert (result.found, [m.id for m in result.missed]) == (1, ["f2"])
        return result.otherwise.get("f2")

    assert run(joined(912, "liveness")) == 12.0
    assert run(said) is None  # open all the time, and silent about it
    assert run(joined(600, "liveness")) is None  # before it began
    assert run(joined(912, "thermal")) is None  # of something else
    assert run(joined(912, "liveness"), follows=None) is None  # no matter of the open incident


def test_second_incident_for_one_fault_is_a_duplicate() -> None:
    result = score([label()], [found(), found(id="i2", kind="thermal")], 10.0)
    assert (result.found, result.matched, result.duplicates, len(result.false)) == (1, 1, 1, 0)


def test_one_incident_may_name_two_faults() -> None:
    rack = found(members=[["n1", None], ["n2", None]])
    result = score([label(), label(id="f2", node="n2")], [rack], 10.0)
    assert (result.found, result.matched, result.duplicates) == (2, 1, 0)


@pytest.mark.parametrize(("action", "false"), [("watch", 0), ("probe", 0), ("drain", 1), ("isolate", 1)])
def test_hard_negative(action: str, false: int) -> None:
    result = score([label(hardware=False, kind="uneven")], [found(action=action)], 10.0)
    assert (len(result.false_drains), len(result.false), result.tolerated) == (false, false, 1 - false)
    assert result.faults == 0 and result.recall is None


def test_drain_of_a_healthy_node_is_false_twice() -> None:
    result = score([], [found(action="drain")], 10.0)
    assert len(result.false_drains) == len(result.false) == 1
    assert result.precision == 0.0


def test_rates_state_their_bound() -> None:
    assert score([], [], 1500.0).per_1000_gpu_days(0) == "0 (<= 2.00 at 95 %)"
    assert score([], [], 500.0).per_1000_gpu_days(1) == "2.00"
    assert score([], [], 0.0).per_1000_gpu_days(1) == "unknown"


def test_rows_of_another_form_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        label(kind="gremlin")
    with pytest.raises(KeyError):
        found_of({"id": "x"})


def test_percentile() -> None:
    assert percentile([], 0.95) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 0.95) == 95.0


def foretold(**change: Any) -> Label:
    """A GPU that falls off the bus ten minutes after its corrected errors began to grow."""
    more = {"kind": "xid", "cause": "fallen_off_bus", "precursor": "ecc", "precursor_start": BASE - 600_000}
    return label(**{**more, **change})


def test_what_names_the_precursor_warns_and_is_not_false() -> None:
    warning = found(kind="memory", opened=BASE - 300_000)
    result = score([foretold()], [warning], 10.0)
    assert result.warned == {"f1": 300.0} and result.precision == 1.0
    assert result.found == 1 and result.delays_s == [0.0]  # memory names an XID too


def test_a_precursor_that_names_no_fault_does_not_find_it() -> None:
    warning = found(kind="thermal", opened=BASE - 300_000)
    result = score([foretold(precursor="heat")], [warning], 10.0)
    assert result.warned == {"f1": 300.0} and result.precision == 1.0
    assert result.found == 0 and [m.id for m in result.missed] == ["f1"]


def test_after_the_fault_only_its_own_kinds_are_right() -> None:
    result = score([foretold(precursor="heat")], [found(kind="thermal", opened=BASE + 300_000)], 10.0)
    assert result.warned == {} and len(result.false) == 1


def test_before_its_precursor_nothing_is_right() -> None:
    result = score([foretold()], [found(kind="memory", opened=BASE - 631_000)], 10.0)
    assert result.warned == {} and len(result.false) == 1


def test_an_unknown_precursor_is_refused() -> None:
    with pytest.raises(ValueError, match="known are ecc"):
        foretold(precursor="noise")
