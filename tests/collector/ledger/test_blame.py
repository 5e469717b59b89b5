"""Whose fault lost time is: the parts add up to what the ledger says was taken, and each has its incident."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.ledger.blame import TAKEN, Blame, blame_of, job_loss
from drover_collector.ledger.facts import Activity, Facts, LedgerIncident, Share
from drover_collector.ledger.partition import partition
from drover_collector.ledger.spans import GpuSpans

from .test_sums import END, FEW, INDEX, JOBS, facts, layers_of, times

MIN = 60_000


def incident(kind: str, cause: str, members: list[tuple[str, int | None]], **more: object) -> LedgerIncident:
    fields: dict[str, object] = {
        "id": f"{kind}-{cause}", "kind": kind, "cause": cause, "node": members[0][0], "members": members,
        "job": "train", "since_ms": 10 * MIN, "closed_ms": None, "counted_ms": 60 * MIN, "severity": "warning",
        "summary": "", "spans": [(10 * MIN, None)],
    }  # fmt: skip
    return LedgerIncident(**(fields | more))  # type: ignore[arg-type]  # by name


def worked(*incidents: LedgerIncident) -> Facts:
    """An hour of one job on four GPUs that all work."""
    rows = [(gpu, 0, 60 * MIN, 0) for gpu in range(4)]
    activity = GpuSpans.of((gpu, low, high, int(Activity.WORKING)) for gpu, low, high, _ in rows)
    return Facts(["train"], GpuSpans.of(rows), 60 * MIN, activity, incidents)


@FEW
@given(facts(), st.sampled_from(["slowdown", "straggler"]), times, times)
def test_whatever_happened_the_parts_add_up_to_what_was_taken(found: Facts, kind: str, a: int, b: int) -> None:
    found = replace(found, incidents=[replace(i, kind=kind) if n % 2 else i for n, i in enumerate(found.incidents)])
    low, high = min(a, b), max(a, b)
    ledger = partition(found, layers_of(found), low, high)
    for number in range(len(JOBS)):
        loss = job_loss(INDEX, found, number, low, high)
        assert list(loss.shares) == ledger.ms[ledger.job == number].sum(axis=0).tolist()
        slow = sum(part.slow_ms for part in loss.parts)
        assert loss.lost_ms == sum(loss.shares[share] for share in TAKEN) + slow
        assert 0 <= slow <= loss.shares[Share.USEFUL]
        assert all(part.ms > 0 for part in loss.parts)
        assert loss.held_ms <= 4 * END


def test_a_slow_gpu_and_a_bad_port_share_the_waiting_and_each_is_named() -> None:
    slow = incident("straggler", "power_cap", [("n0", 1)], waited_ms=30 * MIN, closed_ms=40 * MIN, counted_ms=40 * MIN,
                    spans=[(10 * MIN, 40 * MIN)])  # fmt: skip
    port = incident("straggler", "nic", [("n1", None)], since_ms=40 * MIN, waited_ms=10 * MIN,
                    spans=[(40 * MIN, None)])  # fmt: skip
    loss = job_loss(INDEX, worked(slow, port), 0, 0, 60 * MIN)
    assert [(part.blame, part.incident, part.ms) for part in loss.parts] == [
        (Blame.GPU, 0, pytest.approx(30 * MIN, abs=90)), (Blame.NETWORK, 1, pytest.approx(10 * MIN, abs=90)),
    ]  # fmt: skip
    assert loss.lost_ms == loss.shares[Share.WAITING]


def test_a_job_that_is_slower_than_its_past_lost_a_part_of_its_useful_time_once() -> None:
    fields = {"members": [("n0", None), ("n1", None)], "lost_ms": 40 * MIN}
    first = incident("slowdown", "waits_for_host", **fields)  # type: ignore[arg-type]  # fields of many types, for 4 GPUs and 50 minutes
    again = incident("slowdown", "slower", since_ms=20 * MIN, spans=[(20 * MIN, None)], **fields)  # type: ignore[arg-type]  # as above
    loss = job_loss(INDEX, worked(first, again), 0, 0, 60 * MIN)
    assert [(part.blame, part.incident) for part in loss.parts] == [(Blame.STORAGE, 0)]
    assert loss.parts[0].ms == loss.parts[0].slow_ms == pytest.approx(40 * MIN, abs=1)
    assert loss.shares[Share.USEFUL] == loss.held_ms, "the ledger itself counts it as useful"


def test_work_that_is_repeated_is_the_fault_that_made_it_so() -> None:
    rows = [(gpu, low * MIN, high * MIN, job) for gpu in range(4) for low, high, job in ((0, 30, 0), (30, 60, 1))]
    fell = incident("xid", "xid_79", [("n0", 1)], severity="critical", since_ms=30 * MIN, closed_ms=30 * MIN)
    found = replace(
        worked(fell), jobs=["train", "train-r1"], holds=GpuSpans.of(rows), checkpoints=[(0, 20 * MIN)],
        steps=[(0, 0, 30 * MIN), (1, 30 * MIN, 60 * MIN)],
    )  # fmt: skip
    (part,) = job_loss(INDEX, found, 1, 0, 60 * MIN).parts
    assert (part.blame, part.incident, part.ms) == (Blame.GPU, 0, 4 * 10 * MIN)


@pytest.mark.parametrize(
    ("kind", "cause", "members", "blame"),
    [
        ("straggler", "power_cap", [("n0", 1)], Blame.GPU), ("straggler", "host", [("n0", None)], Blame.HOST),
        ("straggler", "unexplained", [("n0", 1)], Blame.GPU), ("xid", "xid_79", [("n0", 1)], Blame.GPU),
        ("xid", "xid_13", [("n0", 1)], Blame.PROGRAM), ("xid", "xid_999", [("n0", 1)], Blame.UNKNOWN),
        ("link", "hot_switch", [("n0", None), ("n1", None)], Blame.NETWORK), ("link", "port_down", [("n0", None)],
         Blame.NETWORK),
        ("link", "nvlink_down", [("n0", 1)], Blame.GPU), ("thermal", "inlet", [("n0", None)], Blame.HOST),
        ("thermal", "cooling", [("n0", 1)], Blame.GPU), ("memory", "uncorrected_errors", [("n0", 1)], Blame.GPU),
        ("liveness", "silent", [("n0", None)], Blame.HOST), ("hang", "rank_missing", [("n0", 1)], Blame.UNKNOWN),
        ("hang", "collective_mismatch", [("n0", 1)], Blame.PROGRAM), ("slowdown", "clocks", [("n0", None)], Blame.JOB),
        ("hang", "hung_task", [("n0", None)], Blame.UNKNOWN),
    ],
)  # fmt: skip
def test_blame_follows_the_cause(kind: str, cause: str, members: list[tuple[str, int | None]], blame: Blame) -> None:
    assert blame_of(incident(kind, cause, members)) is blame
