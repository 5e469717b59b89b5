"""Is it safe to give a node back: what is said for and against it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drover_collector.api.actions import judge_return
from drover_core.model.events import (
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    ProbeReason,
    ProbeVerdict,
    RecommendedAction,
    Severity,
)

T0 = 1_790_000_000_000
OUT = NodeOutage("n1", Health.DRAINING, T0, "i1", "GPU 3 fell off the bus.", "alex (console)")
NOW = replace(OUT, stage=Health.DRAINED, ts_ms=T0 + 60_000, reason="no job runs there")
PASSED = ProbeVerdict("p1", "n1", None, True, "", "all as it should be", T0 + 120_000, ProbeReason.REPAIRED)
OPEN = Incident(
    "i2", IncidentKind.MEMORY, "remap_failed", "gpu", "n1", 2, (("n1", 2),), T0, T0, None, Severity.CRITICAL, 0.9,
    RecommendedAction.DRAIN, "A row remap failed on GPU 2", "Have it replaced.",
)  # fmt: skip


def test_one_that_passed_its_probes_since_is_safe_and_the_story_is_shown() -> None:
    safe, reasons = judge_return(OUT, NOW, [], 2_000, [PASSED])
    assert safe is True
    assert reasons == [
        "Out since 2026-09-21T14:13:20.000Z, by alex (console): GPU 3 fell off the bus.",
        "Now drained: no job runs there.",
        "Its probes of 2026-09-21T14:15:20.000Z, since it was taken out, passed: all as it should be",
    ]


def test_without_probes_nothing_is_proven() -> None:
    safe, reasons = judge_return(OUT, NOW, [], 2_000, [])
    assert safe is None
    assert "not probed since" in reasons[-1]


@pytest.mark.parametrize(
    ("opened", "silent_ms", "verdicts", "why"),
    [
        ([OPEN], 2_000, [PASSED], "Still open: A row remap failed on GPU 2"),
        ([], 90_000, [PASSED], "It does not report: its present state is not known."),
        (
            [], 2_000, [PASSED, replace(PASSED, request="p2", gpu=1, passed=False, text="HBM 20 % slow")],
            "Its probes of 2026-09-21T14:15:20.000Z failed: HBM 20 % slow",
        ),
    ],
    ids=["open", "silent", "failed"],
)  # fmt: skip
def test_what_speaks_against_it_comes_first(
    opened: list[Incident], silent_ms: int, verdicts: list[ProbeVerdict], why: str
) -> None:
    safe, reasons = judge_return(OUT, NOW, opened, silent_ms, verdicts)
    assert safe is False
    assert reasons[0] == why


def test_probes_that_could_not_be_judged_prove_nothing() -> None:
    unclear = replace(PASSED, passed=None, text="no peers")
    safe, reasons = judge_return(OUT, NOW, [], 2_000, [unclear, replace(unclear, gpu=1, passed=True)])
    assert safe is None
    assert any("could not be judged" in line for line in reasons)


def test_a_failure_before_the_last_probes_no_longer_counts_and_returns_are_shown() -> None:
    before = replace(PASSED, request="p0", passed=False)
    safe, reasons = judge_return(replace(OUT, returns=2), NOW, [], 2_000, [before, PASSED])
    assert safe is True
    assert reasons[-1] == "It came back 2 times before, and failed again."


def test_what_is_wrong_around_it_is_reported_and_is_not_its_own() -> None:
    around = replace(OPEN, scope="rack", node=None, gpu=None, summary="Rack r4 gets hot air")
    safe, reasons = judge_return(OUT, NOW, [around], 2_000, [PASSED])
    assert safe is True
    assert reasons[-1] == "Open around it, not on it: Rack r4 gets hot air"
