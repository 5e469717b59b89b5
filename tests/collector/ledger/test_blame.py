"""Whose fault lost time is: the parts add up to what the ledger says was taken, and each has its incident."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.ledger.account import asked_energy, make_account
from drover_collector.ledger.availability import Service
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
        assert loss.lost_ms == sum(loss.shares[share] for share in TAKEN), "one sum, and it is the ledger's"
        assert 0 <= sum(part.slow_ms for part in loss.parts) <= loss.shares[Share.LOST]
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


def test_a_job_that_is_slower_than_its_past_lost_a_part_of_its_work_once() -> None:
    fields = {"members": [("n0", None), ("n1", None)], "lost_ms": 40 * MIN}
    first = incident("slowdown", "waits_for_host", **fields)  # type: ignore[arg-type]  # fields of many types, for 4 GPUs and 50 minutes
    fields["lost_ms"] = 30 * MIN  # the smaller share of its time
    again = incident("slowdown", "slower", since_ms=20 * MIN, spans=[(20 * MIN, None)], **fields)  # type: ignore[arg-type]  # as above
    loss = job_loss(INDEX, worked(first, again), 0, 0, 60 * MIN)
    assert [(part.blame, part.incident) for part in loss.parts] == [(Blame.STORAGE, 0)]
    assert loss.parts[0].ms == loss.parts[0].slow_ms == pytest.approx(40 * MIN, abs=1)
    assert loss.shares[Share.LOST] == loss.lost_ms, "what is lost is not useful at the same time"
    assert loss.shares[Share.USEFUL] == loss.held_ms - loss.lost_ms


SLOWER = 1 - 1 / 1.37  # of the time of a job whose step is 37 % longer


def slowdown(low: int, high: int | None, cause: str = "slower", upto: int = 60, **more: object) -> LedgerIncident:
    """Return a slowdown by 37 % of all four GPUs, in minutes; it is counted up to `upto`, if it is open."""
    end, closed_ms = upto if high is None else high, None if high is None else high * MIN
    return incident(
        "slowdown", cause, [("n0", None), ("n1", None)], id=f"slow-{low}", since_ms=low * MIN, closed_ms=closed_ms,
        counted_ms=end * MIN, spans=[(low * MIN, closed_ms)], lost_ms=round(4 * (end - low) * MIN * SLOWER), **more,
    )  # fmt: skip


@pytest.mark.parametrize(("cause", "blame"), [("slower", Blame.UNKNOWN), ("waits_for_host", Blame.STORAGE)])
def test_half_an_hour_that_is_37_percent_slower_stands_in_the_ledger(cause: str, blame: Blame) -> None:
    loss = job_loss(INDEX, worked(slowdown(20, 50, cause)), 0, 0, 60 * MIN)
    (part,) = loss.parts
    assert (part.blame, part.slow_ms) == (blame, part.ms)
    assert part.ms == loss.shares[Share.LOST] == pytest.approx(4 * 30 * MIN * SLOWER, abs=200)
    assert loss.shares[Share.USEFUL] + loss.shares[Share.LOST] == loss.held_ms == 4 * 60 * MIN


def test_a_slow_gpu_whose_peers_look_busy_costs_what_its_job_became_slower() -> None:
    """As the book has it: the straggler's incident carries the slowness that it explains."""
    slow = incident("straggler", "power_cap", [("n0", 1)], since_ms=20 * MIN, closed_ms=50 * MIN, counted_ms=50 * MIN,
                    spans=[(20 * MIN, 50 * MIN)], waited_ms=round(4 * 30 * MIN * SLOWER))  # fmt: skip
    loss = job_loss(INDEX, worked(slow), 0, 0, 60 * MIN)
    assert [part.blame for part in loss.parts] == [Blame.GPU]
    assert loss.lost_ms == loss.shares[Share.WAITING] == pytest.approx(4 * 30 * MIN * SLOWER, abs=200)


def test_two_slow_phases_add_up() -> None:
    loss = job_loss(INDEX, worked(slowdown(5, 15), slowdown(30, 50, "waits_for_host")), 0, 0, 60 * MIN)
    by = {part.blame: part.ms for part in loss.parts}
    assert by == {
        Blame.UNKNOWN: pytest.approx(4 * 10 * MIN * SLOWER, abs=200),
        Blame.STORAGE: pytest.approx(4 * 20 * MIN * SLOWER, abs=200),
    }
    assert loss.lost_ms == loss.shares[Share.LOST] == sum(by.values())


def test_a_job_that_is_still_slow_goes_on_to_lose_what_its_incident_has_counted_so_far() -> None:
    """An open incident is stored every five minutes: since then it takes as much as before."""
    loss = job_loss(INDEX, worked(slowdown(20, None, upto=56)), 0, 0, 60 * MIN)
    assert loss.lost_ms == loss.shares[Share.LOST] == pytest.approx(4 * 40 * MIN * SLOWER, abs=200)


def test_where_a_fault_and_a_slow_phase_overlap_no_hour_counts_twice() -> None:
    hung = incident("hang", "rank_stopped", [("n0", 1)], since_ms=40 * MIN, closed_ms=50 * MIN, counted_ms=50 * MIN,
                    spans=[(40 * MIN, 50 * MIN)], lost_ms=10 * MIN, waited_ms=30 * MIN)  # fmt: skip
    loss = job_loss(INDEX, worked(slowdown(20, 50), hung), 0, 0, 60 * MIN)
    by = {part.incident: part.ms for part in loss.parts}
    assert by == {1: 4 * 10 * MIN, 0: pytest.approx(4 * 20 * MIN * SLOWER, abs=200)}
    assert loss.lost_ms == loss.shares[Share.LOST] + loss.shares[Share.WAITING] == sum(by.values())
    assert sum(loss.shares) == loss.held_ms == 4 * 60 * MIN


def test_slowness_takes_nothing_from_another_job_on_the_node_and_nothing_while_no_gpu_works() -> None:
    rows = [(gpu, 0, 60 * MIN, gpu % 2) for gpu in range(4)]  # each job has a GPU of each node
    activity = [
        (gpu, low * MIN, high * MIN, int(shown)) for gpu in range(4)
        for low, high, shown in ((0, 30, Activity.WORKING), (30, 40, Activity.IDLE), (40, 60, Activity.WORKING))
    ]  # fmt: skip
    slow = slowdown(20, 50)
    slow = replace(slow, lost_ms=round((slow.lost_ms or 0) / 2))  # of a job of two GPUs
    found = Facts(["train", "other"], GpuSpans.of(rows), 60 * MIN, GpuSpans.of(activity), [slow])
    ledger = partition(found, layers_of(found), 0, 60 * MIN)
    by_job = {job: ledger.ms[ledger.job == job].sum(axis=0)[Share.LOST] for job in (0, 1)}
    assert by_job == {0: pytest.approx(2 * 20 * MIN * SLOWER, abs=200), 1: 0}


def test_a_slow_job_keeps_no_node_from_service() -> None:
    idle = GpuSpans.of((gpu, 0, 60 * MIN, int(Activity.IDLE)) for gpu in range(4))  # between two epochs
    found = replace(worked(slowdown(20, 50)), activity=idle)
    service = make_account(INDEX, found, asked_energy(INDEX, found.holds, 0, 60 * MIN), 0, 60 * MIN).service
    assert service[:, Service.LOST].sum() == 0


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
