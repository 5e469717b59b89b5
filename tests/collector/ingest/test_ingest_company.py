"""How long telemetry waits for company: little of it longer, but not past the read of a bucket."""

from typing import Any

import pytest

from drover_collector.ingest import telemetry_writer as telemetry_writer
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.telemetry_writer import LITTLE_BYTES, batching_s
from drover_collector.store import Store
from drover_collector.store.rollups.dirty_ranges import SLACK_MS
from testbed.fleets import T0, batch, hello, index_of
from testbed.ingest import GOOD, LIVE, Collector
from testbed.loop import in_loop
from testbed.waiting import until

LIMITS = Limits(flush_s=1.0)
READS = [round(0.1 * n, 1) for n in range(100)]  # in so many seconds


@pytest.mark.parametrize(
    ("size", "seen", "lasts_s"),
    [
        (10, True, 3.0),
        (LITTLE_BYTES - 1, True, 3.0),
        (LITTLE_BYTES, True, 1.0),
        (10, False, 8.45),
        (LITTLE_BYTES, False, 1.0),
    ],
)
def test_little_waits_three_times_as_long_and_until_the_read_when_nobody_looks(
    size: int, seen: bool, lasts_s: float
) -> None:
    assert batching_s(size, 9.5, 0.0, seen, False, LIMITS) == pytest.approx(lasts_s)


@pytest.mark.parametrize(("shared", "seen"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("reads_in_s", READS)
def test_what_came_a_second_before_a_read_is_stored_by_then(reads_in_s: float, shared: bool, seen: bool) -> None:
    """A wait that began `reads_in_s` before it. What came in the last second may miss it, as it always might; of a
    server, what is stored within its slack."""
    lasts_s, slack_s = batching_s(10, reads_in_s, 0.0, seen, shared, LIMITS), SLACK_MS / 1000 if shared else 0.0
    before = lasts_s <= reads_in_s - slack_s or lasts_s == LIMITS.flush_s
    assert before or (reads_in_s < LIMITS.flush_s and lasts_s <= reads_in_s + 9 - slack_s)


@pytest.mark.parametrize("took_s", [0.5, 1.0, 3.0, 60.0])
@pytest.mark.parametrize("reads_in_s", READS[10:])
def test_where_inserts_take_long_a_read_is_given_three_times_that(reads_in_s: float, took_s: float) -> None:
    """Else a collector with little CPU would judge buckets without what waited for them."""
    lasts_s = batching_s(10, reads_in_s, took_s, False, False, LIMITS)
    assert lasts_s == LIMITS.flush_s or reads_in_s - lasts_s >= min(3 * took_s, reads_in_s - LIMITS.flush_s)


def test_a_read_is_met_once_where_nobody_looks() -> None:
    """What comes too late for a read waits for the next one, and not for a second."""
    assert batching_s(10, 0.9, 0.0, False, False, LIMITS) == pytest.approx(9.85)


@in_loop
async def test_who_asks_for_newest_values_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def lasts_s(_size: int, _reads_in_s: float, _took_s: float, seen: bool, *_: Any) -> float:
        found.append(seen)
        return 0.0

    monkeypatch.setattr(telemetry_writer, "batching_s", lasts_s)
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await agent.until_held(LIVE, 1)
        store.samples.latest_gpu(index_of(), "power_w", T0)
        await agent.send(batch=batch(2, GOOD))
        await agent.until_held(LIVE, 2)
    assert found == [store.shared, True]


@in_loop
async def test_a_collector_that_is_stopped_waits_for_no_company(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is stored before it ends, and nothing of it was acknowledged before."""
    monkeypatch.setattr(telemetry_writer, "batching_s", lambda *_: 1e6)
    limits = Limits(flush_s=1e6)
    async with Collector(store, limits) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await until(lambda: collector.ingest.stats.waiting_bytes > 0, "it was taken in")
        assert agent.held.get(LIVE, 0) == 0
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 0
    assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2
