"""Which incidents take which time: a fault that ends a job, one that slows it, one that says nothing of its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from drover_collector.ledger.account import Account, asked_energy, make_account
from drover_collector.ledger.claims import RESTART_MS
from drover_collector.ledger.facts import Activity, Facts, LedgerIncident, Share
from drover_collector.ledger.message import Asked, Prices, make_message
from drover_collector.ledger.spans import GpuSpans
from drover_core.model.events import Health, NodeOutage
from testbed.collected import small_index

INDEX = small_index(2, 2)
MINUTE = 60_000
END = 120 * MINUTE
WORKING, IDLE = int(Activity.WORKING), int(Activity.IDLE)
PRICES = Prices("EUR", [2.0, 2.0], 0.25, 0.999)


def incident(kind: str = "xid", cause: str = "xid_79", **changes: object) -> LedgerIncident:
    usual = LedgerIncident(
        "i1", kind, cause, "n1", [("n1", 0)], "train", 50 * MINUTE, None, END, "critical", "it fell off the bus",
        [(50 * MINUTE, None)],
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]  # whatever field the test says


def facts(
    incidents: Sequence[LedgerIncident] = (),
    holds: Sequence[tuple[int, int, int]] = ((0, 60, 0),),
    activity: Sequence[tuple[int, int, int]] = ((0, 120, WORKING),),
    steps: Sequence[tuple[int, int, int]] = (),
    jobs: Sequence[str] = ("train", "train-r1"),
) -> Facts:
    """Holds (from, to, job) and activity (from, to, state) are of all four GPUs, in minutes."""

    def all_gpus(rows: Sequence[tuple[int, int, int]]) -> GpuSpans:
        return GpuSpans.of((gpu, low * MINUTE, high * MINUTE, value) for gpu in range(4) for low, high, value in rows)

    stepped = [(job, low * MINUTE, high * MINUTE) for job, low, high in steps]
    return Facts(jobs, all_gpus(holds), END, all_gpus(activity), incidents, stepped)


def account_of(found: Facts) -> Account:
    return make_account(INDEX, found, asked_energy(INDEX, found.holds, 0, END), 0, END)


def minutes(found: Facts) -> dict[str, float]:
    """Share -> GPU-minutes, without those that are 0."""
    ms = account_of(found).ledger.ms.sum(axis=0).tolist()
    return {share.name.lower(): ms[share] / MINUTE for share in Share if ms[share]}


def test_a_fault_that_ends_a_job_takes_all_of_its_gpus_from_then_on() -> None:
    found = facts([incident()])
    assert minutes(found) == {"useful": 200, "lost": 10, "waiting": 30}
    (end,) = account_of(found).interruptions
    assert (end.nodes, end.recovery_ms) == ((1,), None)


@pytest.mark.parametrize("changes", [{"severity": "warning"}, {"kind": "idle"}, {"since_ms": 5 * MINUTE}])
def test_what_is_no_grave_fault_or_long_ago_has_not_ended_it(changes: dict[str, object]) -> None:
    assert minutes(facts([incident(**changes)])) == {"useful": 240}


def test_a_job_that_a_person_ends_long_after_it_hung_was_ended_by_the_hang() -> None:
    hung = incident("hang", "standstill", since_ms=10 * MINUTE, members=[("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)])
    assert minutes(facts([hung])) == {"useful": 40, "waiting": 200}  # nobody stands out: all waited


def test_a_restart_lasts_until_the_job_works_again() -> None:
    found = facts(
        [incident()], ((0, 60, 0), (70, 110, 1)), ((0, 60, WORKING), (60, 90, IDLE), (90, 120, WORKING))
    )  # fmt: skip
    assert minutes(found) == {"useful": 200 + 80, "lost": 10, "waiting": 30, "restarting": 80}
    account = account_of(found)
    assert account.interruptions[0].recovery_ms == 40 * MINUTE
    assert account.between_ms == {1: 4 * 10 * MINUTE}
    reply = make_message(INDEX, found, account, PRICES, Asked())
    (again,) = [row for row in reply.jobs if row.name == "train-r1"]
    assert again.ettr == 80 / (160 + 40)
    assert reply.causes[0].shares.restarting_ms == 80 * MINUTE


def test_a_restart_that_never_works_is_idle_after_half_an_hour() -> None:
    found = facts([incident()], ((0, 60, 0), (70, 110, 0)), ((0, 60, WORKING), (60, 120, IDLE)))
    rest = 40 * 4 - 4 * RESTART_MS / MINUTE
    assert minutes(found) == {"useful": 200, "lost": 10, "waiting": 30, "restarting": 120, "idle": rest}


def test_missing_telemetry_is_unknown_also_in_a_restart() -> None:
    found = facts([incident()], ((0, 60, 0), (70, 110, 0)), ((0, 60, WORKING),))
    assert minutes(found) == {"useful": 200, "lost": 10, "waiting": 30, "unknown": 160}


@pytest.mark.parametrize("cause", ["silent", "no_telemetry", "late", "pages_silent", "gpu_page_silent_common"])
def test_a_node_that_is_silent_while_its_job_goes_on_is_unknown(cause: str) -> None:
    quiet = incident("liveness", cause, members=[("n1", None)], lost_ms=70 * 2 * MINUTE, since_ms=50 * MINUTE)
    found = facts([quiet], ((0, 120, 0),), ((0, 50, WORKING),))
    assert minutes(found) == {"useful": 200, "unknown": 280}


def test_a_slow_gpu_makes_its_peers_wait_for_the_share_that_was_measured() -> None:
    """30 minutes of 3 peers in 70 minutes: a seventh of their time."""
    slow = incident(
        "straggler", "clock", severity="warning", waited_ms=30 * MINUTE, closed_ms=None, since_ms=50 * MINUTE
    )  # fmt: skip
    found = facts([slow], ((0, 120, 0),))
    waiting = account_of(found).ledger.ms[:, Share.WAITING]
    assert abs(int(waiting.sum()) - 30 * MINUTE) < 10  # parts of a millionth are not counted
    assert waiting.tolist()[2] == 0
    assert int(account_of(found).ledger.ms.sum()) == 480 * MINUTE


def test_a_stopped_gpu_is_lost_only_while_it_does_not_work() -> None:
    stopped = incident(job=None, lost_ms=70 * MINUTE)
    dead = facts([stopped], ((0, 120, 0),), ((0, 50, WORKING), (50, 120, IDLE)))
    assert minutes(dead) == {"useful": 200, "lost": 70, "idle": 210}
    assert minutes(facts([stopped], ((0, 120, 0),))) == {"useful": 480}


def test_a_reopened_incident_takes_nothing_while_it_was_closed() -> None:
    spans = [(50 * MINUTE, 60 * MINUTE), (80 * MINUTE, 90 * MINUTE)]
    slow = incident("thermal", "cooling", severity="warning", spans=spans, closed_ms=90 * MINUTE,
                    counted_ms=90 * MINUTE, lost_ms=10 * MINUTE)  # fmt: skip
    found = facts([slow], ((0, 120, 0),))
    assert minutes(found) == {"useful": 470, "lost": 10}


def test_a_job_that_reports_steps_is_useful_only_while_it_steps() -> None:
    found = facts((), ((0, 120, 0),), steps=((0, 10, 50), (0, 60, 120)))
    assert minutes(found) == {"useful": 400, "unknown": 80}


def saved(*checkpoints: tuple[int, int], faults: Sequence[int] = (50,), runs: int = 2) -> Facts:
    """Runs of 60 and 30 minutes and of 30 more, each ended by a fault `faults`, all of whose time reports steps."""
    holds = [(0, 60, 0), (60, 90, 1), (90, 120, 2)][:runs]
    ends = [
        incident(id=f"i{at}", since_ms=at * MINUTE, closed_ms=at * MINUTE, job="train" if at < 61 else "train-r1")
        for at in faults
    ]
    found = facts(
        ends, holds, steps=[(job, low, high) for low, high, job in holds], jobs=("train", "train-r1", "train-r2")
    )
    return dataclasses.replace(found, checkpoints=[(job, at * MINUTE) for job, at in checkpoints])


@pytest.mark.parametrize(
    ("found", "repeated", "unsaved"),
    [
        (saved((0, 35), faults=(50,)), 15, 0),
        (saved((0, 35), (0, 48), faults=(50,)), 2, 0),
        (saved((0, 35), (1, 62), faults=(50,)), 15, 0),  # saving does not make the work new
        (saved(), 0, 1),  # nothing reports checkpoints
        (saved((1, 70)), 0, 1),  # the first run began before what is read, and may have saved then
        (saved((0, 35), faults=(50, 85), runs=3), 15 + 25, 0),  # the second saved nothing: from minute 60 to 85 again
        (saved((0, 35), (1, 80), faults=(50, 85), runs=3), 15 + 5, 0),
    ],
)
def test_repeated_work_is_what_came_since_the_last_checkpoint(found: Facts, repeated: int, unsaved: int) -> None:
    assert minutes(found).get("repeated", 0) == 4 * repeated
    account = account_of(found)
    assert account.unsaved == unsaved
    reply = make_message(INDEX, found, account, PRICES, Asked())
    assert any("repeated" in doubt for doubt in reply.doubts) == bool(unsaved)


@pytest.mark.parametrize(
    ("saved_at", "repeated", "known"),
    [
        ((), 0, False),
        ((30,), 20, True),
        ((5, 30), 20, True),
        ((50,), 0, True),
        ((55,), 0, True),
        ((65,), 0, False),  # of neither run
    ],
)
def test_work_after_the_last_checkpoint_is_repeated_once_the_job_works_again(
    saved_at: Sequence[int], repeated: int, known: bool
) -> None:
    """The fault begins at minute 50, and the run ends at 60."""
    again = facts([incident()], ((0, 60, 0), (70, 110, 0)), steps=((0, 0, 50), (0, 70, 110)))
    found = dataclasses.replace(again, checkpoints=[(0, at * MINUTE) for at in saved_at])
    shares = minutes(found)
    assert shares.pop("repeated", 0) == 4 * repeated
    assert shares == {"useful": 360 - 4 * repeated, "lost": 10, "waiting": 30}
    doubts = make_message(INDEX, found, account_of(found), PRICES, Asked()).doubts
    assert any("repeated is not known" in doubt for doubt in doubts) == (saved_at != () and not known)
    assert any("no loop reports checkpoints" in doubt for doubt in doubts) == (saved_at == ())


@pytest.mark.parametrize(("from_minute", "repeated", "unsaved"), [(60, 15 + 25, 0), (61, 15, 1)])
def test_a_run_that_may_have_saved_before_what_is_read_owes_what_nobody_knows(
    from_minute: int, repeated: int, unsaved: int
) -> None:
    found = saved((0, 35), faults=(50, 85), runs=3)
    found = dataclasses.replace(found, checkpoints_from_ms=from_minute * MINUTE)
    assert minutes(found).get("repeated", 0) == 4 * repeated
    assert account_of(found).unsaved == unsaved


def test_availability_counts_what_is_drained_silent_and_dark() -> None:
    """n1 is silent for 20 minutes, for 10 of them nobody reports, and drained for 30 later."""
    outages = [
        NodeOutage("n1", stage, at * MINUTE, "i", "a fan")
        for stage, at in ((Health.DRAINING, 60), (Health.DRAINED, 70), (Health.HEALTHY, 100))
    ]
    n0, n1 = ((0, 30), (40, 120)), ((0, 20), (40, 120))
    rows = [(gpu, a * MINUTE, b * MINUTE, WORKING) for gpu in range(4) for a, b in (n0 if gpu < 2 else n1)]
    found = dataclasses.replace(facts(), activity=GpuSpans.of(rows), outages={"n1": outages})
    reply = make_message(INDEX, found, account_of(found), PRICES, Asked())
    fleet = reply.availability[0]
    assert (fleet.in_ms, fleet.out_ms, fleet.silent_ms, fleet.unknown_ms) == tuple(
        n * MINUTE for n in (2 * 110 + 2 * 70, 2 * 30, 2 * 10, 4 * 10)
    )
    assert fleet.available == 360 / 440
    assert [row.name for row in reply.worst_nodes] == ["n1"]


def test_money_and_rows_that_are_not_listed_add_up() -> None:
    found = facts([incident()], ((0, 60, 0), (70, 110, 1)))
    reply = make_message(INDEX, found, account_of(found), PRICES, Asked(limit=1))
    assert reply.total.cost == pytest.approx(2.0 * 400 / 60)
    assert reply.total.lost_cost == pytest.approx(2.0 * 40 / 60)
    assert reply.jobs[0].held_ms + reply.other_jobs.held_ms == reply.total.held_ms
    assert reply.other_jobs.name == ""
    no_price = dataclasses.replace(PRICES, gpu_hour=[2.0, None])
    assert not make_message(INDEX, found, account_of(found), no_price, Asked()).total.HasField("cost")


def test_nodes_to_repair_have_their_reasons() -> None:
    repair = {"n0": [NodeOutage("n0", Health.REPAIR, MINUTE, "i", "gemm failed on GPU 1")]}
    found = dataclasses.replace(facts([incident()]), outages=repair)
    rows = make_message(INDEX, found, account_of(found), PRICES, Asked()).repair
    assert [(row.node, row.stage, row.reason) for row in rows] == [
        ("n0", "repair", "gemm failed on GPU 1"),
        ("n1", "", "it fell off the bus"),
    ]
