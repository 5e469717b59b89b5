"""How numbers, times and places read."""

from __future__ import annotations

from datetime import UTC

import pytest

from drover_core.metrics import catalog
from drover_core.model.events import Health, RecommendedAction, Severity
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.theme import HEALTH, SEVERITY, health_of

NOON_MS = 1_800_014_400_000  # 2027-01-15T12:00:00Z
BERLIN = fmt.zone("Europe/Berlin")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(-5, "0 s"), (42_400, "42 s"), (60_000, "1 min"), (59 * 60_000, "59 min"), (11_100_000, "3 h 05 min"),
     (48 * 3_600_000, "2 d 0 h"), (52 * 3_600_000, "2 d 4 h")],
)  # fmt: skip
def test_duration(ms: int, text: str) -> None:
    assert fmt.duration(ms) == text


def test_clock_shows_the_day_only_when_it_is_another_for_the_viewer() -> None:
    assert fmt.clock(NOON_MS, BERLIN, NOON_MS) == "13:00:00"
    assert fmt.clock(NOON_MS - 13 * 3_600_000 - 1000, BERLIN, NOON_MS) == "Jan 14 23:59:59"
    assert fmt.clock(NOON_MS - 13 * 3_600_000 + 1000, UTC, NOON_MS) == "Jan 14 23:00:01"


@pytest.mark.parametrize("name", [None, "", "No/Such_Zone", "../../etc/passwd"])
def test_unknown_zone_is_utc(name: str | None) -> None:
    assert fmt.zone(name) is UTC


def test_times_in_sentences_become_the_viewers() -> None:
    text = "silent since 2027-01-15T11:59:00.250Z, see 2027-01-15T13:00:00+01:00"
    assert fmt.local_times(text, BERLIN, NOON_MS) == "silent since 12:59:00, see 13:00:00"
    assert fmt.local_times("build 2027-01-15", BERLIN, NOON_MS) == "build 2027-01-15"


def test_values_carry_their_unit() -> None:
    assert fmt.value(catalog.BY_NAME["gpu_temp_c"], 71) == "71 °C"
    assert fmt.value(catalog.BY_NAME["gpu_util_ratio"], 0.934) == "93.4 %"
    assert fmt.value(catalog.BY_NAME["sm_clock_mhz"], 1410) == "1,410 MHz"
    assert fmt.unit(catalog.BY_NAME["gpu_util_ratio"]) == "%"
    assert fmt.unit(catalog.BY_NAME["ecc_dram_corrected"]) == ""


def test_absence_and_unknown_cost_are_words() -> None:
    assert all(fmt.absent(reason) == fmt.ABSENCES[reason] for reason in catalog.Absent)
    assert fmt.absent("") == "not reported"
    assert fmt.absent("never seen") == "never seen"
    assert fmt.hours(None) == fmt.hours(float("nan")) == "not known"
    assert fmt.hours(0) == "0.0"
    assert fmt.hours(0.05) == "0.05"


def test_places() -> None:
    assert fmt.members([("n1", 3), ("n2", None)]) == "n1 GPU 3, n2"
    assert fmt.members([(f"n{i}", None) for i in range(9)], 2) == "n0, n1 and 7 more"


def test_every_state_has_words_and_a_look() -> None:
    assert set(HEALTH) == set(Health)
    assert set(SEVERITY) == set(Severity)
    assert set(fmt.ACTIONS) == set(RecommendedAction)
    signs = [look.sign for look in HEALTH.values() if look.sign]
    assert len(set(signs)) == len(signs) == len(Health) - 2, "only healthy and unknown (hatched) need no sign"


def test_a_health_of_a_newer_collector_is_unknown() -> None:
    assert health_of("quarantined") is Health.UNKNOWN
    assert health_of("suspect") is Health.SUSPECT


def test_marks_only_where_a_gpu_differs_from_its_peers() -> None:
    assert view.deviation_mark(1700, 1710, "MHz") is None
    assert view.deviation_mark(1500, 1700, "MHz") == view.Mark("-12 %", "warn")
    assert view.deviation_mark(500, 700, "W") == view.Mark("-29 %", "bad")
    assert view.deviation_mark(80, 66, "°C") == view.Mark("+14 °C", "bad")
    assert view.deviation_mark(70, 66, "°C") is None
    assert view.deviation_mark(3, 0, "W") is None, "no share of a median of 0"
    assert view.deviation_mark(float("nan"), 5, "W") is None


def test_what_would_be_out_is_not_shown_as_out() -> None:
    assert fmt.out_of_service([], []) == "nodes: 0"
    assert fmt.out_of_service(["n1", "n2"], {"n2": 1}) == "nodes: 1; only by a decision, with nothing done: 1"
    assert fmt.out_of_service(["n2"], ["n2", "n3"]) == "nodes: 1"


def test_a_name_in_a_label_is_no_markdown() -> None:
    assert fmt.plain("alex_b [x](https://evil.example)") == r"alex\_b \[x\]\(https\:\/\/evil\.example\)"


@pytest.mark.parametrize(("name", "expected"), [("812", "job 812"), ("job-1001", "job-1001"), ("Jobs/a", "Jobs/a")])
def test_a_job_is_not_called_job_twice(name: str, expected: str) -> None:
    assert fmt.job(name) == expected


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("xid", "64", "XID 64"),
        ("lifecycle", "agent_started", "agent started"),
        ("kernel", "oom_kill", "kernel oom kill"),
    ],
)
def test_events_are_shown_in_words(kind: str, code: str, expected: str) -> None:
    assert fmt.event(kind, code) == expected


def test_codes_in_sentences_become_words() -> None:
    who = view.Viewer(BERLIN, NOON_MS)
    assert who.localize("asks to drain n1 for memory/xid_64; 4303 +- 17 GB/s, 86 degC") == (
        "asks to drain n1 for XID 64 (memory); 4303 ± 17 GB/s, 86 °C"
    )
    assert who.localize("PCI:0000/3a, /var/memory/x and n1/gpu_3") == "PCI:0000/3a, /var/memory/x and n1/gpu_3"
