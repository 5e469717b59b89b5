"""The ledger's sums are exact, whatever the facts: a plain walk over each millisecond finds the same shares."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drover_collector.ledger import partition as partitioning
from drover_collector.ledger.account import asked_energy, make_account
from drover_collector.ledger.checkpoints import find_repeated
from drover_collector.ledger.claims import JobHistory, find_ends, make_layers
from drover_collector.ledger.facts import PPM, SHARES, Activity, Claim, Claims, Facts, LedgerIncident, Share
from drover_collector.ledger.holds import of_changes
from drover_collector.ledger.partition import Layers, Ledger, partition
from drover_collector.ledger.spans import GpuSpans
from drover_collector.ledger.telemetry import Buckets, find_activity, find_energy
from drover_core.model.events import Health, NodeOutage
from testbed.collected import small_index

INDEX = small_index(2, 2)
GPUS, JOBS, END = 4, ("train", "train-r1", "chat"), 60
FEW = settings(max_examples=25, deadline=None)

times = st.integers(0, END)
activities = st.sampled_from(list(map(int, Activity)))
gpus = st.integers(0, GPUS - 1)


@st.composite
def spans(draw: st.DrawFn, values: st.SearchStrategy[int], most: int = 6) -> GpuSpans:
    rows = draw(st.lists(st.tuples(gpus, times, times, values), max_size=most))
    return GpuSpans.of((g, min(a, b), max(a, b), v) for g, a, b, v in rows if a != b)


@st.composite
def holds(draw: st.DrawFn) -> GpuSpans:
    """Any changes in any order: jobs share nodes, take over, come back, and some are held to the end."""
    rows = draw(
        st.lists(st.tuples(gpus, times, st.integers(-1, len(JOBS) - 1)), max_size=10, unique_by=lambda r: r[:2])
    )
    table = np.array(rows, np.int64).reshape(-1, 3).T
    return of_changes(table[0], table[1], table[2], END)


@st.composite
def incidents(draw: st.DrawFn) -> LedgerIncident:
    """Of any kind, on any GPUs, reopened or not, with and without an end, known and unknown cost."""
    edges = sorted(draw(st.lists(times, min_size=2, max_size=4, unique=True)))
    opened = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=False)]
    if len(edges) % 2 or draw(st.booleans()):
        opened = [*opened[:-1], (opened[-1][0], None)]
    node = draw(st.sampled_from(["n0", "n1", "gone"]))
    slot = draw(st.sampled_from([None, 0, 1]))
    cost = st.none() | st.integers(0, 4 * END)
    return LedgerIncident(
        f"i{draw(st.integers(0, 10**9))}", draw(st.sampled_from(["hang", "straggler", "xid", "liveness", "idle"])),
        draw(st.sampled_from(["xid_79", "silent"])), node, [(node, slot)], draw(st.sampled_from([None, *JOBS])),
        edges[0], opened[-1][1], draw(times), draw(st.sampled_from(["critical", "warning", "info"])), "a sentence",
        opened, draw(cost), draw(cost),
    )  # fmt: skip


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    job_times = st.lists(
        st.tuples(st.integers(0, len(JOBS) - 1), times, times).filter(lambda r: r[1] < r[2]), max_size=3
    )
    return Facts(
        JOBS, draw(holds()), END, draw(spans(activities)).apart(),
        draw(st.lists(incidents(), max_size=4, unique_by=lambda i: i.id)), draw(job_times),
        {"n1": [NodeOutage("n1", Health.REPAIR, draw(times), "i", "a fan")]},
        draw(st.lists(st.tuples(st.integers(0, len(JOBS) - 1), times), max_size=3)),
    )  # fmt: skip


def layers_of(found: Facts) -> Layers:
    history = JobHistory(INDEX, found)
    attempts = find_ends(found, history)
    return make_layers(found, history, attempts, find_repeated(found, attempts))


def rows_of(each: GpuSpans) -> list[tuple[int, int, int, int]]:
    columns = (each.gpu, each.from_ms, each.to_ms, each.value)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def held(found: Facts, from_ms: int, to_ms: int) -> dict[tuple[int, int], int]:
    """(job, GPU) -> how long it was held, by a walk over each millisecond."""
    total: dict[tuple[int, int], int] = {}
    for gpu, low, high, job in zip(
        *(getattr(found.holds, n).tolist() for n in ("gpu", "from_ms", "to_ms", "value")), strict=True
    ):
        for _ in range(max(low, from_ms), min(high, to_ms)):
            total[job, gpu] = total.get((job, gpu), 0) + 1
    return total


def sums(ledger: Ledger) -> dict[tuple[int, int], list[int]]:
    total: dict[tuple[int, int], list[int]] = {}
    for job, gpu, row in zip(ledger.job.tolist(), ledger.gpu.tolist(), ledger.ms.tolist(), strict=True):
        before = total.get((job, gpu), [0] * SHARES)
        total[job, gpu] = [a + b for a, b in zip(before, row, strict=True)]
    return total


@FEW
@given(facts(), times, times)
def test_shares_add_up_to_what_was_held(found: Facts, one: int, other: int) -> None:
    from_ms, to_ms = min(one, other), max(one, other)
    ledger = partition(found, layers_of(found), from_ms, to_ms)
    assert (ledger.ms >= 0).all()
    assert {key: sum(row) for key, row in sums(ledger).items()} == held(found, from_ms, to_ms)


@FEW
@given(facts(), st.lists(times, min_size=2, max_size=5, unique=True))
def test_parts_of_a_span_add_up_to_the_whole(found: Facts, cuts: list[int]) -> None:
    layers, cuts = layers_of(found), sorted(cuts)
    whole = partition(found, layers, cuts[0], cuts[-1])
    parts = [partition(found, layers, low, high) for low, high in pairwise(cuts)]
    added: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        for key, row in sums(part).items():
            added[key] = [a + b for a, b in zip(added.get(key, [0] * SHARES), row, strict=True)]
    assert added == sums(whole)
    assert sum(part.claim_ms.sum() for part in parts) == whole.claim_ms.sum()


@FEW
@given(facts())
def test_blocks_of_gpus_give_what_all_at_once_give(found: Facts) -> None:
    layers = layers_of(found)
    whole = partition(found, layers, 0, END)
    with mock.patch.object(partitioning, "BLOCK", 1):
        parts = partition(found, layers, 0, END)
    for name in ("job", "gpu", "day", "ms"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    assert parts.claim_ms.sum(axis=0).tolist() == whole.claim_ms.sum(axis=0).tolist()


@FEW
@given(facts())
def test_what_incidents_took_is_in_the_shares(found: Facts) -> None:
    ledger = partition(found, layers_of(found), 0, END)
    for share in (Share.LOST, Share.WAITING, Share.RESTARTING):
        assert ledger.claim_ms[:, share].sum() == ledger.ms[:, share].sum()
    assert not ledger.claim_ms[:, [Share.USEFUL, Share.IDLE, Share.UNKNOWN]].any()


@FEW
@given(
    holds(), spans(st.sampled_from(list(map(int, Activity)))), st.lists(spans(st.just(0), 3), min_size=6, max_size=6)
)
def test_each_millisecond_goes_where_the_order_says(held_by: GpuSpans, shown: GpuSpans, layers: list[GpuSpans]) -> None:
    activity = shown.apart()
    shares = (Share.REPEATED, Share.LOST, Share.WAITING, Share.LOST, Share.RESTARTING)
    claims = [Claims([Claim(share, PPM, 0)], each) for share, each in zip(shares, layers, strict=False)]
    ledger = partition(Facts(JOBS, held_by, END, activity), Layers(*claims, layers[5]), 0, END)

    def inside(each: GpuSpans, gpu: int, ms: int) -> int | None:
        return next((value for g, low, high, value in rows_of(each) if g == gpu and low <= ms < high), None)

    walked: dict[tuple[int, int], list[int]] = {}
    for gpu in range(GPUS):
        for ms in range(END):
            job = inside(held_by, gpu, ms)
            if job is None:
                continue
            seen, stalled = inside(activity, gpu, ms), inside(layers[5], gpu, ms) is not None
            works, idle = seen == Activity.WORKING and not stalled, seen == Activity.IDLE and not stalled
            open_to = (True, True, True, not works, seen == Activity.IDLE or (stalled and seen is not None))
            there = (s for s, o, each in zip(shares, open_to, layers, strict=False) if o and inside(each, gpu, ms) == 0)
            share = next(there, Share.USEFUL if works else Share.IDLE if idle else Share.UNKNOWN)
            walked.setdefault((job, gpu), [0] * SHARES)[share] += 1
    assert sums(ledger) == walked


@FEW
@given(facts())
def test_each_gpus_time_is_in_one_service(found: Facts) -> None:
    account = make_account(INDEX, found, asked_energy(INDEX, found.holds, 5, END - 5), 5, END - 5)
    assert (account.service >= 0).all()
    assert account.service.sum(axis=1).tolist() == [END - 10] * GPUS


@FEW
@given(
    st.lists(st.tuples(gpus, st.integers(0, 11), st.integers(0, 3), st.integers(-1, 900)), max_size=30),
    st.lists(times, min_size=2, max_size=4, unique=True),
)
def test_energy_of_parts_adds_up_and_never_exceeds_the_counters(
    rows: list[tuple[int, int, int, int]], cuts: list[int]
) -> None:
    table = np.array(rows, np.int64).reshape(-1, 4).T
    buckets = Buckets(5, table[0], table[1] * 5, table[2], np.full(len(rows), 0.5), table[3]).in_order()
    energy, cuts = find_energy(buckets), sorted(cuts)

    def ask(low: int, high: int) -> tuple[list[int], list[int]]:
        asked = GpuSpans.of((gpu, low, high, 0) for gpu in range(GPUS))
        mj, known = energy.within(asked)
        assert (mj >= 0).all() and (known >= 0).all() and (known <= high - low).all()
        return mj.tolist(), known.tolist()

    parts = [ask(low, high) for low, high in pairwise(cuts)]
    whole = ask(cuts[0], cuts[-1])
    assert [list(map(sum, zip(*each, strict=True))) for each in zip(*parts, strict=True)] == list(whole)
    grown = sum(max(0, b - a) for g in range(GPUS) for a, b in _steps(buckets, g))
    assert sum(whole[0]) <= grown
    activity = find_activity(buckets)
    assert (activity.to_ms > activity.from_ms).all() if len(activity) else True
    assert activity.apart().merged().to_ms.tolist() == activity.to_ms.tolist()  # no overlap


def _steps(buckets: Buckets, gpu: int) -> list[tuple[int, int]]:
    known = buckets.energy_mj[(buckets.gpu == gpu) & (buckets.energy_mj >= 0)].tolist()
    return list(pairwise(known))


def test_the_rest_of_a_partial_claim_is_what_telemetry_shows() -> None:
    held_by = GpuSpans.of([(0, 0, 100, 0)])
    activity = GpuSpans.of([(0, 0, 60, int(Activity.WORKING)), (0, 60, 80, int(Activity.IDLE))])
    layers = Layers(*(Claims() for _ in range(5)), GpuSpans.of(()))
    slow = replace(layers, measured=Claims([Claim(Share.WAITING, 250_000, 0, 3)], GpuSpans.of([(0, 0, 100, 0)])))
    (row,) = partition(Facts(JOBS, held_by, 100, activity), slow, 0, 100).ms.tolist()
    assert row == [45, 25, 0, 0, 0, 15, 15]
