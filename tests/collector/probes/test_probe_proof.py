"""What probes prove: a failed one makes the suspicion critical and asks for a drain, a passed one clears it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drover_collector.detectors import Detector
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.engine import probe_evidence as proof
from drover_collector.engine.engine import LAG_MS, Engine, Outcome
from drover_collector.engine.replay import Replay
from drover_collector.incidents.book import CLEARED_MS
from drover_collector.policy.policy import PROOF, Policy
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    Health,
    Incident,
    IncidentKind,
    ProbeReason,
    ProbeVerdict,
    RecommendedAction,
    Severity,
)
from drover_core.model.probe_figures import FIGURES

INDEX = small_fleet(12)
POLICY = Policy.load()
NODE, GPU = "n01", 2
MINUTE = 60_000


class Suspects:
    """A detector that says what a test gives it."""

    def __init__(self, cause: str = "hbm", kind: IncidentKind = IncidentKind.STRAGGLER) -> None:
        self.finding = Finding(
            "straggler", kind, cause, "gpu", NODE, GPU, ((NODE, GPU),), 0, START_MS, Severity.WARNING, 0.7,
            RecommendedAction.DRAIN, f"GPU {GPU} of {NODE} is slow", "Probe it.",
        )  # fmt: skip
        self.on = True

    def detector(self) -> Detector:
        def detect(window: Any, state: Any, now_ms: int) -> tuple[list[Finding], Any]:
            return [replace(self.finding, ts_ms=now_ms)] if self.on and window.fresh else [], state

        return Detector("straggler", 1, detect, lambda _: [], (), 180_000)


def engine(suspects: Suspects) -> Engine:
    return Engine(INDEX, POLICY, START_MS, [suspects.detector()])


def feed(to: Engine, numbers: Sequence[int]) -> list[Outcome]:
    buckets = [training_bucket(INDEX, number) for number in numbers]
    return [to.on_bucket(bucket, bucket.end_ms + LAG_MS) for bucket in buckets]


def at(number: int) -> int:
    """Just after the bucket of that number was judged."""
    return START_MS + (number + 1) * 10_000 + LAG_MS + 1


def verdict(passed: bool | None, probe: str = "", good: tuple[str, ...] = (), **more: Any) -> ProbeVerdict:
    base = ProbeVerdict(
        "p1", NODE, GPU, passed, probe, f"GPU {GPU}: {probe} 3440 GB/s", 0, ProbeReason.CONFIRM, "", 3440.0, 4300.0, 96,
        good,
    )  # fmt: skip
    return replace(base, **more)


def the_incident(of: Engine) -> Incident:
    (found,) = of.incidents.values()
    return found


def test_a_probe_that_fails_proves_the_straggler() -> None:
    subject = engine(Suspects())
    feed(subject, range(3))
    before = the_incident(subject)
    assert (before.action, before.severity) == (RecommendedAction.PROBE, Severity.WARNING)
    assert subject.health_of(NODE, GPU)[0] is Health.SUSPECT
    whole = verdict(False, "hbm_copy", gpu=None)
    outcome = subject.on_verdicts([verdict(False, "hbm_copy"), whole], at(2))
    after = the_incident(subject)
    assert outcome.incidents == (after,)
    assert (after.id, after.kind, after.cause) == (before.id, IncidentKind.STRAGGLER, "hbm")
    assert (after.severity, after.action, after.confidence) == (
        Severity.CRITICAL,
        RecommendedAction.DRAIN,
        proof.CONFIDENCE,
    )
    assert after.detectors == ("straggler", PROOF)
    (evidence,) = [e for e in after.evidence if e.value is not None]
    assert (evidence.value, evidence.expected, evidence.peers) == (3440.0, 4300.0, 96)
    (decision,) = outcome.decisions
    assert (decision.wanted, decision.outcome) == (RecommendedAction.DRAIN, "would_act")
    assert subject.health_of(NODE, GPU)[0] is Health.CONFIRMED
    feed(subject, range(3, 40))  # quiet does not undo a proof
    assert the_incident(subject).closed_ms is None


def test_a_probe_that_passes_clears_the_innocent_for_an_hour() -> None:
    subject = engine(suspects := Suspects())
    feed(subject, range(3))
    outcome = subject.on_verdicts([verdict(True, good=("hbm_copy", "sdc")), verdict(True, gpu=None)], at(2))
    (cleared,) = outcome.incidents
    assert cleared.closed_ms == at(2)
    assert cleared.timeline[-1].text.startswith("cleared by a probe: GPU 2")
    assert subject.health_of(NODE, GPU)[0] is Health.HEALTHY
    assert not [d for d in outcome.decisions if d.wanted is RecommendedAction.DRAIN]
    hour = CLEARED_MS // 10_000
    feed(subject, range(3, hour))
    assert the_incident(subject).closed_ms == at(2)  # neither open again nor another one
    suspects.finding = replace(suspects.finding, cause="nvlink")
    feed(subject, [hour])
    assert [i.cause for i in subject.incidents.values() if i.closed_ms is None] == ["nvlink"]
    suspects.finding = replace(suspects.finding, cause="hbm")
    feed(subject, range(hour + 1, hour + 3))
    assert {i.cause for i in subject.incidents.values() if i.closed_ms is None} >= {"nvlink"}


def test_after_an_hour_the_same_suspicion_may_come_again() -> None:
    subject = engine(Suspects())
    feed(subject, range(3))
    subject.on_verdicts([verdict(True, good=("hbm_copy",))], at(2))
    later = CLEARED_MS // 10_000 + 3
    feed(subject, [later])
    assert [i for i in subject.incidents.values() if i.closed_ms is None]


@pytest.mark.parametrize("cause", ["thermal", "nic", "nvlink", "pcie", "unheard of"])
def test_what_a_probe_did_not_look_at_is_not_cleared(cause: str) -> None:
    subject = engine(Suspects(cause))
    feed(subject, range(3))
    subject.on_verdicts([verdict(True, good=("gemm_bf16", "pcie_h2d", "sdc"))], at(2))
    incident = the_incident(subject)
    assert incident.closed_ms is None and incident.action is RecommendedAction.PROBE
    assert incident.timeline[-1].text.startswith("a probe found nothing, and did not look for its cause")


def test_what_a_register_says_is_not_cleared() -> None:
    subject = Engine(INDEX, POLICY, START_MS)
    feed(subject, range(3))
    event = Event("e", START_MS + 35_000, NODE, GPU, EventKind.XID, "79", "fallen off the bus")
    subject.on_events([event], at(2))
    before = the_incident(subject)
    subject.on_verdicts([verdict(True, good=("gemm_bf16", "hbm_copy", "sdc"))], at(2) + 1)
    after = the_incident(subject)
    assert (after.closed_ms, after.version, after.action) == (None, before.version, RecommendedAction.DRAIN)


def test_an_order_that_failed_leaves_a_suspect_a_suspect() -> None:
    subject = engine(Suspects())
    feed(subject, range(3))
    before = the_incident(subject)
    failed = verdict(None, gpu=None, incident_id=before.id, text="n01: not judged, expired: no answer within 1800 s")
    subject.on_verdicts([failed], at(2))
    after = the_incident(subject)
    assert replace(after, timeline=(), version=0, updated_ms=0) == replace(before, timeline=(), version=0, updated_ms=0)
    assert after.timeline[-1].text == f"a probe gave no verdict: {failed.text}"
    subject.on_verdicts([failed], at(2) + 1)  # given again until it is stored
    assert the_incident(subject) == after
    assert subject.health_of(NODE, GPU)[0] is Health.SUSPECT


FAILS = {
    "wrong result": (verdict(False, "sdc", end="wrong"), IncidentKind.SDC, "wrong_results", RecommendedAction.DRAIN),
    "wrong loss": (
        verdict(False, "train_step", end="wrong"),
        IncidentKind.SDC,
        "wrong_results",
        RecommendedAction.DRAIN,
    ),
    "memory": (
        verdict(False, "memory_pattern", end="wrong"),
        IncidentKind.MEMORY,
        "memory_pattern",
        RecommendedAction.DRAIN,
    ),
    "nvlink": (verdict(False, "p2p"), IncidentKind.LINK, "nvlink", RecommendedAction.DRAIN),
    "cooling": (verdict(False, "soak"), IncidentKind.THERMAL, "cooling", RecommendedAction.DRAIN),
    "slow doubles": (verdict(False, "gemm_fp64"), IncidentKind.STRAGGLER, "clock", RecommendedAction.DRAIN),
    "slow calls": (verdict(False, "launch"), IncidentKind.STRAGGLER, "host", RecommendedAction.DRAIN),
    "slow": (verdict(False, "gemm_bf16"), IncidentKind.STRAGGLER, "clock", RecommendedAction.DRAIN),
    "hung": (
        verdict(False, "gemm_bf16", value=None, end="hung"),
        IncidentKind.HANG,
        "probe_hung",
        RecommendedAction.DRAIN,
    ),
    "disk": (verdict(False, "disk_read", gpu=None), IncidentKind.STRAGGLER, "disk", RecommendedAction.ADVISE),
}


@pytest.mark.parametrize("case", list(FAILS))
def test_a_failure_without_a_suspicion_is_an_incident_until_a_probe_passes(case: str) -> None:
    failed, kind, cause, action = FAILS[case]
    suspects = Suspects()
    suspects.on = False
    subject = engine(suspects)
    feed(subject, range(3))
    subject.on_verdicts([failed], at(2))
    incident = the_incident(subject)
    assert (incident.kind, incident.cause, incident.action) == (kind, cause, action)
    feed(subject, range(3, 30))
    other = replace(failed, passed=True, probe="", good=tuple(FIGURES.keys() - {failed.probe}), end="", text="all well")
    subject.on_verdicts([other], at(29))
    assert the_incident(subject).closed_ms is None  # what it failed was not run again
    passed = (failed.probe, "gemm_bf16", "sdc")
    subject.on_verdicts([replace(failed, passed=True, probe="", good=passed, end="")], at(29))
    assert the_incident(subject).closed_ms == at(29)


def test_a_wrong_result_on_a_straggler_is_silent_corruption() -> None:
    subject = engine(Suspects())
    feed(subject, range(3))
    subject.on_verdicts([verdict(False, "sdc", end="wrong")], at(2))
    incident = the_incident(subject)
    assert (incident.kind, incident.confidence) == (IncidentKind.SDC, proof.CONFIDENCE_EXACT)
    subject.on_verdicts([verdict(True, good=("sdc",))], at(2) + 1)
    assert the_incident(subject).closed_ms == at(2) + 1


def test_drift_is_reported_and_asks_for_nothing_until_it_is_over() -> None:
    suspects = Suspects()
    suspects.on = False
    subject = engine(suspects)
    feed(subject, range(3))
    subject.on_verdicts([verdict(True, good=("hbm_copy",), drift="3 % below", drift_since_ms=START_MS)], at(2))
    incident = the_incident(subject)
    assert (incident.kind, incident.severity, incident.since_ms) == (IncidentKind.DRIFT, Severity.INFO, START_MS)
    assert subject.health_of(NODE, GPU)[0] is Health.HEALTHY
    subject.on_verdicts([verdict(None)], at(2) + 1)
    assert the_incident(subject).closed_ms is None
    subject.on_verdicts([verdict(True, good=("hbm_copy",))], at(2) + 2)
    feed(subject, [3])
    assert the_incident(subject).closed_ms is not None


def test_what_a_configuration_lost_with_its_driver_is_one_incident_until_it_is_over() -> None:
    suspects = Suspects()
    suspects.on = False
    subject = engine(suspects)
    feed(subject, range(3))
    head = "hbm_copy (quick) of H200, driver 580.1:"
    slower = f"{head} 30 boards read 5.1 % below what 30 gave with driver 570.1 (4302 GB/s); similarity 0.949"
    of_node = replace(verdict(True, gpu=None), measured=(head, "sdc (quick) of H200, driver 580.1:"))
    subject.on_verdicts([replace(of_node, shifts=(slower,), shifted=(head,))], at(2))
    incident = the_incident(subject)
    assert (incident.kind, incident.cause, incident.severity) == (IncidentKind.DRIFT, "driver_hbm_copy", Severity.INFO)
    assert (incident.scope, incident.node, incident.action) == ("node", NODE, RecommendedAction.NONE)
    assert slower in incident.summary
    assert subject.health_of(NODE, GPU)[0] is Health.HEALTHY
    other = replace(of_node, node="n02", shifts=(slower.replace("30 boards", "38 boards"),), shifted=(head,))
    subject.on_verdicts([other], at(2) + 1)
    assert the_incident(subject).closed_ms is None, "another node of this configuration is no incident of its own"
    subject.on_verdicts([replace(of_node, measured=("sdc (quick) of H200, driver 580.1:",))], at(2) + 2)
    assert the_incident(subject).closed_ms is None, "this order did not measure it"
    subject.on_verdicts([replace(other, shifts=(), shifted=())], at(2) + 3)
    feed(subject, [3])
    assert the_incident(subject).closed_ms is not None


@pytest.mark.parametrize("passed", [True, False])
def test_a_restart_gives_the_same_answers(passed: bool) -> None:
    def run(restart: bool) -> list[Incident]:
        subject = engine(suspects := Suspects())
        feed(subject, range(3))
        probe, good = ("", ("hbm_copy",)) if passed else ("hbm_copy", ())
        subject.on_verdicts([verdict(passed, probe, good)], at(2))
        if restart:
            known = list(subject.incidents.values())
            subject = engine(suspects)
            subject.restore(known, [training_bucket(INDEX, number) for number in range(3)], [])
        feed(subject, range(3, 8))
        return list(subject.incidents.values())

    assert run(restart=True) == run(restart=False)


@pytest.mark.parametrize("passed", [True, False])
def test_a_replay_with_the_verdicts_ends_as_the_live_run(passed: bool) -> None:
    buckets = [training_bucket(INDEX, number) for number in range(8)]
    event = Event(
        "e", START_MS + 20_000, NODE, GPU, EventKind.XID, "13", "graphics exception", received_ms=START_MS + 20_000
    )
    verdicts = [replace(v, ts_ms=at(2)) for v in (verdict(passed, "" if passed else "sdc"), verdict(passed, gpu=None))]
    live = Engine(INDEX, POLICY, START_MS)
    for number, bucket in enumerate(buckets):
        if number == 1:
            live.on_events([event], START_MS + 20_000)
        live.on_bucket(bucket, bucket.end_ms + LAG_MS)
        if number == 2:
            live.on_verdicts(verdicts, at(2))
    run = Replay(INDEX, iter(buckets), [event], POLICY, [], verdicts)
    for _ in run:
        pass
    assert run.engine is not None
    assert run.engine.incidents == live.incidents
    assert any("probe" in i.detectors for i in live.incidents.values()) == (not passed)
